"""Reads the configuration: default < file < environment < flag, each value with its origin.

In: a YAML file, the `DSCHED_…` variables, the flags. Out: a checked `LoadedConfig`, or one
`ConfigError` whose message is one line that starts with the path of the value, as in
`$.pools.decode.engines[1].url: Expected `str`, got `int` (cluster.yaml:9)`.

Layers are merged value by value, guided by the types of `dsched.config.Config`, before anything is
converted; so `false`, `0`, `""` and `[]` override like any other value, and `null` (or an empty
variable) leaves the default. A `pools` mapping or a list replaces the one below it as a whole.
"""

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin, get_type_hints

import msgspec

from dsched.config import ENVIRONMENT_PREFIX, OTHER_VARIABLES, Config, Section
from dsched.config_checks import check_config
from dsched.config_yaml import key_path, parse_yaml
from dsched.errors import ConfigError

MAX_FILE_BYTES = 4 * 1024 * 1024
"""Largest configuration file. A larger one is a mistake (a log, a model), and slow to refuse."""

BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "1": True} | {
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a value comes from."""

    layer: Literal["default", "file", "environment", "flag", "derived"]
    detail: str = ""
    """File and line, variable, or flag."""

    def __str__(self) -> str:
        return self.detail or self.layer


DEFAULT = Origin(layer="default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One value an operator can set: a field that is not itself a section."""

    path: tuple[str, ...]
    section: type[Section]
    """The struct that has the field; its docstring names the group of flags."""
    type: object
    default: object
    """The default value, or `msgspec.UNSET` if the key is required."""

    @property
    def flag(self) -> str:
        """`--front-door-port`."""
        return "--" + "-".join(self.path).replace("_", "-")

    @property
    def variable(self) -> str:
        """`DSCHED_FRONT_DOOR_PORT`."""
        return ENVIRONMENT_PREFIX + "_".join(self.path).upper()

    @property
    def is_boolean(self) -> bool:
        return bare_type(self.type) is bool

    @property
    def dotted(self) -> str:
        """`front_door.port`."""
        return ".".join(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A configuration that was read and checked."""

    config: Config
    origins: Mapping[str, Origin]
    """By path (`$.front_door.port`); what is missing is a default. A mapping that the file has is
    listed too, though it has defaults inside."""
    file: Path | None = None
    flags: Mapping[str, str] | None = None
    """Where it was read from, beside the environment, so that it can be read again."""
    warnings: tuple[str, ...] = ()
    """What looks like a mistake but does no harm, one line each."""

    def origin(self, path: str) -> Origin:
        """Return where the value at `path` comes from."""
        return self.origins.get(path, DEFAULT)

    def place(self, path: str) -> str:
        """Return ` (file:line)` for a message about `path`, as `place_of` does."""
        return place_of(path, self.origins)


def load_config(
    file: str | Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Read, merge and check a configuration.

    `environment` has the `DSCHED_…` variables (`dsched.config.dsched_environment()`), `flags` the
    text of each flag that was given, by key (`front_door.port`). Raises `ConfigError`.
    """
    layers = _Layers()
    if file is not None:
        layers.read_file(Path(file))
    layers.read_environment(environment or {})
    layers.read_flags(flags or {})
    loaded = _convert(layers, where=str(file) if file is not None else None)
    return replace(loaded, file=None if file is None else Path(file), flags=flags)


def parse_config(text: str) -> Config:
    """Read a configuration from YAML text.

    >>> parse_config("front_door: {port: 9000}").front_door.port
    9000
    >>> parse_config("front_door: {prot: 9000}")
    Traceback (most recent call last):
        ...
    dsched.errors.ConfigError: $.front_door.prot: unknown key; did you mean `port` (line 1)
    """
    layers = _Layers()
    layers.read_yaml(text, where=None)
    return _convert(layers, where=None).config


@cache
def config_keys() -> tuple[Key, ...]:
    """Return every key, in the order of the fields."""
    return tuple(_keys_of(Config, ()))


def _keys_of(section: type[Section], prefix: tuple[str, ...]) -> Iterator[Key]:
    hints = _hints_of(section)
    for field in msgspec.structs.fields(section):
        path = (*prefix, field.name)
        hint = hints[field.name]
        if _is_section(hint):
            yield from _keys_of(hint, path)
        else:
            default = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            if default is msgspec.NODEFAULT:
                default = msgspec.UNSET
            yield Key(path=path, section=section, type=hint, default=default)


def place_of(path: str, origins: Mapping[str, Origin]) -> str:
    """Return ` (file:line)` of the value at `path`, or of its nearest known parent; else nothing.

    >>> place_of("$.a.b[0]", {"$.a": Origin(layer="file", detail="c.yaml:3")})
    ' (c.yaml:3)'
    """
    while path and path not in origins:
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return f" ({origins[path]})" if path else ""


class _Layers:
    """The values that were set, merged, and where each comes from."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}
        self.warnings: list[str] = []

    def read_file(self, path: Path) -> None:
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}") from error
        self.read_yaml(text, where=str(path))

    def read_yaml(self, text: str, *, where: str | None) -> None:
        tree, lines = parse_yaml(text, where=where)
        if tree is None:
            return
        if not isinstance(tree, dict):
            place = f" ({where})" if where is not None else ""
            raise ConfigError(f"$: expected a mapping of keys, got {_kind_of(tree)}{place}")
        values = _without_nulls(tree, Config)
        assert isinstance(values, dict)
        self.values = values
        for path in _paths_of(values, "$"):
            line = lines.get(path, lines["$"])
            place = f"{where}:{line}" if where is not None else f"line {line}"
            self.origins[path] = Origin(layer="file", detail=place)
        _check_known(self.values, Config, "$", self)

    def read_environment(self, environment: Mapping[str, str]) -> None:
        keys = {key.variable: key for key in config_keys()}
        for variable, text in environment.items():
            if variable in OTHER_VARIABLES or not variable.startswith(ENVIRONMENT_PREFIX):
                continue
            key = keys.get(variable)
            if key is None:
                hint = _did_you_mean(variable, keys)
                self.warnings.append(f"{variable}: no such key{hint}; ignored")
            elif text:
                if text.startswith("tcp://") and bare_type(key.type) is int:
                    raise ConfigError(
                        f"$.{key.dotted}: {text!r} in {variable} was set by Kubernetes for a "
                        "service; rename that or set enableServiceLinks: false"
                    )
                self._set(key, text, Origin(layer="environment", detail=f"${variable}"))

    def read_flags(self, flags: Mapping[str, str]) -> None:
        keys = {key.dotted: key for key in config_keys()}
        for dotted, text in flags.items():
            if dotted not in keys:
                raise ValueError(f"{dotted!r} is not a configuration key")
            key = keys[dotted]
            self._set(key, text, Origin(layer="flag", detail=key.flag))

    def _set(self, key: Key, text: str, origin: Origin) -> None:
        path = "$." + key.dotted
        value = _parse_text(text, key.type, f"{path}", origin)
        for known in [p for p in self.origins if p.startswith((path + ".", path + "["))]:
            del self.origins[known]
        self.origins.pop(path, None)
        if value is not None:
            self.origins |= dict.fromkeys(_paths_of(value, path), origin)
        *parents, name = key.path
        section = self.values
        for depth, parent in enumerate(parents):
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                section_path = "$." + ".".join(key.path[: depth + 1])
                found = _kind_of(section)
                raise ConfigError(
                    f"{section_path}: expected a mapping of keys, got {found}"
                    f"{self.place(section_path)}"
                )
        if value is None:
            section.pop(name, None)
        else:
            section[name] = value

    def place(self, path: str) -> str:
        """Return ` (file:line)` for a message about `path`, as `place_of` does."""
        return place_of(path, self.origins)


def _convert(layers: _Layers, *, where: str | None) -> LoadedConfig:
    _check_known(layers.values, Config, "$", layers)
    _check_values(layers.values, Config, "$", layers)
    try:
        config = msgspec.convert(layers.values, Config)
    except msgspec.ValidationError as error:  # what the walk above has no rule for
        raise ConfigError(f"{where or '$'}: {error}") from error
    try:
        config = check_config(config)
    except ConfigError as error:
        path = str(error).split(": ", 1)[0]
        raise ConfigError(f"{error}{layers.place(path)}") from error
    return LoadedConfig(
        config=config, origins=dict(layers.origins), warnings=tuple(layers.warnings)
    )


# -- walking values along their types --------------------------------------------------------------


def bare_type(hint: object) -> object:
    """The type without `Annotated` and without `| None`."""
    if get_origin(hint) is Annotated:
        return bare_type(get_args(hint)[0])
    if _is_union(hint):
        others = [arg for arg in get_args(hint) if arg is not types.NoneType]
        return bare_type(others[0]) if len(others) == 1 else hint
    return hint


@cache
def _hints_of(section: type[Section]) -> Mapping[str, object]:
    return get_type_hints(section, include_extras=True)


def _is_union(hint: object) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _is_section(hint: object) -> TypeGuard[type[Section]]:
    return isinstance(hint, type) and issubclass(hint, Section)


def _children(value: object, hint: object, path: str) -> Iterator[tuple[str, object, object]]:
    """The (path, value, type) of every part of `value` that its type knows."""
    bare = bare_type(hint)
    if _is_section(bare) and isinstance(value, dict):
        hints = _hints_of(bare)
        for name, part in value.items():
            if name in hints:
                yield key_path(path, name), part, hints[name]
    elif get_origin(bare) is dict and isinstance(value, dict):
        for name, part in value.items():
            yield key_path(path, name), part, get_args(bare)[1]
    elif get_origin(bare) in (tuple, list) and isinstance(value, list):
        for index, part in enumerate(value):
            yield f"{path}[{index}]", part, get_args(bare)[0]


def _paths_of(value: object, path: str) -> Iterator[str]:
    """The path of a value and of everything inside it."""
    yield path
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _paths_of(part, key_path(path, name))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _paths_of(part, f"{path}[{index}]")


def _without_nulls(value: object, hint: object) -> object:
    """Drop the keys of sections whose value is null: they mean the default."""
    bare = bare_type(hint)
    if _is_section(bare) and isinstance(value, dict):
        hints = _hints_of(bare)
        return {
            name: _without_nulls(part, hints.get(name, object))
            for name, part in value.items()
            if part is not None or name not in hints
        }
    if get_origin(bare) is dict and isinstance(value, dict):
        return {name: _without_nulls(part, get_args(bare)[1]) for name, part in value.items()}
    if get_origin(bare) in (tuple, list) and isinstance(value, list):
        return [_without_nulls(part, get_args(bare)[0]) for part in value]
    return value


def _check_known(value: object, hint: object, path: str, layers: _Layers) -> None:
    """Refuse a key that no field has."""
    bare = bare_type(hint)
    if _is_section(bare) and isinstance(value, dict):
        known = _hints_of(bare)
        for name in value:
            if name not in known:
                where = key_path(path, name)
                hint_text = _did_you_mean(str(name), known)
                raise ConfigError(f"{where}: unknown key{hint_text}{layers.place(where)}")
    for child_path, child, child_hint in _children(value, hint, path):
        _check_known(child, child_hint, child_path, layers)


def _check_values(value: object, hint: object, path: str, layers: _Layers) -> None:
    """Convert each part alone, innermost first, so that a message has the whole path."""
    for child_path, child, child_hint in _children(value, hint, path):
        _check_values(child, child_hint, child_path, layers)
    reason: str | None = None
    if isinstance(value, float) and not math.isfinite(value):
        reason = f"{value} is not a finite number"
    else:
        try:
            msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            reason = _reason_against(value, hint, str(error).split(" - at `", 1)[0])
    if reason is not None:
        raise ConfigError(f"{path}: {reason}{layers.place(path)}")


def _reason_against(value: object, hint: object, reason: str) -> str:
    """Say in an operator's words why `value` does not fit; `reason` are msgspec's words."""
    bare = bare_type(hint)
    if (_is_section(bare) or get_origin(bare) is dict) and not isinstance(value, dict):
        return f"expected a mapping of keys, got {_kind_of(value)}"
    if get_origin(bare) in (tuple, list) and not isinstance(value, list):
        return f"expected a list, got {_kind_of(value)}"
    if get_origin(bare) is Literal:
        return f"{value!r} is none of {', '.join(get_args(bare))}"
    if "missing required field" in reason:
        return f"missing key {reason.rpartition(' ')[2]}"
    if isinstance(value, int | float | str) and "got `" not in reason:
        return f"{reason[0].lower()}{reason[1:]}, got {value!r}"
    return f"{reason[0].lower()}{reason[1:]}"


def _kind_of(value: object) -> str:
    if value is None:
        return "nothing"
    return {"dict": "a mapping", "list": "a list", "str": "text"}.get(
        type(value).__name__, f"`{type(value).__name__}`"
    )


def _parse_text(text: str, hint: object, path: str, origin: Origin) -> object:
    """Read the text of a variable or flag as a value of its key's type."""
    bare = bare_type(hint)
    if bare is str or get_origin(bare) is Literal:
        return text
    if bare is bool:
        if text.lower() not in BOOLEAN_WORDS:
            raise ConfigError(f"{path}: {text!r} is not true or false ({origin})")
        return BOOLEAN_WORDS[text.lower()]
    if bare in (int, float):
        try:
            return int(text) if bare is int else float(text)
        except ValueError:
            kind = "a whole number" if bare is int else "a number"
            raise ConfigError(f"{path}: {text!r} is not {kind} ({origin})") from None
    try:
        tree, _ = parse_yaml(text, where=None)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error} ({origin})") from error
    return _without_nulls(tree, hint)


def _did_you_mean(name: str, known: Mapping[str, Any]) -> str:
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean `{near[0]}`" if near else ""
