"""Real SGLang servers over the tiny model, for tests; see `engines`."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from dsched.drivers.http import HttpPool
from dsched.drivers.local import LocalEngine, make_tiny_model
from dsched.drivers.sglang.launcher import (
    find_sglang_python,
    launch_sglang_engine,
    plan_server,
)
from dsched.drivers.sglang.watch import RESERVED_TOKENS
from dsched.errors import ConfigError
from dsched.ids import EngineId
from dsched.testing.engines import (
    MAX_MODEL_LEN,
    MAX_RUNNING,
    MODEL_NAME,
    TinyEngines,
    post_json,
    running_together,
)

NO_SGLANG: Final = "no SGLang environment; run `make .venv-sglang/.ready`"
ENGINE_ARGS: Final = (
    # Without it SGLang serves a float32 model in float16, whose answers depend on the batch.
    *("--dtype", "float32"),
    *("--context-length", str(MAX_MODEL_LEN + RESERVED_TOKENS)),
    *("--max-running-requests", str(MAX_RUNNING)),
    *("--chunked-prefill-size", "512"),
)


def is_sglang_there() -> bool:
    """Whether an environment with SGLang can be found."""
    try:
        find_sglang_python()
    except ConfigError:
        return False
    return True


def running_sglang(
    *,
    state_dir: Path,
    name: str = "sglang",
    num_dp_ranks: int = 1,
    args: Sequence[str] = ENGINE_ARGS,
    variables: Mapping[str, str] | None = None,
) -> AbstractContextManager[TinyEngines]:
    """Start one server, wait until it has answered a request, and stop it at the end.

    `variables` are put on top of the server's environment.
    """
    plan = plan_server(EngineId(f"{name}-0"), num_dp_ranks=num_dp_ranks, is_expert_parallel=False)

    async def launch(engine_id: EngineId, endpoint: str, model_path: Path) -> LocalEngine:
        return await launch_sglang_engine(
            model_path,
            engine_id=engine_id,
            agent_endpoint=endpoint,
            state_dir=state_dir,
            served_model_name=MODEL_NAME,
            extra_args=(*plan.args, *args),
            variables={**plan.variables, **(variables or {})},
        )

    return running_together(
        kind="sglang",
        engine_ids=[plan.engine_id],
        make_model=lambda: make_tiny_model(
            state_dir / "models" / "tiny-moe", python=find_sglang_python()
        ),
        launch=launch,
        ask=ask_tokens,
    )


async def generate(
    pool: HttpPool, prompt: Sequence[int], *, max_tokens: int, **fields: object
) -> dict[str, Any]:
    """Ask a server directly, without dsched: greedy, not streamed.

    Raises:
        DriverError: no answer, or one that is not 200.
    """
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0},
        **fields,
    }
    answer: dict[str, Any] = await post_json(pool, "/generate", body)
    return answer


async def ask_tokens(pool: HttpPool, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The server's own greedy answer."""
    answer = await generate(pool, prompt, max_tokens=num_tokens)
    return list(answer["output_ids"])
