"""policy_check: passes what keeps the contract, and says of each wrong policy what is wrong."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsched.errors import PolicyError
from dsched.plugins import METHODS, RequestView
from dsched.testing import policy_check


class Base:
    """What a policy has beside its method."""

    name = "mine"
    api_version = 1


class Idlest(Base):
    """The good one."""

    def pick(self, request: RequestView, candidates: Sequence[Any]) -> int | None:
        if not request.session:
            return None
        return min(range(len(candidates)), key=lambda at: candidates[at].num_running)


class Everything(Idlest):
    """A good policy of every kind."""

    def keep(self, request: Any, candidates: Any) -> list[bool]:  # noqa: ANN401
        return [each.num_running < 200 for each in candidates]

    def score(self, request: Any, candidates: Any) -> list[float]:  # noqa: ANN401
        return [each.cost_ns for each in candidates]

    def admit(self, request: Any, view: Any) -> str:  # noqa: ANN401
        return "refuse" if view.load_share > 1 else "accept"

    def priority(self, request: Any) -> int:  # noqa: ANN401
        return int(-request.num_prompt_tokens)

    def weights(self, view: Any) -> list[float]:  # noqa: ANN401
        return [1.0 + count for count in view.num_requests]

    def should_rebalance(self, view: Any) -> bool:  # noqa: ANN401
        return bool(view.worst_balancedness < 0.8)

    def pick_handoff(self, request: Any, candidates: Any) -> int:  # noqa: ANN401
        return len(candidates) - 1


def test_a_good_policy_passes_and_is_described() -> None:
    report = policy_check(Idlest(), across_processes=False)

    assert (report.name, report.methods) == ("mine", ("pick",))
    assert 0 < report.num_defaults < report.num_questions
    assert report.slowest_us > 0


def test_every_kind_is_asked() -> None:
    report = policy_check(Everything(), across_processes=False)

    assert report.methods == tuple(METHODS.values())
    assert report.num_questions == 60 * len(METHODS)


class Remembers(Base):
    """Allowed: the same life gives the same answers."""

    def __init__(self) -> None:
        self.turn = 0

    def pick(self, request: Any, candidates: Any) -> int:  # noqa: ANN401
        self.turn += 1
        return self.turn % len(candidates)


def test_a_policy_may_remember() -> None:
    policy_check(Remembers(), across_processes=False)


class NoVersion:
    name = "mine"

    def pick(self, request: Any, candidates: Any) -> None: ...  # noqa: ANN401


class OldSignature(Base):
    def pick(self, candidates: Any) -> None: ...  # noqa: ANN401


class LastPlusOne(Base):
    def pick(self, request: Any, candidates: Any) -> int:  # noqa: ANN401
        return len(candidates)


class OnlyTwoRanks(Base):
    """Works where it was tried."""

    def pick(self, request: Any, candidates: Any) -> int:  # noqa: ANN401
        return int(candidates[1].dp_rank % len(candidates))


class DividesByCapacity(Base):
    def score(self, request: Any, candidates: Any) -> list[float]:  # noqa: ANN401
        return [each.num_kv_tokens / each.kv_capacity_tokens for each in candidates]


class NanWhenIdle(Base):
    def score(self, request: Any, candidates: Any) -> list[float]:  # noqa: ANN401
        total = sum(each.num_running for each in candidates)
        return [each.num_running / total if total else float("nan") for each in candidates]


class OneScoreShort(Base):
    def score(self, request: Any, candidates: Any) -> list[float]:  # noqa: ANN401
        return [0.0] * (len(candidates) - 1)


class Writes(Base):
    def priority(self, request: Any) -> int:  # noqa: ANN401
        request.priority = 5
        return 5


class HalfPriority(Base):
    def priority(self, request: Any) -> float:  # noqa: ANN401
        return float(request.num_prompt_tokens / 2)


class Admits(Base):
    def admit(self, request: Any, view: Any) -> bool:  # noqa: ANN401
        return True


class Starves(Base):
    def weights(self, view: Any) -> list[float]:  # noqa: ANN401
        return [float(count) for count in view.num_requests]


class TruthyTrigger(Base):
    def should_rebalance(self, view: Any) -> int:  # noqa: ANN401
        return 1


class Clock(Base):
    """Depends on what it does not see."""

    def pick(self, request: Any, candidates: Any) -> int:  # noqa: ANN401
        return int(time.monotonic_ns() // 7 % len(candidates))


class Slow(Base):
    def pick(self, request: Any, candidates: Any) -> int:  # noqa: ANN401
        if len(candidates) == 320:
            time.sleep(0.01)
        return 0


class Locked(Base):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def pick(self, request: Any, candidates: Any) -> int:  # noqa: ANN401
        return 0


@pytest.mark.parametrize(
    ("policy_class", "message"),
    [
        (NoVersion, "api_version is None; this dsched speaks version 1"),
        (OldSignature, r"pick\(\) does not take \(request, candidates\)"),
        (LastPlusOne, r"pick\(RequestView\(model='m'.*, 1 candidates\): 1 is not one of 1 candi"),
        (OnlyTwoRanks, "1 candidates.: IndexError: tuple index out of range"),
        (DividesByCapacity, "score.*TypeError: unsupported operand"),
        (NanWhenIdle, "score.*score 0 is nan; it must be finite"),
        (OneScoreShort, "0 scores for 1 candidates"),
        (Writes, "priority.*FrozenInstanceError: cannot assign to field 'priority'"),
        (HalfPriority, "is not a whole number"),
        (Admits, "True is neither accept nor refuse"),
        (Starves, "must be above 0: no bucket may starve"),
        (TruthyTrigger, "1 is neither True nor False"),
        (Clock, "must not depend on anything but what it sees"),
        (Slow, r"10\.\d ms for one call over 320 ranks, of 2 ms|1\d\.\d ms"),
        (Locked, "cannot be copied .*: what does it hold on to"),
    ],
)
def test_each_kind_of_wrong_policy_is_told_what_is_wrong(policy_class: type, message: str) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        policy_check(policy_class(), across_processes=False)

    assert "\n" not in str(caught.value)
    assert caught.value.policy_name == "mine"


class Hangs(Base):
    def pick(self, request: Any, candidates: Any) -> int:  # noqa: ANN401
        while True:
            pass


@pytest.mark.slow
def test_a_policy_that_hangs_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the author's test ends."""
    monkeypatch.setattr("dsched.testing.policies.HANG_S", 1)

    with pytest.raises(PolicyError, match="no answer within 1 s"):
        policy_check(Hangs(), across_processes=False)


def test_the_authors_own_exception_is_the_cause() -> None:
    """So that pytest shows the line."""
    with pytest.raises(PolicyError) as caught:
        policy_check(DividesByCapacity(), across_processes=False)

    assert isinstance(caught.value.__cause__, TypeError)


HASHES = """
class Hashes:
    name, api_version = "hashes", 1
    def pick(self, request, candidates):
        return hash(request.session or "none") % len(candidates)

class Crc(Hashes):
    def pick(self, request, candidates):
        return sum(request.session.encode()) % len(candidates)
"""


@pytest.mark.slow
def test_an_answer_that_differs_between_processes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hash()` of text is another number in every process."""
    (tmp_path / "hashing_policy.py").write_text(HASHES)
    monkeypatch.syspath_prepend(tmp_path)
    import hashing_policy  # type: ignore[import-not-found]

    policy_check(hashing_policy.Crc())
    with pytest.raises(PolicyError, match=r"in one process and \d+ in another.*zlib.crc32"):
        policy_check(hashing_policy.Hashes())
