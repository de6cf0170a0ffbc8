"""Subcommands that are imported when they are called, not when a help page lists them.

A subcommand is a `CommandRow`: a function or a `typer.Typer` in a module that need not exist yet.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRow:
    """One line of a help page."""

    name: str
    target: str
    """`module:attribute`; the row is left out while there is no such module."""
    help: str
    panel: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """One line of a help page that has subcommands of its own."""

    name: str
    rows: tuple[CommandRow, ...]
    help: str
    panel: str


class LazyCommand(TyperCommand):
    """Stands for a subcommand in the help page of its group."""

    def __init__(self, row: CommandRow) -> None:
        super().__init__(row.name, help=row.help, short_help=row.help, rich_help_panel=row.panel)
        self._row = row

    def load(self) -> Any:  # noqa: ANN401 - a command of click or of typer's own copy of it
        """Import the module and make the real command."""
        module_name, _, attribute = self._row.target.partition(":")
        found = getattr(importlib.import_module(module_name), attribute)
        if not isinstance(found, typer.Typer):
            app = typer.Typer(add_completion=False)
            command_class = getattr(found, "command_class", None)
            app.command(self._row.name, cls=command_class, help=_reflow(found.__doc__))(found)
            found = app
        return typer.main.get_command(found)


class LazyGroup(TyperGroup):
    """A group of rows, in the order given."""

    def __init__(
        self,
        name: str,
        rows: Sequence[CommandRow | GroupRow],
        **attributes: Any,  # noqa: ANN401 - click's own
    ) -> None:
        super().__init__(name=name, no_args_is_help=True, **attributes)
        for row in rows:
            if isinstance(row, GroupRow):
                group = LazyGroup(row.name, row.rows, help=row.help, rich_help_panel=row.panel)
                if group.commands:
                    self.add_command(group, row.name)
            elif _has_module(row.target):
                self.add_command(LazyCommand(row), row.name)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ANN401, ARG002
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, LazyCommand) else command, rest


def _has_module(target: str) -> bool:
    try:
        return importlib.util.find_spec(target.partition(":")[0]) is not None
    except ModuleNotFoundError:
        return False


def _reflow(docstring: str | None) -> str:
    """Join the lines of each paragraph, so that a help page breaks them at its own width."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
