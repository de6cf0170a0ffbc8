"""dsched inside SGLang's processes, through SGLang's own plug-in entry point.

SGLang calls `activate` in every process that it starts, before it makes anything. Without
`DSCHED_ENDPOINT` nothing happens. With it two constructors are extended:

- `Scheduler`: once it is made, its rank gets an agent, and the methods of this one object that
  dsched's features need are wrapped (`FEATURE_HOOKS`, `dsched.drivers.sglang.chunking`). Of the
  ranks that share a request (attention TP and CP, pipeline stages) only the first reports.
- `DataParallelController`: `dsched.drivers.sglang.ranks`.

and, if asked for, the functions that plan experts (`.eplb`) and verify lengths (`.verify`).

SGLang logs errors of plug-ins and goes on, so a feature that could not be attached would be missed
by nobody. Therefore everything that is wanted is checked after it was attached: what lacks goes to
the log at level ERROR and into `AgentHello.missing`, from where dsched shows it in `dsched workers`
and as a metric. The rest runs. Each part sits behind a door of its own: if it raises, it is logged,
reported and switched off, and SGLang goes on. An SGLang that was never tried gets a warning.

Hooks of SGLang 0.5.23: `sglang.srt.plugins.hook_registry`, and those named in the modules. This
module imports nothing of SGLang before it is called.
"""

import functools
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from dsched import __version__
from dsched.clock import Clock, SystemClock
from dsched.config import (
    AgentSettings,
    agent_settings_from_environment,
    chunk_settings_from_environment,
    eplb_settings_from_environment,
    verify_settings_from_environment,
)
from dsched.drivers.agent import (
    CHUNK_BUDGET,
    LOAD_REPORTS,
    WAITING_PREFILL_TOKENS,
    Agent,
    StepRecord,
    default_engine_id,
    new_incarnation,
)
from dsched.drivers.sglang import eplb, verify
from dsched.drivers.sglang.ranks import HOOKS as RANK_HOOKS
from dsched.drivers.sglang.ranks import attach_ranks, lost_dp_ranks
from dsched.drivers.wire import AgentCommand, AgentHello, SetStepBudget

TESTED_VERSIONS: Final = ("0.5.23",)
"""Versions of SGLang that the engine tests ran with."""
SCHEDULER: Final = "sglang.srt.managers.scheduler"
CONTROLLER: Final = "sglang.srt.managers.data_parallel_controller"
EPLB: Final = "eplb"
VERIFY_LENGTHS: Final = "verify_lengths"
DP_ROUTING: Final = "dp_routing"
"""The choice among the DP ranks of a server."""
FEATURE_HOOKS: Final = {
    LOAD_REPORTS: (
        "process_batch_result",
        "running_batch",
        "waiting_queue",
        "pool_stats_observer",
        "max_total_num_tokens",
        "disaggregation_mode",
    ),
    WAITING_PREFILL_TOKENS: ("load_inquirer",),
}
"""Attributes of SGLang's `Scheduler` that each part reads or wraps."""

log = logging.getLogger("sglang.dsched")


class RankPlace(NamedTuple):
    """Where a scheduler stands among the ranks of its server."""

    dp_rank: int
    num_dp_ranks: int
    ranks_of_request: int
    """Schedulers that share each request."""
    is_first: bool
    """It is the one of them that speaks for all."""
    has_stages: bool
    """The model is cut into pipeline stages."""


def activate() -> None:
    """Entry point `sglang.srt.plugins`: extend what this process is going to make. Safe to repeat.

    Never raises; what is wrong is logged.
    """
    try:
        if agent_settings_from_environment().endpoint is None:
            return
        _register()
    except Exception:  # the door: SGLang must start without us
        log.error("plugin.failed; SGLang runs without dsched", exc_info=True)


