"""Chunk control over a stand-in for vLLM's scheduler: planned, obeyed, and never in the way."""

from collections import deque
from types import SimpleNamespace

import pytest

from dsched.config import ChunkSettings
from dsched.drivers.plan_watch import MAX_LATE_IN_A_ROW
from dsched.drivers.vllm import chunking
from dsched.drivers.vllm.chunking import ChunkControl, ChunkingMixin, make_chunk_control
from dsched.drivers.wire import SayHello, SetStepBudget


class FakeRequest(SimpleNamespace):
    """What is read of vLLM's `Request`."""

    def __init__(self, request_id: str, num_prompt_tokens: int, max_tokens: int = 50) -> None:
        super().__init__(
            request_id=request_id,
            num_prompt_tokens=num_prompt_tokens,
            num_tokens=num_prompt_tokens,
            num_computed_tokens=0,
            num_output_placeholders=0,
            spec_token_ids=[],
            max_tokens=max_tokens,
        )

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class FakeQueue(deque):
    """vLLM's first-come queue."""

    def remove_request(self, request: FakeRequest) -> None:
        self.remove(request)

    def prepend_request(self, request: FakeRequest) -> None:
        self.appendleft(request)


class FakeScheduler:
    """The two loops of vLLM's `schedule`: running requests get what they may, one without tokens
    is passed over; the queue is served until its head gets nothing or `kv_free` is used up."""

    def __init__(
        self, *, policy: str = "fcfs", chunked: bool = True, kv_free: int = 1 << 30
    ) -> None:
        self.scheduler_config = SimpleNamespace(policy=policy, enable_chunked_prefill=chunked)
        self.max_num_running_reqs = 4
        self.max_num_scheduled_tokens = 2_048
        self.kv_free = kv_free
        self.running: list[FakeRequest] = []
        self.waiting = FakeQueue()
        self.requests: dict[str, FakeRequest] = {}

    def add_request(self, request: FakeRequest) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> SimpleNamespace:
        scheduled: dict[str, int] = {}
        budget = self.max_num_scheduled_tokens
        for request in self.running:
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            count = self._reserve_prefill_lookahead(request, request.num_computed_tokens, count)
            if count > 0:
                scheduled[request.request_id] = count
                budget -= count
        while self.waiting and budget > 0 and len(self.running) < self.max_num_running_reqs:
            request = self.waiting[0]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            count = self._reserve_prefill_lookahead(request, request.num_computed_tokens, count)
            if count == 0 or request.num_tokens > self.kv_free:
                break
            self.kv_free -= request.num_tokens
            self.waiting.popleft()
            self.running.append(request)
            scheduled[request.request_id] = count
            budget -= count
        for request_id, count in scheduled.items():
            self.requests[request_id].num_computed_tokens += count
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
        )

    def _reserve_prefill_lookahead(self, request: FakeRequest, computed: int, count: int) -> int:
        return count

    def _preempt_request(self, request: FakeRequest) -> None:
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def update_from_output(self, output: SimpleNamespace) -> None:
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            if request.num_computed_tokens == request.num_tokens:
                request.num_tokens += 1
                if request.num_tokens == request.num_prompt_tokens + request.max_tokens:
                    self.running.remove(request)
                    self._free_request(request)

    def _free_request(self, request: FakeRequest) -> None:
        del self.requests[request.request_id]

    def shutdown(self) -> None:
        pass


class Scheduler(ChunkingMixin, FakeScheduler):
    """As `DschedScheduler` is made."""


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 ms a step on the default machine: 960 tokens without decodes."""
    monkeypatch.delenv("DSCHED_ENDPOINT", raising=False)
    monkeypatch.setenv("DSCHED_STEP_BUDGET_MS", "100")
    # Steps here take no time; nothing is to be learned from them.
    monkeypatch.setattr(chunking.ChunkControl, "after_step", lambda _: None)


def step(scheduler: FakeScheduler) -> dict[str, int]:
    output = scheduler.schedule()
    scheduler.update_from_output(output)
    return output.num_scheduled_tokens


def control_of(scheduler: Scheduler) -> ChunkControl:
    assert scheduler._dsched_chunks is not None
    return scheduler._dsched_chunks


@pytest.mark.usefixtures("budget")
def test_prompt_is_cut_to_the_time_budget() -> None:
    """960 tokens a step; every chunk is the planned one; then it decodes and ends."""
    scheduler = Scheduler()
    scheduler.add_request(FakeRequest("a", 2_000, max_tokens=3))

    steps = [step(scheduler) for _ in range(5)]

    assert steps == [{"a": 960}, {"a": 960}, {"a": 80}, {"a": 1}, {"a": 1}]
    control = control_of(scheduler)
    assert (control.num_differed, control.num_fallbacks) == (0, 0)
    assert len(control.planner) == 0
    assert scheduler.requests == {}


@pytest.mark.usefixtures("budget")
def test_short_prompt_passes_a_long_one_in_the_queue() -> None:
    """vLLM stops at the first of the queue that gets nothing, so who has a chunk goes first."""
    scheduler = Scheduler()
    scheduler.max_num_running_reqs = 3
    for name, length in (("long", 300_000), ("mid", 30_000), ("short", 500)):
        scheduler.add_request(FakeRequest(name, length))

    first = step(scheduler)

    assert first["short"] > 0
    assert sum(first.values()) <= 960
    assert control_of(scheduler).num_differed == 0


@pytest.mark.usefixtures("budget")
def test_without_a_budget_vllm_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable, no control: the chunk is all that the token budget allows."""
    monkeypatch.delenv("DSCHED_STEP_BUDGET_MS")
    scheduler = Scheduler()
    scheduler.add_request(FakeRequest("a", 2_000))

    assert step(scheduler) == {"a": 2_000}
    assert scheduler._dsched_chunks is None


