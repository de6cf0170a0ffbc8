"""Policies: what is refused at the start, and what a bad one costs at run time."""

import gc
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsched.clock import ManualClock, SystemClock
from dsched.errors import ConfigError
from dsched.ids import DpRank, EngineId
from dsched.plugins import (
    BREAKER_FAILURES,
    BREAKER_PAUSE_NS,
    AdmissionPolicy,
    FailureReason,
    PolicyGuard,
    RankCandidate,
    RequestView,
    RoutingFilter,
    RoutingPolicies,
    RoutingPolicy,
    RoutingScorer,
    check_admission,
    check_flags,
    check_policy,
    check_position,
    check_scores,
    load_policy,
)
from dsched.plugins.guard import MAX_LEFT_BEHIND
from dsched.testing.runaway import hoard_forever, loop_forever

REQUEST = RequestView(model="m", num_prompt_tokens=10, max_output_tokens=5)
ROUTING = (RoutingPolicy, RoutingFilter, RoutingScorer)


def candidates(count: int = 3) -> tuple[RankCandidate, ...]:
    return tuple(
        RankCandidate(
            engine_id=EngineId("e"),
            dp_rank=DpRank(rank),
            num_running=rank,
            num_kv_tokens=10 * rank,
            kv_capacity_tokens=100,
            cost_ns=float(rank),
        )
        for rank in range(count)
    )


class Picker:
    """A policy that does what it is told."""

    api_version = 1
    name = "picker"

    def __init__(self, answer: object = 1) -> None:
        self.answer = answer

    def pick(self, request: RequestView, candidates: Sequence[RankCandidate]) -> Any:  # noqa: ANN401
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer() if callable(self.answer) else self.answer


def ask(policy: object, **options: Any) -> tuple[Any, PolicyGuard[Any]]:  # noqa: ANN401
    options.setdefault("budget_ns", 5_000_000_000)  # a busy machine is no reason to fail
    guard: PolicyGuard[Any] = PolicyGuard(policy, **options)
    policies = RoutingPolicies([(guard, 1.0)])
    try:
        return policies.choose(REQUEST, candidates()), guard
    finally:
        policies.close()


def test_a_good_policy_decides() -> None:
    """Its position among the candidates is the answer, with its name."""
    answer, guard = ask(Picker(2))

    assert answer == (2, "picker")
    assert sum(guard.num_failures.values()) == 0


def test_none_leaves_it_to_the_default_and_is_no_failure() -> None:
    answer, guard = ask(Picker(None))

    assert answer is None
    assert sum(guard.num_failures.values()) == 0


class ReprRaises:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


class TextlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ValueError("broken"), FailureReason.RAISED),
        (TextlessError(), FailureReason.RAISED),
        (KeyboardInterrupt, FailureReason.RAISED),
        (3, FailureReason.WRONG_ANSWER),
        (-1, FailureReason.WRONG_ANSWER),
        (True, FailureReason.WRONG_ANSWER),
        (float("nan"), FailureReason.WRONG_ANSWER),
        ("0", FailureReason.WRONG_ANSWER),
        (np.array([1, 2]), FailureReason.WRONG_ANSWER),
        (ReprRaises(), FailureReason.WRONG_ANSWER),
        (lambda: time.sleep(0.2), FailureReason.TIMEOUT),
        (loop_forever, FailureReason.TIMEOUT),
        (hoard_forever, FailureReason.TIMEOUT),
        (lambda: sum(range(30_000_000)) and 1, FailureReason.TIMEOUT),
    ],
    ids=[
        *("raises", "no text", "interrupts", "beyond", "negative", "bool", "nan", "text"),
        *("array", "no repr", "sleeps", "loops", "hoards", "keeps the lock"),
    ],
)
def test_a_bad_policy_costs_one_preference(answer: object, reason: FailureReason) -> None:
    """The default decides, the reason is counted, the caller goes on soon."""
    if isinstance(answer, type):
        answer = _raiser(answer)
    start_ns = SystemClock().now_ns()

    options = {"budget_ns": 30_000_000} if reason is FailureReason.TIMEOUT else {}
    result, guard = ask(Picker(answer), **options)

    assert result is None
    assert guard.num_failures[reason] == 1
    assert SystemClock().now_ns() - start_ns < 10_000_000_000


