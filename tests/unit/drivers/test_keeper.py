"""The keeper, with stand-ins for the engine's Python: what dies comes back, alone and in time."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from dsched.clock import ManualClock
from dsched.drivers import local
from dsched.drivers.keeper import STEADY_NS, EngineKeeper
from dsched.drivers.local import LocalEngine, ServerPlan
from dsched.drivers.vllm.launcher import launch_vllm_engine
from dsched.errors import DriverError
from dsched.ids import EngineId
from dsched.testing.processes import make_model_folder, make_python

ENGINE = EngineId("e0")
LIVE = "while :; do sleep 0.05; done"
WAIT_S = 20


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


class World:
    """One keeper over stand-ins that note their starts, and pauses that pass at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_model_folder(folder)
        self.clock = ManualClock()
        self.plans = [ServerPlan(engine_id=ENGINE)]
        self.pauses: list[float] = []
        self.moves: list[tuple[str, str]] = []
        self.launched: list[LocalEngine] = []
        self.before_launch: Callable[[], Awaitable[None]] | None = None
        self.may_sleep = asyncio.Event()
        self.may_sleep.set()
        self.keeper = EngineKeeper(
            "e0",
            plan=lambda: self.plans,
            launch=self.launch,
            on_moved=lambda engine_id, url: self.moves.append((engine_id, url)),
            clock=self.clock,
            sleep=self.sleep,
        )

    def script(self, text: str) -> None:
        """What a server does; `$n` is the number of starts before, `$d` a folder of the test."""
        count = 'd=$(dirname "$0"); touch $d/starts; n=$(wc -l < $d/starts); echo x >> $d/starts'
        self.python = make_python(self.folder, f"{count}\n{text}")

    @property
    def num_starts(self) -> int:
        path = self.folder / "starts"
        return len(path.read_text().split()) if path.exists() else 0

    @property
    def engine(self) -> LocalEngine:
        return self.keeper.servers[ENGINE]

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await self.may_sleep.wait()

    async def launch(self, plan: ServerPlan, port: int) -> LocalEngine:
        if self.before_launch is not None:
            await self.before_launch()
        engine = await launch_vllm_engine(
            self.model,
            engine_id=plan.engine_id,
            port=port,
            agent_endpoint=None,
            state_dir=self.folder / "state",
            served_model_name="m",
            extra_args=plan.args,
            python=self.python,
        )
        self.launched.append(engine)
        return engine

    async def settled(self, num_starts: int) -> None:
        """Wait until so many servers were started, and the last one has begun its work."""
        await until(lambda: len(self.launched) == num_starts == self.num_starts)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    world.script(LIVE)
    yield world
    world.may_sleep.set()
    await world.keeper.stop()


async def test_engine_that_dies_at_its_start_is_started_again(world: World) -> None:
    """After pauses that double; each end is told with its reason."""
    world.script(f"[ $n -lt 3 ] && echo bad luck && exit 7; {LIVE}")
    with capture_logs() as logs:
        await world.keeper.start()
        await world.settled(4)

    assert world.pauses == [1.0, 2.0, 4.0]
    await until(lambda: world.keeper.num_restarts == 3)
    assert world.engine.is_alive
    died = [each for each in logs if each["event"] == "engine.died"]
    assert [(each["engine_id"], each["status"], each["log"]) for each in died] == [
        ("e0", 7, "bad luck\n")
    ] * 3
    restarting = [each["pause_s"] for each in logs if each["event"] == "engine.restarting"]
    assert restarting == world.pauses


async def test_pause_is_short_again_after_a_steady_life(world: World) -> None:
    """And grows while an engine does not live that long."""
    await world.keeper.start()
    for number, life_ns in enumerate((STEADY_NS - 1, STEADY_NS - 1, STEADY_NS, 0)):
        await world.settled(number + 1)
        world.clock.advance_to(world.clock.now_ns() + life_ns)
        world.engine.kill()
        await until(lambda: len(world.pauses) == number + 1)  # noqa: B023 - awaited here

    assert world.pauses == [1.0, 2.0, 1.0, 2.0]


