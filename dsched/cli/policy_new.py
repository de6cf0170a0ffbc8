"""`dsched policy new`: start a policy package."""

from pathlib import Path
from typing import Annotated

import typer

from dsched.cli.policy_package import PolicyKind, class_name, module_name, package_files
from dsched.errors import ConfigError


def new(
    name: Annotated[str, typer.Argument(help="Name of the package and of its entry point.")],
    *,
    kind: Annotated[
        PolicyKind, typer.Option("--kind", help="What the policy decides.")
    ] = PolicyKind.ROUTING,
    folder: Annotated[
        Path, typer.Option("--folder", help="Where to make the package's own folder.")
    ] = Path(),
) -> None:
    """Write a complete package: a policy that decides something, its test, its entry point."""
    root = folder / name
    files = package_files(name, kind)
    if root.exists():
        raise ConfigError(f"{root}: exists already; nothing was written")
    try:
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{root}: cannot be written: {error.strerror or error}") from error
    reference = f"{module_name(name)}:{class_name(name)}"
    typer.echo("\n".join(f"{root}/{path}" for path in files))
    lines = [f"cd {root}", "pytest", f"dsched policy test {reference}"]
    if kind is PolicyKind.ROUTING:
        lines.append(f"dsched run --policy {reference}")
    typer.echo("\n  ".join(["\nTry it:\n", *lines]))
