"""What a policy's answer must be. Each check returns one that can be used, or `None` for "use the
default", or raises `ValueError` with the value and the rule.

Answers come from foreign code and may be anything, so nothing is assumed of them: a check may run
their code (`__index__`, `__float__`, `__len__`), and so runs inside the guarded call.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, cast

from dsched.plugins.contract import AdmissionAnswer

MAX_PRIORITY: Final = 1 << 53
"""Largest priority on either side of 0; exact in any number format."""


def check_position(answer: object, *, num_candidates: int) -> int | None:
    """Return a position that was offered, or `None`. Raises `ValueError` for anything else.

    >>> check_position(1, num_candidates=2), check_position(None, num_candidates=2)
    (1, None)
    """
    if answer is None:
        return None
    position = _whole_number(answer, "a position")
    if not 0 <= position < num_candidates:
        raise ValueError(f"{position} is not one of {num_candidates} candidates")
    return position


def check_scores(answer: object, *, num_candidates: int) -> tuple[float, ...] | None:
    """Return one finite score for each candidate, or `None`. Raises `ValueError`."""
    return _numbers(answer, count=num_candidates, what="score", of="candidates")


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
        raise ValueError(f"{shown(answer)} is neither accept nor refuse") from None


def check_priority(answer: object) -> int | None:
    """Return a priority, or `None`. Raises `ValueError`.

    >>> check_priority(-3)
    -3
    >>> check_priority(0.5)
    Traceback (most recent call last):
        ...
    ValueError: 0.5 is not a whole number
    """
    if answer is None:
        return None
    priority = _whole_number(answer, "a whole number")
    if abs(priority) > MAX_PRIORITY:
        raise ValueError(f"{shown(priority)} is beyond ±2^53")
    return priority


def check_weights(answer: object, *, num_buckets: int) -> tuple[float, ...] | None:
    """Return one weight above 0 for each bucket, or `None`. Raises `ValueError`."""
    weights = _numbers(answer, count=num_buckets, what="weight", of="buckets")
    if weights is not None and min(weights, default=1.0) <= 0:
        raise ValueError(f"weights {shown(list(weights))} must be above 0: no bucket may starve")
    return weights


def check_truth(answer: object) -> bool | None:
    """Return a truth value, or `None`. Raises `ValueError` for what is only true or false by
    accident: a number, text, an array."""
    if answer is None:
        return None
    if isinstance(answer, bool) or type(answer).__name__ in ("bool", "bool_"):  # numpy's too
        return bool(answer)
    raise ValueError(f"{shown(answer)} is neither True nor False")


def _whole_number(answer: object, what: str) -> int:
    if isinstance(answer, bool) or not hasattr(answer, "__index__"):
        raise ValueError(f"{shown(answer)} is not {what}")
    try:
        return cast("int", answer).__index__()
    except TypeError:  # an array of several numbers has the method and cannot use it
        raise ValueError(f"{shown(answer)} is not {what}") from None


def _numbers(answer: object, *, count: int, what: str, of: str) -> tuple[float, ...] | None:
    if answer is None:
        return None
    is_list = isinstance(answer, Sequence) and not isinstance(answer, str | bytes)
    if not is_list and not hasattr(answer, "__array__"):
        raise ValueError(f"{shown(answer)} is not a list of {what}s")
    values = list(cast("Sequence[Any]", answer)[: count + 1])
    if len(values) != count:
        raise ValueError(f"{len(values)} {what}s for {count} {of}")
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{shown(answer)} is not a list of numbers") from None
    for position, number in enumerate(numbers):
        if not math.isfinite(number):
            raise ValueError(f"{what} {position} is {number}; it must be finite")
    return numbers


def shown(answer: object) -> str:
    """The beginning of an answer's text."""
    try:
        text = repr(answer)
    except Exception:  # an answer may be anything, so also its text may fail
        text = f"a {type(answer).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"