@pytest.mark.usefixtures("budget")
@pytest.mark.parametrize("settings", [{"policy": "priority"}, {"chunked": False}])
def test_settings_that_leave_no_room_are_left_alone(settings: dict) -> None:
    """With priorities or without chunked prefill vLLM's own rule stays."""
    scheduler = Scheduler(**settings)
    scheduler.add_request(FakeRequest("a", 2_000))

    assert scheduler._dsched_chunks is None
    assert step(scheduler) == {"a": 2_000}


@pytest.mark.usefixtures("budget")
def test_scheduler_without_the_hook_is_left_alone() -> None:
    """Another vLLM turns off just this feature."""

    class Other(FakeScheduler):
        _reserve_prefill_lookahead = None

    bare = Other()
    settings = ChunkSettings(step_budget_ms=100.0, costs=None)
    assert make_chunk_control(bare, settings) is not None

    class Bare:
        scheduler_config = bare.scheduler_config

    assert make_chunk_control(Bare(), settings) is None


@pytest.mark.usefixtures("budget")
def test_broken_setting_does_not_stop_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong variable is logged and counted; the engine starts with its own rule."""
    monkeypatch.setenv("DSCHED_STEP_BUDGET_MS", "soon")

    scheduler = Scheduler()

    assert scheduler._dsched_chunks is None
    assert scheduler._dsched_num_errors == 1


@pytest.mark.usefixtures("budget")
@pytest.mark.parametrize("method", ["before_schedule", "chunk", "after_schedule", "add", "remove"])
def test_error_of_ours_leaves_vllms_rule(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Whatever raises is switched off; every request is still served to its end."""

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    scheduler = Scheduler()
    monkeypatch.setattr(ChunkControl, method, fail)
    scheduler.add_request(FakeRequest("a", 3_000, max_tokens=3))
    for _ in range(8):
        step(scheduler)

    assert scheduler.requests == {}
    assert scheduler._dsched_chunks is None
    assert scheduler._dsched_num_errors == 1


@pytest.mark.usefixtures("budget")
def test_prefix_hit_is_taken_over_in_the_next_plan() -> None:
    """vLLM finds 1 000 cached tokens that the plan did not know of; no token is lost."""
    scheduler = Scheduler()
    request = FakeRequest("a", 2_000, max_tokens=1)
    scheduler.add_request(request)
    request.num_computed_tokens = 1_500

    assert step(scheduler) == {"a": 500}
    assert control_of(scheduler).num_differed == 1


@pytest.mark.usefixtures("budget")
def test_preempted_request_starts_again() -> None:
    """vLLM takes its KV away; the next plan sees it waiting with nothing computed."""
    scheduler = Scheduler()
    request = FakeRequest("a", 1_500)
    scheduler.add_request(request)
    step(scheduler)
    scheduler.running.remove(request)
    scheduler._preempt_request(request)

    assert step(scheduler) == {"a": 960}
    assert step(scheduler) == {"a": 540}


@pytest.mark.usefixtures("budget")
def test_step_in_which_nothing_ran_hands_the_next_to_vllm() -> None:
    """The plan wanted a request that vLLM cannot start; vLLM tries its own way once."""
    scheduler = Scheduler(kv_free=1_000)
    scheduler.add_request(FakeRequest("big", 1_500))

    assert step(scheduler) == {}
    assert step(scheduler) == {}
    assert control_of(scheduler).num_fallbacks == 1
    scheduler.kv_free = 2_000
    assert step(scheduler) == {"big": 960}


