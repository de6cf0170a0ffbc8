"""Writes what a command was asked to write with `--json`."""

import json
from pathlib import Path
from typing import Any

import typer

from dsched.errors import ConfigError


def write_json(values: dict[str, Any], path: Path, *, sort_keys: bool = False) -> None:
    """Write `values` to `path`, or to standard output for `-`; never NaN, which is no JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(values, indent=2, allow_nan=False, sort_keys=sort_keys)
    if str(path) == "-":
        typer.echo(text)
        return
    try:
        path.write_text(text + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
