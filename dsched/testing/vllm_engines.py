"""Real vLLM servers over the tiny model, for tests: started together, stopped together.

One engine needs half a minute to load and about 3 GB, so a test session shares them. They end with
the session, also when it fails or is interrupted: each runs in a process group of its own that the
launcher ends, and the kernel ends it if Python dies.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from dsched.drivers.http import HttpPool
from dsched.drivers.local import LocalEngine, free_port
from dsched.drivers.vllm.launcher import find_vllm_python, launch_vllm_engine, make_tiny_model
from dsched.errors import ConfigError, DriverError
from dsched.ids import EngineId

NO_VLLM: Final = "no vLLM environment; run `make .venv-vllm/.ready`"
MODEL_NAME: Final = "tiny"
MAX_MODEL_LEN: Final = 1_024
MAX_RUNNING: Final = 64
READY_TIMEOUT_S: Final = 300.0
ENGINE_ARGS: Final = (
    *("--dtype", "float32", "--enforce-eager", "--generation-config", "vllm"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_RUNNING)),
    *("--max-num-batched-tokens", "512", "--block-size", "32"),
)
"""float32: with bfloat16 the batch a request shares changes its logits by up to 1 %, and greedy
answers with it."""
GROUP_ARGS: Final = (
    *ENGINE_ARGS,
    *("--data-parallel-size", "2", "--enable-expert-parallel", "--api-server-count", "1"),
)
"""Two DP ranks that share one set of experts. On a CPU vLLM needs the tests' plug-in for it."""


class TinyEngines:
    """Running servers, and what is needed to talk to them."""

    def __init__(
        self, *, engines: Sequence[LocalEngine], agent_endpoint: str, model_path: Path
    ) -> None:
        self.engines = tuple(engines)
        self.agent_endpoint = agent_endpoint
        """Bind a `ReportReader` here; the agents reconnect within two seconds."""
        self.model_path = model_path


def is_vllm_there() -> bool:
    """Whether an environment with vLLM can be found."""
    try:
        find_vllm_python()
    except ConfigError:
        return False
    return True


@contextmanager
def running_engines(
    *,
    num_engines: int,
    state_dir: Path,
    name: str = "vllm",
    args: Sequence[str] = ENGINE_ARGS,
    variables: Mapping[str, str] | None = None,
) -> Iterator[TinyEngines]:
    """Start servers, wait until each has answered a request, and stop them at the end.

    `variables` are put on top of the servers' environment.
    """
    engines: list[LocalEngine] = []
    endpoint = f"tcp://127.0.0.1:{free_port()}"

    async def start() -> Path:
        model_path = await make_tiny_model(state_dir / "models" / "tiny-moe")
        for index in range(num_engines):
            engine = await launch_vllm_engine(
                model_path,
                engine_id=EngineId(f"{name}-{index}"),
                agent_endpoint=endpoint,
                state_dir=state_dir,
                served_model_name=MODEL_NAME,
                extra_args=args,
                variables=variables,
            )
            engines.append(engine)
        await asyncio.gather(*(wait_until_ready(engine) for engine in engines))
        return model_path

    async def stop() -> None:
        await asyncio.gather(*(engine.stop() for engine in engines))

    with asyncio.Runner() as runner:
        try:
            model_path = runner.run(start())
            yield TinyEngines(engines=engines, agent_endpoint=endpoint, model_path=model_path)
        finally:
            runner.run(stop())


async def wait_until_ready(engine: LocalEngine, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Wait until the server has computed something: its first step may compile for long.

    Raises:
        DriverError: it died, or is not ready in time; the message has the end of its log.
    """
    pool = HttpPool(engine.url)
    try:
        async with asyncio.timeout(timeout_s):
            while engine.is_alive:
                try:
                    await complete(pool, [5, 6, 7], max_tokens=2)
                except DriverError:
                    await asyncio.sleep(0.5)
                else:
                    return
    except TimeoutError:
        pass
    finally:
        pool.close()
    raise DriverError(f"engine {engine.engine_id} is not ready: {engine.log_tail()}")


async def complete(
    pool: HttpPool, prompt: Sequence[int], *, max_tokens: int, **fields: object
) -> dict[str, Any]:
    """Ask a server directly, without dsched: greedy, not streamed; return `choices[0]`.

    Raises:
        DriverError: no answer, or one that is not 200.
    """
    body = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }
    status, _, answer = await pool.fetch(
        "POST",
        "/v1/completions",
        headers=[(b"content-type", b"application/json")],
        body=msgspec.json.encode(body),
        timeout_s=120,
    )
    if status != 200:
        raise DriverError(f"status {status}: {answer[:500]!r}")
    choice: dict[str, Any] = msgspec.json.decode(answer)["choices"][0]
    return choice
