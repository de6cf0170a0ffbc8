"""Calls an operator's policy so that the worst one costs a request its preference, never the tick.

Every call has a budget. It runs on a thread of its own, so that a policy that sleeps, loops or
hoards memory costs its caller the budget and no more; what still runs then is interrupted as soon
as Python gets to an instruction of it. An exception, a wrong answer or a late one makes the default
decide, and is counted by reason. After `BREAKER_FAILURES` failures in a row the policy is left
alone for a while (the breaker is open), and gets one call to prove itself afterwards.

What a thread cannot bound: one call into C that keeps the interpreter's lock (a regular expression
that backtracks, `sum(range(10**9))`) holds the whole process until it returns. It is counted as
late then, and its policy suspended like any other. Decided in docs/adr/0003.

structlog is imported with the first guard that has no log of its own: an engine's environment may
lack it.
"""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from dsched.clock import Clock, SystemClock

DEFAULT_BUDGET_NS: Final = 2_000_000
"""Time of one call. Below: good policies are late on a busy machine. Above: a bad one delays every
request of its tick by that much, until the breaker opens."""
BREAKER_FAILURES: Final = 5
"""Failures in a row that open the breaker."""
MAX_LEFT_BEHIND: Final = 3
"""Threads that were interrupted and do not end (they sleep in C, or catch everything) before the
policy is asked no more until one does. Fewer: one long sleep suspends it. More: each one that loops
takes its share of the processor for ever."""
BREAKER_PAUSE_NS: Final = 10_000_000_000
"""Time the breaker stays open. Below: a broken policy costs its budget often. Above: a mended one
stays unused for long."""

Policy = TypeVar("Policy")
Answer = TypeVar("Answer")


class FailureReason(StrEnum):
    """Why the default decided; a label of `dsched_policy_errors_total`."""

    RAISED = "raised"
    TIMEOUT = "timeout"
    WRONG_ANSWER = "wrong_answer"
    BREAKER_OPEN = "breaker_open"


class PolicyLog(Protocol):
    """Hears of failures: of the first of each reason, and of every suspension."""

    def on_failure(self, policy: str, reason: FailureReason, detail: str) -> None: ...

    def on_suspended(self, policy: str, pause_s: float) -> None: ...


class StructuredPolicyLog:
    """Writes to dsched's own log."""

    def __init__(self) -> None:
        import structlog

        self._log = structlog.get_logger("dsched.plugins")

    def on_failure(self, policy: str, reason: FailureReason, detail: str) -> None:
        self._log.warning("policy.failed", policy=policy, reason=reason.value, detail=detail)

    def on_suspended(self, policy: str, pause_s: float) -> None:
        self._log.warning("policy.suspended", policy=policy, pause_s=pause_s)


class _PolicyInterrupt(BaseException):
    """Raised inside a policy that has used up its time; no `Exception`, so that a policy that
    catches those does not go on."""


@dataclass(slots=True)
class _Call:
    function: Callable[[], object]
    done: threading.Event
    answer: object = None
    error: str | None = None
    took_ns: int = 0


class _Runner:
    """A thread that runs one call after the other, and can be left behind.

    An interruption comes up between any two instructions of Python, so what both sides wait for is
    written in C: a `threading.Semaphore` may be left with its lock held for ever.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self._clock = clock
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        """`None` wakes a thread that is to end."""
        self._is_closed = False
        self._is_ending = threading.Lock()
        """Taken for good by the thread that ends: an interruption would come up outside of it."""
        self._thread = threading.Thread(target=self._run, name=f"policy {name}", daemon=True)
        self._thread.start()

    def run(self, function: Callable[[], object], *, timeout_s: float) -> _Call | None:
        """Run `function`; `None` when it is not done in time. Then this runner is used up."""
        call = _Call(function, threading.Event())
        self._calls.put(call)
        return call if call.done.wait(timeout_s) else None

    def interrupt(self) -> None:
        """End what runs, as soon as Python gets to run an instruction of it, and the thread."""
        self._is_closed = True
        if self._is_ending.acquire(blocking=False):
            try:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(_PolicyInterrupt)
                )
            finally:
                self._is_ending.release()
        self._calls.put(None)  # it may have answered meanwhile and be waiting for the next call

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread when it is idle."""
        self._is_closed = True
        self._calls.put(None)

    def _run(self) -> None:
        try:
            try:
                self._answer_calls()
            finally:
                # One that was sent before this comes up here at the latest.
                self._is_ending.acquire()
        except _PolicyInterrupt:
            pass

    def _answer_calls(self) -> None:
        while not self._is_closed:  # also after an interruption that the policy caught
            call = self._calls.get()
            if call is not None and not self._is_closed:
                _execute(call, self._clock)


