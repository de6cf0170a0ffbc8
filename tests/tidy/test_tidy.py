"""The tree keeps its own rules: layers, imports, docstrings, nothing of one machine.

Each check is a function from source text to findings, tried here on planted mistakes first, and
then run over every file. An exception is a line in a table with its reason, never a silent pass.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "errors", "ids", "states", "clock", "rng", "jit", "logs",
        "config", "config_yaml", "config_checks", "config_load", "config_text", "sqlite_wal",
        "drivers.base", "drivers.wire",
    ),
    ("costs",),
    ("scheduler", "spec_decode", "eplb", "routing", "faults"),
    ("plugins", "trace", "metrics"),
    ("controller",),
    ("registry", "drivers", "sim"),
    ("frontdoor",),
    ("testing",),
    ("cli",),
)  # fmt: skip
"""Parts of `dsched`, lowest layer first. A part imports its own layer never, lower ones freely; the
modules of the base import each other."""

HOMES = {"vllm": "drivers.vllm", "sglang": "drivers.sglang", "torch": "drivers", "numba": "jit"}
"""Packages that only a driver may import."""

ALLOWED_IMPORTS: dict[tuple[str, str], str] = {}
"""(importing module, imported part) that break the layers on purpose, each with its reason."""

MACHINE_PATHS = re.compile(r"(?<![\w.$~/-])/(?:work|root|tmp|home|Users|mnt)/[\w./-]+")
ALLOWED_MACHINE_PATHS: dict[str, str] = {}
"""Files that must name a path of one machine, each with its reason."""


@cache
def parse(source: str) -> ast.Module:
    """Parse once what several checks look at."""
    return ast.parse(source)


def part_of(module: str) -> str | None:
    """The part of `dsched` a module belongs to; `None` for the package itself.

    >>> part_of("dsched.drivers.wire"), part_of("dsched.drivers.vllm.agent"), part_of("dsched")
    ('drivers.wire', 'drivers', None)
    """
    names = module.split(".")[1:]
    if not names:
        return None
    if ".".join(names[:2]) in LAYERS[0]:
        return ".".join(names[:2])
    return names[0]


def layer_of(part: str) -> int:
    for number, parts in enumerate(LAYERS):
        if part in parts:
            return number
    raise KeyError(f"dsched/{part} is in no layer: add it to LAYERS")


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level + (node.module or "")
            elif node.module == "dsched":
                for alias in node.names:
                    yield node.lineno, f"dsched.{alias.name}"
            elif node.module in ("dsched.drivers",):
                for alias in node.names:
                    yield node.lineno, f"{node.module}.{alias.name}"
            else:
                yield node.lineno, node.module or ""


def find_layer_faults(module: str, source: str) -> list[str]:
    """Imports of `module` that go up, sideways, or to what has one home."""
    faults = []
    own = part_of(module)
    for line, imported in imports_of(parse(source)):
        if imported.startswith("."):
            faults.append(f"{module}:{line}: import {imported} is not absolute")
        top = imported.split(".")[0]
        home = HOMES.get(top)
        if home is not None and not f"{module}.".startswith(f"dsched.{home}."):
            faults.append(f"{module}:{line}: {top} is imported outside dsched.{home}")
        if top != "dsched" or own is None:
            continue
        part = part_of(imported)
        if part is None or part == "__version__" or part == own:
            continue
        if (module, part) in ALLOWED_IMPORTS:
            continue
        is_base = layer_of(own) == layer_of(part) == 0
        if layer_of(part) >= layer_of(own) and not is_base:
            faults.append(f"{module}:{line}: {own} may not import {part}")
    return faults


def find_docstring_fault(name: str, source: str) -> list[str]:
    """A module says what it decides and why."""
    return [] if ast.get_docstring(parse(source)) else [f"{name}: no module docstring"]


def find_machine_paths(name: str, text: str) -> list[str]:
    """Absolute paths that exist on the machine of whoever wrote the line."""
    return [
        f"{name}:{number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for match in MACHINE_PATHS.finditer(line)
    ]


def find_mutable_globals(name: str, source: str) -> list[str]:
    """Lists, dicts and sets at module level that are not named as constants."""
    faults = []
    for node in parse(source).body:
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        is_mutable = isinstance(
            node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp
        )
        if is_mutable and not all(each.isupper() or each == "__all__" for each in names):
            faults.append(f"{name}:{node.lineno}: {', '.join(names)} is mutable and not a constant")
    return faults


# -- the checks find planted mistakes


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("dsched.routing.decode", "from dsched.controller import x", "may not import controller"),
        ("dsched.routing.decode", "import dsched.eplb.placement", "may not import eplb"),
        ("dsched.routing.decode", "from dsched import eplb", "may not import eplb"),
        ("dsched.errors", "def f():\n    from dsched.cli import main", "may not import cli"),
        ("dsched.sim.engine", "from dsched.drivers.vllm import x", "may not import drivers"),
        ("dsched.costs.curve", "from .isotonic import x", "not absolute"),
        ("dsched.sim.engine", "import torch.nn", "torch is imported outside"),
        ("dsched.drivers.sglang.agent", "import vllm", "vllm is imported outside"),
        ("dsched.routing.kernels", "from numba import njit", "numba is imported outside"),
    ],
)
def test_layer_check_finds(module: str, source: str, found: str) -> None:
    """Upwards, sideways, inside a function, relative, and engines outside their driver."""
    (fault,) = find_layer_faults(module, source)

    assert found in fault


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dsched.controller.tick", "from dsched.drivers.wire import RankReport"),
        ("dsched.controller.tick", "from dsched.drivers import base"),
        ("dsched.cli.run", "from dsched import __version__\nimport dsched.frontdoor.server"),
        ("dsched.config_load", "from dsched.config import Config"),
        ("dsched.drivers.vllm.agent", "import vllm\nimport torch"),
        ("dsched.jit", "from numba import njit"),
        ("dsched.routing.ledger", "from dsched.routing import kernels"),
    ],
)
def test_layer_check_accepts(module: str, source: str) -> None:
    """Downwards, within a part, and the wire messages as base."""
    assert find_layer_faults(module, source) == []


def test_other_checks_find() -> None:
    """A missing docstring, a path of one machine, a mutable global."""
    machine_path = "/" + "home/someone/x"

    assert find_docstring_fault("m", "x = 1") == ["m: no module docstring"]
    assert find_machine_paths("m", f"a\nopen('{machine_path}')") == [f"m:2: {machine_path}"]
    assert find_machine_paths("m", "GET /v1/models, ../shared/x, /proc/self, a/root/b") == []
    assert len(find_mutable_globals("m", "a = []\n_b: dict[str, int] = {}\nc = (1,)")) == 2
    assert find_mutable_globals("m", "__all__ = ['x']\nTABLE = {1: 2}") == []


# -- the tree


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    names = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def text_files() -> list[Path]:
    """Everything that could be tracked: sources, documents, settings; no build or cache."""
    suffixes = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".cfg", ".html", ".sh", ".json"}
    files = [p for p in ROOT.iterdir() if p.is_file() and (p.suffix in suffixes or not p.suffix)]
    for folder in ("dsched", "tests", "benchmarks", "examples", "docs", "requirements", ".ci"):
        files += [p for p in (ROOT / folder).rglob("*") if p.is_file()]
    return sorted(p for p in files if "__pycache__" not in p.parts and p.suffix != ".pyc")


def test_imports_keep_the_layers() -> None:
    """base <- costs <- planners <- plugins, trace, metrics <- controller <- registry, drivers, sim
    <- frontdoor <- cli; engines only under their driver, numba in `jit`; all imports absolute."""
    faults = [
        fault
        for path in python_files("dsched")
        for fault in find_layer_faults(module_of(path), path.read_text(encoding="utf-8"))
    ]

    assert faults == []


def test_exceptions_are_still_needed() -> None:
    """An exception whose cause is gone is removed from the table."""
    for module, part in ALLOWED_IMPORTS:
        path = ROOT / (module.replace(".", "/") + ".py")
        imported = {part_of(name) for _, name in imports_of(ast.parse(path.read_text()))}
        assert part in imported, f"{module} no longer imports {part}"


def test_every_module_says_what_it_is_for() -> None:
    """Also tests, benchmarks and examples."""
    faults = [
        fault
        for path in python_files("dsched", "tests", "benchmarks", "examples")
        for fault in find_docstring_fault(
            str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        )
    ]

    assert faults == []


def test_no_file_names_a_path_of_one_machine() -> None:
    """What is checked in works anywhere."""
    faults = [
        fault
        for path in text_files()
        if str(path.relative_to(ROOT)) not in ALLOWED_MACHINE_PATHS
        for fault in find_machine_paths(
            str(path.relative_to(ROOT)), path.read_text(encoding="utf-8", errors="ignore")
        )
    ]

    assert faults == []


def test_no_mutable_object_at_module_level() -> None:
    """No shared state by import: what must be shared is passed."""
    faults = [
        fault
        for path in python_files("dsched")
        for fault in find_mutable_globals(
            str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        )
    ]

    assert faults == []
