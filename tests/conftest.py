"""Fixtures that several folders share: the real engines and the real etcd of the session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsched.testing.engines import SharedEngines, TinyEngines
from dsched.testing.etcd_nodes import NO_ETCD, EtcdNodes, is_etcd_there, running_etcd
from dsched.testing.sglang_engines import NO_SGLANG, is_sglang_there, running_sglang
from dsched.testing.vllm_engines import (
    GROUP_ARGS,
    NO_VLLM,
    is_vllm_there,
    running_engines,
)

STATE_DIR = Path(__file__).parents[1] / ".dsched" / "tests"
VLLM_PLUGIN = Path(__file__).parent / "vllm" / "plugin"
"""Lets vLLM's CPU build run an EP group; see the module there."""


@pytest.fixture(scope="session")
def vllm_engines() -> Iterator[TinyEngines]:
    """One vLLM server with dsched's scheduler over the tiny model."""
    if not is_vllm_there():
        pytest.skip(NO_VLLM)
    with running_engines(num_engines=1, state_dir=STATE_DIR) as engines:
        yield engines


@pytest.fixture(scope="session")
def vllm_group() -> Iterator[TinyEngines]:
    """One vLLM server with two DP ranks that share their experts. `tests/vllm/test_wide_ep.py`
    kills it at its end."""
    if not is_vllm_there():
        pytest.skip(NO_VLLM)
    with running_engines(
        num_engines=1,
        state_dir=STATE_DIR,
        name="group",
        args=GROUP_ARGS,
        variables={"PYTHONPATH": str(VLLM_PLUGIN)},
    ) as engines:
        yield engines


@pytest.fixture(scope="session")
def shared_sglang() -> Iterator[dict[str, SharedEngines]]:
    """SGLang servers with one and with two DP ranks, by kind; started when somebody needs one."""
    shared = {
        "sglang": SharedEngines(lambda: running_sglang(state_dir=STATE_DIR)),
        "sglang-dp2": SharedEngines(
            lambda: running_sglang(state_dir=STATE_DIR, name="sglang-dp2", num_dp_ranks=2)
        ),
    }
    yield shared
    for each in shared.values():
        each.close()


@pytest.fixture
def sglang_engines(shared_sglang: dict[str, SharedEngines]) -> TinyEngines:
    """One SGLang server; a test may kill it."""
    if not is_sglang_there():
        pytest.skip(NO_SGLANG)
    return shared_sglang["sglang"].get()


@pytest.fixture
def sglang_dp2(shared_sglang: dict[str, SharedEngines]) -> TinyEngines:
    """One SGLang server with two DP ranks; a test may kill it."""
    if not is_sglang_there():
        pytest.skip(NO_SGLANG)
    return shared_sglang["sglang-dp2"].get()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdNodes]:
    """One etcd node; tests take a prefix each and leave it running."""
    if not is_etcd_there():
        pytest.skip(NO_ETCD)
    with running_etcd(tmp_path_factory.mktemp("etcd")) as nodes:
        yield nodes
