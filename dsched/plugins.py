"""Policies that operators write: what they see, how they are found, and what guards us from them.

A policy is a Python class in a package of the operator's own. It sees frozen views and answers with
a position among the candidates it was offered, with scores, or with `None` for "use the default".
It cannot name what it was not offered, so the worst policy can only prefer badly.

It is named in the configuration as `module:Class`, or by the name of an entry point in the group
`dsched.policies`, and made once at the start with keyword arguments from the configuration. What
can be checked is checked then: that it imports, that its `api_version` is ours, that its methods
take what they will be given. A mistake there is the operator's to mend before a port is opened.

At run time every call has a budget. It runs on a thread of its own, so that a policy that sleeps or
loops costs its caller the budget and no more; what is still running then is interrupted as soon as
Python lets it. An exception, a wrong answer or a late one makes the default decide, and is counted
by reason. After `BREAKER_FAILURES` failures in a row the policy is left alone for a while (the
breaker is open), and gets one call to prove itself afterwards.

The protocols are version 1. Fields may be added to views in a version; nothing is removed or
renamed without a new number.
"""

import ctypes
import importlib
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Final, Generic, Protocol, TypeVar, cast, runtime_checkable

import structlog

from dsched.clock import Clock, SystemClock
from dsched.errors import ConfigError
from dsched.ids import DpRank, EngineId

log = structlog.get_logger(__name__)

API_VERSION: Final = 1
ENTRY_POINT_GROUP: Final = "dsched.policies"
DEFAULT_BUDGET_NS: Final = 2_000_000
"""Time of one call. Below: good policies are late on a busy machine. Above: a bad one delays every
request of its tick by that much, until the breaker opens."""
BREAKER_FAILURES: Final = 5
"""Failures in a row that open the breaker."""
BREAKER_PAUSE_NS: Final = 10_000_000_000
"""Time the breaker stays open. Below: a broken policy costs its budget often. Above: a mended one
stays unused for long."""


# What policies see.


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One request, as policies see it: sizes and names, never its text."""

    model: str
    num_prompt_tokens: int
    max_output_tokens: int
    tenant: str = ""
    session: str = ""
    """From the client's `X-Session-Id`; empty without one."""
    priority: int = 0
    num_held_ns: int = 0
    """How long it has waited at the router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCandidate:
    """One eligible DP rank: up, with room, and with the pinned number if there is one."""

    engine_id: EngineId
    dp_rank: DpRank
    num_running: int
    """Requests on it."""
    num_kv_tokens: int
    kv_capacity_tokens: int | None
    """`None` where the engine does not say."""
    cost_ns: float
    """Modelled step time after taking the request, without its constant part; the default takes
    the least."""
    num_cached_tokens: int = 0
    """Prompt tokens of the request already in its KV cache, as far as known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionView:
    """How full the pool is when a request arrives."""

    num_running: int
    num_held: int
    num_ranks_up: int
    load_share: float
    """KV tokens in use over KV tokens of the ranks that are up; 0 where no engine says."""
    tenant_share: float
    """The tenant's requests over all requests in work."""


