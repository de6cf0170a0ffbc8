"""The configuration as text: effective values with their origins, and the documentation of keys.

What `to_yaml` prints can be read again and gives the same configuration.
"""

import ast
import inspect
import math
from collections.abc import Iterator
from functools import cache

import msgspec
import yaml

from dsched import config as config_module
from dsched.config import PoliciesConfig, PolicyConfig, Section
from dsched.config_load import Key, LoadedConfig
from dsched.config_yaml import key_path

COMMENT_COLUMN = 48
"""Where origin comments start, unless the value is longer."""


def to_yaml(loaded: LoadedConfig) -> str:
    """Return the effective configuration; each line that has a value ends in its origin."""
    lines = _lines_of(msgspec.to_builtins(loaded.config), "$", "")
    return "\n".join(
        text if path is None else f"{text:<{COMMENT_COLUMN}}  # {loaded.origin(path)}"
        for text, path in lines
    )


def to_rows(loaded: LoadedConfig) -> list[tuple[str, str, str]]:
    """Return (path, value as YAML, origin) of every value, in the order of the fields."""
    return [
        (path, scalar_to_yaml(value), str(loaded.origin(path)))
        for path, value in _leaves_of(msgspec.to_builtins(loaded.config), "$")
    ]


def scalar_to_yaml(value: object) -> str:
    """Write a value as YAML on one line.

    >>> scalar_to_yaml("off"), scalar_to_yaml(""), scalar_to_yaml([1, 2]), scalar_to_yaml(None)
    ("'off'", "''", '[1, 2]', 'null')
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(scalar_to_yaml(part) for part in value)}]"
    text = _dump(value)
    if len(text.splitlines()) > 1:  # only double quotes keep a line end on one line
        text = _dump(value, default_style='"')
    return text


def _dump(value: object, *, default_style: str | None = None) -> str:
    text = yaml.safe_dump(
        value,
        default_flow_style=True,
        width=math.inf,
        allow_unicode=True,
        default_style=default_style,
    )
    return str(text).removesuffix("\n").removesuffix("...").strip("\n")


def _is_leaf(value: object) -> bool:
    """A scalar, an empty container, or a list of scalars."""
    if isinstance(value, dict):
        return not value
    if isinstance(value, list | tuple):
        return not any(isinstance(part, dict | list | tuple) for part in value)
    return True


def _leaves_of(value: object, path: str) -> Iterator[tuple[str, object]]:
    if _is_leaf(value):
        yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves_of(part, key_path(path, name))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _leaves_of(part, f"{path}[{index}]")


def _lines_of(value: object, path: str, indent: str) -> Iterator[tuple[str, str | None]]:
    """The lines of a block, each with the path of its value if it has one."""
    if isinstance(value, dict):
        for name, part in value.items():
            key, path_of_part = f"{indent}{scalar_to_yaml(name)}:", key_path(path, name)
            if _is_leaf(part):
                leaf = list(part) if isinstance(part, tuple) else part
                yield f"{key} {scalar_to_yaml(leaf)}", path_of_part
            else:
                yield key, None
                yield from _lines_of(part, path_of_part, indent + "  ")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            for number, (text, text_path) in enumerate(_lines_of(part, f"{path}[{index}]", "")):
                yield f"{indent}{'- ' if number == 0 else '  '}{text}", text_path


# -- documentation of keys -------------------------------------------------------------------------


def doc_of(key: Key) -> str:
    """Return the documentation of a key: the text under its field, on one line, after that of the
    section's own field where the section stands in several places."""
    own = field_docs()[key.section.__name__].get(key.path[-1], "")
    if key.section is not PolicyConfig:
        return own
    return f"{field_docs()[PoliciesConfig.__name__][key.path[-2]]} {own}"


def summary_of(key: Key) -> str:
    """Return the first sentence of a key's documentation."""
    text = doc_of(key)
    head, stop, _ = text.partition(". ")
    return head + "." if stop else text


def section_doc(section: type[Section]) -> str:
    """Return the first line of a section's docstring."""
    return (section.__doc__ or "").strip().split("\n", 1)[0]


@cache
def field_docs() -> dict[str, dict[str, str]]:
    """Return the text under each field of each struct in `dsched.config`, by struct and field.

    Python drops these texts when it runs; so they are read from the source.
    """
    tree = ast.parse(inspect.getsource(config_module))
    docs: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            docs[node.name] = dict(_docs_of_class(node))
    return docs


def _docs_of_class(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, below in zip(node.body, node.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = below.value.value
            if isinstance(text, str):
                yield statement.target.id, " ".join(text.split())
