"""An operator's step budget reaches every agent that greets, also after its engine's restart."""

import asyncio

from dsched.drivers.agent import Agent, new_incarnation
from dsched.drivers.reports import ReportReader
from dsched.drivers.vllm.driver import VllmDriver
from dsched.drivers.wire import AgentCommand, AgentHello, SetStepBudget
from dsched.ids import EngineId
from dsched.testing.recorders import RecordingListener

ENGINE = EngineId("e")


def hello() -> AgentHello:
    return AgentHello(
        dsched_version="0",
        engine_id=ENGINE,
        incarnation=new_incarnation(),
        engine="vllm",
        engine_version="double",
        model="tiny",
        max_model_len=100,
        dp_rank=0,
        num_dp_ranks=1,
        kv_capacity_tokens=100,
        max_running_requests=4,
    )


async def commands_of(endpoint: str) -> list[AgentCommand]:
    """Run an agent until it was commanded."""
    commands: list[AgentCommand] = []
    agent = Agent(endpoint=endpoint, hello=hello(), on_command=commands.append)
    agent.start()
    try:
        async with asyncio.timeout(10):
            while not commands:
                await asyncio.sleep(0.01)
    finally:
        await asyncio.to_thread(agent.close)
    return commands


async def test_every_incarnation_gets_the_budget_when_it_greets() -> None:
    """Once for each start of the engine, in nanoseconds."""
    reader = ReportReader(endpoint="tcp://127.0.0.1:*")
    reader.start()
    driver = VllmDriver(
        engine_id=ENGINE, url="http://127.0.0.1:9", reports=reader, step_budget_ns=200_000_000
    )
    driver.start(RecordingListener())
    try:
        first = await commands_of(reader.endpoint)
        second = await commands_of(reader.endpoint)
    finally:
        driver.close()
        reader.close()

    wanted = [SetStepBudget(epoch=0, step_budget_ns=200_000_000)]
    assert first == wanted
    assert second == wanted