class AdmissionAnswer(StrEnum):
    """What to do with a request that arrives."""

    ACCEPT = "accept"
    REFUSE = "refuse"
    """429 with `Retry-After`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketView:
    """Work that waits in the length buckets of one DP rank."""

    num_requests: tuple[int, ...]
    num_tokens: tuple[int, ...]
    oldest_wait_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceView:
    """How even the experts of an EP group are."""

    num_steps_since: int
    """Steps since the last rebalance."""
    worst_balancedness: float
    """Of the worst layer, in (0, 1]."""
    mean_balancedness: float


# What policies are. All methods are pure: the same views give the same answer.


@runtime_checkable
class RoutingPolicy(Protocol):
    """Choose one of the candidates; they come sorted by engine and DP rank."""

    name: str
    api_version: int

    def pick(self, request: RequestView, candidates: Sequence[RankCandidate]) -> int | None:
        """Return a position in `candidates`, or `None` for the default."""
        ...


@runtime_checkable
class RoutingFilter(Protocol):
    """Leave candidates out. If none is left, all count again."""

    name: str
    api_version: int

    def keep(
        self, request: RequestView, candidates: Sequence[RankCandidate]
    ) -> Sequence[bool] | None:
        """Return one truth value for each candidate."""
        ...


@runtime_checkable
class RoutingScorer(Protocol):
    """Score the candidates: the least wins, ties go to the first."""

    name: str
    api_version: int

    def score(
        self, request: RequestView, candidates: Sequence[RankCandidate]
    ) -> Sequence[float] | None:
        """Return one finite number for each candidate."""
        ...


@runtime_checkable
class AdmissionPolicy(Protocol):
    """Accept or refuse a request that arrives."""

    name: str
    api_version: int

    def admit(self, request: RequestView, view: AdmissionView) -> AdmissionAnswer | None: ...


@runtime_checkable
class PriorityPolicy(Protocol):
    """Give a request its priority; larger goes first."""

    name: str
    api_version: int

    def priority(self, request: RequestView) -> int | None: ...


@runtime_checkable
class ChunkWeightsPolicy(Protocol):
    """Share a step's prefill time among the length buckets."""

    name: str
    api_version: int

    def weights(self, view: BucketView) -> Sequence[float] | None:
        """Return one weight above 0 for each bucket."""
        ...


@runtime_checkable
class RebalanceTrigger(Protocol):
    """Say whether expert placements should be renewed now."""

    name: str
    api_version: int

    def should_rebalance(self, view: RebalanceView) -> bool | None: ...


@runtime_checkable
class HandoffPolicy(Protocol):
    """Choose where a request goes on after its engine was lost."""

    name: str
    api_version: int

    def pick_handoff(
        self, request: RequestView, candidates: Sequence[RankCandidate]
    ) -> int | None: ...


METHODS: Final[Mapping[type, str]] = {
    RoutingPolicy: "pick",
    RoutingFilter: "keep",
    RoutingScorer: "score",
    AdmissionPolicy: "admit",
    PriorityPolicy: "priority",
    ChunkWeightsPolicy: "weights",
    RebalanceTrigger: "should_rebalance",
    HandoffPolicy: "pick_handoff",
}
"""The one method of each kind of policy."""


# Finding and checking, at the start.

Policy = TypeVar("Policy")


def load_policy(
    kinds: Sequence[type], reference: str, arguments: Mapping[str, Any], *, path: str
) -> object:
    """Import, make and check a policy of one of `kinds`.

    Args:
        kinds: the protocols it may follow; it must have the method of at least one.
        reference: `module:Class`, or the name of an entry point in `dsched.policies`.
        arguments: keyword arguments of its constructor.
        path: of the configuration key, for messages.

    Raises:
        ConfigError: it cannot be found, imported or made, or does not keep the contract; one line
            that names the path, and the method where one is wrong.
    """
    policy_class = _find_class(reference, path=path)
    try:
        inspect.signature(policy_class).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{path}_args: {reference}: {error}") from error
    try:
        policy = policy_class(**arguments)
    except Exception as error:
        raise ConfigError(f"{path}: {reference} cannot be made: {_brief(error)}") from error
    check_policy(policy, kinds, where=f"{path}: {reference}")
    return policy


def check_policy(policy: object, kinds: Sequence[type], *, where: str) -> None:
    """Check version, name and method signatures. Raises `ConfigError`."""
    version = getattr(policy, "api_version", None)
    if version != API_VERSION:
        raise ConfigError(
            f"{where}: api_version is {version!r}; this dsched speaks version {API_VERSION}"
        )
    if not isinstance(getattr(policy, "name", None), str) or not policy.name:  # type: ignore[attr-defined]
        raise ConfigError(f"{where}: a policy needs a name that is a non-empty string")
    methods = [METHODS[kind] for kind in kinds if hasattr(policy, METHODS[kind])]
    if not methods:
        wanted = " or ".join(f"{METHODS[kind]}()" for kind in kinds)
        raise ConfigError(f"{where}: has no method {wanted}")
    for kind in kinds:
        if METHODS[kind] in methods:
            _check_method(policy, kind, where=where)