@functools.cache
def _register() -> None:
    """Register the hooks, once in a process."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if SCHEDULER in sys.modules:
        # Others make no scheduler; importing it there costs a second of start.
        HookRegistry.register(f"{SCHEDULER}.Scheduler.__init__", _make_scheduler, HookType.AROUND)
        eplb.attach_eplb()
    if CONTROLLER in sys.modules:
        HookRegistry.register(
            f"{CONTROLLER}.DataParallelController.__init__", _make_controller, HookType.AFTER
        )


def _make_scheduler(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(scheduler, *args, **kwargs)
    try:
        attach_scheduler(scheduler)
    except Exception:  # the door
        log.error("plugin.failed; SGLang runs without dsched", exc_info=True)
    return result


def _make_controller(_: Any, controller: Any, *args: Any, **kwargs: Any) -> None:
    del args, kwargs
    try:
        attach_ranks(controller)
    except Exception:  # the door
        log.error("rank.failed; SGLang chooses the ranks", exc_info=True)


def attach_scheduler(scheduler: Any) -> "RankAgent | None":
    """Give a scheduler what the environment asks for; `None` where another rank speaks for it.

    Raises ConfigError for settings that cannot be used, and whatever an unknown SGLang makes of us.
    """
    settings = agent_settings_from_environment()
    place = place_of(scheduler)
    missing = list(missing_features(scheduler))
    features = [feature for feature in FEATURE_HOOKS if feature not in missing]
    for feature, attach in (
        (EPLB, _check_eplb),
        (VERIFY_LENGTHS, _attach_verify),
        (DP_ROUTING, _check_ranks),
    ):
        reason = _try(attach, scheduler, place)
        if reason is None:
            features.append(feature)
        elif reason:
            missing.append(feature)
            log.error("feature.missing feature=%s reason=%r", feature, reason)
    if not place.is_first:
        return None
    version = sglang_version()
    if version not in TESTED_VERSIONS:
        log.warning("engine.version_unknown version=%s tested=%s", version, TESTED_VERSIONS)
    for feature in missing:
        if feature in FEATURE_HOOKS:
            log.error("feature.missing feature=%s reason='this SGLang lacks a hook'", feature)
    chunks = _make_chunks(scheduler, place, features, missing)
    hello = translate_hello(
        scheduler,
        place,
        engine_id=settings.engine_id or default_engine_id(),
        engine_version=version,
        features=tuple(features),
        missing=tuple(missing),
    )
    rank_agent = RankAgent(
        scheduler,
        hello,
        settings,
        chunks=chunks,
        has_stages=place.has_stages,
        clock=SystemClock(),
    )
    rank_agent.install()
    # For whoever looks into a running scheduler.
    scheduler.dsched = rank_agent
    return rank_agent


def _try(
    attach: Callable[[Any, RankPlace], str | None], scheduler: Any, place: RankPlace
) -> str | None:
    """Return `None` if attached, a reason if not, and "" where nobody asked for it."""
    try:
        return attach(scheduler, place)
    except Exception as error:  # the door: just this feature is missing
        return repr(error)


def _check_eplb(scheduler: Any, _: RankPlace) -> str | None:
    if not eplb_settings_from_environment().is_on or not scheduler.server_args.enable_eplb:
        return ""
    for target in (eplb.REBALANCE, eplb.METADATA):
        if not is_wrapped(target):
            return f"SGLang did not take the hook of {target}"
    return None


def _attach_verify(scheduler: Any, _: RankPlace) -> str | None:
    drafter = str(getattr(scheduler.spec_algorithm, "name", ""))
    if not verify_settings_from_environment().is_on or drafter != "DSPARK":
        return ""
    from sglang.srt.plugins.hook_registry import HookRegistry

    verify.register_verify_budget(verify.VerifyBudget())
    HookRegistry.apply_hooks()
    return None if is_wrapped(verify.TARGET) else "SGLang did not take the hook"


def _check_ranks(_: Any, place: RankPlace) -> str | None:
    """The controller lives in another process; what can be seen from here is whether its class is
    what we know."""
    if place.num_dp_ranks == 1:
        return ""
    controller = importlib.import_module(CONTROLLER).DataParallelController
    names = ("dispatching_with_trace", "refresh_load_budget", "maybe_external_dp_rank_routing")
    lacking = [name for name in names if not hasattr(controller, name)]
    return f"this SGLang lacks {', '.join(lacking)} beside {RANK_HOOKS[0]}" if lacking else None


def _make_chunks(scheduler: Any, place: RankPlace, features: list[str], missing: list[str]) -> Any:
    """Return the `ChunkControl` if chunks are to be planned and can be."""
    try:
        settings = chunk_settings_from_environment()
        if settings.step_budget_ms is None:
            return None
        # Late: numba is only for those who want it.
        from dsched.drivers.sglang import chunking

        reason = chunking.why_not(scheduler, ranks_of_request=place.ranks_of_request)
        if reason is None:
            control = chunking.make_chunk_control(scheduler, settings)
            features.append(CHUNK_BUDGET)
            return control
    except Exception as error:  # the door
        reason = repr(error)
    missing.append(CHUNK_BUDGET)
    log.error("feature.missing feature=%s reason=%r", CHUNK_BUDGET, reason)
    return None


def missing_features(scheduler: object) -> tuple[str, ...]:
    """Return the parts whose hooks this SGLang's scheduler lacks, in the order of
    `FEATURE_HOOKS`."""
    lacking = [
        feature
        for feature, names in FEATURE_HOOKS.items()
        if not all(hasattr(scheduler, name) for name in names)
    ]
    inquirer = getattr(scheduler, "load_inquirer", None)
    if WAITING_PREFILL_TOKENS not in lacking and not hasattr(
        inquirer, "get_num_waiting_uncached_tokens"
    ):
        lacking.append(WAITING_PREFILL_TOKENS)
    return tuple(lacking)


def is_wrapped(target: str) -> bool:
    """Whether SGLang has put a hook around the function or method `target`."""
    module, _, name = target.rpartition(".")
    try:
        owner: Any = importlib.import_module(module)
    except ImportError:
        module, _, cls = module.rpartition(".")
        owner = getattr(importlib.import_module(module), cls)
    return hasattr(getattr(owner, name), "__wrapped__")


def place_of(_: Any) -> RankPlace:
    """Return where this process's scheduler stands. Raises what SGLang raises if it is not told."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    dp_rank = parallel.dp_rank or 0
    return RankPlace(
        dp_rank=dp_rank,
        num_dp_ranks=max(parallel.num_dp_ranks, dp_rank + 1),
        ranks_of_request=parallel.attn_tp_size * parallel.attn_cp_size * parallel.pp_size,
        is_first=parallel.attn_tp_rank == parallel.attn_cp_rank == parallel.pp_rank == 0,
        has_stages=parallel.pp_size > 1,
    )


