"""Separate pools over two real vLLM processes: one computes prompts, the other decodes.

They share KV through vLLM's `ExampleConnector`, which keeps a folder of files for each prompt. It
stores a prompt that is computed in one step, so steps are long enough here for every prompt.
Compared are tokens: the files hold the KV exactly, and answers run one after the other where a
batch could round them differently.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from live_service import serving

from dsched.cli.service import Service
from dsched.controller.request import InferenceRequest, RequestError, RequestFinish
from dsched.drivers.base import AttemptSink
from dsched.drivers.http import HttpPool
from dsched.drivers.local import LocalEngine
from dsched.drivers.wire import GenerateCommand, SamplingParams
from dsched.ids import AttemptId, DpRank, EngineId, RankId, RequestId
from dsched.testing.engines import TinyEngines
from dsched.testing.live_run import read_samples
from dsched.testing.recorders import RecordingStream
from dsched.testing.vllm_engines import (
    ENGINE_ARGS,
    MODEL_NAME,
    NO_VLLM,
    complete,
    is_vllm_there,
    running_engines,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_TOKENS = 24
BLOCK_TOKENS = 32
PROMPT_LEN = 300
"""Nine whole blocks before the last token; the rest is for the decode engine to compute."""
NUM_LOADED = (PROMPT_LEN - 1) // BLOCK_TOKENS * BLOCK_TOKENS


class Engines:
    """Both servers, and the folder that they share."""

    def __init__(self, running: TinyEngines, store: Path, sockets: str) -> None:
        self.prefill, self.decode = running.engines
        self.model_path = running.model_path
        self.agent_endpoint = running.agent_endpoint
        self.store = store
        self.kv_events = f"ipc://{sockets}/{self.prefill.engine_id}"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    if not is_vllm_there():
        pytest.skip(NO_VLLM)
    state_dir = tmp_path_factory.mktemp("split")
    store = state_dir / "kv"
    store.mkdir()
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(store)},
    }
    args = (
        *ENGINE_ARGS,
        *("--max-num-batched-tokens", "4096", "--load-format", "auto"),
        *("--kv-transfer-config", json.dumps(connector)),
    )
    # Paths of sockets may have a hundred characters, which those of tests exceed.
    with tempfile.TemporaryDirectory(prefix="dsched-kv-") as sockets:

        def args_of(engine_id: EngineId) -> list[str]:
            events = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"ipc://{sockets}/{engine_id}",
                "replay_endpoint": f"ipc://{sockets}/{engine_id}-replay",
            }
            return [*args, "--kv-events-config", json.dumps(events)]

        with running_engines(
            num_engines=2, state_dir=state_dir, name="split", args=args_of
        ) as running:
            yield Engines(running, store, sockets)


class Heard(RecordingStream):
    """A client's stream that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.has_ended = asyncio.Event()

    def on_finish(self, finish: RequestFinish) -> None:
        super().on_finish(finish)
        self.has_ended.set()

    def on_error(self, error: RequestError) -> None:
        super().on_error(error)
        self.has_ended.set()


@asynccontextmanager
async def running_service(engines: Engines, folder: Path) -> AsyncIterator[Service]:
    """dsched over a prefill and a decode pool of one engine each."""

    def pool(role: str, engine: LocalEngine) -> dict[str, Any]:
        model = {"name": MODEL_NAME, "tokenizer": str(engines.model_path)}
        fields = {"url": engine.url, "id": engine.engine_id}
        if role == "prefill":
            replay = f"{engines.kv_events}-replay"
            fields |= {"kv_events": engines.kv_events, "kv_events_replay": replay}
        return {"role": role, "model": model, "engines": [fields]}

    document = {
        "state_dir": str(folder),
        "front_door": {"port": 0, "stop_grace_s": 1.0},
        "admin": {"port": 0},
        "agent": {"endpoint": engines.agent_endpoint},
        "debug": {"validate": True},
        "pools": {
            "prefill": pool("prefill", engines.prefill),
            "decode": pool("decode", engines.decode),
        },
    }
    async with serving(document) as service:
        yield service


async def ask(service: Service, prompt: list[int]) -> tuple[list[int], RequestFinish]:
    heard = Heard()
    service.controller.submit(
        InferenceRequest(
            request_id=RequestId(f"r-{prompt[0]}-{prompt[-1]}"),
            model=MODEL_NAME,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
        ),
        heard,
    )
    async with asyncio.timeout(60):
        await heard.has_ended.wait()
    return heard.token_ids, heard.finish