def _raiser(error: type[BaseException]) -> Any:  # noqa: ANN401
    def raise_it() -> None:
        raise error

    return raise_it


def policy_threads() -> list[str]:
    """What each of them is doing now."""
    frames = sys._current_frames()
    return [
        "".join(traceback.format_stack(frames[thread.ident]))
        for thread in threading.enumerate()
        if thread.name == "policy picker" and thread.ident in frames
    ]


def wait_for_policy_threads() -> None:
    for _ in range(500):
        if not policy_threads():
            return
        time.sleep(0.01)


@pytest.mark.parametrize("runaway", [loop_forever, hoard_forever])
def test_a_policy_that_never_ends_is_interrupted(runaway: Any) -> None:  # noqa: ANN401
    """Its thread ends, and what it hoarded is free again."""
    ask(Picker(runaway), budget_ns=20_000_000)

    wait_for_policy_threads()
    gc.collect()

    assert policy_threads() == []


def answer_late() -> int:
    """Keep the interpreter's lock for 50 ms, where nobody may ask for it sooner."""
    end_ns = time.monotonic_ns() + 50_000_000
    while time.monotonic_ns() < end_ns:
        pass
    return 1


def test_a_policy_that_answers_just_too_late_leaves_no_thread() -> None:
    """Done before anyone could interrupt it, its thread waits for another call."""
    switch_interval_s = sys.getswitchinterval()

    try:
        sys.setswitchinterval(30.0)
        _, guard = ask(Picker(answer_late), budget_ns=5_000_000)
    finally:
        sys.setswitchinterval(switch_interval_s)
    wait_for_policy_threads()

    assert guard.num_failures[FailureReason.TIMEOUT] == 1
    assert policy_threads() == []


def test_a_policy_thread_that_is_interrupted_as_it_takes_a_lock_holds_nobody_up() -> None:
    """A lock of the standard library that is written in Python would be left taken for ever."""
    switch_interval_s = sys.getswitchinterval()

    def wait_for_interruption(frame: Any, event: str, _: object) -> None:  # noqa: ANN401
        if (
            event == "return"
            and frame.f_code is threading.Condition.__enter__.__code__
            and frame.f_back.f_code is not threading.Event.set.__code__  # whose waiter has left
        ):
            for _ in range(3_000):
                time.sleep(0.01)

    def choose() -> None:
        threading.setprofile(wait_for_interruption)
        sys.setswitchinterval(30.0)
        ask(Picker(answer_late), budget_ns=5_000_000)

    asking = threading.Thread(target=choose, daemon=True)
    try:
        asking.start()
        asking.join(10)
    finally:
        threading.setprofile(None)
        sys.setswitchinterval(switch_interval_s)
    wait_for_policy_threads()

    assert not asking.is_alive()
    assert policy_threads() == []


def test_a_policy_that_has_ended_is_not_interrupted_outside_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its first interruption it catches; the second comes when its thread is about to end."""
    caught, goes_on, is_ending, is_told = (threading.Event() for _ in range(4))
    escaped: list[object] = []
    monkeypatch.setattr(threading, "excepthook", escaped.append)

    def answer_late() -> int:
        try:
            loop_forever()
        except BaseException:
            caught.set()
        goes_on.wait(30)
        return 1

    def hold_the_end(frame: Any, event: str, _: object) -> None:  # noqa: ANN401
        if event == "return" and frame.f_code is threading.Thread.run.__code__:
            is_ending.set()
            is_told.wait(30)

    guard: PolicyGuard[Any] = PolicyGuard(Picker(answer_late), budget_ns=5_000_000)
    policies = RoutingPolicies([(guard, 1.0)])
    threading.setprofile(hold_the_end)
    try:
        policies.choose(REQUEST, candidates())
    finally:
        threading.setprofile(None)
    assert caught.wait(30)
    goes_on.set()
    assert is_ending.wait(30)

    guard.policy.answer = 1
    policies.choose(REQUEST, candidates())
    is_told.set()
    policies.close()
    wait_for_policy_threads()

    assert policy_threads() == []
    assert escaped == []


def test_a_system_without_threads_costs_one_preference(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a bad policy does; when there are threads again it is asked."""
    policies = RoutingPolicies([(PolicyGuard[Any](Picker(1), budget_ns=30_000_000_000), 1.0)])

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    first = policies.choose(REQUEST, candidates())
    monkeypatch.undo()
    second = policies.choose(REQUEST, candidates())
    policies.close()

    assert (first, second) == (None, (1, "picker"))


