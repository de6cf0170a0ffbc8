"""Operators' policies of every kind inside the real controller: what a good one decides, and what a
bad one costs. Engines are simulated, on virtual time."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from dsched.controller.request import RequestError, RequestFinish
from dsched.drivers.wire import SamplingParams, TokenLogprob
from dsched.plugins import (
    AdmissionView,
    FailureReason,
    PolicyGuard,
    PolicySet,
    RankCandidate,
    RequestView,
    RoutingPolicies,
)
from dsched.sim import SimCluster
from dsched.sim.engine import SimEngineConfig
from dsched.testing.runaway import hoard_forever, loop_forever

KINDS = ("pick", "keep", "score", "admit", "priority", "pick_handoff")
SAMPLING = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


class Told:
    """A policy of every kind that answers what it is told to."""

    name = "told"
    api_version = 1

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def _say(self) -> Any:  # noqa: ANN401
        return self._answer() if callable(self._answer) else self._answer

    def pick(self, request: RequestView, candidates: Sequence[RankCandidate]) -> Any:  # noqa: ANN401
        return self._say()

    def keep(self, request: RequestView, candidates: Sequence[RankCandidate]) -> Any:  # noqa: ANN401
        return self._say()

    def score(self, request: RequestView, candidates: Sequence[RankCandidate]) -> Any:  # noqa: ANN401
        return self._say()

    def admit(self, request: RequestView, view: AdmissionView) -> Any:  # noqa: ANN401
        return self._say()

    def priority(self, request: RequestView) -> Any:  # noqa: ANN401
        return self._say()

    def pick_handoff(self, request: RequestView, candidates: Sequence[RankCandidate]) -> Any:  # noqa: ANN401
        return self._say()


class OnlyKind:
    """Another policy, reduced to one of its methods."""

    api_version = 1

    def __init__(self, policy: object, method: str) -> None:
        self.name: str = policy.name  # type: ignore[attr-defined]
        setattr(self, method, getattr(policy, method))


class Stream:
    """One client of the simulated cluster."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ends: list[str] = []

    def on_tokens(
        self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        assert first_index == len(self.tokens)
        self.tokens += token_ids

    def on_finish(self, finish: RequestFinish) -> None:
        self.ends.append("finished")

    def on_error(self, error: RequestError) -> None:
        self.ends.append(error.code)


class NamedStream(Stream):
    """Tells in which order requests end."""

    def __init__(self, name: str, order: list[str]) -> None:
        super().__init__()
        self._name = name
        self._order = order

    def on_finish(self, finish: RequestFinish) -> None:
        super().on_finish(finish)
        self._order.append(self._name)


def policy_set(method: str, policy: object, cluster: SimCluster, **options: Any) -> PolicySet:  # noqa: ANN401
    """A set with `policy` in the place of `method`'s kind."""
    guard: PolicyGuard[Any] = PolicyGuard(
        OnlyKind(policy, method), clock=cluster.loop.clock, **options
    )
    if method in ("pick", "keep", "score"):
        return PolicySet(routing=RoutingPolicies([(guard, 1.0)]))
    key = {"admit": "admission", "pick_handoff": "handoff"}.get(method, method)
    return PolicySet(**{key: guard})  # type: ignore[arg-type]


@pytest.fixture
def cluster() -> Iterator[SimCluster]:
    cluster = SimCluster(num_engines=2, engine=SimEngineConfig(num_dp_ranks=2))
    cluster.start()
    yield cluster
    cluster.validate()
    cluster.controller.policies.close()


def serve(cluster: SimCluster, count: int = 4, **names: str) -> list[Stream]:
    streams = [Stream() for _ in range(count)]
    for index, stream in enumerate(streams):
        cluster.submit((1 + index, 2, 3), SAMPLING, stream, **names)
    cluster.loop.run_while(lambda: not all(stream.ends for stream in streams))
    return streams


def lose_an_engine(cluster: SimCluster, streams: list[Stream]) -> None:
    """Fail the engine of a request that has tokens; the others go on."""
    cluster.loop.run_while(lambda: not any(stream.tokens for stream in streams))
    victim = next(
        engine_id for engine_id in cluster.drivers if cluster.controller.num_requests_on(engine_id)
    )
    cluster.drivers[victim].kill()
    cluster.loop.run_while(lambda: not all(stream.ends for stream in streams))


def raise_it() -> None:
    raise RuntimeError("broken")


BAD: dict[str, tuple[object, FailureReason]] = {
    "raises": (raise_it, FailureReason.RAISED),
    "sleeps": (lambda: time.sleep(0.1), FailureReason.TIMEOUT),
    "loops": (loop_forever, FailureReason.TIMEOUT),
    "hoards": (hoard_forever, FailureReason.TIMEOUT),
    "nan": (float("nan"), FailureReason.WRONG_ANSWER),
    "nans": ([float("nan")] * 4, FailureReason.WRONG_ANSWER),
    "beyond": (10**9, FailureReason.WRONG_ANSWER),
    "far beyond": (1 << 80, FailureReason.WRONG_ANSWER),
    "text": ("0", FailureReason.WRONG_ANSWER),
}


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (method, name)
        for method in KINDS
        for name in BAD
        if (method, name) != ("priority", "beyond")  # which is a good one
    ],
)
def test_a_bad_policy_of_any_kind_costs_preferences_only(
    cluster: SimCluster, method: str, name: str
) -> None:
    """Every request is served with its own tokens; the reason is counted; the default decides."""
    answer, reason = BAD[name]
    undisturbed = [stream.tokens for stream in serve(cluster)]
    # A busy machine is late with good answers, too: only what never ends has little time here.
    budget_ns = 5_000_000 if reason is FailureReason.TIMEOUT else 5_000_000_000
    policies = policy_set(method, Told(answer), cluster, budget_ns=budget_ns)
    cluster.controller.use_policies(policies)

    streams = [Stream() for _ in range(4)]
    for index, stream in enumerate(streams):
        cluster.submit((1 + index, 2, 3), SAMPLING, stream)
    if method == "pick_handoff":
        lose_an_engine(cluster, streams)
    else:
        cluster.loop.run_while(lambda: not all(stream.ends for stream in streams))

    assert [stream.tokens for stream in streams] == undisturbed
    assert all(stream.ends == ["finished"] for stream in streams)
    failures = policies.counts()["told"].num_failures
    assert failures[reason] >= 1
    assert sum(failures.values()) == failures[reason] + failures[FailureReason.BREAKER_OPEN]