def _check_method(policy: object, kind: type, *, where: str) -> None:
    name = METHODS[kind]
    method = getattr(policy, name)
    wanted = [p for p in inspect.signature(getattr(kind, name)).parameters if p != "self"]
    if not callable(method):
        raise ConfigError(f"{where}: {name} is not a method")
    if inspect.iscoroutinefunction(method):
        raise ConfigError(f"{where}: {name}() must not be async; policies do no I/O")
    try:
        inspect.signature(method).bind(*wanted)
    except TypeError as error:
        raise ConfigError(
            f"{where}: {name}() does not take ({', '.join(wanted)}): {error}"
        ) from error


def _find_class(reference: str, *, path: str) -> Callable[..., object]:
    if ":" not in reference:
        return _find_entry_point(reference, path=path)
    module_name, _, attribute = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ConfigError(f"{path}: there is no module {missing!r} to import") from error
        raise ConfigError(f"{path}: {module_name} imports {missing!r}, which is missing") from error
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"
        raise ConfigError(f"{path}: {module_name}: syntax error at {where}: {error.msg}") from error
    except Exception as error:
        raise ConfigError(f"{path}: {module_name} cannot be imported: {_brief(error)}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ConfigError(f"{path}: module {module_name!r} has no class {attribute!r}")
    return cast("Callable[..., object]", found)


def _find_entry_point(name: str, *, path: str) -> Callable[..., object]:
    found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none is installed"
        raise ConfigError(
            f"{path}: {name!r} is neither module:Class nor an entry point of "
            f"{ENTRY_POINT_GROUP} ({known})"
        )
    try:
        return cast("Callable[..., object]", found[name].load())
    except Exception as error:
        raise ConfigError(f"{path}: entry point {name!r}: {_brief(error)}") from error


def _brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# Calling, at run time.


class FailureReason(StrEnum):
    """Why the default decided; a label of `dsched_policy_errors_total`."""

    RAISED = "raised"
    TIMEOUT = "timeout"
    WRONG_ANSWER = "wrong_answer"
    BREAKER_OPEN = "breaker_open"


class _InterruptedPolicyError(Exception):
    """Raised inside a policy that has used up its time."""


Answer = TypeVar("Answer")


@dataclass(slots=True)
class _Call:
    function: Callable[[], object]
    done: threading.Event
    answer: object = None
    error: BaseException | None = None


class _Runner:
    """A thread that runs one call after the other, and can be left behind."""

    def __init__(self, name: str) -> None:
        self._wake = threading.Semaphore(0)
        self._call: _Call | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"policy {name}", daemon=True)
        self._thread.start()

    def run(self, function: Callable[[], object], *, timeout_s: float) -> _Call | None:
        """Run `function`; `None` when it is not done in time. Then this runner is used up."""
        call = _Call(function, threading.Event())
        self._call = call
        self._wake.release()
        return call if call.done.wait(timeout_s) else None

    def interrupt(self) -> None:
        """End what runs, as soon as Python gets to run an instruction of it, and the thread."""
        self._is_closed = True
        identity = self._thread.ident
        if identity is not None and self._thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(identity), ctypes.py_object(_InterruptedPolicyError)
            )

    def close(self) -> None:
        """End the thread when it is idle."""
        self._is_closed = True
        self._wake.release()

    def _run(self) -> None:
        while True:
            try:
                self._wake.acquire()
                if self._is_closed:
                    return
                call = self._call
                if call is not None:
                    self._execute(call)
            except _InterruptedPolicyError:
                return

    def _execute(self, call: _Call) -> None:
        try:
            call.answer = call.function()
        except _InterruptedPolicyError:
            raise
        except BaseException as error:  # the door: nothing that a policy does gets further
            call.error = error
        call.done.set()


