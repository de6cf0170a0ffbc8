"""Gives a command one flag for every configuration key, and hands it the loaded configuration.

`with_config` is the whole use:

    @with_config
    def run(loaded: LoadedConfig, *, dry_run: Annotated[bool, typer.Option()] = False) -> None: ...

The decorated function has the options `-c FILE`, all keys (`--front-door-port`, grouped by section)
and its own. Booleans are `--x`, `--no-x` and also `--x=false`.
"""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand

from dsched.config import CONFIG_FILE_VARIABLE, Config, dsched_environment
from dsched.config_load import BOOLEAN_WORDS, Key, LoadedConfig, bare_type, config_keys, load_config
from dsched.config_text import scalar_to_yaml, section_doc, summary_of

SHORT_FLAGS = {
    "front_door.host": "--host",
    "front_door.port": "--port",
    "launch.engine": "--engine",
    "launch.model": "--model",
    "launch.replicas": "--replicas",
    "launch.data_parallel_size": "--data-parallel-size",
    "launch.expert_parallel": "--enable-expert-parallel",
    "routing.policy": "--policy",
    "logging.level": "--log-level",
}
"""Second names for the keys that people type most."""

Result = TypeVar("Result")


class ConfigCommand(TyperCommand):
    """A command whose boolean flags also take a value, `--metrics-process=false`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - click's or typer's
        return list(super().parse_args(ctx, split_boolean_values(args)))


def split_boolean_values(args: list[str]) -> list[str]:
    """Rewrite `--x=false` as `--no-x` for the boolean keys, up to a bare `--`.

    >>> split_boolean_values(["--metrics-process=off", "--seed=0", "--", "--metrics-process=off"])
    ['--no-metrics-process', '--seed=0', '--', '--metrics-process=off']
    """
    booleans = [key for key in config_keys() if key.is_boolean]
    flags = {key.flag for key in booleans} | {SHORT_FLAGS.get(key.dotted) for key in booleans}
    end = args.index("--") if "--" in args else len(args)
    rewritten = []
    for arg in args[:end]:
        flag, equals, text = arg.partition("=")
        if equals and flag in flags and text.lower() in BOOLEAN_WORDS:
            rewritten.append(flag if BOOLEAN_WORDS[text.lower()] else f"--no-{flag[2:]}")
        else:
            rewritten.append(arg)
    return rewritten + args[end:]


def with_config(function: Callable[..., Result]) -> Callable[..., Result]:
    """Add the configuration options to a command; its first parameter gets the `LoadedConfig`."""
    own = inspect.signature(function, eval_str=True)
    first, *others = own.parameters.values()
    keys = config_keys()

    @functools.wraps(function)
    def command(**values: Any) -> Result:  # noqa: ANN401 - what typer parsed
        file = values.pop("config_file")
        flags = {}
        for key in keys:
            value = values.pop(_parameter_name(key))
            if value is not None:
                flags[key.dotted] = str(value)
        environment = dsched_environment()
        file = file or environment.get(CONFIG_FILE_VARIABLE) or None
        loaded = load_config(file, environment=environment, flags=flags)
        for warning in loaded.warnings:
            typer.echo(f"dsched: warning: {warning}", err=True)
        return function(loaded, **values)

    parameters = [
        *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in others),
        _config_file_parameter(),
        *(_parameter_of(key) for key in keys),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    command.command_class = ConfigCommand  # type: ignore[attr-defined]
    assert first.annotation in (LoadedConfig, inspect.Parameter.empty)
    return command


def _config_file_parameter() -> inspect.Parameter:
    option = typer.Option(
        "--config", "-c", help="YAML file; else $DSCHED_CONFIG.", metavar="FILE", show_default=False
    )
    return inspect.Parameter(
        "config_file",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Path | None, option],
    )


def _parameter_of(key: Key) -> inspect.Parameter:
    names = [key.flag]
    if key.dotted in SHORT_FLAGS:
        names.append(SHORT_FLAGS[key.dotted])
    if key.is_boolean:
        names = [f"{name}/--no-{name[2:]}" for name in names]
    option = typer.Option(
        *names,
        help=_help_of(key),
        metavar=None if key.is_boolean else _metavar_of(key),
        show_default=False,
        rich_help_panel=_panel_of(key),
    )
    value_type = bool if key.is_boolean else str
    return inspect.Parameter(
        _parameter_name(key),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[value_type | None, option],
    )


def _parameter_name(key: Key) -> str:
    return "key__" + "__".join(key.path)


def _panel_of(key: Key) -> str:
    if key.section is Config:
        return "Cluster"
    return f"{'.'.join(key.path[:-1])}: {section_doc(key.section).rstrip('.')}"


def _metavar_of(key: Key) -> str:
    bare = bare_type(key.type)
    if get_origin(bare) is Literal:
        return "|".join(get_args(bare))
    names: dict[object, str] = {int: "INT", float: "NUM", str: "TEXT"}
    return names.get(bare, "YAML")


def _help_of(key: Key) -> str:
    if key.default is None or key.default in ((), {}, ""):
        return summary_of(key)
    default = list(key.default) if isinstance(key.default, tuple) else key.default
    return f"{summary_of(key)} Default: {scalar_to_yaml(default)}."
