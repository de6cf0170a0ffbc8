"""Fixtures that several folders share: the real engines and the real etcd of the session.

Tests of real engines come last, by engine: an idle server still takes processor time (SGLang's
controller of several DP ranks a whole core), which tests with deadlines must not pay for. SGLang's
servers end with the last test that is marked for them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

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


SHARED_SGLANG = {
    "sglang": SharedEngines(lambda: running_sglang(state_dir=STATE_DIR)),
    "sglang-dp2": SharedEngines(
        lambda: running_sglang(state_dir=STATE_DIR, name="sglang-dp2", num_dp_ranks=2)
    ),
}
"""SGLang servers with one and with two DP ranks, by kind; started when somebody needs one."""


def order_of_engines(item: pytest.Item) -> int:
    """No engine, SGLang, SGLang and vLLM, vLLM."""
    is_vllm, is_sglang = (item.get_closest_marker(name) for name in ("vllm", "sglang"))
    if is_sglang:
        return 2 if is_vllm else 1
    return 3 if is_vllm else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=order_of_engines)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End SGLang's servers after their last test; what a test set up for its log is not the next
    one's."""
    structlog.reset_defaults()
    is_next = nextitem is not None and nextitem.get_closest_marker("sglang")
    if item.get_closest_marker("sglang") and not is_next:
        for each in SHARED_SGLANG.values():
            each.close()


@pytest.fixture
def sglang_engines() -> TinyEngines:
    """One SGLang server; a test may kill it."""
    if not is_sglang_there():
        pytest.skip(NO_SGLANG)
    return SHARED_SGLANG["sglang"].get()


@pytest.fixture
def sglang_dp2() -> TinyEngines:
    """One SGLang server with two DP ranks; a test may kill it."""
    if not is_sglang_there():
        pytest.skip(NO_SGLANG)
    return SHARED_SGLANG["sglang-dp2"].get()


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdNodes]:
    """One etcd node; tests take a prefix each and leave it running."""
    if not is_etcd_there():
        pytest.skip(NO_ETCD)
    with running_etcd(tmp_path_factory.mktemp("etcd")) as nodes:
        yield nodes
