"""The scheduler mixin over a stand-in scheduler: it counts, and it changes nothing."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dsched.clock import ManualClock
from dsched.drivers.agent import StepRecord
from dsched.drivers.vllm import mixin as mixin_module
from dsched.drivers.vllm.mixin import (
    LOAD_REPORTS,
    WAITING_PREFILL_TOKENS,
    PromptLedger,
    SchedulerMixin,
    StepMeter,
    kv_capacity_tokens,
    missing_features,
    translate_rank,
)

ENDPOINT = "tcp://127.0.0.1:9"


def make_request(request_id: str, num_prompt_tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=request_id, num_prompt_tokens=num_prompt_tokens, num_computed_tokens=0
    )


class FakeScheduler:
    """What the mixin uses of vLLM's scheduler: a step computes 10 tokens of each request."""

    def __init__(self, vllm_config: SimpleNamespace, *, log_stats: bool = False) -> None:
        self.vllm_config = vllm_config
        self.scheduler_config = SimpleNamespace(async_scheduling=False)
        self.log_stats = log_stats
        self.block_size = 16
        self.max_num_running_reqs = 2
        self.running: list[SimpleNamespace] = []
        self.waiting: list[SimpleNamespace] = []
        self.was_shut_down = False

    def add_request(self, request: SimpleNamespace) -> str:
        self.waiting.append(request)
        return "added"

    def schedule(self, throttle_prefills: bool = False) -> SimpleNamespace:  # noqa: FBT001, FBT002
        while self.waiting and len(self.running) < self.max_num_running_reqs:
            self.running.append(self.waiting.pop(0))
        for request in self.running:
            request.num_computed_tokens += 10
        num_tokens = 10 * len(self.running)
        return SimpleNamespace(total_num_scheduled_tokens=num_tokens, throttle=throttle_prefills)

    def update_from_output(self, scheduler_output: SimpleNamespace, model_output: str) -> tuple:
        for request in [each for each in self.running if each.num_computed_tokens >= 40]:
            self.running.remove(request)
            self._free_request(request)
        return ("outputs", scheduler_output, model_output)

    def _free_request(self, request: SimpleNamespace, delay_free_blocks: bool = False) -> None:  # noqa: FBT001, FBT002
        request.is_freed = True

    def shutdown(self) -> None:
        self.was_shut_down = True


class Scheduler(SchedulerMixin, FakeScheduler):
    pass


def make_config(**changes: object) -> SimpleNamespace:
    fields: dict = {
        "parallel_config": SimpleNamespace(
            data_parallel_rank=0, data_parallel_index=1, data_parallel_size=2
        ),
        "cache_config": SimpleNamespace(num_gpu_blocks=10, kv_cache_size_tokens=150),
        "model_config": SimpleNamespace(
            served_model_name=None, model="path/of/model", max_model_len=99
        ),
    }
    return SimpleNamespace(**(fields | changes))


