"""Who serves what: pools, engines, EP groups and DP ranks, their state, and the membership epoch.

In: facts about engines (up, down, suspect, rank lost) and an operator's word (drain). Out: the
state of every rank, and an epoch that rises at each change and that every command carries, so that
an answer or a plan from before a change can be told apart.

**The EP group is the failure domain.** Its ranks exchange tokens in every layer, so one dead rank
stops all of them (measured on vLLM 0.32: killing one DP rank ends the streams of its siblings
within 0.7 s). A group is one engine, or the engines that the configuration names with one
`ep_group`. It serves when all of them are there. Only an elastic group goes on without the ranks it
lost.

**Silence alone never takes down more than half of a pool.** When many engines seem to have gone at
once and nothing but their silence says so, it is likelier that we cannot hear: what is above half
becomes suspect, which still serves when nothing better is up.

A drained engine stays drained when it restarts, until the operator takes the word back.

State: mutable, owned by the controller. `view()` is what planners and observers read.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dsched.drivers.base import EngineCapabilities, EngineDescription
from dsched.errors import InvariantError
from dsched.ids import DpRank, EngineId, RankId
from dsched.states import Evidence, PoolRole, RankState

MAX_LEASE_LOSS_SHARE = 0.5
"""Share of a pool's engines that silence alone may take down. Above: a partition of the network
empties the pool. Below: engines that died together stay suspect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One configured engine."""

    engine_id: EngineId
    model: str
    """What the engine itself must call its model; another answer keeps it out of the pool."""
    ep_group: str | None = None
    """Engines with one name here live and die together; `None`: the engine is a group by itself."""
    is_elastic: bool = False
    """Its group goes on without the ranks it lost."""

    @property
    def group(self) -> str:
        return self.ep_group if self.ep_group is not None else str(self.engine_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """One configured pool: engines that do the same work for one model."""

    name: str
    role: PoolRole = PoolRole.COMBINED
    model: str
    """Name that clients use."""
    engines: tuple[EngineSpec, ...]
    max_model_len: int | None = None
    """Limit set by the operator; the engines' own limit holds too."""