def test_threads_that_do_not_end_are_few() -> None:
    """A policy that waits where no interruption comes up is asked no more while three of its calls
    run."""
    is_over = threading.Event()
    clock = ManualClock()
    guard: PolicyGuard[Any] = PolicyGuard(
        Picker(lambda: is_over.wait(60)), budget_ns=5_000_000, clock=clock
    )
    policies = RoutingPolicies([(guard, 1.0)])
    for _ in range(10):
        clock.advance_to(clock.now_ns() + 2 * BREAKER_PAUSE_NS)
        policies.choose(REQUEST, candidates())
    is_over.set()
    policies.close()
    wait_for_policy_threads()

    assert guard.num_calls == MAX_LEFT_BEHIND
    assert guard.num_failures[FailureReason.BREAKER_OPEN] == 10 - MAX_LEFT_BEHIND
    assert policy_threads() == []


def test_the_guard_works_after_a_timeout() -> None:
    """The next call has a fresh thread."""
    answers = iter([loop_forever, 1])
    policy = Picker()
    policy.answer = lambda: (lambda a: a() if callable(a) else a)(next(answers))
    guard: PolicyGuard[Any] = PolicyGuard(policy, budget_ns=20_000_000)
    policies = RoutingPolicies([(guard, 1.0)])

    first = policies.choose(REQUEST, candidates())
    guard._budget_ns = 30_000_000_000  # a busy machine is no reason to fail
    second = policies.choose(REQUEST, candidates())
    policies.close()

    assert (first, second) == (None, (1, "picker"))


def test_the_breaker_opens_after_failures_in_a_row_and_gives_one_more_chance() -> None:
    """While it is open the policy is not called at all."""
    clock = ManualClock()
    policy = Picker(ValueError("broken"))
    guard: PolicyGuard[Any] = PolicyGuard(policy, budget_ns=None, clock=clock)
    policies = RoutingPolicies([(guard, 1.0)])
    for _ in range(BREAKER_FAILURES + 3):
        policies.choose(REQUEST, candidates())
    assert guard.num_calls == BREAKER_FAILURES
    assert guard.num_failures[FailureReason.BREAKER_OPEN] == 3

    clock.advance_to(BREAKER_PAUSE_NS)
    policies.choose(REQUEST, candidates())
    assert guard.is_breaker_open

    clock.advance_to(2 * BREAKER_PAUSE_NS)
    policy.answer = 0
    assert policies.choose(REQUEST, candidates()) == (0, "picker")
    assert not guard.is_breaker_open


class OnlyRank:
    api_version = 1
    name = "only"

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def keep(self, request: RequestView, offered: Sequence[RankCandidate]) -> list[bool]:
        return [each.dp_rank >= self.rank for each in offered]


class MostRunning:
    api_version = 1
    name = "most"

    def score(self, request: RequestView, offered: Sequence[RankCandidate]) -> Any:  # noqa: ANN401
        return np.array([-each.num_running for each in offered])


def test_filters_come_first_and_scores_count_among_what_is_left() -> None:
    """Positions are those of the whole offer."""
    guards = [(PolicyGuard(OnlyRank(1), budget_ns=None), 1.0)]
    only_filter = RoutingPolicies(guards).choose(REQUEST, candidates())
    both = RoutingPolicies([*guards, (PolicyGuard(MostRunning(), budget_ns=None), 1.0)])

    assert only_filter == (1, "only")
    kept = RoutingPolicies(guards).choose(REQUEST, candidates(), default=2)
    left_out = RoutingPolicies(guards).choose(REQUEST, candidates(), default=0)
    assert (kept, left_out) == (None, (1, "only"))
    assert both.choose(REQUEST, candidates()) == (2, "most")


