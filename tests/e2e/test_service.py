"""dsched as one process over engine doubles: what a client and an operator see."""

import asyncio
import json

import openai
import pytest
from double_cluster import MODEL, PROMPT, Cluster

from dsched.errors import ConfigError


async def test_every_stream_is_the_engines_own_answer_and_both_engines_work(
    two_engines: Cluster,
) -> None:
    """64 streams at once: no token lost, repeated or mixed up."""
    prompts = [[5 + index, *PROMPT] for index in range(64)]

    answers = await asyncio.gather(
        *(two_engines.complete(prompt, max_tokens=32) for prompt in prompts)
    )

    for prompt, (token_ids, usage) in zip(prompts, answers, strict=True):
        assert token_ids == two_engines.model.stream(prompt, 32)
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 32)
    shares = [len(double.bodies) / 64 for double in two_engines.doubles]
    assert max(shares) <= 0.6


@pytest.mark.slow
async def test_a_burst_before_any_report_is_spread(cluster: Cluster) -> None:
    """Engines that have not reported share eight requests two each (RT-01)."""
    for _ in range(4):
        await cluster.add_double(has_agent=False)
    await cluster.start_service()
    await cluster.wait_until_up()

    await asyncio.gather(
        *(cluster.complete([9, *PROMPT], max_tokens=4, user=str(index)) for index in range(8))
    )

    assert [len(double.bodies) for double in cluster.doubles] == [2, 2, 2, 2]


@pytest.mark.parametrize("after", [0, 1, 5, 15])
async def test_a_killed_engine_costs_its_streams_a_pause(two_engines: Cluster, after: int) -> None:
    """Tokens and usage equal the undisturbed run; one end each (FA-01)."""
    tasks = [
        asyncio.create_task(two_engines.complete([5 + index, *PROMPT], max_tokens=24))
        for index in range(16)
    ]
    victim = two_engines.doubles[0]
    journal = two_engines.service.journal

    def num_tokens() -> int:
        return journal.status().num_recorded_tokens

    await two_engines.wait_until(lambda: victim.num_running and num_tokens() >= 16 * after)
    await victim.kill()
    answers = await asyncio.gather(*tasks)

    for index, (token_ids, usage) in enumerate(answers):
        assert token_ids == two_engines.model.stream([5 + index, *PROMPT], 24)
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT) + 1, 24)
    assert sum(two_engines.service.controller.num_recoveries.values()) >= 1


@pytest.mark.slow
async def test_a_frozen_engine_costs_its_streams_the_progress_timeout(
    two_engines: Cluster,
) -> None:
    """No socket breaks; missing progress gives it away, and nothing is lost."""
    tasks = [
        asyncio.create_task(two_engines.complete([5 + index, *PROMPT], max_tokens=40))
        for index in range(8)
    ]
    victim = two_engines.doubles[1]
    journal = two_engines.service.journal
    await two_engines.wait_until(lambda: journal.status().num_recorded_tokens >= 8 * 4)
    victim.freeze()
    answers = await asyncio.gather(*tasks)

    for index, (token_ids, _) in enumerate(answers):
        assert token_ids == two_engines.model.stream([5 + index, *PROMPT], 40)
    states = {s.engine_id: s.state.name for s in two_engines.service.controller.engine_statuses()}
    assert states["p-1"] in ("SUSPECT", "DOWN")