def test_refused_requests_get_429_and_are_counted(cluster: SimCluster) -> None:
    """The admission policy sees the tenant's share of what is in work."""
    seen: list[AdmissionView] = []

    class HalfEach(Told):
        def admit(self, request: RequestView, view: AdmissionView) -> str:
            seen.append(view)
            return "refuse" if view.tenant_share >= 0.5 and view.num_running else "accept"

    cluster.controller.use_policies(policy_set("admit", HalfEach(None), cluster, budget_ns=None))
    streams = serve(cluster, 1, tenant="a")
    first, second = Stream(), Stream()
    cluster.submit((1, 2), SAMPLING, first, tenant="a")
    cluster.loop.run_while(lambda: not first.tokens)
    cluster.submit((1, 3), SAMPLING, second, tenant="a")
    cluster.loop.run_while(lambda: not (first.ends and second.ends))

    assert streams[0].ends == first.ends == ["finished"]
    assert second.ends == ["not_admitted"]
    assert seen[0] == AdmissionView(
        num_running=0, num_held=0, num_ranks_up=4, load_share=0.0, tenant_share=0.0
    )
    assert (seen[-1].num_running, seen[-1].tenant_share) == (1, 1.0)
    assert 0.0 < seen[-1].load_share < 1.0


def test_priorities_decide_who_of_those_that_wait_goes_first() -> None:
    """One rank with one place; the client's own wish counts only because the policy says so."""
    cluster = SimCluster(engine=SimEngineConfig(num_dp_ranks=1, max_running_requests=1))
    cluster.start()

    class Paying(Told):
        def priority(self, request: RequestView) -> int:
            return {"gold": 2, "silver": 1}.get(request.tenant, 0)

    cluster.controller.use_policies(policy_set("priority", Paying(None), cluster, budget_ns=None))
    ends: list[str] = []
    for tenant in ("first", "", "silver", "gold", "gold"):
        stream = NamedStream(tenant, ends)
        cluster.submit((1, 2, len(ends)), SAMPLING, stream, tenant=tenant)
        if tenant == "first":
            cluster.loop.run_while(lambda: cluster.controller.num_waiting_requests > 0)
    cluster.loop.run_while(lambda: len(ends) < 5)

    assert ends == ["first", "gold", "gold", "silver", ""]
    cluster.validate()


@pytest.mark.parametrize("choice", [0, 1])
def test_the_handoff_policy_chooses_where_a_lost_request_goes_on(choice: int) -> None:
    """Among the ranks that are left, and it sees how much of the answer is out already."""
    cluster = SimCluster(num_engines=3, engine=SimEngineConfig(num_dp_ranks=1))
    cluster.start()
    seen: list[tuple[int, list[str]]] = []

    class Chooser(Told):
        def pick_handoff(
            self, request: RequestView, candidates: Sequence[RankCandidate]
        ) -> int | None:
            engines = [candidate.engine_id for candidate in candidates]
            seen.append((request.num_output_tokens, engines))
            return choice

    policies = policy_set("pick_handoff", Chooser(None), cluster, budget_ns=None)
    cluster.controller.use_policies(policies)
    streams = [Stream()]
    cluster.submit((1, 2, 3), SAMPLING, streams[0])
    lose_an_engine(cluster, streams)

    ((num_output_tokens, engines),) = seen
    assert num_output_tokens > 0
    assert len(engines) == 2
    dispatched = cluster.controller.num_dispatched
    assert sum(dispatched.values()) == 2
    assert any(rank.engine_id == engines[choice] for rank in dispatched)
    assert policies.counts()["told"].num_calls == 1


def test_a_new_set_counts_on_and_requests_go_on(cluster: SimCluster) -> None:
    """Replaced between two ticks, with requests waiting and running."""
    first = policy_set("pick", Told(0), cluster, budget_ns=None)
    cluster.controller.use_policies(first)
    streams = [Stream() for _ in range(4)]
    for index, stream in enumerate(streams):
        cluster.submit((1 + index, 2), SAMPLING, stream)
    cluster.loop.run_while(lambda: not any(stream.tokens for stream in streams))

    second = policy_set("pick", Told(1), cluster, budget_ns=None)
    assert cluster.controller.use_policies(second) is first
    cluster.loop.run_while(lambda: not all(stream.ends for stream in streams))
    serve(cluster, 2)

    assert all(stream.ends == ["finished"] for stream in streams)
    assert cluster.controller.policies.counts()["told"].num_calls == 6
