"""Doctests are collected from the whole package, except from modules that need an engine."""

import re
from importlib.util import find_spec
from pathlib import Path

DRIVERS = Path(__file__).parent / "dsched" / "drivers"
ENGINES = ("vllm", "sglang")


def _needs(path: Path, engine: str) -> bool:
    return re.search(rf"^(from|import) {engine}\b", path.read_text(), re.MULTILINE) is not None


collect_ignore = [
    str(path)
    for engine in ENGINES
    if find_spec(engine) is None
    for path in sorted((DRIVERS / engine).glob("*.py"))
    if _needs(path, engine)
]
