"""Who serves what: the engines of every pool, their state, and the membership epoch.

State, owned by the controller. The epoch rises at each change of the ranks that may get work, and
every command carries it, so that an answer or a plan from before a change can be told apart.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dsched.drivers.base import EngineCapabilities, EngineDescription
from dsched.errors import InvariantError
from dsched.ids import DpRank, EngineId, RankId
from dsched.routing import RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One configured engine."""

    engine_id: EngineId
    model: str
    """What the engine itself must call its model; another answer keeps it out of the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """One configured pool: engines that do the same work for one model."""

    name: str
    model: str
    """Name that clients use."""
    engines: tuple[EngineSpec, ...]
    max_model_len: int | None = None
    """Limit set by the operator; the engines' own limit holds too."""


@dataclass(slots=True, kw_only=True)
class EngineRecord:
    """What is known of one engine."""

    spec: EngineSpec
    pool: str
    state: RankState = RankState.DOWN
    reason: str = "not seen yet"
    """Why it is not up, for people."""
    description: EngineDescription | None = None
    """What it said when it was last up."""

    def rank_ids(self) -> Iterator[RankId]:
        if self.description is not None:
            for rank in range(self.description.num_dp_ranks):
                yield RankId(self.spec.engine_id, DpRank(rank))


@dataclass(slots=True, kw_only=True)
class Cluster:
    """All pools and engines."""

    pools: Mapping[str, PoolSpec]
    engines: dict[EngineId, EngineRecord] = field(default_factory=dict)
    epoch: int = 1

    @classmethod
    def from_pools(cls, pools: Iterable[PoolSpec]) -> "Cluster":
        """Start with every engine down.

        Raises `ValueError` when two engines share an id or two pools a name or a model.
        """
        by_name: dict[str, PoolSpec] = {}
        engines: dict[EngineId, EngineRecord] = {}
        pool_of_model: dict[str, str] = {}
        for pool in pools:
            if pool.name in by_name:
                raise ValueError(f"two pools are called {pool.name!r}")
            if pool.model in pool_of_model:
                raise ValueError(
                    f"pools {pool_of_model[pool.model]!r} and {pool.name!r} both serve model "
                    f"{pool.model!r}; one pool serves a model"
                )
            by_name[pool.name] = pool
            pool_of_model[pool.model] = pool.name
            for spec in pool.engines:
                if spec.engine_id in engines:
                    raise ValueError(f"two engines are called {spec.engine_id!r}")
                engines[spec.engine_id] = EngineRecord(spec=spec, pool=pool.name)
        return cls(pools=by_name, engines=engines)

    def apply_up(self, description: EngineDescription) -> EngineRecord:
        """The engine answers. It comes up unless it serves another model than its pool."""
        record = self.engines[description.engine_id]
        record.description = description
        if description.model != record.spec.model:
            record.reason = (
                f"serves model {description.model!r}, but pool {record.pool!r} needs "
                f"{record.spec.model!r}"
            )
            record.state = RankState.DOWN
        elif record.state is not RankState.DRAINING:
            record.state = RankState.UP
            record.reason = ""
        self.epoch += 1
        return record

    def apply_down(self, engine_id: EngineId, reason: str) -> EngineRecord:
        """The engine cannot serve."""
        record = self.engines[engine_id]
        record.reason = reason
        if record.state is not RankState.DOWN:
            record.state = RankState.DOWN
            self.epoch += 1
        return record

    def apply_suspect(self, engine_id: EngineId, reason: str) -> EngineRecord:
        """The engine has stopped without saying so: nothing new while another one is up."""
        record = self.engines[engine_id]
        if record.state in (RankState.UP, RankState.DRAINING):
            record.state, record.reason = RankState.SUSPECT, reason
            self.epoch += 1
        return record

    def apply_trusted(self, engine_id: EngineId) -> EngineRecord:
        """A suspect engine has shown progress: it rejoins under a new epoch."""
        record = self.engines[engine_id]
        if record.state is RankState.SUSPECT:
            record.state, record.reason = RankState.UP, ""
            self.epoch += 1
        return record

    def apply_draining(self, engine_id: EngineId, *, is_draining: bool) -> EngineRecord:
        """An operator takes the engine out of service, or back into it."""
        record = self.engines[engine_id]
        if is_draining and record.state is RankState.UP:
            record.state, record.reason = RankState.DRAINING, "drained by an operator"
            self.epoch += 1
        elif not is_draining and record.state is RankState.DRAINING:
            record.state, record.reason = RankState.UP, ""
            self.epoch += 1
        return record

    def up_engines(self, pool: str) -> list[EngineRecord]:
        """Engines of a pool that take new requests, by id."""
        return [
            record
            for engine_id, record in sorted(self.engines.items())
            if record.pool == pool and record.state is RankState.UP
        ]

    def capabilities(self, pool: str) -> EngineCapabilities:
        """What every engine of the pool that was ever up can do; nothing before the first."""
        known = [
            record.description.capabilities
            for record in self.engines.values()
            if record.pool == pool and record.description is not None
        ]
        if not known:
            return EngineCapabilities()
        return EngineCapabilities(
            can_stream_logprobs=all(each.can_stream_logprobs for each in known),
            can_seed=all(each.can_seed for each in known),
            can_structured_output=all(each.can_structured_output for each in known),
            can_steer_dp_rank=all(each.can_steer_dp_rank for each in known),
            can_migrate=all(each.can_migrate for each in known),
            has_load_reports=all(each.has_load_reports for each in known),
        )

    def validate(self) -> None:
        """Check that an engine that is up has said what it is. O(engines)."""
        for engine_id, record in self.engines.items():
            if record.state is RankState.UP and record.description is None:
                raise InvariantError(f"engine {engine_id} is up and has no description")
