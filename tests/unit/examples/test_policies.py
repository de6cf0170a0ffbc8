"""The example policies: their contract, what each decides, its effect on a simulated cluster."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsched.cli.policy_setup import make_policies
from dsched.config_load import load_config
from dsched.controller.request import RequestError, RequestFinish
from dsched.drivers.wire import SamplingParams
from dsched.ids import DpRank, EngineId
from dsched.plugins import (
    AdmissionAnswer,
    AdmissionView,
    PolicyGuard,
    PolicySet,
    RankCandidate,
    RequestView,
    RoutingPolicies,
)
from dsched.sim import SimCluster, generate_workload
from dsched.sim.engine import SimEngineConfig
from dsched.sim.workload import FixedLength, PoissonArrivals
from dsched.testing import policy_check

FOLDER = Path(__file__).parents[3] / "examples" / "policies"


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)


def policies_of(yaml: str, tmp_path: Path) -> PolicySet:
    """The policies of a configuration, as `dsched run` makes them."""
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml)
    return make_policies(load_config(path))


def request(**fields: Any) -> RequestView:  # noqa: ANN401
    defaults = {"model": "m", "num_prompt_tokens": 10, "max_output_tokens": 10}
    return RequestView(**(defaults | fields))


def candidates(
    running: Sequence[int], *, engine: str = "e", capacity: int = 1_000
) -> list[RankCandidate]:
    return [
        RankCandidate(
            engine_id=EngineId(engine),
            dp_rank=DpRank(rank),
            num_running=count,
            num_kv_tokens=10 * count,
            kv_capacity_tokens=capacity,
            cost_ns=float(count),
        )
        for rank, count in enumerate(running)
    ]


def blocks() -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", blocks())
def test_the_read_me_names_policies_that_keep_their_contract(block: str, tmp_path: Path) -> None:
    """Each configuration is one that `dsched run` starts with."""
    policies = policies_of(block, tmp_path)
    guards = list(policies.guards())

    assert len(guards) == 1
    report = policy_check(guards[0].policy)
    assert report.num_defaults < report.num_questions


def test_there_are_as_many_configurations_as_policies() -> None:
    assert len(blocks()) == len(list(FOLDER.glob("*.py")))


# -- session affinity


def test_a_session_stays_and_moves_only_when_its_rank_leaves() -> None:
    from session_affinity import SessionAffinity  # type: ignore[import-not-found]

    policy, ranks = SessionAffinity(), candidates([0] * 8)
    homes = {
        f"s{number}": ranks[policy.pick(request(session=f"s{number}"), ranks)].dp_rank
        for number in range(400)
    }
    left = [rank for rank in ranks if rank.dp_rank != 3]
    after = {
        session: left[policy.pick(request(session=session), left)].dp_rank for session in homes
    }

    assert all(30 <= count <= 70 for count in Counter(homes.values()).values())
    assert {s for s in homes if homes[s] != after[s]} == {s for s in homes if homes[s] == 3}


def test_a_full_home_is_passed_over_and_no_session_is_the_default() -> None:
    from session_affinity import SessionAffinity

    policy = SessionAffinity(cap=1.5, slack_requests=2)
    home = policy.pick(request(session="s"), candidates([4] * 4))
    running = [4] * 4
    running[home] = 40

    assert policy.pick(request(session="s"), candidates(running)) != home
    assert policy.pick(request(), candidates([4] * 4)) is None
    with pytest.raises(ValueError, match=r"cap is 0\.5; below 1"):
        SessionAffinity(cap=0.5)


# -- cheap first


def test_cheap_ranks_are_kept_until_they_are_full() -> None:
    from cost_aware import CheapFirst  # type: ignore[import-not-found]

    policy = CheapFirst(cheap="own-*", max_running=8, max_kv_share=0.5)

    def kept(cheap_running: int, **fields: Any) -> list[bool] | None:  # noqa: ANN401
        offered = candidates([cheap_running], engine="own-0") + candidates([0], engine="rented")
        answer: list[bool] | None = policy.keep(request(**fields), offered)
        return answer

    assert kept(7) == [True, False]
    assert kept(8) is None
    assert kept(0, num_prompt_tokens=501) is None
    with pytest.raises(ValueError, match="names no engine"):
        CheapFirst(cheap=[])


def test_light_load_stays_on_cheap_engines_and_heavy_load_spills_over() -> None:
    """Simulated: two engines of one rank each."""
    from cost_aware import CheapFirst

    shares = []
    for rate in (2.0, 200.0):
        cluster = SimCluster(num_engines=2, engine=SimEngineConfig(num_dp_ranks=1))
        policy = CheapFirst(cheap="sim-000", max_running=4)
        guard = PolicyGuard(policy, budget_ns=None, clock=cluster.loop.clock)
        cluster.controller.use_policies(PolicySet(routing=RoutingPolicies([(guard, 1.0)])))
        report = cluster.replay(
            generate_workload(
                num_requests=60,
                seed=3,
                prompt=FixedLength(num_tokens=50),
                output=FixedLength(num_tokens=20),
                arrivals=PoissonArrivals(rate_per_s=rate),
            )
        )
        shares.append(float((report.times.rank == 0).mean()))
        assert report.times.is_finished.all()

    assert shares[0] > 0.95
    assert 0.3 < shares[1] < 0.7


# -- tenant fairness


class Client:
    """Notes whose request ended, in order."""

    def __init__(self, tenant: str, ends: list[str]) -> None:
        self._tenant, self._ends = tenant, ends

    def on_tokens(self, first_index: int, token_ids: Any, logprobs: Any) -> None: ...  # noqa: ANN401

    def on_finish(self, finish: RequestFinish) -> None:
        self._ends.append(self._tenant)

    def on_error(self, error: RequestError) -> None:
        self._ends.append(error.code)


def test_tenants_that_wait_are_served_by_weight_whoever_sends_more(tmp_path: Path) -> None:
    """Gold sends after the others and a quarter of what they send; it gets three of four places."""
    cluster = SimCluster(engine=SimEngineConfig(num_dp_ranks=1, max_running_requests=1))
    cluster.start()
    cluster.controller.use_policies(
        policies_of(
            "policies: {priority: {policy: 'tenant_fairness:TenantFairness', "
            "args: {weights: {gold: 3}}}}\nrouting: {policy_budget_ms: 5000}",
            tmp_path,
        )
    )
    ends: list[str] = []
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    for tenant, count in (("free", 80), ("gold", 20)):
        for number in range(count):
            cluster.submit((1, 2, number), sampling, Client(tenant, ends), tenant=tenant)
    cluster.loop.run_while(lambda: len(ends) < 100)
    cluster.controller.policies.close()

    assert ends[0] == "free"  # it was there first
    assert 14 <= Counter(ends[1:21])["gold"] <= 16
    assert Counter(ends) == {"free": 80, "gold": 20}


def test_only_who_has_more_than_its_share_is_refused_and_only_when_it_is_full() -> None:
    from tenant_fairness import TenantFairness  # type: ignore[import-not-found]

    policy = TenantFairness(weights={"gold": 3}, full_share=0.9, max_held=10)
    for tenant in ("gold", "free"):
        policy.priority(request(tenant=tenant))

    def answer(tenant: str, share: float, *, load: float = 0.95, held: int = 20) -> object:
        view = AdmissionView(
            num_running=9, num_held=held, num_ranks_up=1, load_share=load, tenant_share=share
        )
        return policy.admit(request(tenant=tenant), view)

    assert answer("free", 0.3) is AdmissionAnswer.REFUSE
    assert answer("free", 0.2) is None
    assert answer("gold", 0.7) is None
    assert answer("gold", 0.8) is AdmissionAnswer.REFUSE
    assert answer("free", 0.9, load=0.5) is None
    assert answer("free", 0.9, held=3) is None
    with pytest.raises(ValueError, match=r"weights of \['a'\] must be above 0"):
        TenantFairness(weights={"a": 0})


def test_a_tenant_that_was_away_has_bounded_credit_and_memory_is_bounded() -> None:
    from tenant_fairness import MAX_TENANTS, TenantFairness

    policy = TenantFairness(credit_tokens=100)
    for _ in range(50):
        policy.priority(request(tenant="busy"))
    busy = policy.priority(request(tenant="busy"))
    back = policy.priority(request(tenant="back"))
    assert busy < back <= busy + 120

    for number in range(2 * MAX_TENANTS):
        policy.priority(request(tenant=f"t{number}"))
    assert len(policy._meters) == MAX_TENANTS