@pytest.fixture
def schedulers(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Makes schedulers as an engine does; their agents end with the test."""
    monkeypatch.setenv("DSCHED_ENDPOINT", ENDPOINT)
    monkeypatch.setenv("DSCHED_ENGINE_ID", "e0")
    monkeypatch.setattr(mixin_module, "vllm_version", lambda: "0.32.0+cpu")
    made: list[SchedulerMixin] = []

    def make(cls: type = Scheduler, config: SimpleNamespace | None = None) -> SchedulerMixin:
        scheduler = cls(config or make_config(), log_stats=True)
        made.append(scheduler)
        return scheduler

    yield make
    for scheduler in made:
        scheduler.shutdown()


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[StepRecord]:
    """What the mixin hands to the agent."""
    records: list[StepRecord] = []
    monkeypatch.setattr(mixin_module.Agent, "record_step", lambda _, record: records.append(record))
    return records


def step(scheduler: FakeScheduler) -> tuple:
    return scheduler.update_from_output(scheduler.schedule(), "model output")


def test_every_call_reaches_vllm_and_every_answer_comes_back(schedulers) -> None:  # noqa: ANN001
    """Arguments and results pass unchanged."""
    scheduler = schedulers()
    request = make_request("a", 5)

    assert scheduler.add_request(request) == "added"
    output = scheduler.schedule(throttle_prefills=True)
    answer = scheduler.update_from_output(output, model_output="m")
    scheduler.shutdown()

    assert output.throttle
    assert answer == ("outputs", output, "m")
    assert scheduler.was_shut_down


def test_counts_follow_the_requests(schedulers, records: list[StepRecord]) -> None:  # noqa: ANN001
    """Running, waiting, KV tokens and prompt tokens to compute, after each step."""
    scheduler = schedulers()
    for name, num_prompt_tokens in (("a", 5), ("b", 25), ("c", 7)):
        scheduler.add_request(make_request(name, num_prompt_tokens))

    for _ in range(9):
        step(scheduler)

    counts = [each[1:5] for each in records]
    assert counts == [
        (2, 1, 20, 15 + 7),
        (2, 1, 40, 5 + 7),
        (2, 1, 60, 7),
        (0, 1, 0, 7),
        (1, 0, 10, 0),
        (1, 0, 20, 0),
        (1, 0, 30, 0),
        (0, 0, 0, 0),
        (0, 0, 0, 0),
    ]
    assert [each.step for each in records] == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert [each.num_step_tokens for each in records] == [20, 20, 20, 20, 10, 10, 10, 10, 0]
    assert records[-1].step_ns == 0


def test_hello_describes_the_engine_core(schedulers) -> None:  # noqa: ANN001
    scheduler = schedulers()

    hello = scheduler._dsched_agent.hello

    assert (hello.engine, hello.engine_version, hello.engine_id) == ("vllm", "0.32.0+cpu", "e0")
    assert (hello.model, hello.max_model_len) == ("path/of/model", 99)
    assert (hello.dp_rank, hello.num_dp_ranks) == (1, 2)
    assert (hello.kv_capacity_tokens, hello.kv_block_tokens) == (150, 16)
    assert hello.max_running_requests == 2
    assert hello.features == (LOAD_REPORTS, WAITING_PREFILL_TOKENS)
    assert hello.missing == ()


@pytest.mark.parametrize("name", ["served", ["served", "alias"]])
def test_served_name_is_the_models_name(schedulers, name: object) -> None:  # noqa: ANN001
    model_config = SimpleNamespace(served_model_name=name, model="path", max_model_len=99)

    scheduler = schedulers(config=make_config(model_config=model_config))

    assert scheduler._dsched_agent.hello.model == "served"


def test_without_an_endpoint_nothing_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class is vLLM's own until somebody asks for reports."""
    monkeypatch.delenv("DSCHED_ENDPOINT", raising=False)
    scheduler = Scheduler(make_config())
    scheduler.add_request(make_request("a", 5))

    answer = step(scheduler)

    assert answer[0] == "outputs"
    assert scheduler._dsched_agent is None
    assert scheduler._dsched_meter is None
    assert scheduler._dsched_num_errors == 0


@pytest.mark.parametrize(
    ("variable", "value"), [("DSCHED_ENDPOINT", "nonsense"), ("DSCHED_ENGINE_ID", "a/b")]
)
def test_unusable_settings_do_not_stop_the_engine(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
) -> None:
    """A wrong variable costs the reports, not the engine."""
    monkeypatch.setenv("DSCHED_ENDPOINT", ENDPOINT)
    monkeypatch.setenv(variable, value)
    with caplog.at_level(logging.WARNING, logger="vllm.dsched"):
        scheduler = Scheduler(make_config())
    scheduler.add_request(make_request("a", 5))

    assert step(scheduler)[0] == "outputs"
    assert scheduler._dsched_num_errors == 1
    assert sum("feature.failed" in each.message for each in caplog.records) == 1


def test_config_in_other_places_costs_the_reports_only(
    schedulers,  # noqa: ANN001
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A vLLM that keeps its configuration elsewhere runs on."""
    config = SimpleNamespace(parallel_config=SimpleNamespace())

    scheduler = schedulers(config=config)
    scheduler.add_request(make_request("a", 5))

    assert step(scheduler)[0] == "outputs"
    assert scheduler._dsched_num_errors == 1


def test_fault_in_the_meter_is_counted_once_and_switched_off(
    schedulers,  # noqa: ANN001
    records: list[StepRecord],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A step never fails through us, and the fault does not come again."""
    scheduler = schedulers()
    scheduler.add_request(make_request("a", 5))
    step(scheduler)

    with caplog.at_level(logging.WARNING, logger="vllm.dsched"):
        del scheduler.running[0].num_prompt_tokens
        answers = [step(scheduler) for _ in range(3)]

    assert [answer[0] for answer in answers] == ["outputs"] * 3
    assert len(records) == 1
    assert scheduler._dsched_num_errors == 1
    assert len(caplog.records) == 1
    assert scheduler._dsched_agent.hello.missing == (LOAD_REPORTS,)


def test_fault_in_the_ledger_leaves_the_other_counts(
    schedulers,  # noqa: ANN001
    records: list[StepRecord],
) -> None:
    """One part fails, the rest goes on: then only running requests have prompts to compute."""
    scheduler = schedulers()
    broken = SimpleNamespace(request_id="x", num_computed_tokens=0)
    assert scheduler.add_request(broken) == "added"
    scheduler.waiting.clear()
    scheduler.add_request(make_request("a", 25))
    step(scheduler)

    assert scheduler._dsched_agent.hello.missing == (WAITING_PREFILL_TOKENS,)
    assert records[0][1:5] == (1, 0, 10, 15)


def test_missing_hook_turns_off_only_its_part(schedulers, records: list[StepRecord]) -> None:  # noqa: ANN001
    """A vLLM without `_free_request` still reports its load."""

    def update_from_output(self: object, scheduler_output: object, model_output: str) -> tuple:
        return ("outputs",)

    members = vars(FakeScheduler) | {"update_from_output": update_from_output}
    older = type("Older", (), {k: v for k, v in members.items() if k != "_free_request"})
    scheduler = schedulers(type("OldScheduler", (SchedulerMixin, older), {}))
    scheduler.add_request(make_request("a", 25))

    assert step(scheduler) == ("outputs",)
    assert scheduler._dsched_agent.hello.features == (LOAD_REPORTS,)
    assert scheduler._dsched_agent.hello.missing == (WAITING_PREFILL_TOKENS,)
    assert records[0][1:5] == (1, 0, 10, 15)


def test_scheduler_without_any_hook_reports_nothing() -> None:
    class Bare(SchedulerMixin):
        pass

    assert missing_features(Bare.__new__(Bare)) == (LOAD_REPORTS, WAITING_PREFILL_TOKENS)


@pytest.mark.parametrize(("version", "num_warnings"), [("0.32.5", 0), ("0.33.0", 1), ("1.0", 1)])
def test_unknown_version_is_warned_of_and_runs(
    schedulers,  # noqa: ANN001
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    num_warnings: int,
) -> None:
    monkeypatch.setattr(mixin_module, "vllm_version", lambda: version)
    with caplog.at_level(logging.WARNING, logger="vllm.dsched"):
        scheduler = schedulers()

    assert scheduler._dsched_agent is not None
    assert sum("version_unknown" in each.message for each in caplog.records) == num_warnings


def test_lost_asynchronous_scheduling_is_warned_of(
    schedulers,  # noqa: ANN001
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The synchronous class under asynchronous scheduling costs throughput; say so."""

    class WithAsync(FakeScheduler):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            self.scheduler_config.async_scheduling = True

    class AsyncClass(SchedulerMixin, WithAsync):
        _dsched_is_async = True

    with caplog.at_level(logging.WARNING, logger="vllm.dsched"):
        schedulers(AsyncClass)
        assert caplog.records == []
        schedulers(type("SyncClass", (SchedulerMixin, WithAsync), {}))

    assert "DschedAsyncScheduler" in caplog.text


def test_step_time_runs_from_schedule_to_update() -> None:
    clock = ManualClock(1_000)
    meter = StepMeter(clock)

    meter.start()
    clock.advance_to(1_500)
    first = measure(meter)
    clock.advance_to(9_000)
    meter.start()
    clock.advance_to(9_100)
    second = measure(meter)

    assert (first.step_ns, second.step_ns) == (500, 100)


def test_overlapping_steps_do_not_count_time_twice() -> None:
    """With asynchronous scheduling step 2 is scheduled while step 1 computes."""
    clock = ManualClock(0)
    meter = StepMeter(clock)

    meter.start()
    clock.advance_to(100)
    meter.start()
    clock.advance_to(1_000)
    first = measure(meter)
    meter.start()
    clock.advance_to(1_900)
    second = measure(meter)

    assert (first.step_ns, second.step_ns) == (1_000, 900)


def measure(meter: StepMeter) -> StepRecord:
    return meter.measure(running=[], num_waiting=0, num_prompt_tokens=0, num_step_tokens=1)


def test_update_without_a_schedule_has_no_duration() -> None:
    assert measure(StepMeter(ManualClock(5))).step_ns == 0


def test_ledger_counts_each_request_once() -> None:
    """A session that sends more input replaces its count; unknown ids change nothing."""
    ledger = PromptLedger()

    ledger.add(make_request("a", 5))
    ledger.add(make_request("b", 7))
    ledger.add(make_request("a", 9))
    ledger.remove(make_request("x", 100))
    assert ledger.num_tokens == 16

    ledger.remove(make_request("a", 1_000))
    ledger.remove(make_request("a", 1_000))
    assert ledger.num_tokens == 7


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"data_parallel_rank": 3, "data_parallel_size": 8}, (3, 8)),
        ({"data_parallel_rank": 0, "data_parallel_index": 2, "data_parallel_size": 1}, (2, 3)),
        (
            {
                "data_parallel_rank": 5,
                "data_parallel_size": 8,
                "data_parallel_external_lb": True,
            },
            (0, 1),
        ),
        (
            {
                "data_parallel_rank": 5,
                "data_parallel_size": 8,
                "data_parallel_hybrid_lb": True,
                "data_parallel_rank_local": 1,
                "data_parallel_size_local": 4,
            },
            (1, 4),
        ),
    ],
)
def test_rank_is_the_one_behind_this_server(
    fields: dict[str, object], expected: tuple[int, int]
) -> None:
    """For dsched an engine is what one URL fronts."""
    assert translate_rank(SimpleNamespace(**fields)) == expected


def test_kv_capacity_prefers_vllms_own_figure() -> None:
    """Blocks times block size is wrong with several kinds of KV cache."""
    own = SimpleNamespace(num_gpu_blocks=10, kv_cache_size_tokens=77)
    older = SimpleNamespace(num_gpu_blocks=10)
    unknown = SimpleNamespace(num_gpu_blocks=None, kv_cache_size_tokens=None)

    assert kv_capacity_tokens(own, block_tokens=16) == 77
    assert kv_capacity_tokens(older, block_tokens=16) == 160
    assert kv_capacity_tokens(unknown, block_tokens=16) == 0


def test_engine_needs_nothing_that_vllm_does_not_bring() -> None:
    """`pip install --no-deps dsched` beside vLLM is enough, and nothing heavy is loaded."""
    code = (
        "import sys\n"
        "import dsched.drivers.vllm.chunking, dsched.drivers.vllm.verify\n"
        "unwanted = ('structlog', 'sortedcontainers', 'httptools', 'aiohttp', 'uvloop', 'typer',"
        " 'starlette', 'uvicorn', 'tokenizers', 'jinja2', 'prometheus_client')\n"
        "print([each for each in unwanted if each in sys.modules])"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.strip() == "[]"


def test_client_parts_import_without_vllm() -> None:
    """dsched's own process has no vLLM; only the scheduler classes need it."""
    import dsched.drivers.vllm as package

    assert package.VllmDriver.__name__ == "VllmDriver"
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = package.Nonsense
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        _ = package.DschedScheduler