class PolicyGuard(Generic[Policy]):
    """Calls one policy within its budget, counts what goes wrong, and knows when to stop asking.

    One thread owns a guard. `budget_ns=None` calls the policy directly, without a thread and a
    limit: for simulations, where answers must not depend on the machine.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        budget_ns: int | None = DEFAULT_BUDGET_NS,
        clock: Clock | None = None,
    ) -> None:
        if budget_ns is not None and budget_ns <= 0:
            raise ValueError(f"budget_ns is {budget_ns}; it must be positive")
        self.policy = policy
        self.name: str = getattr(policy, "name", type(policy).__name__)
        self.num_calls = 0
        self.num_failures: dict[FailureReason, int] = dict.fromkeys(FailureReason, 0)
        self._budget_ns = budget_ns
        self._clock = clock or SystemClock()
        self._runner: _Runner | None = None
        self._failures_in_row = 0
        self._closed_until_ns: int | None = None
        self._logged: set[FailureReason] = set()

    @property
    def is_breaker_open(self) -> bool:
        """The policy is being left alone."""
        return self._closed_until_ns is not None and self._clock.now_ns() < self._closed_until_ns

    def call(
        self, function: Callable[[], object], check: Callable[[object], Answer | None]
    ) -> Answer | None:
        """Ask the policy; `None` means that the default decides.

        Args:
            function: the call, e.g. `lambda: policy.pick(request, candidates)`.
            check: turns the answer into one that can be used, `None` for "use the default", or
                raises `ValueError` for a wrong one.
        """
        if self.is_breaker_open:
            self.num_failures[FailureReason.BREAKER_OPEN] += 1
            return None
        self.num_calls += 1
        call = self._run(partial(_ask, function, check))
        if call is None:
            self._fail(FailureReason.TIMEOUT, f"no answer within {self._budget_ns} ns")
            return None
        if call.error is not None:
            self._fail(FailureReason.RAISED, _brief(call.error))
            return None
        answer, wrong = cast("tuple[Answer | None, str | None]", call.answer)
        if wrong is not None:
            self._fail(FailureReason.WRONG_ANSWER, wrong)
            return None
        self._failures_in_row = 0
        self._closed_until_ns = None
        return answer

    def close(self) -> None:
        """End the guard's thread."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _run(self, function: Callable[[], object]) -> _Call | None:
        if self._budget_ns is None:
            call = _Call(function, threading.Event())
            try:
                call.answer = function()
            except Exception as error:  # the door
                call.error = error
            return call
        if self._runner is None:
            self._runner = _Runner(self.name)
        call_or_none = self._runner.run(function, timeout_s=self._budget_ns / 1e9)
        if call_or_none is None:
            self._runner.interrupt()
            self._runner = None
        return call_or_none

    def _fail(self, reason: FailureReason, detail: str) -> None:
        self.num_failures[reason] += 1
        self._failures_in_row += 1
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning("policy.failed", policy=self.name, reason=reason.value, detail=detail)
        if self._failures_in_row >= BREAKER_FAILURES:
            self._closed_until_ns = self._clock.now_ns() + BREAKER_PAUSE_NS
            # One more failure after the pause opens it again at once.
            self._failures_in_row = BREAKER_FAILURES - 1
            log.warning("policy.suspended", policy=self.name, pause_s=BREAKER_PAUSE_NS / 1e9)


def _ask(
    function: Callable[[], object], check: Callable[[object], Answer | None]
) -> tuple[Answer | None, str | None]:
    """Answer, or what is wrong with it. The check belongs to the call: answers may run code."""
    answer = function()
    try:
        return check(answer), None
    except ValueError as error:
        return None, str(error)


def check_position(answer: object, *, num_candidates: int) -> int | None:
    """Return a position that was offered, or `None`. Raises `ValueError` for anything else.

    >>> check_position(1, num_candidates=2), check_position(None, num_candidates=2)
    (1, None)
    """
    if answer is None:
        return None
    if isinstance(answer, bool) or not hasattr(answer, "__index__"):
        raise ValueError(f"{_shown(answer)} is not a position")
    position = cast("int", answer).__index__()
    if not 0 <= position < num_candidates:
        raise ValueError(f"{position} is not one of {num_candidates} candidates")
    return position