def test_a_filter_that_leaves_nobody_counts_for_nothing() -> None:
    """The default decides among all."""
    guard = PolicyGuard(OnlyRank(9), budget_ns=None)

    assert RoutingPolicies([(guard, 1.0)]).choose(REQUEST, candidates()) is None


@pytest.mark.parametrize(
    ("check", "answer", "message"),
    [
        (check_position, 4, "4 is not one of 3 candidates"),
        (check_scores, [1.0, 2.0], "2 scores for 3 candidates"),
        (check_scores, [1.0, float("inf"), 0.0], "score 1 is inf"),
        (check_scores, "abc", "is not a list of scores"),
        (check_flags, [True, None, False], "is not a list of numbers"),
    ],
)
def test_wrong_answers_are_named(check: Any, answer: object, message: str) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=message):
        check(answer, num_candidates=3)


def test_admission_answers_are_words() -> None:
    assert check_admission("refuse") == "refuse"
    with pytest.raises(ValueError, match="neither accept nor refuse"):
        check_admission("maybe")


HEAD = "class Policy:\n    name = 'p'\n    api_version = 1\n"
PICK = "    def pick(self, request, candidates): ...\n"
PACKAGES = {
    "syntax": ("def broken(:\n", "syntax error at .*syntax.*:1"),
    "imports": ("import not_there_at_all\n", "imports 'not_there_at_all', which is missing"),
    "raises": ("raise RuntimeError('at import')\n", "cannot be imported: RuntimeError: at import"),
    "missing": ("x = 1\n", "has no class 'Policy'"),
    "version": (
        HEAD.replace("1", "2") + PICK,
        "api_version is 2; this dsched speaks version 1",
    ),
    "unnamed": ("class Policy:\n    api_version = 1\n" + PICK, "needs a name"),
    "signature": (
        HEAD + "    def pick(self, request): ...\n",
        r"pick\(\) does not take \(request, candidates\)",
    ),
    "coroutine": (HEAD + PICK.replace("def", "async def"), r"pick\(\) must not be async"),
    "methodless": (HEAD, r"has no method pick\(\) or keep\(\) or score\(\)"),
    "constructor": (
        HEAD + "    def __init__(self, weight): ...\n" + PICK,
        r"routing.policy_args: .*missing a required argument: 'weight'",
    ),
    "making": (
        HEAD + "    def __init__(self): 1 / 0\n" + PICK,
        "cannot be made: ZeroDivisionError",
    ),
}


@pytest.mark.parametrize("case", PACKAGES)
def test_a_package_that_cannot_work_is_one_line_at_the_start(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the key and what is wrong."""
    source, message = PACKAGES[case]
    module = f"policy_case_{case}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ConfigError, match=message) as caught:
        load_policy(ROUTING, f"{module}:Policy", {}, path="$.routing.policy")

    assert "\n" not in str(caught.value)
    assert "$.routing.policy" in str(caught.value)
    sys.modules.pop(module, None)


@pytest.mark.parametrize("reference", ["no.such.module:X", "nothing_installed"])
def test_a_reference_to_nothing_is_named(reference: str) -> None:
    with pytest.raises(ConfigError, match=r"no module 'no'|is neither module:Class"):
        load_policy(ROUTING, reference, {}, path="$.routing.policy")


def test_arguments_reach_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keyword arguments come from the configuration."""
    (tmp_path / "policy_with_args.py").write_text(
        "class Policy:\n    name = 'p'\n    api_version = 1\n"
        "    def __init__(self, *, rank=0): self.rank = rank\n"
        "    def pick(self, request, candidates): return self.rank\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    policy = load_policy(ROUTING, "policy_with_args:Policy", {"rank": 2}, path="$.routing.policy")

    assert ask(policy)[0] == (2, "p")
    sys.modules.pop("policy_with_args", None)


def test_a_kind_that_is_not_wanted_is_refused() -> None:
    """A routing policy in the place of an admission policy."""
    with pytest.raises(ConfigError, match=r"has no method admit\(\)"):
        check_policy(Picker(), (AdmissionPolicy,), where="$.admission.policy: picker")