async def test_engine_starts_only_when_nothing_of_it_is_left(world: World) -> None:
    """A core that outlives its server and ignores SIGTERM would hold the device."""
    world.script(
        "if [ $n -gt 0 ]; then grep '^State:.*[RSD]' /proc/$(cat $d/child)/status && touch $d/two; "
        f"touch $d/again; {LIVE}; fi\n"
        'sh -c \'trap "" TERM; echo $$ > "$0/child"; while :; do sleep 0.05; done\' $d &\n'
        "until [ -s $d/child ]; do sleep 0.01; done"
    )
    await world.keeper.start()
    await until((world.folder / "again").exists)

    assert not (world.folder / "two").exists()
    assert world.launched[0].is_gone


async def test_server_keeps_its_port(world: World) -> None:
    await world.keeper.start()
    await world.settled(1)
    world.engine.kill()
    await world.settled(2)

    first, second = world.launched
    assert first.port == second.port
    assert world.moves == []


async def test_port_that_somebody_else_has_is_chosen_anew(world: World) -> None:
    """Whoever uses the engine hears of its new place before it is there."""
    await world.keeper.start()
    await world.settled(1)
    known: list[list[tuple[str, str]]] = []

    async def note() -> None:
        known.append(world.moves[:])

    world.before_launch = note
    with socket.socket() as listener, capture_logs() as logs:
        listener.bind(("127.0.0.1", world.engine.port))
        listener.listen()
        world.engine.kill()
        await world.settled(2)

    first, second = world.launched
    assert first.port != second.port
    assert world.moves == [("e0", second.url)]
    assert known == [world.moves]
    (changed,) = [each for each in logs if each["event"] == "engine.port_changed"]
    assert (changed["taken_port"], changed["port"]) == (first.port, second.port)


async def test_servers_of_a_group_start_again_together(world: World) -> None:
    """One that comes back alone would wait for cores that know nothing of it."""
    world.plans = [ServerPlan(engine_id=EngineId(each)) for each in ("e0-dp0", "e0-dp1")]
    await world.keeper.start()
    await world.settled(2)
    first = list(world.keeper.servers.values())
    first[1].kill()
    await world.settled(4)

    assert all(server.is_gone for server in first)
    assert [each.engine_id for each in world.launched[2:]] == ["e0-dp0", "e0-dp1"]
    await until(lambda: world.keeper.num_restarts == 1)


async def test_start_that_fails_is_tried_again(world: World) -> None:
    """Out of memory for a new process, say; the first start's failure is the caller's."""
    await world.keeper.start()
    await world.settled(1)
    failures = [DriverError("no memory"), OSError("no space")]

    async def fail() -> None:
        if failures:
            raise failures.pop()

    world.before_launch = fail
    with capture_logs() as logs:
        world.engine.kill()
        await world.settled(2)

    assert world.pauses == [1.0, 2.0, 4.0]
    reasons = [each["reason"] for each in logs if each["event"] == "engine.not_started"]
    assert reasons == ["no space", "no memory"]
    await until(lambda: world.keeper.num_restarts == 1)


async def test_first_start_that_fails_is_told(world: World) -> None:
    world.python = world.folder / "nowhere" / "python"
    world.python.parent.mkdir()
    world.python.write_text("no program")

    with pytest.raises(DriverError, match="cannot be started"):
        await world.keeper.start()
    await world.keeper.stop()

    assert world.launched == []


async def test_stop_while_it_runs(world: World) -> None:
    await world.keeper.start()
    await world.settled(1)
    await world.keeper.stop()
    await world.keeper.stop()

    assert world.engine.is_gone
    assert (world.num_starts, world.pauses) == (1, [])


