"""The real controller over simulated engines: every request served, every token right."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dsched.costs.affine import AffineStepCost
from dsched.drivers.wire import SamplingParams
from dsched.ids import EngineId
from dsched.sim import SimCluster, generate_workload, read_trace
from dsched.sim.cluster import SimPolicy
from dsched.sim.driver import ReportFaults
from dsched.sim.engine import KvPolicy, SimEngineConfig
from dsched.sim.prompts import PromptMaker
from dsched.sim.report import ReplayReport
from dsched.sim.traces import Trace
from dsched.sim.workload import ClosedLoop, GammaArrivals, LogNormalLength

SMALL = LogNormalLength(median_tokens=60, sigma=1.0, max_tokens=900)
SHORT = LogNormalLength(median_tokens=25, sigma=0.8, max_tokens=200)


def workload(seed: int, num_requests: int = 120, **fields: object) -> Trace:
    arrivals = fields.pop("arrivals", GammaArrivals(rate_per_s=60.0, cv=2.0))
    return generate_workload(
        num_requests=num_requests,
        seed=seed,
        prompt=SMALL,
        output=SHORT,
        arrivals=arrivals,  # type: ignore[arg-type]
    )


def config(**fields: object) -> SimEngineConfig:
    defaults: dict[str, object] = {
        "num_dp_ranks": 4,
        "kv_capacity_tokens": 2_000,
        "max_running_requests": 12,
        "max_step_tokens": 200,
        "max_model_len": 2_000,
    }
    return SimEngineConfig(**(defaults | fields))  # type: ignore[arg-type]


class Answers:
    """Collects the tokens of every request, and refuses gaps."""

    def __init__(self, count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]

    def __call__(self, index: int, first_index: int, token_ids: Sequence[int]) -> None:
        assert first_index == len(self.tokens[index])
        self.tokens[index] += token_ids


def check_answers(cluster: SimCluster, trace: Trace, answers: Answers) -> None:
    prompts = PromptMaker(trace, vocab_size=cluster.model.vocab_size, seed=cluster.seed)
    for index, tokens in enumerate(answers.tokens):
        expected = cluster.model.stream(prompts.prompt(index), int(trace.num_output_tokens[index]))
        assert tuple(tokens) == expected, f"request {index}"


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_with_the_models_own_tokens(seed: int) -> None:
    """Under preemption, reserved KV, several engines and late or lost reports."""
    rng = np.random.default_rng(seed)
    trace = workload(seed)
    cluster = SimCluster(
        num_engines=int(rng.integers(1, 4)),
        engine=config(kv_policy=KvPolicy.RESERVE if seed % 3 == 0 else KvPolicy.PREEMPT),
        report_faults=ReportFaults(
            delay_ns=int(rng.integers(0, 3)) * 40_000_000, loss_share=0.3 * (seed % 2)
        ),
        seed=seed,
    )
    answers = Answers(trace.num_requests)

    report = cluster.replay(trace, on_tokens=answers)

    cluster.validate()
    assert report.times.is_finished.all()
    assert report.num_errors == {}
    assert np.array_equal(report.times.num_output_tokens, trace.num_output_tokens)
    check_answers(cluster, trace, answers)
    loads = [driver.engine.loads() for driver in cluster.drivers.values()]
    assert all(load.num_kv_tokens.sum() == 0 for load in loads), "KV is left behind"


def test_times_are_in_order() -> None:
    report = SimCluster(engine=config()).replay(workload(1))
    times = report.times

    assert np.all(times.arrival_ns < times.first_token_ns)
    assert np.all(times.first_token_ns <= times.end_ns)
    assert np.array_equal(times.first_token_ns == times.end_ns, times.num_output_tokens == 1)
    assert np.all(times.tpot_ns >= 15_000_000), "a step cannot be shorter than its constant part"
    assert set(times.rank.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.parametrize("num_engines", [1, 3])
def test_keeping_output_back_changes_nothing(seed: int, num_engines: int) -> None:
    """Delivering every token at its own time gives the same decisions and the same times."""
    digests = [
        SimCluster(num_engines=num_engines, engine=config(), seed=seed, is_batching=is_batching)
        .replay(workload(seed))
        .times.digest()
        for is_batching in (True, False)
    ]

    assert digests[0] == digests[1]


def test_same_seed_same_report_other_seed_another() -> None:
    reports = [
        SimCluster(engine=config(), seed=seed, report_faults=ReportFaults(loss_share=0.5))
        .replay(workload(seed))
        .as_json()
        for seed in (1, 1, 2)
    ]

    assert reports[0] == reports[1]
    assert reports[0]["digest"] != reports[2]["digest"]


def test_overload_waits_instead_of_failing() -> None:
    """Ten times more than the cluster can hold: the queue shows in TTFT, nobody is refused."""
    burst = workload(5, num_requests=400, arrivals=GammaArrivals(rate_per_s=5_000.0, cv=1.0))
    small = config(num_dp_ranks=2, max_running_requests=3)

    report = SimCluster(engine=small).replay(burst)

    assert report.times.is_finished.all()
    assert report.times.ttft_ns.max() > 20 * report.times.ttft_ns.min()


def test_closed_loop_keeps_its_concurrency() -> None:
    trace = workload(4, arrivals=ClosedLoop(max_concurrency=9))

    times = SimCluster(engine=config()).replay(trace).times

    moments = np.unique(np.concatenate((times.arrival_ns, times.end_ns)))
    present = [
        int(np.sum((times.arrival_ns <= moment) & (times.end_ns > moment))) for moment in moments
    ]
    last_arrival = int(np.searchsorted(moments, times.arrival_ns.max()))
    assert present[: last_arrival + 1] == [9] * (last_arrival + 1)
    assert max(present) == 9


RT_01 = "t_s,input_tokens,output_tokens\n" + "0.0,1000,100\n" * 8
RT_05 = "t_s,input_tokens,output_tokens\n0.000,15000,2000\n" + "".join(
    f"0.00{i},1000,2000\n" for i in range(1, 6)
)


def replay_text(tmp_path: Path, text: str, num_ranks: int, policy: SimPolicy) -> ReplayReport:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    engine = SimEngineConfig(num_dp_ranks=num_ranks)
    return SimCluster(engine=engine, policy=policy).replay(read_trace(path))


@pytest.mark.parametrize("policy", list(SimPolicy))
def test_first_burst_does_not_herd(tmp_path: Path, policy: SimPolicy) -> None:
    """RT-01: eight requests at once, before any report: two on each of four ranks."""
    report = replay_text(tmp_path, RT_01, 4, policy)

    assert np.bincount(report.times.rank).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("policy", "ranks"),
    [
        (SimPolicy.TWO_TERM, [0, 1, 1, 1, 0, 1]),
        (SimPolicy.LEAST_REQUESTS, [0, 1, 0, 1, 0, 1]),
        (SimPolicy.LEAST_KV, [0, 1, 1, 1, 1, 1]),
        (SimPolicy.ROUND_ROBIN, [0, 1, 0, 1, 0, 1]),
    ],
)
def test_each_policy_places_as_its_name_says(
    tmp_path: Path, policy: SimPolicy, ranks: list[int]
) -> None:
    """RT-05: one huge prompt and five small ones on two ranks."""
    assert replay_text(tmp_path, RT_05, 2, policy).times.rank.tolist() == ranks


def test_prefix_blocks_are_reused_on_their_rank(tmp_path: Path) -> None:
    """The second request of a conversation on one rank computes only its own tokens."""
    path = tmp_path / "trace.csv"
    path.write_text(
        "t_ms,input_tokens,output_tokens,block512_ids\n0,2048,5,0-3\n60000,2560,5,0-4\n"
    )
    times = {}
    for tokens in (0, 100_000):
        engine = SimEngineConfig(num_dp_ranks=1, prefix_cache_tokens=tokens)
        times[tokens] = SimCluster(engine=engine).replay(read_trace(path)).times.ttft_ns.tolist()

    assert times[0][0] == times[100_000][0]
    assert times[100_000][1] < times[0][1] / 2


def test_one_request_by_hand() -> None:
    """100 prompt tokens, 3 output tokens: the times are those of the cost model."""
    cost = AffineStepCost(
        base_ns=1_000,
        per_decode_request_ns=100,
        per_kv_token_ns=1,
        per_prefill_token_ns=10,
        per_prefill_context_ns=0,
    )
    cluster = SimCluster(engine=config(num_dp_ranks=1), cost=cost)
    trace = generate_workload(num_requests=1)
    one = Trace(
        source="one",
        shape="plain",
        arrival_ns=trace.arrival_ns.copy(),
        num_prompt_tokens=np.array([100], dtype=np.int32),
        num_output_tokens=np.array([3], dtype=np.int32),
        counts=trace.counts,
    )

    times = cluster.replay(one).times

    assert times.ttft_ns.tolist() == [1_000 + 100 * 10]
    assert (times.end_ns - times.first_token_ns).tolist() == [1_100 + 101 + 1_100 + 102]


def test_requests_can_be_sent_one_by_one() -> None:
    """Without a trace: submit, and let time pass."""
    cluster = SimCluster(engine=config())
    cluster.start()
    heard: list[object] = []

    class Stream:
        def on_tokens(self, first_index: int, token_ids: Sequence[int], logprobs: object) -> None:
            heard.extend(token_ids)

        def on_finish(self, finish: object) -> None:
            heard.append("end")

        def on_error(self, error: object) -> None:
            heard.append(error)

    prompt = tuple(range(30))
    cluster.submit(prompt, SamplingParams(max_tokens=4, temperature=0.0), Stream())
    cluster.loop.run_until(1_000_000_000)

    assert heard == [*cluster.model.stream(prompt, 4), "end"]


def test_killed_engine_costs_requests_without_output_nothing() -> None:
    """What had no token yet is served by the other engine; time goes on, nothing hangs."""
    cluster = SimCluster(num_engines=2, engine=config(), seed=1)
    trace = workload(9)
    victim = cluster.drivers[EngineId("sim-000")]
    cluster.loop.call_at(700_000_000, victim.kill)

    report = cluster.replay(trace)

    cluster.validate()
    finished = int(report.times.is_finished.sum())
    assert finished + sum(report.num_errors.values()) == trace.num_requests
    assert set(report.num_errors) <= {"engine_lost"}
    assert finished > trace.num_requests // 2
    late = report.times.arrival_ns > 700_000_000
    assert report.times.is_finished[late].all()


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="num_engines 0"):
        SimCluster(num_engines=0)
    with pytest.raises(ValueError, match="seed -1"):
        SimCluster(seed=-1)
