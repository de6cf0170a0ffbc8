"""Rewrites the tables of `operations.md` from the code: `python docs/make_tables.py`.

The tables stand between `<!-- begin: NAME -->` and `<!-- end: NAME -->`; everything else is written
by hand. `tests/unit/docs` fails while a table differs from the code.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from dsched import config as config_module
from dsched.config import Config, Section
from dsched.config_load import config_keys
from dsched.config_text import doc_of, field_docs, scalar_to_yaml
from dsched.metrics import CATALOG

OPERATIONS = Path(__file__).with_name("operations.md")


def make_tables() -> dict[str, str]:
    """Return each table's Markdown, by name."""
    return {
        "keys": "\n".join(_key_rows()),
        "pools": "\n".join(_pool_rows()),
        "metrics": "\n".join(_metric_rows()),
    }


def replace_tables(text: str, tables: dict[str, str]) -> str:
    """Return `text` with the part between each pair of marks replaced.

    >>> replace_tables("a\\n<!-- begin: x -->\\nold\\n<!-- end: x -->\\nb", {"x": "new"})
    'a\\n<!-- begin: x -->\\nnew\\n<!-- end: x -->\\nb'
    """
    for name, table in tables.items():
        begin, end = f"<!-- begin: {name} -->\n", f"<!-- end: {name} -->"
        head, found_begin, rest = text.partition(begin)
        _, found_end, tail = rest.partition(end)
        if not found_begin or not found_end:
            raise ValueError(f"no marks for the table {name!r}")
        text = f"{head}{begin}{table}\n{end}{tail}"
    return text


def _key_rows() -> Iterator[str]:
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    for key in config_keys():
        default = list(key.default) if isinstance(key.default, tuple) else key.default
        shown = "" if default is None else f"`{scalar_to_yaml(default)}`"
        yield f"| `{key.dotted}` | {shown} | {doc_of(key)} |"


def _pool_rows() -> Iterator[str]:
    yield "| key in `pools` | default | meaning |"
    yield "|---|---|---|"
    for prefix, section in (
        ("POOL", config_module.PoolConfig),
        ("POOL.model", config_module.ModelConfig),
        ("POOL.engines[]", config_module.EngineConfig),
    ):
        for field in msgspec.structs.fields(section):
            default = "required" if field.required else ""
            if not field.required and field.default is not None:
                default = f"`{scalar_to_yaml(field.default)}`"
            meaning = field_docs()[section.__name__][field.name]
            yield f"| `{prefix}.{field.name}` | {default} | {meaning} |"


def _metric_rows() -> Iterator[str]:
    yield "| metric | kind | labels | meaning |"
    yield "|---|---|---|---|"
    for metric in CATALOG.values():
        labels = " ".join(f"`{label}`" for label in metric.labels)
        yield f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def undocumented_sections() -> list[str]:
    """Return structs of the configuration that no table shows."""
    shown = {key.section for key in config_keys()} | {
        Config,
        config_module.PoolConfig,
        config_module.ModelConfig,
        config_module.EngineConfig,
        config_module.PoliciesConfig,  # its fields' texts stand before those of their keys
    }
    # Settings are read from variables of their own, which the text names.
    names = [s.__name__ for s in Section.__subclasses__() if s not in shown]
    return [name for name in names if not name.endswith("Settings")]


def main() -> None:
    """Rewrite the tables in place."""
    text = OPERATIONS.read_text(encoding="utf-8")
    OPERATIONS.write_text(replace_tables(text, make_tables()), encoding="utf-8")


if __name__ == "__main__":
    main()
