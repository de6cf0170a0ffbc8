"""`dsched check`: what a configuration amounts to, before anything is started."""

from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dsched.cli.options import with_config
from dsched.cli.policy_setup import make_policies
from dsched.config import Config
from dsched.config_load import LoadedConfig
from dsched.config_text import to_rows, to_yaml


@with_config
def check(
    loaded: LoadedConfig,
    *,
    origins: Annotated[
        bool, typer.Option("--origins", help="Print only what is not a default, as a table.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print values and origins as JSON.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file, for editors.")
    ] = False,
) -> None:
    """Check a configuration and print its effective values with their origins.

    Layers, the later ones first: flag, DSCHED_… variable, file, default. The output is YAML that
    `-c` can read. Exit status 2 and one line with the path if something is wrong; no port is opened
    and no engine contacted.
    """
    make_policies(loaded)
    if schema:
        typer.echo(_pretty(msgspec.json.schema(Config)))
    elif json:
        typer.echo(_to_json(loaded))
    elif origins:
        Console().print(_to_table(loaded))
    else:
        typer.echo(to_yaml(loaded))


def _to_json(loaded: LoadedConfig) -> str:
    set_origins = {
        path: str(loaded.origin(path))
        for path, _, _ in to_rows(loaded)
        if loaded.origin(path).layer != "default"
    }
    document = {"config": loaded.config, "origins": set_origins, "warnings": loaded.warnings}
    return _pretty(document)


def _pretty(document: object) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _to_table(loaded: LoadedConfig) -> Table:
    table = Table("key", "value", "from", box=None, header_style="bold")
    for path, value, origin in to_rows(loaded):
        if loaded.origin(path).layer != "default":
            table.add_row(path.removeprefix("$."), value, origin)
    return table
