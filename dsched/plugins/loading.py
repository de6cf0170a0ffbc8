"""Finds, makes and checks operators' policies, at the start and at a reload.

What can be checked before the first request is checked here: that it imports, that its
`api_version` is ours, that its methods take what they will be given. Each mistake is one line that
names the configuration key.
"""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

from dsched.errors import ConfigError
from dsched.plugins.contract import API_VERSION, METHODS
from dsched.plugins.guard import brief

ENTRY_POINT_GROUP: Final = "dsched.policies"


def load_policy(
    kinds: Sequence[type],
    reference: str,
    arguments: Mapping[str, Any],
    *,
    path: str,
    arguments_path: str | None = None,
    builtin_names: Sequence[str] = (),
) -> object:
    """Import, make and check a policy of one of `kinds`.

    Args:
        kinds: the protocols it may follow; it must have the method of at least one.
        reference: `module:Class`, or the name of an entry point in `dsched.policies`.
        arguments: keyword arguments of its constructor.
        path: of the configuration key, for messages.
        arguments_path: of the key with the arguments; default: `path` and `_args`.
        builtin_names: what else the key may say, for messages.

    Raises:
        ConfigError: it cannot be found, imported or made, or does not keep the contract; one line
            that names the path, and the method where one is wrong.
    """
    policy_class = find_class(reference, path=path, builtin_names=builtin_names)
    try:
        inspect.signature(policy_class).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{arguments_path or path + '_args'}: {reference}: {error}") from error
    except ValueError:  # a builtin without a signature: nothing to compare with
        pass
    try:
        policy = policy_class(**arguments)
    except Exception as error:
        raise ConfigError(f"{path}: {reference} cannot be made: {brief(error)}") from error
    check_policy(policy, kinds, where=f"{path}: {reference}")
    return policy


def check_policy(policy: object, kinds: Sequence[type], *, where: str) -> None:
    """Check version, name and method signatures. Raises `ConfigError`."""
    version = getattr(policy, "api_version", None)
    if version != API_VERSION:
        raise ConfigError(
            f"{where}: api_version is {version!r}; this dsched speaks version {API_VERSION}"
        )
    name = getattr(policy, "name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: a policy needs a name that is a non-empty string")
    found = kinds_of(policy, kinds)
    if not found:
        wanted = " or ".join(f"{METHODS[kind]}()" for kind in kinds)
        raise ConfigError(f"{where}: has no method {wanted}")
    for kind in found:
        _check_method(policy, kind, where=where)


def kinds_of(policy: object, kinds: Iterable[type] = tuple(METHODS)) -> list[type]:
    """The kinds of policy whose method `policy` has, in the order of `kinds`.

    An attribute of the same name (`weights`) that cannot be called is nobody's method.
    """
    return [kind for kind in kinds if callable(getattr(policy, METHODS[kind], None))]


def _check_method(policy: object, kind: type, *, where: str) -> None:
    name = METHODS[kind]
    method = getattr(policy, name)
    wanted = [p for p in inspect.signature(getattr(kind, name)).parameters if p != "self"]
    if inspect.iscoroutinefunction(method):
        raise ConfigError(f"{where}: {name}() must not be async; policies do no I/O")
    try:
        inspect.signature(method).bind(*wanted)
    except TypeError as error:
        raise ConfigError(
            f"{where}: {name}() does not take ({', '.join(wanted)}): {error}"
        ) from error


def find_class(
    reference: str, *, path: str, builtin_names: Sequence[str] = ()
) -> Callable[..., object]:
    """Import what `reference` names. Raises `ConfigError` on one line."""
    module_name, colon, attribute = reference.partition(":")
    if not colon:
        point = _entry_points().get(reference)
        if point is None:
            known = ", ".join(sorted(_entry_points())) or "none is installed"
            builtin = f"none of {', '.join(builtin_names)}, and " if builtin_names else ""
            raise ConfigError(
                f"{path}: {reference!r} is {builtin}neither module:Class nor an entry point of "
                f"{ENTRY_POINT_GROUP} ({known})"
            )
        module_name, attribute = point.module, point.attr
    if not module_name or not attribute:
        raise ConfigError(f"{path}: {reference!r} is not of the form module:Class")
    found: object = _import(module_name, path=path)
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise ConfigError(f"{path}: module {module_name!r} has no class {attribute!r}")
    return cast("Callable[..., object]", found)


def _import(module_name: str, *, path: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ConfigError(f"{path}: there is no module {missing!r} to import") from error
        raise ConfigError(f"{path}: {module_name} imports {missing!r}, which is missing") from error
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}"
        raise ConfigError(f"{path}: {module_name}: syntax error at {where}: {error.msg}") from error
    except (Exception, SystemExit) as error:  # the door: a module may do anything when imported
        raise ConfigError(f"{path}: {module_name} cannot be imported: {brief(error)}") from error


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


@contextmanager
def fresh_modules(references: Iterable[str]) -> Iterator[None]:
    """Let what is imported inside come from its files as they are now.

    Forgets the modules of the packages that `references` name, so that an edited policy is read
    again with everything it imports from its own package; objects made of the old modules live on.
    An exception inside puts the old modules back. dsched itself, the standard library and modules
    that are not Python source are never forgotten.
    """
    packages = {package for each in references if (package := _package_of(each)) is not None}
    old = {
        name: module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in packages and _is_source(module)
    }
    for name, module in old.items():
        del sys.modules[name]
        # A cache is believed by the second and the size of its source: not enough for an edit.
        with contextlib.suppress(OSError):
            Path(module.__cached__ or "").unlink()
    importlib.invalidate_caches()
    try:
        yield
    except BaseException:
        for name, module in list(sys.modules.items()):  # at once: others import meanwhile
            if name.partition(".")[0] in packages and _is_source(module):
                sys.modules.pop(name, None)
        sys.modules.update(old)
        raise


def _package_of(reference: str) -> str | None:
    module_name, colon, _ = reference.partition(":")
    if not colon:
        point = _entry_points().get(reference)
        if point is None:
            return None
        module_name = point.module
    package = module_name.partition(".")[0]
    is_kept = package in ("dsched", "__main__") or package in sys.stdlib_module_names
    return None if is_kept or not package else package


def _is_source(module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    return spec is not None and str(spec.origin or "").endswith(".py")
