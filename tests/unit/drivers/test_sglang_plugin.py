"""dsched's plug-in for SGLang over stand-ins: what is attached, what is missing, what is told."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from dsched.clock import ManualClock
from dsched.config import AgentSettings
from dsched.drivers.agent import CHUNK_BUDGET, LOAD_REPORTS, WAITING_PREFILL_TOKENS
from dsched.drivers.sglang import plugin
from dsched.drivers.sglang.plugin import RankAgent, RankPlace, attach_scheduler
from dsched.drivers.wire import SetStepBudget

ENDPOINT = "tcp://127.0.0.1:9"
MS = 1_000_000
CONTROLLER = "sglang.srt.managers.data_parallel_controller"


class Registry:
    """SGLang's `HookRegistry`."""

    hooks: list[tuple[str, Any, str]]

    def __init__(self) -> None:
        self.hooks = []

    def register(self, target: str, hook: Callable[..., Any], kind: str) -> None:
        self.hooks.append((target, hook, kind))

    def apply_hooks(self) -> None: ...


class Inquirer:
    """SGLang's `SchedulerLoadInquirer`, as it answers and how often it is asked."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_asked = 0

    def get_num_waiting_uncached_tokens(self) -> int:
        self.num_asked += 1
        return self.num_tokens


class Request(SimpleNamespace):
    """Of SGLang's `Req` only whether it has ended; hashable as that is."""

    __hash__ = object.__hash__


def request(*, is_finished: bool = False) -> Any:
    return Request(finished_reason="stop" if is_finished else None)


def batch(kind: str, reqs: list[Any], *, num_tokens: int = 0, launched_ms: float = 0.0) -> Any:
    mode = SimpleNamespace(
        is_idle=lambda: kind == "idle",
        is_extend=lambda: kind == "extend",
        is_decode=lambda: kind == "decode",
    )
    return SimpleNamespace(
        reqs=reqs, forward_mode=mode, extend_num_tokens=num_tokens, launch_ts=launched_ms / 1e3
    )


class Scheduler(SimpleNamespace):
    """SGLang's scheduler as far as it is read and wrapped."""

    def __init__(self) -> None:
        pools = SimpleNamespace(get_kv_token_stats=lambda: (321, 0.1))
        super().__init__(
            server_args=SimpleNamespace(
                served_model_name="tiny", model_path="/models/tiny", enable_eplb=False
            ),
            model_config=SimpleNamespace(context_len=4_096),
            spec_algorithm=SimpleNamespace(name="NONE"),
            max_total_num_tokens=8_192,
            max_running_requests=16,
            page_size=1,
            running_batch=batch("decode", []),
            cur_batch_for_debug=None,
            waiting_queue=[],
            disaggregation_mode=SimpleNamespace(name="NULL"),
            chunked_req=None,
            chunked_prefill_size=512,
            prefill_decode_interval=0,
            is_mixed_chunk=False,
            pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: pools),
            load_inquirer=Inquirer(),
            get_new_batch_prefill=lambda _: None,
            get_prefill_adder_class=lambda: SimpleNamespace(add_chunked_req=None, add_one_req=None),
            process_batch_result=lambda *_: "own result",
            run_event_loop=lambda: "own loop",
        )


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Modules of an SGLang 0.5.23 with one rank, and an environment that turns dsched on."""
    registry = Registry()
    parallel = SimpleNamespace(
        dp_rank=None,
        num_dp_ranks=1,
        attn_tp_size=1,
        attn_cp_size=1,
        pp_size=1,
        attn_tp_rank=0,
        attn_cp_rank=0,
        pp_rank=0,
    )
    known = SimpleNamespace(
        dispatching_with_trace=1, refresh_load_budget=1, maybe_external_dp_rank_routing=1
    )
    modules: dict[str, dict[str, Any]] = {
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": registry,
            "HookType": SimpleNamespace(AROUND="around", AFTER="after"),
        },
        "sglang.srt.runtime_context": {"get_parallel": lambda: parallel},
        plugin.SCHEDULER: {},
        CONTROLLER: {"DataParallelController": known},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        parts = name.split(".")
        for end in range(1, len(parts)):
            parent = ".".join(parts[:end])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "sglang_version", lambda: "0.5.23")
    for name in ("STEP_BUDGET_MS", "EPLB", "VERIFY_LENGTHS"):
        monkeypatch.delenv(f"DSCHED_{name}", raising=False)
    monkeypatch.setenv("DSCHED_ENDPOINT", ENDPOINT)
    monkeypatch.setenv("DSCHED_ENGINE_ID", "engine-a")
    plugin._register.cache_clear()
    yield SimpleNamespace(registry=registry, parallel=parallel, controller=known)
    plugin._register.cache_clear()


@pytest.fixture
def attached(sglang: SimpleNamespace) -> Iterator[Callable[[Scheduler], RankAgent]]:
    """Attach to a scheduler; its agent ends with the test."""
    agents: list[RankAgent] = []

    def attach(scheduler: Scheduler) -> RankAgent:
        agent = attach_scheduler(scheduler)
        assert agent is not None
        agents.append(agent)
        return agent

    yield attach
    for agent in agents:
        agent.agent.abandon()


def test_nothing_is_touched_without_an_endpoint(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSCHED_ENDPOINT")
    plugin.activate()

    assert sglang.registry.hooks == []


def test_loaded_twice_it_registers_once(sglang: SimpleNamespace) -> None:
    plugin.activate()
    plugin.activate()

    assert [(target, kind) for target, _, kind in sglang.registry.hooks] == [
        (f"{plugin.SCHEDULER}.Scheduler.__init__", "around"),
        (f"{CONTROLLER}.DataParallelController.__init__", "after"),
    ]


def test_processes_without_a_scheduler_import_none(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The detokenizer would start a second later for it."""
    monkeypatch.delitem(sys.modules, plugin.SCHEDULER)
    monkeypatch.delitem(sys.modules, CONTROLLER)
    plugin.activate()

    assert sglang.registry.hooks == []


