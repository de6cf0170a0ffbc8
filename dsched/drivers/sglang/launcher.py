"""SGLang servers as child processes, for development on one machine.

In: a model folder and a port. Out: a running `sglang.launch_server`, whose schedulers load dsched's
plug-in by themselves; see `dsched.drivers.local` for how it ends.

SGLang 0.5.23 has no CPU build on the package index. It runs on a CPU with a platform plug-in, as
the tests have one (`tests/sglang/plugin`); the Makefile's environment holds it.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dsched.drivers.local import (
    EnginePackage,
    LocalEngine,
    ServerPlan,
    check_model_folder,
    engine_variables,
    find_engine_python,
    free_port,
    start_engine,
)
from dsched.ids import EngineId

PACKAGE: Final = EnginePackage(name="sglang", environment=".venv-sglang")
SERVE: Final = "sglang.launch_server"
ENGINE_VARIABLES: Final = {"HF_HUB_OFFLINE": "1"}
CPU_VARIABLES: Final = {"OMP_NUM_THREADS": "1"}
CPU_ARGS: Final = (
    *("--device", "cpu", "--attention-backend", "torch_native"),
    *("--mem-fraction-static", "0.3", "--max-total-tokens", "65536"),
    "--sleep-on-idle",
)
"""Without a limit SGLang sizes the KV cache as if the machine's memory were its own; and without
the last, each idle rank keeps a core busy."""
CPU_ENGINE_SWITCH: Final = "SGLANG_USE_CPU_ENGINE"
"""Chooses SGLang's own CPU engine, whose kernels are on no package index."""


async def launch_sglang_engine(
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
    """Start an SGLang server on 127.0.0.1 and return while it loads; a driver sees when it is up.

    `port` 0 chooses a free one. `extra_args` come last and so win over what dsched passes. With
    `agent_endpoint` `None` dsched's plug-in stays off and nothing is reported. With
    `step_budget_ms` dsched cuts the engine's prompt chunks to that time. `variables` are put on top
    of the environment that the engine gets.

    Raises:
        ConfigError: no Python with SGLang, or no such model folder.
        DriverError: the process cannot be started.
    """
    interpreter = find_sglang_python(python)
    check_model_folder(model_path)
    port = port or free_port()
    command = [
        *(SERVE, "--model-path", str(model_path)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", served_model_name),
        # Otherwise every event of a stream repeats all tokens before it.
        *("--incremental-streaming-output", "--log-level", "info", "--log-level-http", "warning"),
        *(CPU_ARGS if device == "cpu" else ()),
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


def engine_environment(
    agent_endpoint: str | None, *, engine_id: EngineId, device: str
) -> dict[str, str]:
    """Return the environment of the engine: ours, with defaults that ours overrides."""
    defaults = ENGINE_VARIABLES | (CPU_VARIABLES if device == "cpu" else {})
    variables = engine_variables(agent_endpoint, engine_id=engine_id, defaults=defaults)
    variables.pop(CPU_ENGINE_SWITCH, None)
    return variables


def plan_server(engine_id: EngineId, *, num_dp_ranks: int, is_expert_parallel: bool) -> ServerPlan:
    """Return the server of an engine with some DP ranks, which share their experts or do not.

    With expert parallelism SGLang's ranks are those of its tensor-parallel group with data-parallel
    attention, which runs on GPUs only (0.5.23). On a CPU each rank is bound to a core: SGLang
    refuses more ranks than the machine has memory nodes unless it is told where they go.

    Raises:
        ValueError: no rank at all.

    >>> plan_server(EngineId("s"), num_dp_ranks=2, is_expert_parallel=False).args
    ('--dp-size', '2')
    """
    if num_dp_ranks < 1:
        raise ValueError(f"num_dp_ranks is {num_dp_ranks}; an engine has at least 1")
    if num_dp_ranks == 1:
        return ServerPlan(engine_id=engine_id)
    size = str(num_dp_ranks)
    expert_args = ("--tp-size", size, "--ep-size", size, "--enable-dp-attention")
    cores = sorted(os.sched_getaffinity(0))
    bound = "|".join(str(cores[rank % len(cores)]) for rank in range(num_dp_ranks))
    return ServerPlan(
        engine_id=engine_id,
        args=("--dp-size", size, *(expert_args if is_expert_parallel else ())),
        variables={"SGLANG_CPU_OMP_THREADS_BIND": bound},
    )


def find_sglang_python(stated: Path | str | None = None) -> Path:
    """Return an interpreter that has SGLang; see `find_engine_python`."""
    return find_engine_python(PACKAGE, stated)