async def ask_directly(url: str, prompt: list[int]) -> list[int]:
    pool = HttpPool(url)
    try:
        choice = await complete(pool, prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
    finally:
        pool.close()
    answer: list[int] = choice["token_ids"]
    return answer


async def counters(url: str) -> dict[str, float]:
    """What an engine computed and loaded so far."""
    pool = HttpPool(url)
    try:
        _, _, body = await pool.fetch("GET", "/metrics", timeout_s=10.0)
    finally:
        pool.close()
    text = body.decode()
    found = {"hits": sum(read_samples(text, "vllm:external_prefix_cache_hits_total").values())}
    for labels, value in read_samples(text, "vllm:prompt_tokens_by_source_total").items():
        found[dict(labels)["source"]] = value
    return found


def make_prompt(number: int) -> list[int]:
    return [5 + (number * 131 + at * at + 7 * at) % 240 for at in range(PROMPT_LEN)]


def change(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


async def test_split_pools_answer_as_one_engine_and_decode_only_the_last_block(
    engines: Engines, tmp_path: Path
) -> None:
    """Every prompt is computed once, by the prefill engine; the other one loads its KV."""
    prompts = [make_prompt(number) for number in range(6)]
    before = [await counters(each.url) for each in (engines.prefill, engines.decode)]

    async with running_service(engines, tmp_path) as service:
        answers = [await ask(service, prompt) for prompt in prompts]
        prefills = dict(service.controller.num_prefills)
        dispatched = {rank.engine_id: n for rank, n in service.controller.num_dispatched.items()}

    after = [await counters(each.url) for each in (engines.prefill, engines.decode)]
    assert dispatched == {engines.prefill.engine_id: 6, engines.decode.engine_id: 6}
    assert prefills == {"remote": 6}, "nothing was missed, lost or computed by the decode engine"
    assert change(before[0], after[0], "local_compute") == 6 * PROMPT_LEN
    assert change(before[1], after[1], "hits") == 6 * NUM_LOADED
    assert change(before[1], after[1], "local_compute") == 6 * (PROMPT_LEN - NUM_LOADED)
    assert [end.num_cached_tokens for _, end in answers] == [NUM_LOADED] * 6
    for prompt, (token_ids, _) in zip(prompts, answers, strict=True):
        assert token_ids == await ask_directly(engines.prefill.url, prompt)


async def test_kv_events_say_what_the_prefill_engine_has_cached(
    engines: Engines, tmp_path: Path
) -> None:
    """Of a prompt that it computed, every whole block; a dsched that comes later is told too."""
    prompt, other = make_prompt(300), make_prompt(301)
    rank_id = RankId(engines.prefill.engine_id, DpRank(0))

    async with running_service(engines, tmp_path / "first") as service:
        await ask(service, prompt)
        await wait_for_cached(service, rank_id, prompt)
        assert service.kv_follower.cached_tokens(other) == {rank_id: 0}
    async with running_service(engines, tmp_path / "second") as service:
        await wait_for_cached(service, rank_id, prompt)

        assert service.kv_follower.num_batches["given_up"] == 0
        pool = service.controller._state.pools["prefill"]
        assert pool.cached_tokens(prompt) == [NUM_LOADED]
        assert pool.cached_tokens(other) == [0]


async def wait_for_cached(service: Service, rank_id: RankId, prompt: list[int]) -> None:
    async with asyncio.timeout(20):
        while service.kv_follower.cached_tokens(prompt) != {rank_id: NUM_LOADED}:
            await asyncio.sleep(0.05)


async def test_kv_that_is_deleted_in_between_costs_time_only(
    engines: Engines, tmp_path: Path
) -> None:
    """The decode engine finds nothing, computes the prompt, and says the same; dsched notices."""
    prompt = make_prompt(100)
    before = await counters(engines.decode.url)

    async with running_service(engines, tmp_path) as service:
        driver = service.fleet.drivers[engines.decode.engine_id]
        generate = driver.generate

        def generate_without_kv(command: GenerateCommand, sink: AttemptSink) -> None:
            stored = list(engines.store.iterdir())
            assert stored, "the prefill engine had stored it"
            for folder in stored:
                shutil.rmtree(folder)
            generate(command, sink)

        driver.generate = generate_without_kv  # type: ignore[method-assign]
        token_ids, end = await ask(service, prompt)
        prefills = dict(service.controller.num_prefills)

    after = await counters(engines.decode.url)
    assert prefills == {"remote": 1, "missed": 1}
    assert change(before, after, "hits") == 0
    assert change(before, after, "local_compute") == PROMPT_LEN
    assert end.num_cached_tokens == 0
    assert token_ids == await ask_directly(engines.prefill.url, prompt)


async def test_a_prefill_engine_that_does_not_answer_costs_time_only(
    engines: Engines, tmp_path: Path
) -> None:
    """Its half is aborted on the way; the decode engine computes the prompt itself."""
    prompt = make_prompt(200)

    async with running_service(engines, tmp_path) as service:
        driver = service.fleet.drivers[engines.prefill.engine_id]
        generate = driver.generate

        def generate_and_abort(command: GenerateCommand, sink: AttemptSink) -> None:
            generate(command, sink)
            driver.abort(AttemptId(command.attempt_id))

        driver.generate = generate_and_abort  # type: ignore[method-assign]
        token_ids, _ = await ask(service, prompt)
        prefills = dict(service.controller.num_prefills)

    assert prefills == {"failed": 1, "no_worker": 1}
    assert token_ids == await ask_directly(engines.prefill.url, prompt)
