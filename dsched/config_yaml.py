"""YAML with the line of every value, and without its silent traps.

In: text. Out: plain values and a map from path (`$.pools.decode.engines[1].url`) to line. A key
that appears twice, a key that is not text, a document beside the first and an alias that contains
itself are errors, each with its line.
"""

import yaml

from dsched.errors import ConfigError

MAX_DEPTH = 32
"""Nesting allowed. The configuration has less than ten levels; a deeper one is an alias bomb."""

MAX_NODES = 50_000
"""Values allowed, aliases counted each time. A cluster of a thousand engines has some thousands."""


def parse_yaml(text: str, *, where: str | None) -> tuple[object, dict[str, int]]:
    """Read one YAML document.

    >>> parse_yaml("a: {b: [1, 2]}", where=None)
    ({'a': {'b': [1, 2]}}, {'$': 1, '$.a': 1, '$.a.b': 1, '$.a.b[0]': 1, '$.a.b[1]': 1})

    Raises `ConfigError`, of one line, that starts with `where` and the line.
    """
    loader = yaml.SafeLoader("")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        reader = _Reader(loader, where)
        return reader.value_of(node, "$", 0), reader.lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        reason = " ".join(filter(None, (error.context, error.problem))) or "not readable"
        raise ConfigError(f"{_place(where, line)}: not YAML: {reason}") from error
    except yaml.YAMLError as error:  # characters that YAML forbids
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where or 'line 1'}: not YAML: {reason}") from error
    finally:
        loader.dispose()


def key_path(path: str, name: object) -> str:
    """Return the path of a key inside a mapping, on one line whatever the key is.

    >>> key_path("$", "seed"), key_path("$.pools", "two\\nlines")
    ('$.seed', "$.pools.'two\\\\nlines'")
    """
    text = str(name)
    return f"{path}.{text if text.isprintable() else repr(text)}"


class _Reader:
    """Turns nodes into values and remembers their lines."""

    def __init__(self, loader: yaml.SafeLoader, where: str | None) -> None:
        self._loader = loader
        self._where = where
        self._num_nodes = 0
        self.lines: dict[str, int] = {}

    def value_of(self, node: yaml.Node, path: str, depth: int) -> object:
        self._num_nodes += 1
        line = node.start_mark.line + 1
        if depth > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise self._error(line, f"{path[:60]}: nested deeper than {MAX_DEPTH}, or too large")
        self.lines[path] = line
        if isinstance(node, yaml.MappingNode):
            return self._mapping_of(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [
                self.value_of(part, f"{path}[{index}]", depth + 1)
                for index, part in enumerate(node.value)
            ]
        try:
            return self._loader.construct_object(node)
        except ValueError as error:  # 2026-13-45 is a date to YAML, though not to Python
            raise self._error(line, f"{path}: {error}") from error

    def _mapping_of(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, object]:
        first_lines: dict[str, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            name, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(line, f"{path}: a key must be text")
            if name in first_lines:
                raise self._error(
                    line,
                    f"{key_path(path, name)}: key appears twice, first in line {first_lines[name]}",
                )
            first_lines[name] = line
        self._loader.flatten_mapping(node)  # `<<`: merged keys come first, own keys override
        mapping = {}
        for key_node, value_node in node.value:
            name = key_node.value
            mapping[name] = self.value_of(value_node, key_path(path, name), depth + 1)
        return mapping

    def _error(self, line: int, reason: str) -> ConfigError:
        return ConfigError(f"{reason} ({_place(self._where, line)})")


def _place(where: str | None, line: int) -> str:
    return f"{where}:{line}" if where is not None else f"line {line}"
