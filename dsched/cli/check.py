"""`dsched check`: what a configuration amounts to, before anything is started."""

import asyncio
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dsched.cli.findings import Finding, engine_findings, findings_as_json, static_findings
from dsched.cli.options import with_config
from dsched.cli.policy_setup import make_policies
from dsched.config import Config
from dsched.config_load import LoadedConfig
from dsched.config_text import to_rows, to_yaml

EXIT_FINDINGS = 2
"""As for every other mistake that the operator can mend."""


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
    online: Annotated[
        bool, typer.Option("--online", help="Ask every engine whether it serves what it should.")
    ] = False,
) -> None:
    """Check a configuration and print its effective values with their origins.

    Layers, the later ones first: flag, DSCHED_… variable, file, default. The output is YAML that
    `-c` can read. Policies are imported and made. Exit status 2 and a line with the path for each
    thing that cannot work; what may surprise is a warning. No port is opened, and without --online
    no engine is contacted.
    """
    make_policies(loaded).close()
    findings = list(static_findings(loaded.config))
    if online:
        findings += asyncio.run(engine_findings(loaded.config))
    for finding in findings:
        place = loaded.place(finding.path)
        typer.echo(f"dsched: {finding.level}: {finding.path}: {finding.message}{place}", err=True)
    _print(loaded, findings, origins=origins, as_json=json, schema=schema)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(EXIT_FINDINGS)


def _print(
    loaded: LoadedConfig, findings: list[Finding], *, origins: bool, as_json: bool, schema: bool
) -> None:
    if schema:
        typer.echo(_pretty(msgspec.json.schema(Config)))
    elif as_json:
        typer.echo(_to_json(loaded, findings))
    elif origins:
        Console().print(_to_table(loaded))
    else:
        typer.echo(to_yaml(loaded))


def _to_json(loaded: LoadedConfig, findings: list[Finding]) -> str:
    set_origins = {
        path: str(loaded.origin(path))
        for path, _, _ in to_rows(loaded)
        if loaded.origin(path).layer != "default"
    }
    document = {
        "config": loaded.config,
        "origins": set_origins,
        "warnings": loaded.warnings,
        "findings": findings_as_json(findings),
    }
    return _pretty(document)


def _pretty(document: object) -> str:
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _to_table(loaded: LoadedConfig) -> Table:
    table = Table("key", "value", "from", box=None, header_style="bold")
    for path, value, origin in to_rows(loaded):
        if loaded.origin(path).layer != "default":
            table.add_row(path.removeprefix("$."), value, origin)
    return table