@pytest.mark.slow
async def test_engines_that_come_and_go(cluster: Cluster) -> None:
    """The whole of FA-07: known model without engines is 503, readiness follows by itself."""
    double = await cluster.add_double()
    port = double.port
    await double.stop()
    await cluster.start_service(urls=[double.url])

    # 1: no engine yet.
    assert (await cluster.get("/live"))[0] == 200
    status, body = await cluster.get("/ready")
    assert (status, "no engine up" in json.loads(body)["reason"]) == (503, True)
    with pytest.raises(openai.InternalServerError) as caught:
        await cluster.complete(PROMPT, max_tokens=2)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"

    # 2: it comes up, and readiness follows within 2 s of the engine's own health.
    revived = await cluster.add_double()
    await revived.stop()
    revived = cluster.doubles[-1] = type(revived)(
        engine_id="p-0", agent_endpoint=cluster.agent_endpoint
    )
    await revived.start(port=port)
    await cluster.wait_until_up(1)
    assert (await cluster.get("/ready"))[0] == 200
    token_ids, _ = await cluster.complete(PROMPT, max_tokens=3)
    assert token_ids == cluster.model.stream(PROMPT, 3)

    # 3: all engines die; the model stays known.
    await revived.kill()
    await cluster.wait_until_up(0)
    models = await cluster.client.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await cluster.get("/ready"))[0] == 503
    assert (await cluster.get("/live"))[0] == 200

    # 5: a model that nobody configured.
    with pytest.raises(openai.NotFoundError) as unknown:
        await cluster.client.completions.create(model="other", prompt="a", max_tokens=1)
    assert unknown.value.code == "model_not_found"


@pytest.mark.slow
async def test_silent_reports_do_not_stop_traffic(cluster: Cluster) -> None:
    """Without any report the router's own ledger shares 40 requests evenly (RT-07 b)."""
    for _ in range(4):
        await cluster.add_double(has_agent=False, step_s=0.01)
    await cluster.start_service()
    await cluster.wait_until_up()

    answers = await asyncio.gather(
        *(cluster.complete([5 + index, *PROMPT], max_tokens=8) for index in range(40))
    )

    assert all(len(token_ids) == 8 for token_ids, _ in answers)
    counts = [len(double.bodies) for double in cluster.doubles]
    assert all(9 <= count <= 11 for count in counts), counts


async def test_clients_that_leave_free_their_engine(two_engines: Cluster) -> None:
    """Streams closed in the middle, all but one: running falls to 1, and that one is right."""
    for double in two_engines.doubles:
        double.step_s = 0.05  # no answer ends by itself while its client leaves
    survivor = asyncio.create_task(two_engines.complete(PROMPT, max_tokens=300))
    leavers = [
        asyncio.create_task(two_engines.complete([5 + index, *PROMPT], max_tokens=900))
        for index in range(20)
    ]

    def num_running() -> int:
        return sum(double.num_running + double.num_waiting for double in two_engines.doubles)

    await two_engines.wait_until(lambda: num_running() == 21)
    for task in leavers:
        task.cancel()
    await asyncio.gather(*leavers, return_exceptions=True)
    await two_engines.wait_until(lambda: num_running() <= 1)
    for double in two_engines.doubles:
        double.step_s = 0.002
    token_ids, _ = await survivor

    assert token_ids == two_engines.model.stream(PROMPT, 300)
    await two_engines.wait_until(
        lambda: all(
            rank.num_running == 0 and rank.num_kv_tokens == 0
            for status in two_engines.service.controller.engine_statuses()
            for rank in status.ranks
        ),
        timeout_s=5.0,
    )


@pytest.mark.slow
async def test_an_engine_of_another_model_gets_nothing_and_is_named(cluster: Cluster) -> None:
    """Two models in one pool: `dsched workers` says which engine is wrong."""
    await cluster.add_double()
    wrong = await cluster.add_double(served_model_name="other", has_agent=False)
    await cluster.start_service()
    await cluster.wait_until(
        lambda: "other" in cluster.service.controller.engine_statuses()[1].reason
    )
    await cluster.wait_until_up(1)

    await asyncio.gather(*(cluster.complete(PROMPT, max_tokens=2) for _ in range(4)))

    assert not wrong.bodies
    _, body = await cluster.get("/admin/v1/workers", base=cluster.service.admin_url)
    assert "serves model 'other'" in body.decode()


