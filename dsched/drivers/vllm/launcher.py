"""vLLM servers as child processes, for development on one machine.

In: a model folder and a port. Out: a running `vllm serve` with dsched's scheduler; see
`dsched.drivers.local` for how it ends.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dsched.drivers import local
from dsched.drivers.local import (
    EnginePackage,
    LocalEngine,
    check_model_folder,
    engine_variables,
    find_engine_python,
    free_port,
    start_engine,
)
from dsched.ids import EngineId

SCHEDULER: Final = "dsched.drivers.vllm.DschedScheduler"
ASYNC_SCHEDULER: Final = "dsched.drivers.vllm.DschedAsyncScheduler"
PACKAGE: Final = EnginePackage(name="vllm", environment=".venv-vllm")
SERVE: Final = ("vllm.entrypoints.cli.main", "serve")
ENGINE_VARIABLES: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_VARIABLES: Final = {
    # More threads than one fight over a small machine: 16 instead of 160 steps a second (measured).
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


async def launch_vllm_engine(
    model_path: Path | str,
    *,
    engine_id: EngineId,
    port: int = 0,
    agent_endpoint: str | None,
    state_dir: Path,
    served_model_name: str,
    extra_args: Sequence[str] = (),
    python: Path | str | None = None,
    device: str = "cpu",
    step_budget_ms: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> LocalEngine:
    """Start `vllm serve` on 127.0.0.1 and return while it loads; a driver sees when it is up.

    `port` 0 chooses a free one. `extra_args` come last and so win over what dsched passes. With
    `agent_endpoint` `None` the server runs vLLM's own scheduler and reports nothing. On `cpu` the
    engine gets one thread and one GiB of KV cache, unless the environment says otherwise. With
    `step_budget_ms` dsched cuts the engine's prompt chunks to that time. `variables` are put on top
    of the environment that the engine gets.

    Raises:
        ConfigError: no Python with vLLM, or no such model folder.
        DriverError: the process cannot be started.
    """
    interpreter = find_vllm_python(python)
    check_model_folder(model_path)
    port = port or free_port()
    command = [
        *(*SERVE, str(model_path)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", served_model_name),
        *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
        *(scheduler_args(device) if agent_endpoint is not None else ()),
        *extra_args,
    ]
    return await start_engine(
        command,
        engine_id=engine_id,
        port=port,
        python=interpreter,
        environment=engine_environment(agent_endpoint, engine_id=engine_id, device=device),
        step_budget_ms=step_budget_ms,
        variables=variables,
        state_dir=state_dir,
    )


def scheduler_args(device: str) -> tuple[str, ...]:
    """Choose the scheduler class: vLLM forces asynchronous scheduling off on CPUs."""
    return ("--scheduler-cls", SCHEDULER if device == "cpu" else ASYNC_SCHEDULER)


def engine_environment(
    agent_endpoint: str | None, *, engine_id: EngineId, device: str
) -> dict[str, str]:
    """Return the environment of the engine: ours, with defaults that ours overrides."""
    defaults = ENGINE_VARIABLES | (CPU_VARIABLES if device == "cpu" else {})
    return engine_variables(agent_endpoint, engine_id=engine_id, defaults=defaults)


def find_vllm_python(stated: Path | str | None = None) -> Path:
    """Return an interpreter that has vLLM; see `find_engine_python`."""
    return find_engine_python(PACKAGE, stated)


async def make_tiny_model(folder: Path, *, python: Path | str | None = None) -> Path:
    """Make the tiny random model with the engine's Python, unless it is there; return `folder`.

    Raises:
        ConfigError: no Python with vLLM.
        DriverError: the model cannot be made.
    """
    return await local.make_tiny_model(folder, python=find_vllm_python(python))
