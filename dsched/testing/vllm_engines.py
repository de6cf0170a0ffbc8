"""Real vLLM servers over the tiny model, for tests; see `engines`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from dsched.drivers.http import HttpPool
from dsched.drivers.local import LocalEngine
from dsched.drivers.vllm.launcher import find_vllm_python, launch_vllm_engine, make_tiny_model
from dsched.errors import ConfigError
from dsched.ids import EngineId
from dsched.testing.engines import (
    MAX_MODEL_LEN,
    MAX_RUNNING,
    MODEL_NAME,
    TinyEngines,
    post_json,
    run_engine_python,
    running_together,
)

NO_VLLM: Final = "no vLLM environment; run `make .venv-vllm/.ready`"
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


def is_vllm_there() -> bool:
    """Whether an environment with vLLM can be found."""
    try:
        find_vllm_python()
    except ConfigError:
        return False
    return True


def run_vllm_python(*arguments: str, variables: Mapping[str, str] | None = None) -> str:
    """Run vLLM's Python to its end; return what it printed. Fails with the end of its errors."""
    return run_engine_python(find_vllm_python(), *arguments, variables=variables)


def running_engines(
    *,
    num_engines: int,
    state_dir: Path,
    name: str = "vllm",
    args: Sequence[str] | Callable[[EngineId], Sequence[str]] = ENGINE_ARGS,
    variables: Mapping[str, str] | None = None,
) -> AbstractContextManager[TinyEngines]:
    """Start servers, wait until each has answered a request, and stop them at the end.

    `args` are the same for all, or made for each. `variables` are put on top of the servers'
    environment.
    """

    async def launch(engine_id: EngineId, endpoint: str, model_path: Path) -> LocalEngine:
        return await launch_vllm_engine(
            model_path,
            engine_id=engine_id,
            agent_endpoint=endpoint,
            state_dir=state_dir,
            served_model_name=MODEL_NAME,
            extra_args=args(engine_id) if callable(args) else args,
            variables=variables,
        )

    return running_together(
        kind="vllm",
        engine_ids=[EngineId(f"{name}-{index}") for index in range(num_engines)],
        make_model=lambda: make_tiny_model(state_dir / "models" / "tiny-moe"),
        launch=launch,
        ask=ask_tokens,
    )


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
    choice: dict[str, Any] = (await post_json(pool, "/v1/completions", body))["choices"][0]
    return choice


async def ask_tokens(pool: HttpPool, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The server's own greedy answer."""
    choice = await complete(pool, prompt, max_tokens=num_tokens)
    return list(choice["token_ids"])