def check_scores(answer: object, *, num_candidates: int) -> tuple[float, ...] | None:
    """Return one finite score for each candidate, or `None`. Raises `ValueError`."""
    if answer is None:
        return None
    is_list = isinstance(answer, Sequence) and not isinstance(answer, str | bytes)
    if not is_list and not hasattr(answer, "__array__"):
        raise ValueError(f"{_shown(answer)} is not a list of scores")
    values = list(cast("Sequence[Any]", answer)[: num_candidates + 1])
    if len(values) != num_candidates:
        raise ValueError(f"{len(values)} scores for {num_candidates} candidates")
    try:
        scores = tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{_shown(answer)} is not a list of numbers") from None
    for position, score in enumerate(scores):
        if not math.isfinite(score):
            raise ValueError(f"score {position} is {score}; it must be finite")
    return scores


def check_flags(answer: object, *, num_candidates: int) -> tuple[bool, ...] | None:
    """Return one truth value for each candidate, or `None`. Raises `ValueError`."""
    scores = check_scores(answer, num_candidates=num_candidates)
    return None if scores is None else tuple(score != 0.0 for score in scores)


def check_admission(answer: object) -> AdmissionAnswer | None:
    """Return an admission answer, or `None`. Raises `ValueError`."""
    if answer is None:
        return None
    try:
        return AdmissionAnswer(cast("Any", answer))
    except ValueError:
        raise ValueError(f"{_shown(answer)} is neither accept nor refuse") from None


def _shown(answer: object) -> str:
    """The beginning of an answer's text."""
    try:
        text = repr(answer)
    except Exception:  # an answer may be anything, so also its text may fail
        text = f"a {type(answer).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"


class RoutingPolicies:
    """What the router asks: filters first, then one pick or the sum of weighted scores."""

    def __init__(
        self,
        guards: Sequence[tuple[PolicyGuard[Any], float]],
    ) -> None:
        """`guards` are policies with the weight of their scores, in the order of asking."""
        self.guards = tuple(guards)

    def choose(
        self, request: RequestView, candidates: Sequence[RankCandidate]
    ) -> tuple[int, str] | None:
        """Return a position in `candidates` and the name of who chose; `None` for the default."""
        if not candidates:
            return None
        kept = self._kept(request, candidates)
        offered = tuple(candidates[index] for index in kept)
        check = partial(check_position, num_candidates=len(offered))
        for guard, _ in self._with("pick"):
            position = guard.call(partial(guard.policy.pick, request, offered), check)
            if position is not None:
                return kept[position], guard.name
        best = self._best_score(request, offered)
        if best is not None:
            return kept[best[0]], best[1]
        if len(kept) < len(candidates):
            cheapest = min(kept, key=lambda index: (candidates[index].cost_ns, index))
            return cheapest, "filter"
        return None

    def close(self) -> None:
        """End the guards' threads."""
        for guard, _ in self.guards:
            guard.close()

    def _with(self, method: str) -> list[tuple[PolicyGuard[Any], float]]:
        return [each for each in self.guards if hasattr(each[0].policy, method)]

    def _kept(self, request: RequestView, candidates: Sequence[RankCandidate]) -> list[int]:
        kept = list(range(len(candidates)))
        for guard, _ in self._with("keep"):
            offered = tuple(candidates[index] for index in kept)
            flags = guard.call(
                partial(guard.policy.keep, request, offered),
                partial(check_flags, num_candidates=len(offered)),
            )
            if flags is not None and any(flags):
                kept = [index for index, flag in zip(kept, flags, strict=True) if flag]
        return kept

    def _best_score(
        self, request: RequestView, offered: Sequence[RankCandidate]
    ) -> tuple[int, str] | None:
        totals = [0.0] * len(offered)
        names = []
        for guard, weight in self._with("score"):
            scores = guard.call(
                partial(guard.policy.score, request, offered),
                partial(check_scores, num_candidates=len(offered)),
            )
            if scores is not None:
                names.append(guard.name)
                pairs = zip(totals, scores, strict=True)
                totals = [total + weight * score for total, score in pairs]
        if not names:
            return None
        return min(range(len(offered)), key=lambda index: (totals[index], index)), "+".join(names)