def _execute(call: _Call, clock: Clock) -> None:
    start_ns = clock.now_ns()
    try:
        call.answer = call.function()
    except _PolicyInterrupt:
        raise
    except BaseException as error:  # the door: nothing that a policy does gets further
        call.error = brief(error)
    call.took_ns = clock.now_ns() - start_ns
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
        log: PolicyLog | None = None,
    ) -> None:
        """`clock` times the breaker; calls are always timed by the machine's."""
        if budget_ns is not None and budget_ns <= 0:
            raise ValueError(f"budget_ns is {budget_ns}; it must be positive")
        self.policy = policy
        self.name: str = getattr(policy, "name", type(policy).__name__)
        self.num_calls = 0
        self.num_failures: dict[FailureReason, int] = dict.fromkeys(FailureReason, 0)
        self.busy_ns = 0
        """Time inside the policy; of a call that was given up, its budget."""
        self._budget_ns = budget_ns
        self._machine = SystemClock()
        self._clock = clock or self._machine
        self._log = log or StructuredPolicyLog()
        self._runner: _Runner | None = None
        self._left_behind: list[_Runner] = []
        self._failures_in_row = 0
        self._closed_until_ns: int | None = None
        self._logged: set[FailureReason] = set()

    @property
    def is_breaker_open(self) -> bool:
        """The policy is being left alone."""
        return self._closed_until_ns is not None and self._clock.now_ns() < self._closed_until_ns

    def has(self, method: str) -> bool:
        """Whether the policy has a method of this name."""
        return callable(getattr(self.policy, method, None))

    def call(
        self, function: Callable[[], object], check: Callable[[object], Answer | None]
    ) -> Answer | None:
        """Ask the policy; `None` means that the default decides.

        Args:
            function: the call, e.g. `lambda: policy.pick(request, candidates)`.
            check: turns the answer into one that can be used, `None` for "use the default", or
                raises `ValueError` for a wrong one.
        """
        if self.is_breaker_open or self._has_too_many_left_behind():
            self.num_failures[FailureReason.BREAKER_OPEN] += 1
            return None
        self.num_calls += 1
        call = self._run(partial(_ask, function, check))
        budget_ns = self._budget_ns
        if call is None:
            self.busy_ns += budget_ns or 0
            self._fail(FailureReason.TIMEOUT, f"no answer within {budget_ns} ns")
            return None
        self.busy_ns += call.took_ns
        if call.error is not None:
            self._fail(FailureReason.RAISED, call.error)
            return None
        if budget_ns is not None and call.took_ns > budget_ns:
            # It kept the interpreter's lock, so nobody could stop waiting for it.
            self._fail(FailureReason.TIMEOUT, f"answered after {call.took_ns} of {budget_ns} ns")
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
            start_ns = self._machine.now_ns()
            try:
                call.answer = function()
            except Exception as error:  # the door
                call.error = brief(error)
            call.took_ns = self._machine.now_ns() - start_ns
            return call
        if self._runner is None:
            try:
                self._runner = _Runner(self.name, self._machine)
            except RuntimeError as error:  # the system has no thread left
                return _Call(function, threading.Event(), error=brief(error))
        call_or_none = self._runner.run(function, timeout_s=self._budget_ns / 1e9)
        if call_or_none is None:
            self._runner.interrupt()
            self._left_behind.append(self._runner)
            self._runner = None
        return call_or_none

    def _has_too_many_left_behind(self) -> bool:
        if not self._left_behind:
            return False
        self._left_behind = [runner for runner in self._left_behind if runner.is_alive]
        for runner in self._left_behind:
            runner.interrupt()  # again, for those that caught it
        return len(self._left_behind) >= MAX_LEFT_BEHIND

    def _fail(self, reason: FailureReason, detail: str) -> None:
        self.num_failures[reason] += 1
        self._failures_in_row += 1
        if reason not in self._logged:
            self._logged.add(reason)
            self._log.on_failure(self.name, reason, detail)
        if self._failures_in_row >= BREAKER_FAILURES:
            self._closed_until_ns = self._clock.now_ns() + BREAKER_PAUSE_NS
            # One more failure after the pause opens it again at once.
            self._failures_in_row = BREAKER_FAILURES - 1
            self._log.on_suspended(self.name, BREAKER_PAUSE_NS / 1e9)


AnyGuard = PolicyGuard[Any]


def _ask(
    function: Callable[[], object], check: Callable[[object], Answer | None]
) -> tuple[Answer | None, str | None]:
    """Answer, or what is wrong with it. The check belongs to the call: answers may run code."""
    answer = function()
    try:
        return check(answer), None
    except ValueError as error:
        return None, str(error)


def brief(error: BaseException) -> str:
    """An exception on one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # foreign code, too
        text = "its text cannot be had"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
