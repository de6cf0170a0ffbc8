"""What the whole suite shares.

Doctests are collected everywhere, except from modules that only an engine's Python can import.
Hypothesis draws new examples at every run on a desk, and the same ones in continuous integration,
where a failure must be a failure of the change.
"""

import gc
import os
import re
from importlib.util import find_spec
from pathlib import Path

from hypothesis import settings

settings.register_profile("desk", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "desk")

ROOT = Path(__file__).parent
FOLDERS = ("dsched/drivers/vllm", "dsched/drivers/sglang", "tests/vllm", "tests/sglang")
PROGRAMS = ("tests/vllm/plugin", "tests/sglang/plugin", "tests/sglang/engine_run.py")
"""Of the engines' environments; tests start them there. pytest reads one list alone: this one."""
MISSING = [name for name in ("vllm", "sglang", "torch") if find_spec(name) is None]


def _needs_missing(path: Path) -> bool:
    names = "|".join(MISSING)
    pattern = rf"^(from|import) ({names})\b"
    return bool(MISSING) and re.search(pattern, path.read_text(), re.MULTILINE) is not None


collect_ignore = [str(ROOT / each) for each in PROGRAMS] + [
    str(path)
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if _needs_missing(path)
]


def pytest_collection_finish() -> None:
    """Leave what all tests share out of later collections of garbage, a tenth of their time."""
    gc.collect()
    gc.freeze()
