"""Fixtures that several folders share: the real engines of the session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsched.testing.vllm_engines import TinyEngines, is_vllm_there, running_engines

STATE_DIR = Path(__file__).parents[1] / ".dsched" / "tests"


@pytest.fixture(scope="session")
def vllm_engines() -> Iterator[TinyEngines]:
    """One vLLM server with dsched's scheduler over the tiny model."""
    if not is_vllm_there():
        pytest.skip("no vLLM environment; run `make .venv-vllm/.ready`")
    with running_engines(num_engines=1, state_dir=STATE_DIR) as engines:
        yield engines
