"""Fixtures that several folders share: the real engines and the real etcd of the session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsched.testing.etcd_nodes import NO_ETCD, EtcdNodes, is_etcd_there, running_etcd
from dsched.testing.vllm_engines import TinyEngines, is_vllm_there, running_engines

STATE_DIR = Path(__file__).parents[1] / ".dsched" / "tests"


@pytest.fixture(scope="session")
def vllm_engines() -> Iterator[TinyEngines]:
    """One vLLM server with dsched's scheduler over the tiny model."""
    if not is_vllm_there():
        pytest.skip("no vLLM environment; run `make .venv-vllm/.ready`")
    with running_engines(num_engines=1, state_dir=STATE_DIR) as engines:
        yield engines


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdNodes]:
    """One etcd node; tests take a prefix each and leave it running."""
    if not is_etcd_there():
        pytest.skip(NO_ETCD)
    with running_etcd(tmp_path_factory.mktemp("etcd")) as nodes:
        yield nodes