@pytest.mark.usefixtures("budget")
def test_request_that_cannot_be_planned_for_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the planner's slots vLLM decides for each request."""
    monkeypatch.setattr(chunking, "MAX_WAITING", 0)
    scheduler = Scheduler()
    scheduler.max_num_running_reqs = 8
    for index in range(5):
        scheduler.add_request(FakeRequest(f"r{index}", 100, max_tokens=2))

    assert step(scheduler) == {f"r{index}": 100 for index in range(5)}
    for _ in range(3):
        step(scheduler)
    assert scheduler.requests == {}


@pytest.mark.usefixtures("budget")
def test_late_plans_pause_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is always late gets vLLM's own rule for a while, and it is counted."""
    monkeypatch.setattr(chunking, "SLOW_PLAN_NS", -1)
    scheduler = Scheduler()
    scheduler.add_request(FakeRequest("a", 100_000, max_tokens=900))

    steps = [step(scheduler)["a"] for _ in range(MAX_LATE_IN_A_ROW + 3)]

    assert max(steps[:MAX_LATE_IN_A_ROW]) <= 960
    assert steps[MAX_LATE_IN_A_ROW:] == [2_048] * 3
    control = control_of(scheduler)
    assert control.num_late == MAX_LATE_IN_A_ROW
    assert control.num_fallbacks == 3


@pytest.mark.usefixtures("budget")
def test_command_changes_the_budget() -> None:
    """The control plane sets it while requests run, and takes it back; others are none of ours."""
    scheduler = Scheduler()
    scheduler.add_request(FakeRequest("a", 10_000))
    assert step(scheduler) == {"a": 960}

    scheduler._dsched_on_command(SetStepBudget(epoch=0, step_budget_ns=50_000_000))
    scheduler._dsched_on_command(SayHello())

    assert step(scheduler) == {"a": 384}
    scheduler._dsched_on_command(SetStepBudget(epoch=0, step_budget_ns=None))
    assert step(scheduler) == {"a": 2_048}
    scheduler._dsched_on_command(SetStepBudget(epoch=0, step_budget_ns=100_000_000))
    assert step(scheduler) == {"a": 960}
    assert control_of(scheduler).num_fallbacks == 0


@pytest.mark.usefixtures("budget")
def test_a_command_that_comes_while_the_scheduler_is_made_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """dsched answers an agent's first hello at once; compiling the planner takes seconds."""
    own = chunking.make_chunk_control

    def make(scheduler: Scheduler, settings: ChunkSettings) -> ChunkControl | None:
        scheduler._dsched_on_command(SetStepBudget(epoch=0, step_budget_ns=200_000_000))
        scheduler._dsched_on_command(SetStepBudget(epoch=0, step_budget_ns=50_000_000))
        return own(scheduler, settings)

    monkeypatch.setattr(chunking, "make_chunk_control", make)
    scheduler = Scheduler()
    scheduler.add_request(FakeRequest("a", 10_000))

    assert step(scheduler) == {"a": 384}


@pytest.mark.usefixtures("budget")
def test_commands_that_come_in_the_middle_of_a_step_do_not_end_the_control() -> None:
    """Off and on again after each look of a step."""
    scheduler = Scheduler()
    control = control_of(scheduler)
    commands = [
        SetStepBudget(epoch=0, step_budget_ns=None),
        SetStepBudget(epoch=0, step_budget_ns=100_000_000),
    ]

    class Watched(ChunkControl):
        """Commands come after each look at whether chunks are planned."""

        @property
        def is_on(self) -> bool:
            is_on = self.__dict__["is_on"]
            scheduler._dsched_on_command(commands[0] if is_on else commands[1])
            return is_on

        @is_on.setter
        def is_on(self, value: bool) -> None:
            self.__dict__["is_on"] = value

    control.__class__ = Watched
    scheduler.add_request(FakeRequest("a", 100_000))
    for _ in range(4):
        step(scheduler)
    control.__class__ = ChunkControl
    scheduler._dsched_on_command(commands[1])

    assert step(scheduler) == {"a": 960}


def test_measured_steps_teach_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time from the end of scheduling to the update, less what the step before still took."""
    monkeypatch.delenv("DSCHED_ENDPOINT", raising=False)
    monkeypatch.setenv("DSCHED_STEP_BUDGET_MS", "100")
    scheduler = Scheduler()
    control = control_of(scheduler)
    now = [0]
    control._clock = SimpleNamespace(now_ns=lambda: now[0])
    scheduler.add_request(FakeRequest("a", 400_000))
    for _ in range(60):
        output = scheduler.schedule()
        now[0] += 120_000_000
        scheduler.update_from_output(output)

    assert control.planner.prefill_cost.online.num_steps > 50
    # The device is a fifth slower than the model thought: chunks shrink until a step fits.
    assert output.num_scheduled_tokens["a"] < 900
