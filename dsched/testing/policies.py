"""`policy_check`: what dsched expects of a policy, as one call in the author's own tests.

    from dsched.testing import policy_check

    def test_contract():
        policy_check(MyPolicy())

It asks the policy what dsched would ask it, over many made-up requests and candidates (one rank and
320, full ones and idle ones, engines that do not say how much they hold, names that are missing and
names that are strange), and refuses what dsched would have to refuse at run time, with the question
that led to it. It does not say whether a policy is a good one: `dsched policy test` does.
"""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final

import numpy as np

from dsched.config import inherited_environment
from dsched.errors import PolicyError
from dsched.ids import DpRank, EngineId
from dsched.plugins import (
    METHODS,
    AdmissionPolicy,
    AdmissionView,
    BucketView,
    ChunkWeightsPolicy,
    FailureReason,
    HandoffPolicy,
    PolicyGuard,
    PriorityPolicy,
    RankCandidate,
    RebalanceTrigger,
    RebalanceView,
    RequestView,
    RoutingFilter,
    RoutingPolicy,
    RoutingScorer,
    check_admission,
    check_flags,
    check_policy,
    check_position,
    check_priority,
    check_scores,
    check_truth,
    check_weights,
    kinds_of,
)
from dsched.rng import stream

RANK_COUNTS: Final = (1, 2, 3, 8, 64, 320)
"""Candidates that a policy is offered; 320 is the largest group that DeepSeek has described."""
NUM_QUESTIONS: Final = 60
NUM_TIMED: Final = 5
"""Times the largest question is asked; the fastest counts, as a busy machine is nobody's fault."""
HANG_S: Final = 5
"""Time of one call, after which the policy is said to hang."""
HASH_SEEDS: Final = ("1", "2")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReport:
    """What `policy_check` saw of a policy that keeps its contract."""

    name: str
    methods: tuple[str, ...]
    num_questions: int
    num_defaults: int
    """Answers of `None`: the default decided. All of them is a policy that never does anything."""
    slowest_us: float
    """Of the methods, over the largest question, fastest of a few tries."""