async def test_metrics_show_the_cluster(two_engines: Cluster) -> None:
    """Every part has its counters; no request id is a label."""
    await two_engines.complete(PROMPT, max_tokens=5)

    status, body = await two_engines.get("/metrics")

    text = body.decode()
    assert status == 200
    assert 'dsched_output_tokens_total{model="tiny"} 5.0' in text
    assert 'dsched_worker_state{engine="p-0",pool="p",state="up"} 1.0' in text
    assert "dsched_journal_recorded_tokens_total 5.0" in text
    assert "dsched_registry_registered 1.0" in text


@pytest.mark.slow
async def test_a_stopping_dsched_ends_streams_with_one_error(two_engines: Cluster) -> None:
    """After the grace, streams get an error event and no good end; engines live on."""
    task = asyncio.create_task(two_engines.complete(PROMPT, max_tokens=900))
    await two_engines.wait_until(lambda: any(d.num_running for d in two_engines.doubles))

    service = two_engines.services.pop()
    await service.stop()

    with pytest.raises(openai.APIError):
        await task
    assert all(double.port for double in two_engines.doubles)


@pytest.mark.slow
async def test_four_dsched_processes_share_idle_engines(cluster: Cluster) -> None:
    """Each sends four at once, before anybody reports: four an engine, give or take (RT-03)."""
    for _ in range(4):
        await cluster.add_double(has_agent=False, step_s=0.01)
    for index in range(4):
        await cluster.start_service(
            agent={"endpoint": "tcp://127.0.0.1:*"}, routing={"router_index": index}
        )
    for service in cluster.services:
        await cluster.wait_until_up(service=service)

    async def ask(url: str) -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4)

    urls = [service.front_door_url for service in cluster.services for _ in range(4)]
    await asyncio.gather(*(ask(url) for url in urls))

    counts = [len(double.bodies) for double in cluster.doubles]
    assert sum(counts) == 16
    assert all(3 <= count <= 5 for count in counts), counts


POLICY = """
class Favourite:
    name = "favourite"
    api_version = 1

    def __init__(self, *, engine):
        self.engine = engine

    def pick(self, request, candidates):
        if request.session == "raise":
            raise RuntimeError("broken")
        if request.session == "sleep":
            import time

            time.sleep(5)
        if request.session == "wrong":
            return len(candidates)
        names = [candidate.engine_id for candidate in candidates]
        return names.index(self.engine) if self.engine in names else None
"""


async def test_an_operators_policy_decides_and_a_bad_one_costs_its_preference(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real routes follow the policy; when it raises, sleeps or answers wrongly ours decide."""
    (cluster.folder / "favourite_policy.py").write_text(POLICY)
    monkeypatch.syspath_prepend(cluster.folder)
    for _ in range(2):
        await cluster.add_double()
    await cluster.start_service(
        routing={
            "policy": "favourite_policy:Favourite",
            "policy_args": {"engine": "p-1"},
            "policy_budget_ms": 5_000.0,  # a busy machine is no reason to fail
        }
    )
    await cluster.wait_until_up()

    async def ask(session: str) -> None:
        await cluster.client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=3, extra_headers={"x-session-id": session}
        )

    await asyncio.gather(*(ask("good") for _ in range(8)))
    assert [len(double.bodies) for double in cluster.doubles] == [0, 8]

    for session in ("raise", "wrong"):
        await ask(session)
    for guard in cluster.service.controller.policies.guards():
        guard._budget_ns = 200_000_000
    await ask("sleep")
    _, body = await cluster.get("/metrics")
    for reason in ("raised", "timeout", "wrong_answer"):
        name = f'dsched_policy_errors_total{{policy="favourite",reason="{reason}"}} 1.0'
        assert name in body.decode()


async def test_a_policy_that_cannot_work_stops_the_start(cluster: Cluster) -> None:
    """One line that names the key, before any port is opened."""
    await cluster.add_double()

    with pytest.raises(ConfigError, match=r"\$\.routing\.policy: there is no module"):
        await cluster.start_service(routing={"policy": "not_there:Policy"})