def test_unusable_settings_are_logged_and_sglang_starts(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DSCHED_ENDPOINT", "nonsense")
    plugin.activate()

    assert "plugin.failed" in caplog.text
    assert "DSCHED_ENDPOINT: 'nonsense'" in caplog.text
    assert caplog.records[-1].levelname == "ERROR"


def test_scheduler_is_made_although_dsched_fails(
    sglang: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """An SGLang that keeps its ranks elsewhere."""
    del sglang.parallel.num_dp_ranks
    plugin.activate()
    (_, around, _), *_ = sglang.registry.hooks
    made = around(lambda *_: "made", Scheduler(), "arguments")

    assert made == "made"
    assert "plugin.failed" in caplog.text


def test_hello_describes_the_rank(
    sglang: SimpleNamespace, attached: Callable[[Scheduler], RankAgent]
) -> None:
    sglang.parallel.dp_rank, sglang.parallel.num_dp_ranks = 1, 2
    hello = attached(Scheduler()).agent.hello

    assert structs.asdict(hello) | {"incarnation": ""} == structs.asdict(hello) | {
        "wire_version": hello.wire_version,
        "dsched_version": hello.dsched_version,
        "engine_id": "engine-a",
        "incarnation": "",
        "engine": "sglang",
        "engine_version": "0.5.23",
        "model": "tiny",
        "max_model_len": 4_096,
        "dp_rank": 1,
        "num_dp_ranks": 2,
        "kv_capacity_tokens": 8_192,
        "kv_block_tokens": 1,
        "max_running_requests": 16,
        "features": (LOAD_REPORTS, WAITING_PREFILL_TOKENS, plugin.DP_ROUTING),
        "missing": (),
    }


def test_only_the_first_of_the_ranks_that_share_a_request_speaks(sglang: SimpleNamespace) -> None:
    sglang.parallel.attn_tp_size, sglang.parallel.attn_tp_rank = 2, 1

    assert attach_scheduler(Scheduler()) is None


def without(*names: str) -> Scheduler:
    scheduler = Scheduler()
    for name in names:
        delattr(scheduler, name)
    return scheduler


@pytest.mark.parametrize(
    ("lost", "missing"),
    [
        ("pool_stats_observer", (LOAD_REPORTS,)),
        ("load_inquirer", (WAITING_PREFILL_TOKENS,)),
        ("chunked_req", (CHUNK_BUDGET,)),
        ("is_mixed_chunk", (CHUNK_BUDGET,)),
    ],
)
def test_missing_hook_turns_off_just_its_feature(
    attached: Callable[[Scheduler], RankAgent],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lost: str,
    missing: tuple[str, ...],
) -> None:
    """In the hello, from where `dsched workers` and a metric have it, and loudly in the log."""
    monkeypatch.setenv("DSCHED_STEP_BUDGET_MS", "20")
    agent = attached(without(lost))
    wanted = {LOAD_REPORTS, WAITING_PREFILL_TOKENS, CHUNK_BUDGET}

    assert agent.agent.hello.missing == missing
    assert set(agent.agent.hello.features) == wanted - set(missing)
    assert (agent.chunks is None) == (CHUNK_BUDGET in missing)
    errors = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert len(errors) == 1
    assert f"feature.missing feature={missing[0]}" in errors[0]


def test_unknown_version_is_warned_of_and_runs(
    attached: Callable[[Scheduler], RankAgent],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(plugin, "sglang_version", lambda: "0.6.0")
    agent = attached(Scheduler())

    assert agent.agent.hello.missing == ()
    assert "engine.version_unknown version=0.6.0" in caplog.text


def test_controller_that_is_not_known_is_told_as_missing(
    sglang: SimpleNamespace, attached: Callable[[Scheduler], RankAgent]
) -> None:
    sglang.parallel.num_dp_ranks = 2
    del sglang.controller.refresh_load_budget

    assert attached(Scheduler()).agent.hello.missing == (plugin.DP_ROUTING,)


def test_expert_hooks_that_sglang_did_not_take_are_missing(
    attached: Callable[[Scheduler], RankAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang logs a hook that it cannot apply, and goes on without it."""
    monkeypatch.setenv("DSCHED_EPLB", "1")
    monkeypatch.setattr(plugin, "is_wrapped", lambda _: False)
    scheduler = Scheduler()
    scheduler.server_args.enable_eplb = True

    assert attached(scheduler).agent.hello.missing == (plugin.EPLB,)


class Wrapped:
    def method(self) -> None: ...


Wrapped.method.__wrapped__ = None  # type: ignore[attr-defined]


def test_hooks_are_seen_on_functions_and_methods() -> None:
    module = sys.modules[__name__]
    sys.modules["wrapped_here"] = module
    try:
        assert plugin.is_wrapped("wrapped_here.Wrapped.method")
        assert not plugin.is_wrapped("wrapped_here.without")
    finally:
        del sys.modules["wrapped_here"]


class Stepper:
    """One scheduler with its agent, and a clock."""

    def __init__(self, scheduler: Scheduler, *, has_stages: bool = False) -> None:
        place = plugin.place_of(scheduler)
        assert place == RankPlace(0, 1, 1, is_first=True, has_stages=False)
        hello = plugin.translate_hello(
            scheduler,
            place,
            engine_id="engine-a",
            engine_version="0.5.23",
            features=(LOAD_REPORTS, WAITING_PREFILL_TOKENS),
            missing=(),
        )
        self.clock = ManualClock()
        self.records: list[Any] = []
        settings = AgentSettings(endpoint=ENDPOINT, engine_id=None)
        self.agent = RankAgent(
            scheduler, hello, settings, chunks=None, has_stages=has_stages, clock=self.clock
        )
        self.agent.agent.start = lambda: None  # type: ignore[method-assign]
        self.agent.agent.record_step = self.records.append  # type: ignore[method-assign]
        self.agent.install()
        self.scheduler = scheduler

    def step(self, ended: Any, at_ms: int) -> Any:
        self.clock.advance_to(at_ms * MS)
        assert self.scheduler.process_batch_result(ended, None) == "own result"
        return self.records[-1]


@pytest.fixture
def stepper(sglang: SimpleNamespace) -> Stepper:
    return Stepper(Scheduler())


def test_step_reports_what_it_left_behind(stepper: Stepper) -> None:
    """A prompt step of 40 tokens that began at 10 ms and ended at 25 ms."""
    scheduler = stepper.scheduler
    scheduler.running_batch.reqs = [request(), request(is_finished=True)]
    scheduler.waiting_queue = [request(), request()]
    scheduler.load_inquirer.num_tokens = 77
    record = stepper.step(batch("extend", [request()], num_tokens=40, launched_ms=10), 25)

    assert record._asdict() == {
        "step": 1,
        "num_running": 1,
        "num_waiting": 2,
        "num_kv_tokens": 321,
        "num_waiting_prefill_tokens": 77,
        "step_ns": 15 * MS,
        "num_step_tokens": 40,
    }


def test_overlapped_steps_are_not_counted_twice(stepper: Stepper) -> None:
    """The second is launched at 12 ms while the first computes until 20 ms."""
    first = stepper.step(batch("decode", [request()] * 3, launched_ms=10), 20)
    second = stepper.step(batch("decode", [request()] * 3, launched_ms=12), 29)

    assert (first.step_ns, second.step_ns) == (10 * MS, 9 * MS)
    assert (first.num_step_tokens, second.step) == (3, 2)


def test_launched_prompts_are_running_already(stepper: Stepper) -> None:
    """SGLang puts them among the running ones a step later; a decode batch is there already."""
    scheduler = stepper.scheduler
    scheduler.running_batch.reqs = [request()]
    scheduler.cur_batch_for_debug = batch("extend", [request(), request()])
    with_prompts = stepper.step(batch("decode", [request()]), 1)
    scheduler.cur_batch_for_debug = scheduler.running_batch
    without_prompts = stepper.step(batch("decode", [request()]), 2)

    assert (with_prompts.num_running, without_prompts.num_running) == (3, 1)


def test_all_batches_of_a_pipeline_are_running(sglang: SimpleNamespace) -> None:
    stepper = Stepper(Scheduler(), has_stages=True)
    inflight = {request(), request(), request(is_finished=True)}
    stepper.scheduler.collect_inflight_reqs = lambda: inflight

    assert stepper.step(batch("decode", [request()]), 1).num_running == 2


def test_split_server_counts_those_that_wait_for_the_other_side(stepper: Stepper) -> None:
    """Those whose KV is on its way stand in no ordinary queue, and hold KV while nothing runs."""
    scheduler = stepper.scheduler
    scheduler.disaggregation_mode.name = "DECODE"
    scheduler.load_inquirer.get_loads = lambda: SimpleNamespace(num_waiting_reqs=5)
    record = stepper.step(batch("decode", [request(is_finished=True)]), 1)

    assert (record.num_running, record.num_waiting, record.num_kv_tokens) == (0, 5, 321)


def test_idle_step_beside_others_work_is_no_step(stepper: Stepper) -> None:
    """Attention DP runs empty batches so that the experts of all ranks are reached."""
    record = stepper.step(batch("idle", [], launched_ms=1), 5)

    assert (record.step, record.step_ns, record.num_step_tokens) == (0, 0, 0)
    assert record.num_kv_tokens == 0


def test_queue_is_counted_again_only_when_it_changed(stepper: Stepper) -> None:
    scheduler = stepper.scheduler
    scheduler.waiting_queue = [request()]
    for at_ms in range(1, 6):
        stepper.step(batch("decode", [request()]), at_ms)
    scheduler.waiting_queue.append(request())
    stepper.step(batch("decode", [request()]), 6)

    assert scheduler.load_inquirer.num_asked == 2


def test_part_that_raises_is_lost_and_told(
    stepper: Stepper, caplog: pytest.LogCaptureFixture
) -> None:
    del stepper.scheduler.load_inquirer
    first = stepper.step(batch("decode", [request()]), 1)
    stepper.scheduler.pool_stats_observer = None
    for at_ms in (2, 3):
        stepper.step(batch("decode", [request()]), at_ms)

    assert stepper.agent.agent.hello.missing == (WAITING_PREFILL_TOKENS, LOAD_REPORTS)
    assert stepper.agent.agent.hello.features == ()
    assert stepper.records == [first]
    assert stepper.agent.num_errors == 2
    assert "feature.failed feature=load_reports" in caplog.text


def test_end_of_the_loop_says_goodbye_and_a_crash_does_not(stepper: Stepper) -> None:
    closed: list[bool] = []
    stepper.agent.agent.close = lambda: closed.append(True)  # type: ignore[method-assign]
    assert stepper.scheduler.run_event_loop() == "own loop"
    assert closed == [True]

    def crash() -> None:
        raise RuntimeError("device lost")

    other = Scheduler()
    other.run_event_loop = crash
    second = RankAgent(
        other,
        stepper.agent.agent.hello,
        AgentSettings(endpoint=ENDPOINT, engine_id=None),
        chunks=None,
        has_stages=False,
        clock=ManualClock(),
    )
    second.agent.start = second.agent.close = lambda: closed.append(False)  # type: ignore
    second.install()
    closed.clear()
    with pytest.raises(RuntimeError, match="device lost"):
        other.run_event_loop()
    assert closed == []


def test_budget_command_sets_and_returns_chunks(
    attached: Callable[[Scheduler], RankAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSCHED_STEP_BUDGET_MS", "20")
    agent = attached(Scheduler())
    agent._on_command(SetStepBudget(epoch=1, step_budget_ns=35 * MS))
    assert (agent.chunks.budget_seconds, agent.chunks.is_on) == (0.035, True)
    agent._on_command(SetStepBudget(epoch=1, step_budget_ns=None))

    assert (agent.chunks.budget_seconds, agent.chunks.is_on) == (0.035, False)
