"""Compile kernels with numba, and keep what was compiled for the next start.

Numba keeps a compiled function until the file that it stands in changes. What it calls in other
files is compiled into it, with the constants of their time, and is not looked at: after an update
in place (`git pull` under an editable installation) kernels of two versions decide together, and
nothing says so. So what is kept here is found again only by a **fingerprint** of everything that
was compiled: the bytecode and constants of the function, of all that it calls, and the values of
the globals that they read.

Where nothing can be kept (a read-only installation without a writable home) numba refuses to define
the function at all; here it is compiled anew at every start instead.
"""

from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from types import CodeType, ModuleType
from typing import Any, TypeVar

import numpy as np
from numba import njit
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher

F = TypeVar("F", bound=Callable[..., Any])

_LIBRARIES = frozenset({"builtins", "math", "numba", "numpy"})
"""What they are called does, numba knows, and asks for their versions."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
"""Values that are what they print."""


def kernel(function: F) -> F:
    """Compile `function` when it is first called with new types; it runs without Python's lock."""
    dispatcher: Any = njit(nogil=True)(function)
    with suppress(RuntimeError, OSError):  # there is no place to keep it
        # What `cache=True` does, with another key.
        dispatcher._cache = _KernelCache(function)  # type: ignore[no-untyped-call]
    compiled: F = dispatcher
    return compiled


def fingerprint(function: Callable[..., Any]) -> str:
    """Return a hash of what compiling `function` compiles: its code and constants, those of all
    kernels that it calls, and the globals that they read. The same in every process.

    >>> def one(): return 1
    >>> def two(): return one() + 1
    >>> first = fingerprint(two)
    >>> def one(): return 10
    >>> fingerprint(two) == first
    False
    """
    digest = sha256()
    seen: set[int] = set()
    waiting: list[Any] = [function]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Dispatcher):
            value = value.py_func
        code = getattr(value, "__code__", None)
        if isinstance(value, tuple):
            digest.update(b"tuple %d" % len(value))
            waiting += value
        elif isinstance(code, CodeType) and not _is_of_library(value.__module__):
            digest.update(code.co_qualname.encode())
            if id(code) not in seen:  # also ends the walk of functions that call themselves
                seen.add(id(code))
                waiting += _read_by(value)
                _add_code(digest.update, code)
        else:
            digest.update(_text_of(value).encode())
    return digest.hexdigest()


class _KernelCache(FunctionCache):
    """Numba's own, whose entries are also told apart by `fingerprint`."""

    def _index_key(self, sig: object, codegen: object) -> tuple[Any, ...]:
        # Not before: what a kernel calls may be defined below it.
        key: tuple[Any, ...] = super()._index_key(sig, codegen)  # type: ignore[no-untyped-call]
        return (*key, fingerprint(self._py_func))


def _add_code(update: Callable[[bytes], None], code: CodeType) -> None:
    update(code.co_code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _add_code(update, constant)
        elif isinstance(constant, frozenset):
            update(repr(sorted(map(repr, constant))).encode())  # their order differs by process
        else:
            update(repr(constant).encode())


def _read_by(function: Callable[..., Any]) -> list[Any]:
    """Return the values that the code of `function` may read from outside, in order of names."""
    names = _names_in(function.__code__)
    found: list[Any] = [cell.cell_contents for cell in function.__closure__ or ()]
    for name in names:
        value = function.__globals__.get(name)
        if not isinstance(value, ModuleType):
            found += [name, value]
        elif not _is_of_library(value.__name__):
            # `module.name` is two names of the code; more than what is meant does no harm.
            found += [vars(value)[each] for each in names if each in vars(value)]
    return found


def _is_of_library(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _LIBRARIES


def _names_in(code: CodeType) -> list[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(_names_in(constant))
    return sorted(names)


def _text_of(value: object) -> str:
    if isinstance(value, _PLAIN):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {value.tobytes().hex()}"
    # A type, or a library's function.
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}"