@dataclass(slots=True, kw_only=True)
class EngineMember:
    """What is known of one engine."""

    spec: EngineSpec
    pool: str
    own_state: RankState = RankState.DOWN
    """What the engine itself has shown: up, suspect or down."""
    own_reason: str = "not seen yet"
    evidence: Evidence = Evidence.SOCKET
    """Of what `own_state` says, when it is not up."""
    is_drained: bool = False
    """An operator took it out of service."""
    lost_ranks: dict[DpRank, str] = field(default_factory=dict)
    """Ranks that are gone while the engine answers, with the reason."""
    description: EngineDescription | None = None
    """What it said when it was last up."""
    state: RankState = RankState.DOWN
    """What counts: its own state, its group's and the operator's word together."""
    reason: str = "not seen yet"
    """Why it is not up, for people."""

    def rank_ids(self) -> Iterator[RankId]:
        if self.description is not None:
            for rank in range(self.description.num_dp_ranks):
                yield RankId(self.spec.engine_id, DpRank(rank))

    def rank_state(self, dp_rank: DpRank) -> RankState:
        """The engine's state, or `DOWN` for a rank that was lost."""
        return RankState.DOWN if dp_rank in self.lost_ranks else self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One DP rank."""

    rank_id: RankId
    pool: str
    ep_group: str
    state: RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One EP group: its ranks in order of engine and rank number."""

    name: str
    pool: str
    state: RankState
    ranks: tuple[RankView, ...]
    reason: str

    @property
    def rank_up(self) -> tuple[bool, ...]:
        """[ranks] who holds experts that can be used: what `plan_placement(rank_up=...)` takes."""
        return tuple(rank.state < RankState.DOWN for rank in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipView:
    """The cluster at one epoch."""

    epoch: int
    groups: tuple[GroupView, ...]
    """By name."""

    def group(self, name: str) -> GroupView:
        """Raises `ValueError` for a group that is not there."""
        for group in self.groups:
            if group.name == name:
                return group
        raise ValueError(f"no EP group is called {name!r}")


class Membership:
    """State of all pools and engines.

    >>> pool = PoolSpec(name="p", model="m", engines=tuple(
    ...     EngineSpec(engine_id=EngineId(name), model="m") for name in ("a", "b")))
    >>> membership = Membership([pool])
    >>> membership.epoch, membership.engines[EngineId("a")].state.name
    (1, 'DOWN')
    """

    def __init__(self, pools: Iterable[PoolSpec]) -> None:
        """Start with every engine down.

        Raises:
            ValueError: two engines share an id, two pools a name or the same work for a model, a
                prefill or decode pool is without the other, or an EP group spans pools.
        """
        self.epoch = 1
        self.num_capped_losses = 0
        """Losses by silence alone that were not believed."""
        self.pools: Mapping[str, PoolSpec] = {}
        self.engines: dict[EngineId, EngineMember] = {}
        self._groups: dict[str, list[EngineMember]] = {}
        by_name: dict[str, PoolSpec] = {}
        pool_of_work: dict[tuple[str, bool], str] = {}
        for pool in pools:
            if pool.name in by_name:
                raise ValueError(f"two pools are called {pool.name!r}")
            work = (pool.model, pool.role is PoolRole.PREFILL)
            if work in pool_of_work:
                raise ValueError(
                    f"pools {pool_of_work[work]!r} and {pool.name!r} both serve model "
                    f"{pool.model!r}; one pool serves a model, or one prefill and one decode pool"
                )
            by_name[pool.name] = pool
            pool_of_work[work] = pool.name
            for spec in pool.engines:
                self._add(spec, pool.name)
        self.pools = by_name
        self._check_roles()

    def _check_roles(self) -> None:
        roles: dict[str, set[PoolRole]] = {}
        for pool in self.pools.values():
            roles.setdefault(pool.model, set()).add(pool.role)
        for name, pool in self.pools.items():
            if pool.role is PoolRole.PREFILL and PoolRole.DECODE not in roles[pool.model]:
                raise ValueError(
                    f"prefill pool {name!r} needs a decode pool for model {pool.model!r}"
                )
            if pool.role is PoolRole.DECODE and PoolRole.PREFILL not in roles[pool.model]:
                raise ValueError(
                    f"decode pool {name!r} needs a prefill pool for model {pool.model!r}; a pool "
                    "that does both is a combined one"
                )

    def prefill_pool_of(self, pool: str) -> str | None:
        """The pool that computes the prompts of a decode pool; `None` for the others."""
        spec = self.pools[pool]
        if spec.role is not PoolRole.DECODE:
            return None
        return next(
            name
            for name, other in self.pools.items()
            if other.role is PoolRole.PREFILL and other.model == spec.model
        )

    def _add(self, spec: EngineSpec, pool: str) -> None:
        if spec.engine_id in self.engines:
            raise ValueError(f"two engines are called {spec.engine_id!r}")
        member = EngineMember(spec=spec, pool=pool)
        mates = self._groups.setdefault(spec.group, [])
        if mates and mates[0].pool != pool:
            raise ValueError(
                f"EP group {spec.group!r} has engines of the pools {mates[0].pool!r} and {pool!r}"
            )
        mates.append(member)
        self.engines[spec.engine_id] = member

    def group_of(self, engine_id: EngineId) -> tuple[EngineMember, ...]:
        """The engine and its group's others, in order of configuration."""
        return tuple(self._groups[self.engines[engine_id].spec.group])

    # ---- facts

    def apply_up(self, description: EngineDescription) -> EngineMember:
        """The engine answers. It comes up unless it serves another model than its pool."""
        member = self.engines[description.engine_id]
        member.description = description
        member.lost_ranks.clear()
        if description.model != member.spec.model:
            member.own_state = RankState.DOWN
            member.own_reason = (
                f"serves model {description.model!r}, but pool {member.pool!r} needs "
                f"{member.spec.model!r}"
            )
        else:
            member.own_state, member.own_reason = RankState.UP, ""
        self._refresh(member, is_changed=True)
        return member

    def apply_down(
        self, engine_id: EngineId, reason: str, *, evidence: Evidence = Evidence.SOCKET
    ) -> EngineMember:
        """The engine cannot serve, or is not heard."""
        member = self.engines[engine_id]
        state = RankState.DOWN
        if evidence is Evidence.LEASE and member.own_state is RankState.DOWN:
            return member  # silence adds nothing to what is known
        if evidence is Evidence.LEASE and member.own_state is RankState.SUSPECT:
            evidence = member.evidence  # work that stood still speaks for the loss as well
        if evidence is Evidence.LEASE and self._is_above_lease_cap(member):
            self.num_capped_losses += 1
            state = RankState.SUSPECT
            reason = f"{reason}; kept, because silence alone takes down half of a pool at most"
        is_changed = member.own_state is not state
        member.own_state, member.own_reason, member.evidence = state, reason, evidence
        self._refresh(member, is_changed=is_changed)
        return member

    def _is_above_lease_cap(self, member: EngineMember) -> bool:
        pool = [each for each in self.engines.values() if each.pool == member.pool]
        num_silent = 1 + sum(
            each.own_state is RankState.DOWN and each.evidence is Evidence.LEASE for each in pool
        )
        return num_silent > MAX_LEASE_LOSS_SHARE * len(pool)

    def apply_suspect(self, engine_id: EngineId, reason: str) -> EngineMember:
        """The engine has stopped without saying so: nothing new while another one is up."""
        member = self.engines[engine_id]
        if member.own_state is RankState.UP:
            member.own_state, member.own_reason = RankState.SUSPECT, reason
            member.evidence = Evidence.PROGRESS
            self._refresh(member, is_changed=True)
        return member

    def apply_trusted(self, engine_id: EngineId) -> EngineMember:
        """A suspect engine has shown progress: it rejoins under a new epoch."""
        member = self.engines[engine_id]
        if member.own_state is RankState.SUSPECT:
            member.own_state, member.own_reason = RankState.UP, ""
            self._refresh(member, is_changed=True)
        return member

    def apply_rank_lost(self, rank_id: RankId, reason: str) -> EngineMember:
        """One DP rank is gone while its engine answers. Its whole group goes down with it, unless
        it is elastic. Raises `ValueError` for a rank that the engine does not have."""
        member = self.engines[rank_id.engine_id]
        if rank_id not in list(member.rank_ids()):
            raise ValueError(f"engine {rank_id.engine_id} has no DP rank {rank_id.dp_rank}")
        is_new = rank_id.dp_rank not in member.lost_ranks
        member.lost_ranks[rank_id.dp_rank] = reason
        self._refresh(member, is_changed=is_new)
        return member

    def apply_rank_back(self, rank_id: RankId) -> EngineMember:
        """A lost rank works again. Others of its engine may still be lost."""
        member = self.engines[rank_id.engine_id]
        is_changed = member.lost_ranks.pop(rank_id.dp_rank, None) is not None
        self._refresh(member, is_changed=is_changed)
        return member

    def apply_draining(self, engine_id: EngineId, *, is_draining: bool) -> EngineMember:
        """An operator takes the engine out of service, or back into it."""
        member = self.engines[engine_id]
        is_changed = member.is_drained is not is_draining
        member.is_drained = is_draining
        self._refresh(member, is_changed=is_changed)
        return member

    def _refresh(self, member: EngineMember, *, is_changed: bool) -> None:
        """Work out what counts for the whole group; one epoch a change."""
        mates = self._groups[member.spec.group]
        for mate in mates:
            mate.state, mate.reason = _joint_state(mate, mates)
        self.epoch += is_changed

    # ---- reading

    def up_engines(self, pool: str) -> list[EngineMember]:
        """Engines of a pool that take new requests, by id."""
        return [
            member
            for _, member in sorted(self.engines.items())
            if member.pool == pool and member.state is RankState.UP
        ]

    def capabilities(self, pool: str) -> EngineCapabilities:
        """What every engine of the pool that was ever up can do; nothing before the first."""
        known = [
            member.description.capabilities
            for member in self.engines.values()
            if member.pool == pool and member.description is not None
        ]
        if not known:
            return EngineCapabilities()
        return EngineCapabilities(
            can_stream_logprobs=all(each.can_stream_logprobs for each in known),
            can_seed=all(each.can_seed for each in known),
            can_structured_output=all(each.can_structured_output for each in known),
            can_steer_dp_rank=all(each.can_steer_dp_rank for each in known),
            can_migrate=all(each.can_migrate for each in known),
            can_prefill=all(each.can_prefill for each in known),
            has_load_reports=all(each.has_load_reports for each in known),
        )

    def view(self) -> MembershipView:
        """A copy that does not change. O(ranks)."""
        return MembershipView(
            epoch=self.epoch,
            groups=tuple(_group_view(name, self._groups[name]) for name in sorted(self._groups)),
        )

    def validate(self) -> None:
        """Check the rules of states. O(engines)."""
        for engine_id, member in self.engines.items():
            if member.state is RankState.UP and member.description is None:
                raise InvariantError(f"engine {engine_id} is up and has no description")
            if member.own_state is RankState.DOWN and member.state is not RankState.DOWN:
                raise InvariantError(f"engine {engine_id} is down and counts as {member.state}")
            expected = _joint_state(member, self._groups[member.spec.group])
            if (member.state, member.reason) != expected:
                raise InvariantError(
                    f"engine {engine_id} counts as {member.state}, its group says {expected[0]}"
                )


def _joint_state(member: EngineMember, mates: list[EngineMember]) -> tuple[RankState, str]:
    if member.own_state is RankState.DOWN:
        return RankState.DOWN, member.own_reason
    for mate in mates:
        if mate.own_state is RankState.DOWN and mate is not member and not mate.spec.is_elastic:
            where = f"engine {mate.spec.engine_id} of its EP group"
            return RankState.DOWN, f"{where} is down: {mate.own_reason}"
        has_lost_all = 0 < len(mate.lost_ranks) == len(list(mate.rank_ids()))
        if mate.lost_ranks and (not mate.spec.is_elastic or (mate is member and has_lost_all)):
            dp_rank, reason = next(iter(mate.lost_ranks.items()))
            return RankState.DOWN, f"rank {mate.spec.engine_id}/{dp_rank} was lost: {reason}"
    for mate in mates:
        if mate.own_state is RankState.SUSPECT:
            return RankState.SUSPECT, mate.own_reason
    if member.is_drained:
        return RankState.DRAINING, "drained by an operator"
    return RankState.UP, ""


def _group_view(name: str, members: list[EngineMember]) -> GroupView:
    ranks = tuple(
        RankView(
            rank_id=rank_id,
            pool=member.pool,
            ep_group=name,
            state=member.rank_state(rank_id.dp_rank),
        )
        for member in members
        for rank_id in member.rank_ids()
    )
    worst = max(members, key=lambda member: member.state)
    is_elastic = any(member.spec.is_elastic for member in members)
    best = min(members, key=lambda member: member.state)
    counting = best if is_elastic else worst
    return GroupView(
        name=name, pool=members[0].pool, state=counting.state, ranks=ranks, reason=counting.reason
    )
