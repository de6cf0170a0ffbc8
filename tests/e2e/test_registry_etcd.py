"""dsched over a registry that fails: a real etcd that loses its leader, an endpoint, all of its
nodes, or all it knew; and a file that somebody holds.

Nodes are killed and started again by these tests, so they have clusters of their own. Times are
those of the promise (`docs/registry.md`): TTL + 4 s for the dead, TTL + 2 s for coming back.
"""

import asyncio
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, closing
from itertools import groupby
from pathlib import Path

import msgspec
import openai
import pytest

from dsched.cli.service import Service
from dsched.cli.workers import find_workers
from dsched.clock import SystemClock
from dsched.config import Config, RegistryConfig
from dsched.config_load import LoadedConfig
from dsched.errors import ConfigError, RegistryError
from dsched.registry import Registry, open_registry
from dsched.registry.etcd import EtcdRegistry
from dsched.registry.etcd_gateway import EtcdAccess, EtcdGateway
from dsched.testing.etcd_nodes import NO_ETCD, EtcdNodes, free_ports, is_etcd_there, running_etcd

LEASE_S = 3.0
NUM_STREAMS = 16
ENGINES = [f"sim-{index}" for index in range(4)]

needs_etcd = pytest.mark.skipif(not is_etcd_there(), reason=NO_ETCD)
pytestmark = [pytest.mark.slow]


@pytest.fixture
def three_nodes(tmp_path: Path) -> Iterator[EtcdNodes]:
    with running_etcd(tmp_path / "etcd", num_nodes=3) as nodes:
        yield nodes


@pytest.fixture
def one_node(tmp_path: Path) -> Iterator[EtcdNodes]:
    with running_etcd(tmp_path / "etcd") as nodes:
        yield nodes


def open_(url: str) -> Registry:
    return open_registry(url, clock=SystemClock(), config=RegistryConfig(lease_s=LEASE_S))


