"""KV between simulated engines: kept once, moved over links that queue, gone when it is gone."""

import pytest

from dsched.costs.affine import AffineStepCost
from dsched.drivers.wire import GenerateCommand, SamplingParams
from dsched.errors import DriverError
from dsched.ids import EngineId
from dsched.sim.cluster import SimCluster
from dsched.sim.driver import SimDriver
from dsched.sim.engine import SimEngine, SimEngineConfig
from dsched.sim.kv_store import KvLinkConfig, SimKvStore
from dsched.sim.loop import SimLoop
from dsched.sim.model import SimModel
from dsched.sim.workload import generate_workload
from dsched.testing.recorders import RecordingListener, RecordingSink

P, D, E = EngineId("p"), EngineId("d"), EngineId("e")
PROMPT = tuple(range(100))
MS = 1_000_000


def test_transfers_to_one_engine_queue_and_others_do_not() -> None:
    """1000 bytes a token at a byte per nanosecond: 100 tokens take 0.1 ms after a latency."""
    store = SimKvStore(KvLinkConfig(token_bytes=1_000, link_bytes_per_s=1e9, latency_ns=MS))
    told = [store.keep(P, PROMPT) for _ in range(3)]

    fetches = [
        store.fetch(each, PROMPT, to=to, now_ns=0) for each, to in zip(told, (D, D, E), strict=True)
    ]

    assert [each.ready_ns for each in fetches if each] == [1_100_000, 2_200_000, 1_100_000]
    assert len(store) == 0


def test_kv_is_gone_after_a_fetch_a_death_and_for_another_prompt() -> None:
    store = SimKvStore()
    first, second, third = (store.keep(P, PROMPT) for _ in range(3))

    assert store.fetch(first, PROMPT, to=D, now_ns=0) is not None
    assert store.fetch(first, PROMPT, to=D, now_ns=0) is None
    assert store.fetch(second, PROMPT[1:], to=D, now_ns=0) is None
    store.forget_engine(P)
    assert store.fetch(third, PROMPT, to=D, now_ns=0) is None
    assert store.fetch({}, PROMPT, to=D, now_ns=0) is None


@pytest.mark.parametrize(
    "options", [{"token_bytes": -1}, {"link_bytes_per_s": 0.0}, {"latency_ns": -1}]
)
def test_links_that_cannot_be_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        KvLinkConfig(**options)  # type: ignore[arg-type]


class Pair:
    """A prefill and a decode engine that share a store."""

    def __init__(self) -> None:
        self.loop = SimLoop()
        self.model = SimModel(vocab_size=256)
        self.store = SimKvStore()
        self.drivers = {
            name: SimDriver(
                name,
                SimEngine(
                    SimEngineConfig(num_dp_ranks=1, max_running_requests=8, max_step_tokens=64),
                    self.model,
                    AffineStepCost(base_ns=MS),
                ),
                self.loop,
                kv_store=self.store,
            )
            for name in (P, D)
        }
        for driver in self.drivers.values():
            driver.start(RecordingListener())
        self.loop.run_until(0)

    def generate(self, name: EngineId, **fields: object) -> RecordingSink:
        sink = RecordingSink()
        command = GenerateCommand(
            attempt_id=f"a-{name}",
            epoch=1,
            dp_rank=0,
            prompt_token_ids=PROMPT,
            **({"sampling": SamplingParams(max_tokens=6, temperature=0.0)} | fields),  # type: ignore[arg-type]
        )
        self.drivers[name].generate(command, sink)
        return sink

    def prefill(self) -> dict[str, object]:
        sampling = SamplingParams(max_tokens=1)
        sink = self.generate(P, sampling=sampling, is_prefill=True)
        self.loop.run_while(lambda: not sink.is_ended)
        assert sink.finish is not None
        assert sink.finish.kv_transfer is not None
        return dict(sink.finish.kv_transfer)


def test_the_decode_half_computes_one_token_of_the_prompt() -> None:
    """As a real engine: the last one, whose result is the first token of the answer."""
    pair = Pair()
    told = pair.prefill()
    engine = pair.drivers[D].engine
    num_computed: list[int] = []
    pair.drivers[D].on_step = lambda each, _: num_computed.append(int(each.last_step_tokens.sum()))

    sink = pair.generate(D, kv_transfer=told)
    pair.loop.run_while(lambda: not sink.is_ended)

    assert sink.finish is not None
    assert sink.finish.num_cached_tokens == len(PROMPT) - 1
    assert sum(num_computed) == 1 + 5
    expected = pair.model.stream(PROMPT, 6, SamplingParams(max_tokens=6, temperature=0.0))
    assert tuple(sink.token_ids) == expected
    engine.validate()


def test_kv_that_is_gone_fails_the_attempt_before_its_first_token() -> None:
    pair = Pair()
    told = pair.prefill()
    pair.store.clear()

    sink = pair.generate(D, kv_transfer=told)
    pair.loop.run_while(lambda: not sink.is_ended)

    assert isinstance(sink.error, DriverError)
    assert sink.token_ids == []


def test_an_abort_while_kv_is_on_the_way_ends_the_attempt() -> None:
    pair = Pair()
    told = pair.prefill()

    sink = pair.generate(D, kv_transfer=told)
    pair.drivers[D].abort("a-d")  # type: ignore[arg-type]
    pair.loop.run_until(pair.loop.now_ns() + 1_000 * MS)

    assert sink.finish is not None
    assert (sink.finish.reason.value, sink.violations) == ("abort", [])
    assert pair.drivers[D].engine.is_idle


def test_a_replay_over_separate_pools_answers_as_over_one() -> None:
    """The same tokens for every request, and no prompt is computed by the decode engine."""
    answers: list[dict[int, list[int]]] = []
    for num_prefill_engines in (0, 1):
        heard: dict[int, list[int]] = {}
        cluster = SimCluster(
            engine=SimEngineConfig(num_dp_ranks=2), num_prefill_engines=num_prefill_engines
        )
        report = cluster.replay(
            generate_workload(num_requests=20, seed=3),
            on_tokens=lambda index, _, ids, heard=heard: heard.setdefault(index, []).extend(ids),
        )
        assert int(report.times.is_finished.sum()) == 20
        answers.append(heard)
        num_tokens = cluster.meter.num_step_tokens
        cluster.validate()

    assert answers[0] == answers[1]
    assert num_tokens == report.num_output_tokens
    assert dict(cluster.controller.num_prefills) == {"remote": 20}