def policy_check(
    policy: object, *, budget_ms: float = 2.0, seed: int = 0, across_processes: bool = True
) -> PolicyReport:
    """Check that a policy keeps its contract; every kind whose method it has.

    Args:
        policy: made, with the arguments that it will have.
        budget_ms: time of one call, as `routing.policy_budget_ms`.
        seed: of the made-up questions.
        across_processes: ask in two further processes whose string hashes differ, and compare:
            `hash(session)` gives another rank in every dsched. Skipped for a policy that cannot be
            pickled or imported there.

    Raises:
        PolicyError: it does not; the message has the method, the question and the answer.

    >>> class Emptiest:
    ...     name, api_version = "emptiest", 1
    ...     def pick(self, request, candidates):
    ...         return min(range(len(candidates)), key=lambda at: candidates[at].num_running)
    >>> policy_check(Emptiest(), across_processes=False).methods
    ('pick',)
    """
    name = str(getattr(policy, "name", type(policy).__name__))
    try:
        check_policy(policy, tuple(METHODS), where=type(policy).__name__)
    except Exception as error:
        raise PolicyError(name, str(error)) from error
    methods = tuple(METHODS[kind] for kind in kinds_of(policy))
    questions = list(make_questions(methods, seed=seed))
    twin = _copy_of(policy, name)
    answers = _Asker(policy, name).ask_all(questions)
    _compare(name, questions, answers, _Asker(twin, name).ask_all(questions))
    slowest_us = max(_time_us(policy, name, method, seed=seed) for method in methods)
    if slowest_us > budget_ms * 1e3:
        raise PolicyError(
            name,
            f"{slowest_us / 1e3:.1f} ms for one call over {RANK_COUNTS[-1]} ranks, of "
            f"{budget_ms:g} ms: dsched would use the default",
        )
    if across_processes:
        _compare_processes(policy, name, seed=seed)
    return PolicyReport(
        name=name,
        methods=methods,
        num_questions=len(questions),
        num_defaults=sum(answer is None for answer in answers),
        slowest_us=slowest_us,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One call of a policy."""

    method: str
    arguments: tuple[Any, ...]
    check: Callable[[object], object]

    def __str__(self) -> str:
        return f"{self.method}({', '.join(_brief(each) for each in self.arguments)})"


def make_questions(methods: Sequence[str], *, seed: int) -> Iterator[Question]:
    """Questions to `methods` in turn, so that a policy that remembers sees a mixed life."""
    rng = stream(seed, "policy_check")
    for number in range(NUM_QUESTIONS):
        request = make_request(rng, number)
        candidates = make_candidates(rng, RANK_COUNTS[number % len(RANK_COUNTS)], number)
        for method in methods:
            yield _question(method, request, candidates, rng)


def _question(
    method: str,
    request: RequestView,
    candidates: tuple[RankCandidate, ...],
    rng: np.random.Generator,
) -> Question:
    count = len(candidates)
    by_kind: dict[type, tuple[tuple[Any, ...], Callable[[object], object]]] = {
        RoutingPolicy: ((request, candidates), partial(check_position, num_candidates=count)),
        RoutingFilter: ((request, candidates), partial(check_flags, num_candidates=count)),
        RoutingScorer: ((request, candidates), partial(check_scores, num_candidates=count)),
        HandoffPolicy: ((request, candidates), partial(check_position, num_candidates=count)),
        AdmissionPolicy: ((request, make_admission_view(rng)), check_admission),
        PriorityPolicy: ((request,), check_priority),
        ChunkWeightsPolicy: ((make_bucket_view(rng),), partial(check_weights, num_buckets=4)),
        RebalanceTrigger: ((make_rebalance_view(rng),), check_truth),
    }
    kind = next(kind for kind, each in METHODS.items() if each == method)
    arguments, check = by_kind[kind]
    return Question(method=method, arguments=arguments, check=check)


def example_request(**fields: Any) -> RequestView:  # noqa: ANN401 - those of RequestView
    """A request for an author's own tests; what is not given is small and has no names.

    >>> example_request(session="s1").session
    's1'
    """
    defaults: dict[str, Any] = {
        "model": "model",
        "num_prompt_tokens": 100,
        "max_output_tokens": 100,
    }
    return RequestView(**(defaults | fields))


def example_candidates(
    num_running: Sequence[int], *, num_kv_tokens: Sequence[int] = (), engines: Sequence[str] = ()
) -> tuple[RankCandidate, ...]:
    """Candidates for an author's own tests, one for each number of running requests.

    Without `num_kv_tokens` each request has 1,000; without `engines` all are of one engine.

    >>> [each.num_kv_tokens for each in example_candidates([2, 0])]
    [2000, 0]
    """
    tokens = num_kv_tokens or [1_000 * count for count in num_running]
    return tuple(
        RankCandidate(
            engine_id=EngineId(engines[at] if engines else "engine-0"),
            dp_rank=DpRank(at),
            num_running=count,
            num_kv_tokens=tokens[at],
            kv_capacity_tokens=1_000_000,
            cost_ns=200_000.0 * (count + 1) + 26.0 * tokens[at],
        )
        for at, count in enumerate(num_running)
    )


def make_request(rng: np.random.Generator, number: int) -> RequestView:
    """A request: short and long, with and without names, held and handed off."""
    return RequestView(
        model=("m", "org/model-2")[number % 2],
        num_prompt_tokens=int(10 ** rng.uniform(0, 6)),
        max_output_tokens=int(10 ** rng.uniform(0, 5)),
        tenant=("", "a", "b", "ünïcode tenant")[int(rng.integers(4))],
        session=("", "s1", "a" * 200, f"s-{number}")[int(rng.integers(4))],
        priority=int(rng.integers(-2, 3)),
        num_held_ns=int(rng.integers(2)) * int(10 ** rng.uniform(0, 10)),
        num_output_tokens=int(rng.integers(2)) * int(10 ** rng.uniform(0, 4)),
    )


def make_candidates(
    rng: np.random.Generator, count: int, number: int = 0
) -> tuple[RankCandidate, ...]:
    """Candidates: idle ones, alike ones, full ones, and some that do not say what they hold."""
    is_idle = number % 5 == 0
    candidates = []
    for index in range(count):
        num_running = 0 if is_idle else int(rng.integers(0, 300))
        num_kv_tokens = num_running * int(rng.integers(0, 4_000))
        says_capacity = number % 3 != 1
        candidates.append(
            RankCandidate(
                engine_id=EngineId(f"{('cheap', 'dear')[index % 2]}-{index // 8:03d}"),
                dp_rank=DpRank(index % 8),
                num_running=num_running,
                num_kv_tokens=num_kv_tokens,
                kv_capacity_tokens=max(1, num_kv_tokens * 2) if says_capacity else None,
                cost_ns=200_000.0 * (num_running + 1) + 26.0 * num_kv_tokens,
                num_cached_tokens=int(rng.integers(2)) * int(rng.integers(0, 4_096)),
            )
        )
    return tuple(sorted(candidates, key=lambda each: (each.engine_id, each.dp_rank)))


def make_admission_view(rng: np.random.Generator) -> AdmissionView:
    """From an idle pool to an overfull one."""
    load = float(rng.choice([0.0, 0.5, 0.97, 1.2]))
    return AdmissionView(
        num_running=int(load * 300),
        num_held=int(rng.integers(0, 2)) * int(rng.integers(0, 5_000)),
        num_ranks_up=int(rng.integers(0, 65)),
        load_share=load,
        tenant_share=float(rng.choice([0.0, 0.1, 1.0])),
    )


def make_bucket_view(rng: np.random.Generator) -> BucketView:
    """Four length buckets, some of them empty."""
    counts = rng.integers(0, 3, size=4) * rng.integers(0, 50, size=4)
    return BucketView(
        num_requests=tuple(counts.tolist()),
        num_tokens=tuple((counts * 1_000).tolist()),
        oldest_wait_ns=tuple((np.minimum(counts, 1) * 10**9).tolist()),
    )


def make_rebalance_view(rng: np.random.Generator) -> RebalanceView:
    """From perfectly even to one rank that does everything."""
    worst = float(rng.choice([1.0, 0.9, 0.5, 0.02]))
    return RebalanceView(
        num_times_asked=int(rng.integers(0, 1_000)),
        worst_balancedness=worst,
        mean_balancedness=(1.0 + worst) / 2,
    )


# -- asking ----------------------------------------------------------------------------------------


class _Detail:
    """Keeps what the guard says of a failure."""

    def __init__(self) -> None:
        self.text = ""

    def on_failure(self, policy: str, reason: FailureReason, detail: str) -> None:  # noqa: ARG002
        self.text = f"no answer within {HANG_S} s" if reason is FailureReason.TIMEOUT else detail

    def on_suspended(self, policy: str, pause_s: float) -> None:
        """One failure is enough here."""


class _Asker:
    """Asks one policy through the same guard as dsched, with more patience."""

    def __init__(self, policy: object, name: str) -> None:
        self._policy = policy
        self._name = name
        self._detail = _Detail()
        self._guard: PolicyGuard[object] = PolicyGuard(
            policy, budget_ns=HANG_S * 1_000_000_000, log=self._detail
        )

    def ask(self, question: Question) -> object:
        """The checked answer. Raises `PolicyError` with the question."""
        raised: list[Exception] = []

        def call() -> object:
            try:
                return getattr(self._policy, question.method)(*question.arguments)
            except Exception as error:
                raised.append(error)
                raise

        answer = self._guard.call(call, question.check)
        if self._detail.text:
            cause = raised[0] if raised else None
            raise PolicyError(self._name, f"{question}: {self._detail.text}") from cause
        return answer

    def ask_all(self, questions: Sequence[Question]) -> list[object]:
        try:
            return [self.ask(question) for question in questions]
        finally:
            self._guard.close()

    def time_us(self, question: Question) -> float:
        """Time inside the policy."""
        before_ns = self._guard.busy_ns
        self.ask_all([question])
        return (self._guard.busy_ns - before_ns) / 1e3


def _copy_of(policy: object, name: str) -> object:
    try:
        return copy.deepcopy(policy)
    except Exception as error:
        raise PolicyError(
            name, f"cannot be copied ({type(error).__name__}: {error}): what does it hold on to?"
        ) from error


def _compare(
    name: str, questions: Sequence[Question], ours: Sequence[object], theirs: Sequence[object]
) -> None:
    for question, one, other in zip(questions, ours, theirs, strict=True):
        if one != other:
            raise PolicyError(
                name,
                f"{question} answered {one!r} and then, of a copy that had lived the same, "
                f"{other!r}: it must not depend on anything but what it sees",
            )


def _time_us(policy: object, name: str, method: str, *, seed: int) -> float:
    rng = stream(seed, "policy_check.time")
    request, candidates = make_request(rng, 3), make_candidates(rng, RANK_COUNTS[-1], 3)
    question = _question(method, request, candidates, rng)
    return min(_Asker(_copy_of(policy, name), name).time_us(question) for _ in range(NUM_TIMED))


# -- other processes -------------------------------------------------------------------------------

_CHILD = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from dsched.testing.policies import answer_in_child
answer_in_child()
"""


def _compare_processes(policy: object, name: str, *, seed: int) -> None:
    try:
        pickled = pickle.dumps(policy)
    except Exception:  # whatever keeps it from being sent elsewhere: a local class, a lock
        return
    ones, others = (_answers_elsewhere(pickled, seed=seed, hash_seed=each) for each in HASH_SEEDS)
    if ones is None or others is None:
        return
    methods = tuple(METHODS[kind] for kind in kinds_of(policy))
    for question, one, other in zip(make_questions(methods, seed=seed), ones, others, strict=True):
        if one != other:
            raise PolicyError(
                name,
                f"{question} answered {one} in one process and {other} in another: it depends on "
                "hash() of text, or on the order of a set; zlib.crc32 of the bytes does not",
            )


def _answers_elsewhere(pickled: bytes, *, seed: int, hash_seed: str) -> list[str] | None:
    """The answers of a fresh process; `None` if it could not make the policy."""
    child = subprocess.run(
        [sys.executable, "-c", _CHILD],
        input=pickle.dumps(sys.path) + pickle.dumps((pickled, seed)),
        env=inherited_environment() | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        check=False,
    )
    if child.returncode != 0:
        return None
    answers: list[str] = pickle.loads(child.stdout)
    return answers


def answer_in_child() -> None:
    """Answer every question and write the answers; the other end of `policy_check`."""
    pickled, seed = pickle.load(sys.stdin.buffer)
    policy = pickle.loads(pickled)
    methods = tuple(METHODS[kind] for kind in kinds_of(policy))
    answers = _Asker(policy, "policy").ask_all(list(make_questions(methods, seed=seed)))
    sys.stdout.buffer.write(pickle.dumps([repr(answer) for answer in answers]))


def _brief(value: object) -> str:
    """An argument for a message: what is not as usual of a request, how many candidates."""
    if isinstance(value, tuple):
        return f"{len(value)} candidates"
    parts = [
        f"{field.name}={getattr(value, field.name)!r}"[:60]
        for field in fields(value)  # type: ignore[arg-type]
        if getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(parts)})"
