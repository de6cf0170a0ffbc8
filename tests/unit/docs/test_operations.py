"""docs/operations.md names every key, metric and log event of the code, and no other."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from dsched.config import OTHER_VARIABLES
from dsched.config_load import parse_config

ROOT = Path(__file__).parents[3]
OPERATIONS = ROOT / "docs" / "operations.md"
LEVELS = ("debug", "info", "warning", "error", "exception")
EVENT = re.compile(r"[a-z_]+\.[a-z_]+")


def load_make_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tables", ROOT / "docs" / "make_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_code() -> None:
    """Keys, pools and metrics; after a change run `python docs/make_tables.py`."""
    make_tables = load_make_tables()
    text = OPERATIONS.read_text(encoding="utf-8")

    assert text == make_tables.replace_tables(text, make_tables.make_tables()), (
        "run: python docs/make_tables.py"
    )
    assert make_tables.undocumented_sections() == []


def test_every_variable_is_documented() -> None:
    """Those that are no keys, too: keys follow a rule that the text gives."""
    text = OPERATIONS.read_text(encoding="utf-8")

    assert [name for name in OTHER_VARIABLES if f"| `{name}` |" not in text] == []


def events_of(source: str) -> Iterator[tuple[str, str]]:
    """(event, level) of every call of a logger in `source`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = ast.unparse(node.func.value)
        if node.func.attr not in LEVELS or not re.search(r"(^|[._])log(ger)?(\.|$)", owner):
            continue
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value.split()[0].rstrip(";"), node.func.attr


def test_events_are_found() -> None:
    """By each way to write them; what is no logger is left alone."""
    source = """
log.info("a.done", x=1)
self._log.warning("b.failed reason=%r; it goes on", e)
log.bind(request_id=1).error("c.lost")
math.log.info
print("d.done")
"""

    assert list(events_of(source)) == [
        ("a.done", "info"),
        ("b.failed", "warning"),
        ("c.lost", "error"),
    ]


def documented_events() -> dict[str, set[str]]:
    rows = re.findall(r"^\| `([a-z_.]+)` \| ([a-z, ]+) \| ", OPERATIONS.read_text(), re.MULTILINE)
    return {event: set(levels.split(", ")) for event, levels in rows if EVENT.fullmatch(event)}


@cache
def code_events() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "dsched").rglob("*.py")):
        for event, level in events_of(path.read_text(encoding="utf-8")):
            found.setdefault(event, set()).add(level)
    return found


def test_every_log_event_is_documented() -> None:
    """Same events, same levels; a new event gets a line in the table under "Log"."""
    assert documented_events() == code_events()


def test_events_are_named_by_noun_and_participle() -> None:
    """`noun.past_participle`, so that a log can be searched by what happened to what."""
    for event in code_events():
        assert EVENT.fullmatch(event), event


@pytest.mark.parametrize(
    "block", re.findall(r"```yaml\n(.*?)```", OPERATIONS.read_text(), re.DOTALL)
)
def test_examples_are_configurations(block: str) -> None:
    """Each YAML block passes `dsched check`."""
    assert parse_config(block).pools