async def test_stop_while_it_pauses(world: World) -> None:
    """It is not started any more."""
    world.may_sleep.clear()
    world.script("exit 1")
    await world.keeper.start()
    await until(lambda: world.pauses)
    await world.keeper.stop()
    world.may_sleep.set()
    await asyncio.sleep(0)

    assert world.num_starts == 1
    assert world.keeper.num_restarts == 0


@pytest.mark.parametrize("is_first", [True, False])
async def test_stop_while_it_is_being_started(world: World, *, is_first: bool) -> None:
    """What is made just then ends too; it would be nobody's otherwise."""
    gate, reached = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reached.set()
        await gate.wait()

    if is_first:
        world.before_launch = wait
        starting = asyncio.create_task(world.keeper.start())
        await reached.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    else:
        await world.keeper.start()
        await world.settled(1)
        world.before_launch = wait
        world.engine.kill()
        await reached.wait()
    stopping = asyncio.create_task(world.keeper.stop())
    await asyncio.sleep(0)
    gate.set()
    await stopping

    assert len(world.launched) == (1 if is_first else 2)
    assert all(engine.is_gone for engine in world.launched)


async def test_start_that_goes_on_beside_a_stop_keeps_nothing(world: World) -> None:
    """Its servers have been ended, and would be started again and again."""
    gate, reached = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reached.set()
        await gate.wait()

    world.before_launch = wait
    world.may_sleep.clear()
    starting = asyncio.create_task(world.keeper.start())
    await reached.wait()
    stopping = asyncio.create_task(world.keeper.stop())
    await asyncio.sleep(0)
    gate.set()
    with capture_logs() as logs:
        await asyncio.gather(starting, stopping)
        for _ in range(3):
            await asyncio.sleep(0)

    assert world.launched[0].is_gone
    assert "engine.died" not in [each["event"] for each in logs]


async def test_start_that_fails_while_it_stops_is_nobodys_news(world: World) -> None:
    """Whoever started it has gone already."""
    gate, reached = asyncio.Event(), asyncio.Event()

    async def fail() -> None:
        reached.set()
        await gate.wait()
        raise DriverError("no memory")

    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, each: problems.append(each))
    world.before_launch = fail
    starting = asyncio.create_task(world.keeper.start())
    await reached.wait()
    starting.cancel()
    stopping = asyncio.create_task(world.keeper.stop())
    gate.set()
    await asyncio.wait([starting, stopping])
    await stopping
    world.keeper._launching = None
    gc.collect()

    assert starting.cancelled()
    assert problems == []


async def test_stop_between_two_servers_of_a_group(world: World) -> None:
    """The second is not started."""
    world.plans = [ServerPlan(engine_id=EngineId(each)) for each in ("e0-dp0", "e0-dp1")]
    gate, reached = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        reached.set()
        await gate.wait()

    world.before_launch = wait
    starting = asyncio.create_task(world.keeper.start())
    await reached.wait()
    stopping = asyncio.create_task(world.keeper.stop())
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(starting, stopping)

    assert [each.engine_id for each in world.launched] == ["e0-dp0"]
    assert world.launched[0].is_gone


async def test_stop_while_the_old_one_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel does not end keeps the next start waiting, and is given up at the stop."""
    looks: list[int] = []

    def is_group_alive(group_id: int) -> bool:
        looks.append(group_id)
        return True

    monkeypatch.setattr(local, "is_group_alive", is_group_alive)
    monkeypatch.setattr(local, "KILL_GRACE_S", 0.05)
    world.script("exit 0")
    await world.keeper.start()
    with capture_logs() as logs:
        await until(lambda: len([each for each in logs if each["event"] == "engine.not_ended"]))
        num_looks = len(looks)
        await until(lambda: len(looks) > num_looks + 1)
        await world.keeper.stop()

    assert (world.num_starts, world.pauses) == (1, [])
    assert [each["event"] for each in logs].count("engine.not_ended") == 2
