"""Compiled kernels are kept for the next start, and never outlive what they were made of."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dsched.jit import fingerprint, kernel

LIMIT = 3
TABLE = np.array([1, 2])


def make(source: str, name: str = "outer", **around: object) -> Callable[..., object]:
    """Return the function `name` of a module with this source and these globals."""
    values: dict[str, object] = {"kernel": kernel, "np": np, "__name__": "made", **around}
    exec(source, values)
    made = values[name]
    assert callable(made)
    return made


BASE = """
def inner(x): return x + LIMIT
def outer(x): return inner(x) * 2
"""


@pytest.mark.parametrize(
    ("source", "limit"),
    [
        (BASE.replace("x + LIMIT", "x - LIMIT"), 3),
        (BASE.replace("* 2", "* 4"), 3),
        (BASE, 4),
        (BASE, 3.0),
        (BASE, (3,)),
        (BASE, np.array([3])),
    ],
    ids=["callee", "constant", "global", "type", "tuple", "array"],
)
def test_a_change_of_anything_that_is_compiled_shows(source: str, limit: object) -> None:
    assert fingerprint(make(source, LIMIT=limit)) != fingerprint(make(BASE, LIMIT=3))


def test_equal_code_has_an_equal_fingerprint_wherever_it_stands() -> None:
    assert fingerprint(make("\n\n" + BASE, LIMIT=3)) == fingerprint(make(BASE, LIMIT=3))


def test_values_of_arrays_and_closures_count() -> None:
    source = "def outer(x): return TABLE[x]"
    assert fingerprint(make(source, TABLE=TABLE)) != fingerprint(make(source, TABLE=TABLE + 1))

    def adder(amount: int) -> Callable[[int], int]:
        return lambda x: x + amount

    assert fingerprint(adder(1)) != fingerprint(adder(2))
    assert fingerprint(adder(1)) == fingerprint(adder(1))


def test_functions_that_call_each_other_have_an_end() -> None:
    source = """
def outer(x): return 0 if x < 0 else other(x - 1)
def other(x): return outer(x) + 1
"""
    assert fingerprint(make(source)) != fingerprint(make(source.replace("+ 1", "+ 2")))


def test_a_kernel_calculates_and_lets_kernels_call_it() -> None:
    @kernel
    def add(left: int, right: int) -> int:
        return left + right

    @kernel
    def add_all(values: np.ndarray) -> int:
        total = 0
        for value in values:
            total = add(total, value)
        return total

    assert add_all(np.arange(5)) == 10


OUTER = """
import numpy as np
import inner
from dsched.jit import kernel

@kernel
def outer(x):
    return inner.scaled(x) + 1

print(outer(5), sum(outer.stats.cache_hits.values()))
"""
INNER = """
from dsched.jit import kernel
FACTOR = {factor}

@kernel
def scaled(x):
    return x * FACTOR
"""


def run(folder: Path, *, factor: int, before: str = "", seed: int = 0) -> str:
    """Run `outer.py` in a process of its own; return what it prints: a result, and cache hits."""
    inner = INNER.format(factor=factor)
    if not (folder / "inner.py").exists() or (folder / "inner.py").read_text() != inner:
        (folder / "inner.py").write_text(inner)
    if not (folder / "outer.py").exists():
        (folder / "outer.py").write_text(before + OUTER)
    environment = {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONHASHSEED": str(seed)}
    done = subprocess.run(
        [sys.executable, "-B", "outer.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_a_changed_module_is_compiled_into_what_calls_it(tmp_path: Path) -> None:
    """Numba looks at the file of the kernel alone: `git pull` would leave the old number in it."""
    assert run(tmp_path, factor=2) == "11 0"
    assert run(tmp_path, factor=2, seed=1) == "11 1", "what was compiled is kept"
    assert run(tmp_path, factor=7) == "36 0"
    assert run(tmp_path, factor=2) == "11 1", "the way back finds the old one"


@pytest.mark.slow
def test_a_kernel_works_where_nothing_can_be_kept(tmp_path: Path) -> None:
    nowhere = "from numba.core.caching import CacheImpl; CacheImpl._locator_classes = []\n"
    assert run(tmp_path, factor=2, before=nowhere) == "11 0"
    assert run(tmp_path, factor=2) == "11 0"