@asynccontextmanager
async def running_service(
    tmp_path: Path, url: str, *, name: str = "a", **changes: object
) -> AsyncIterator[Service]:
    """dsched over four simulated engines of one rank, whose steps take 30 ms."""
    document: dict[str, object] = {
        "state_dir": str(tmp_path / f"state-{name}"),
        "front_door": {"port": 0, "stop_grace_s": 0.5},
        "admin": {"port": 0},
        "launch": {"engine": "sim", "replicas": len(ENGINES)},
        "sim": {"step_base_us": 30_000, "num_dp_ranks": 1},
        "registry": {"url": url, "lease_s": LEASE_S},
    }
    config = msgspec.convert(document | changes, Config)
    service = Service(LoadedConfig(config=config, origins={}))
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def stream(client: openai.AsyncOpenAI, number: int, *, max_tokens: int) -> int:
    """Read one stream to its end; return how many tokens its usage counts."""
    finishes, usage = 0, None
    chunks = await client.completions.create(
        model="dsched-sim",
        prompt=f"story {number}",
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in chunks:
        usage = chunk.usage or usage
        finishes += sum(choice.finish_reason is not None for choice in chunk.choices)
    assert finishes == 1
    assert usage is not None
    return usage.completion_tokens


@asynccontextmanager
async def streams(service: Service, *, max_tokens: int) -> AsyncIterator[None]:
    """Sixteen streams run inside of the block; at its end, all of them end well."""
    async with openai.AsyncOpenAI(
        base_url=f"{service.front_door_url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(stream(client, number, max_tokens=max_tokens))
                for number in range(NUM_STREAMS)
            ]
            yield
        assert [task.result() for task in tasks] == [max_tokens] * NUM_STREAMS


class Observer:
    """Reads the registry over and over, and writes down when which keys were there."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.seen: list[tuple[float, frozenset[str]]] = []

    async def look(self) -> frozenset[str] | None:
        """What is there now; `None` while the registry does not answer."""
        asked_s = asyncio.get_running_loop().time()
        try:
            listing = await self.registry.list_entries("")
        except RegistryError:
            return None
        keys = frozenset(entry.key for entry in listing.entries)
        self.seen.append((asked_s, keys))
        return keys

    async def wait_until_gone(self, key: str, *, timeout_s: float) -> float:
        """Wait for a look that does not find the key any more; return when the last one that did
        was begun. A busy machine's looks come late, which is not the registry's time."""
        async with asyncio.timeout(timeout_s):
            while True:
                keys = await self.look()
                if keys is not None and key not in keys:
                    return max(at_s for at_s, found in self.seen if key in found)
                await asyncio.sleep(0.1)

    def always(self) -> frozenset[str]:
        """Keys that were there at every look."""
        return frozenset.intersection(*(keys for _, keys in self.seen))


def start_worker(url: str, key: str) -> "subprocess.Popen[bytes]":
    """Another process that stays registered; returns once it is."""
    command = [sys.executable, "-m", "dsched.testing.registry_worker", url, key, str(LEASE_S)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"registered\n"
    process.stdout.close()
    return process


def end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait(timeout=10)


def leader_first(nodes: EtcdNodes) -> str:
    """The URL in an order that has everybody connected to the node that will be killed."""
    leader = nodes.leader()
    others = [node for node in nodes.nodes if node is not leader]
    return f"etcd://{','.join(node.endpoint for node in (leader, *others))}/dsched"


@needs_etcd
async def test_killed_leader_and_a_worker_that_dies_with_it(
    three_nodes: EtcdNodes, tmp_path: Path
) -> None:
    """No stream breaks, no live entry is ever missing, no lease is lost; the dead worker is gone
    within its lease and four seconds (FA-05 d)."""
    url = leader_first(three_nodes)
    dead = await asyncio.to_thread(start_worker, url, "workers/0")
    alive = await asyncio.to_thread(start_worker, url, "workers/1")
    try:
        async with running_service(tmp_path, url) as service:
            observer = Observer(open_(url))
            await service_registered(service)
            async with streams(service, max_tokens=300):
                await observer.look()
                three_nodes.leader().kill()
                dead.kill()
                killed_s = asyncio.get_running_loop().time()
                last_s = await observer.wait_until_gone("workers/0", timeout_s=LEASE_S + 20)
            await observer.look()
            status = service.member.registration.status()
            await observer.registry.close()
    finally:
        end(dead)
        end(alive)

    assert last_s - killed_s <= LEASE_S + 4.0
    expected = {f"instances/{service.instance_id}", "workers/1"}
    expected |= {f"engines/{engine}/{service.instance_id}" for engine in ENGINES}
    assert expected <= observer.always()
    assert status.num_leases_lost == 0
    assert status.is_registered


async def service_registered(service: Service) -> None:
    """Wait until the registry has this process and its engines, and somebody leads."""
    async with asyncio.timeout(10):
        while not (
            service.member.registration.status().is_registered and service.member.election.leader
        ):
            await asyncio.sleep(0.05)


@needs_etcd
async def test_an_outage_of_three_leases_breaks_nothing(
    one_node: EtcdNodes, tmp_path: Path
) -> None:
    """All of etcd away for three leases: 16 streams go on, new ones are served, engines stay up,
    `dsched workers` answers; back within a lease and two seconds under the same ids (FA-05 c)."""
    url = one_node.url()
    async with running_service(tmp_path, url) as service:
        await service_registered(service)
        observer = Observer(open_(url))
        before = await observer.look()
        async with streams(service, max_tokens=400):
            await asyncio.to_thread(one_node.kill)
            for _ in range(3):
                await asyncio.sleep(LEASE_S)
                states = {status.state.name for status in service.controller.engine_statuses()}
                assert states == {"UP"}
                workers = service.workers()
                assert [row.engine_id for row in workers.engines] == ENGINES
                config = msgspec.structs.replace(
                    service.config,
                    admin=msgspec.structs.replace(
                        service.config.admin, port=service.front_door.bound_admin_port
                    ),
                )
                found = await find_workers(config)
                assert "no etcd endpoint answers" in (found.fault or "")
                assert [row.state for row in found.view.engines] == ["up"] * 4
            async with openai.AsyncOpenAI(
                base_url=f"{service.front_door_url}/v1", api_key="none", max_retries=0
            ) as client:
                assert await stream(client, 99, max_tokens=5) == 5
            status = service.member.registration.status()
            assert status.failed_reason is not None
            assert one_node.nodes[0].url in status.failed_reason
            assert not service.member.registration.status().is_registered
            await asyncio.to_thread(one_node.start)
            async with asyncio.timeout(LEASE_S + 2.0):
                while not service.member.registration.status().is_registered:
                    # Nothing was dropped: etcd kept the leases, and they are renewed in time.
                    assert await observer.look() == before
                    await asyncio.sleep(0.1)
        async with asyncio.timeout(LEASE_S + 2.0):
            while service.member.election.epoch_now() is None:
                await asyncio.sleep(0.1)
        after = await observer.look()
        await observer.registry.close()

    assert after == before
    assert len(service.member.cluster.workers().engines) == 4


@needs_etcd
async def test_an_etcd_that_forgot_everything_is_told_again(
    one_node: EtcdNodes, tmp_path: Path
) -> None:
    """Its disk is empty and its revisions begin anew: every lease is over while all engines are
    fine. They stay up, and everybody registers again under the same ids and follows again."""
    url = one_node.url()
    async with running_service(tmp_path, url) as service:
        await service_registered(service)
        observer = Observer(open_(url))
        before = await observer.look()
        await asyncio.to_thread(one_node.kill)
        shutil.rmtree(one_node.nodes[0].folder / one_node.nodes[0].name)
        await asyncio.to_thread(one_node.start)
        async with asyncio.timeout(LEASE_S + 2.0):
            while await observer.look() != before:
                states = {status.state.name for status in service.controller.engine_statuses()}
                assert states == {"UP"}
                await asyncio.sleep(0.1)
        async with asyncio.timeout(10):
            while not service.member.cluster.is_following:
                await asyncio.sleep(0.1)
        await observer.registry.put("engines/other/x", b"{}")
        async with asyncio.timeout(10):
            while not service.member.cluster.workers().unreadable:
                await asyncio.sleep(0.1)
        await observer.registry.close()


@needs_etcd
async def test_a_frozen_endpoint_is_left_for_another(three_nodes: EtcdNodes) -> None:
    """It keeps its sockets and says nothing: a call goes on elsewhere after one attempt, a watch
    after its silence, and misses nothing."""
    url = leader_first(three_nodes)
    leader = three_nodes.leader()
    endpoints = tuple(url.removeprefix("etcd://").partition("/")[0].split(","))
    gateway = EtcdGateway(endpoints, access=EtcdAccess(), attempt_timeout_s=0.5, silence_s=1.0)
    registry = EtcdRegistry(gateway, prefix="/dsched/")
    writer = open_(url)
    revision = await writer.put("k", b"0")
    values: list[bytes | None] = []

    async def follow() -> None:
        async with aclosing(registry.watch("", from_revision=revision)) as changes:
            async for change in changes:
                values.append(change.value)  # noqa: PERF401 - it never ends

    task = asyncio.create_task(follow())
    async with asyncio.timeout(30):
        while not values:
            await asyncio.sleep(0.05)
        leader.freeze()
        number = 1
        while number < 4:
            try:
                await writer.put("k", bytes([number]))
            except RegistryError:
                continue
            number += 1
        while len(values) < 4:
            assert not task.done()
            await asyncio.sleep(0.05)
    leader.thaw()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await writer.close()
    await registry.close()

    # A put whose answer was lost is put again: the same value twice, never out of order.
    assert [value for value, _ in groupby(values)] == [b"0", bytes([1]), bytes([2]), bytes([3])]


async def test_endpoints_that_are_all_wrong_are_named_at_the_start(tmp_path: Path) -> None:
    """Each with its reason, in one line; nothing is left running."""
    ports = free_ports(2)
    url = f"etcd://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]},no-such-host.invalid:2379/dsched"

    with pytest.raises(ConfigError) as caught:
        async with running_service(tmp_path, url):
            pass

    text = str(caught.value)
    assert text.startswith("$.registry.url: no etcd endpoint answers: ")
    for port in ports:
        assert f"http://127.0.0.1:{port}: Connect" in text
    assert "http://no-such-host.invalid:2379: " in text
    assert "\n" not in text


def test_run_without_any_endpoint_is_one_line_and_status_2(tmp_path: Path) -> None:
    """What an operator with a wrong address sees; `dsched workers` says the same."""
    ports = free_ports(2)
    url = f"etcd://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"
    command = [sys.executable, "-m", "dsched.cli.main"]
    options = ["--registry-url", url, "--state-dir", str(tmp_path), "--admin-port", "0"]
    for arguments in (["run", "--front-door-port", "0"], ["workers"]):
        answer = subprocess.run(
            [*command, *arguments, *options],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        last_line = answer.stderr.strip().splitlines()[-1]
        assert answer.returncode == 2
        assert "no etcd endpoint answers: " in last_line
        assert all(f"http://127.0.0.1:{port}: Connect" in last_line for port in ports)
        assert "Traceback" not in answer.stderr


async def test_a_file_that_somebody_holds_breaks_nothing(tmp_path: Path) -> None:
    """SQLite held for three leases, then free: no stream breaks, and everybody is back."""
    path = tmp_path / "registry.sqlite3"
    registry = {"url": f"sqlite:///{path}", "lease_s": 1.0}
    async with running_service(tmp_path, "", registry=registry) as service:
        await service_registered(service)
        async with streams(service, max_tokens=150):
            with closing(sqlite3.connect(path, isolation_level=None)) as holder:
                holder.execute("BEGIN EXCLUSIVE")
                await asyncio.sleep(3.0)
                states = {status.state.name for status in service.controller.engine_statuses()}
                assert states == {"UP"}
                assert service.member.registration.status().failed_reason is not None
                holder.execute("ROLLBACK")
            async with asyncio.timeout(3.0):
                while not service.member.registration.status().is_registered:
                    await asyncio.sleep(0.05)
        other = open_(registry["url"])  # type: ignore[arg-type]
        keys = [entry.key for entry in (await other.list_entries("")).entries]
        await other.close()

    assert f"instances/{service.instance_id}" in keys
    assert [key.split("/")[1] for key in keys if key.startswith("engines/")] == ENGINES


async def test_a_registry_that_is_not_required_may_be_away(tmp_path: Path) -> None:
    """dsched starts and serves without one."""
    (port,) = free_ports(1)
    registry = {"url": f"etcd://127.0.0.1:{port}", "lease_s": LEASE_S, "required": False}
    async with (
        running_service(tmp_path, "", registry=registry) as service,
        openai.AsyncOpenAI(
            base_url=f"{service.front_door_url}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        assert await stream(client, 1, max_tokens=3) == 3
        assert not service.member.registration.status().is_registered


@needs_etcd
async def test_two_processes_see_each_other_and_one_leads(
    one_node: EtcdNodes, tmp_path: Path
) -> None:
    """Each shows both; when the leader leaves, the other one leads under a higher epoch."""
    url = one_node.url()
    async with running_service(tmp_path, url, name="b") as second:
        async with running_service(tmp_path, url, name="a") as first:
            async with asyncio.timeout(10):
                while len(first.workers().instances) < 2 or len(second.workers().instances) < 2:
                    await asyncio.sleep(0.05)
            await service_registered(first)
            leaders = [each for each in (first, second) if each.member.election.epoch_now()]
            assert len(leaders) == 1
            found = await find_workers(first.config)
            assert found.view.leader is not None
            assert found.view.leader.instance_id == leaders[0].instance_id
            old_epoch = found.view.leader.epoch or 0
            is_second = leaders == [second]
            await first.member.registry.delete("election/rebalancing")
        async with asyncio.timeout(LEASE_S + 2):
            while (second.member.election.epoch_now() or 0) <= old_epoch:
                await asyncio.sleep(0.05)
            while len(second.workers().instances) > 1:
                await asyncio.sleep(0.05)
        assert is_second