def translate_hello(
    scheduler: Any,
    place: RankPlace,
    *,
    engine_id: str,
    engine_version: str,
    features: tuple[str, ...],
    missing: tuple[str, ...],
) -> AgentHello:
    """Describe the rank that `scheduler` serves, in dsched's words."""
    arguments = scheduler.server_args
    return AgentHello(
        dsched_version=__version__,
        engine_id=engine_id,
        incarnation=new_incarnation(),
        engine="sglang",
        engine_version=engine_version,
        model=arguments.served_model_name or arguments.model_path,
        max_model_len=scheduler.model_config.context_len,
        dp_rank=place.dp_rank,
        num_dp_ranks=place.num_dp_ranks,
        kv_capacity_tokens=scheduler.max_total_num_tokens,
        kv_block_tokens=scheduler.page_size,
        max_running_requests=scheduler.max_running_requests,
        features=features,
        missing=missing,
    )


def sglang_version() -> str:
    """Return the version of the SGLang that is installed here, `unknown` if it does not say."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


class RankAgent:
    """One scheduler's agent, and what it does after each step."""

    def __init__(
        self,
        scheduler: Any,
        hello: AgentHello,
        settings: AgentSettings,
        *,
        chunks: Any,
        has_stages: bool,
        clock: Clock,
    ) -> None:
        """Raises ValueError for an engine id that cannot be used; `settings.endpoint` is set."""
        self.chunks = chunks
        """The `ChunkControl`, if chunks are planned."""
        self.num_errors = 0
        self.agent = Agent(
            endpoint=settings.endpoint or "",
            hello=hello,
            log=log,
            max_pending_steps=settings.max_pending_messages,
            on_command=self._on_command,
        )
        self._endpoint = settings.endpoint
        self._scheduler = scheduler
        self._has_stages = has_stages
        self._clock = clock
        self._is_reporting = LOAD_REPORTS in hello.features
        self._knows_waiting = WAITING_PREFILL_TOKENS in hello.features
        self._step = 0
        self._last_end_ns = 0
        self._is_elastic = is_elastic(scheduler)
        self._queue_seen: tuple[int, ...] = ()
        self._num_waiting_tokens = 0

    def install(self) -> None:
        """Wrap the methods of the scheduler and start the agent."""
        scheduler, agent = self._scheduler, self.agent
        if self.chunks is not None:
            from dsched.drivers.sglang.chunking import attach_chunks

            attach_chunks(scheduler, self.chunks, self._lose_chunks)
        if self._is_reporting or self.chunks is not None:
            own_result = scheduler.process_batch_result

            def process_batch_result(batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
                answer = own_result(batch, result, *args, **kwargs)
                self._after_step(batch)
                return answer

            scheduler.process_batch_result = process_batch_result
        own_loop = scheduler.run_event_loop

        def run_event_loop(*args: Any, **kwargs: Any) -> Any:
            # One that raises has no time for a goodbye: dsched is to see a death.
            answer = own_loop(*args, **kwargs)
            agent.close()
            return answer

        scheduler.run_event_loop = run_event_loop
        agent.start()
        hello = agent.hello
        log.info(
            "agent.started endpoint=%s engine_id=%s dp_rank=%d features=%s missing=%s",
            self._endpoint,
            hello.engine_id,
            hello.dp_rank,
            ",".join(hello.features),
            ",".join(hello.missing) or "none",
        )

    def _after_step(self, batch: Any) -> None:
        end_ns = self._clock.now_ns()
        # With the overlap scheduler a step is launched while the one before still computes.
        launched_s = getattr(batch, "launch_ts", None) or 0.0
        step_ns = max(0, end_ns - max(int(launched_s * 1e9), self._last_end_ns))
        self._last_end_ns = end_ns
        if self._is_reporting:
            try:
                self.agent.record_step(self._measure(batch, step_ns))
            except Exception as error:  # the door: a step must not fail through us
                self._lose(LOAD_REPORTS, error)
        if self._is_elastic:
            try:
                self._note_lost_ranks()
            except Exception as error:  # the door: without just this news
                self._is_elastic = False
                log.warning("ranks.unknown reason=%r", error)
        if self.chunks is not None:
            try:
                self.chunks.after_step(batch, step_ns)
            except Exception as error:  # the door
                self._lose_chunks(error)

    def _note_lost_ranks(self) -> None:
        from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager
        from sglang.srt.elastic_ep.topology import attn_replica_size

        state = ElasticEPStateManager.instance()
        self.agent.set_lost_ranks(lost_dp_ranks(state, replica_size=attn_replica_size()))

    def _measure(self, batch: Any, step_ns: int) -> StepRecord:
        """What the step has left behind. O(R + W), the second only if the queue has changed."""
        scheduler, mode = self._scheduler, batch.forward_mode
        if mode.is_idle():
            # Other ranks of the EP group had work.
            num_step_tokens = 0
        else:
            num_step_tokens = batch.extend_num_tokens if mode.is_extend() else len(batch.reqs)
        if num_step_tokens:
            self._step += 1
        num_running, num_waiting = self._num_running(), len(scheduler.waiting_queue)
        used, _ = scheduler.pool_stats_observer.get_pool_stats().get_kv_token_stats()
        is_split = scheduler.disaggregation_mode.name != "NULL"
        if is_split:
            # Those that wait for the other side stand in queues of their own, some with KV.
            num_waiting = scheduler.load_inquirer.get_loads().num_waiting_reqs
        return StepRecord(
            step=self._step,
            num_running=num_running,
            num_waiting=num_waiting,
            # Of requests that have ended only cached prefixes are left.
            num_kv_tokens=int(used) if num_running or is_split else 0,
            num_waiting_prefill_tokens=self._waiting_tokens() if self._knows_waiting else 0,
            step_ns=step_ns if num_step_tokens else 0,
            num_step_tokens=num_step_tokens,
        )

    def _num_running(self) -> int:
        scheduler = self._scheduler
        if self._has_stages:
            # Each stage holds several batches.
            return num_alive(scheduler.collect_inflight_reqs())
        running = scheduler.running_batch
        launched = getattr(scheduler, "cur_batch_for_debug", None)
        count = num_alive(running.reqs)
        if launched is not None and launched is not running and launched.forward_mode.is_extend():
            # Not yet among the running ones.
            count += num_alive(launched.reqs)
        return count

    def _waiting_tokens(self) -> int:
        """Prompt tokens without a prefix in the cache, as SGLang estimates them; asked again only
        when the queue or the prompt that is being cut has changed."""
        scheduler = self._scheduler
        queue, cut = scheduler.waiting_queue, scheduler.chunked_req
        seen = (
            id(queue),
            len(queue),
            id(queue[-1]) if queue else 0,
            0 if cut is None else cut.prefix_len,
        )
        if seen != self._queue_seen:
            try:
                inquirer = scheduler.load_inquirer
                self._num_waiting_tokens = int(inquirer.get_num_waiting_uncached_tokens())
            except Exception as error:  # the door: without just this number
                self._knows_waiting = False
                self._num_waiting_tokens = 0
                self._lose(WAITING_PREFILL_TOKENS, error)
            self._queue_seen = seen
        return self._num_waiting_tokens

    def _lose_chunks(self, error: Exception) -> None:
        self.chunks = None
        self._lose(CHUNK_BUDGET, error)

    def _lose(self, feature: str, error: Exception) -> None:
        self.num_errors += 1
        if feature == LOAD_REPORTS:
            self._is_reporting = False
        log.error("feature.failed feature=%s reason=%r; the engine goes on", feature, error)
        self.agent.drop_feature(feature)

    def _on_command(self, command: AgentCommand) -> None:
        """Runs on the agent's thread; sets plain attributes, which the next plan reads."""
        chunks = self.chunks
        if not isinstance(command, SetStepBudget) or chunks is None:
            return
        if command.step_budget_ns:
            chunks.budget_seconds = command.step_budget_ns / 1e9
        chunks.is_on = bool(command.step_budget_ns)
        log.info("chunks.budget_set ns=%s", command.step_budget_ns)


def is_elastic(scheduler: Any) -> bool:
    """Whether this engine goes on without ranks that it lost."""
    arguments = getattr(scheduler, "server_args", None)
    return getattr(arguments, "elastic_ep_backend", None) is not None


def num_alive(requests: Any) -> int:
    """Count the requests that have not finished: SGLang takes them out a step later."""
    count = 0
    for request in requests:
        if request.finished_reason is None:
            count += 1
    return count
