"""Makes engines and their drivers from the configuration: simulated, launched here, or elsewhere.

Used by `dsched run`. Nothing here decides; each engine gets the driver of its kind.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from dsched.clock import SystemClock
from dsched.config import (
    Config,
    EngineConfig,
    ModelConfig,
    PoolConfig,
    SimConfig,
    chunk_weights_environment,
)
from dsched.controller import EngineSpec, PoolSpec
from dsched.costs.affine import AffineStepCost
from dsched.drivers.base import Driver
from dsched.drivers.http_driver import HttpDriver
from dsched.drivers.keeper import EngineKeeper, PlanServers
from dsched.drivers.local import LocalEngine, ServerPlan, free_port, make_tiny_model
from dsched.drivers.reports import ReportReader
from dsched.drivers.sglang.driver import SglangDriver
from dsched.drivers.sglang.launcher import find_sglang_python, launch_sglang_engine, plan_server
from dsched.drivers.vllm.driver import VllmDriver
from dsched.drivers.vllm.launcher import find_vllm_python, launch_vllm_engine
from dsched.drivers.vllm.parallel import plan_servers
from dsched.drivers.watch import EngineHints
from dsched.errors import ConfigError
from dsched.frontdoor.models import ServedModel, load_model, make_token_cache
from dsched.frontdoor.renderer import TemplateRenderer
from dsched.ids import EngineId
from dsched.sim.driver import SimDriver
from dsched.sim.engine import SimEngine, SimEngineConfig
from dsched.sim.expert_load import SimExpertLoad
from dsched.sim.expert_slots import SimExpertSlots
from dsched.sim.kv_store import SimKvStore
from dsched.sim.loop import Timers
from dsched.sim.tokenizer import CHAT_TEMPLATE, build_sim_model, build_sim_tokenizer
from dsched.states import PoolRole

LAUNCH_POOL = "default"
"""Pool of the engines that dsched starts itself."""
SIM_TOP_K = 6
"""Experts that each token of a simulated engine goes to."""
TINY_MODEL = "tiny"
"""`--model tiny` makes a small random model, to try a real engine without weights."""

LAUNCHERS: Final = {"vllm": launch_vllm_engine, "sglang": launch_sglang_engine}


@dataclass(slots=True, kw_only=True)
class Fleet:
    """Everything between the controller and the engines."""

    pools: tuple[PoolSpec, ...]
    drivers: dict[EngineId, Driver]
    models: dict[str, ServedModel]
    urls: dict[EngineId, str]
    keepers: list[EngineKeeper]
    """Of the engines that were started here."""
    on_moved: list[Callable[[EngineId, str], None]] = field(default_factory=list)
    """Told when an engine that was started here is at another URL."""

    async def stop(self) -> None:
        """End the engines that were started here."""
        await asyncio.gather(*(keeper.stop() for keeper in self.keepers))

    def move(self, engine_id: EngineId, url: str) -> None:
        """Find a server at another URL from now on."""
        driver = self.drivers[engine_id]
        if isinstance(driver, HttpDriver):
            driver.move(url)
        self.urls[engine_id] = url
        for tell in self.on_moved:
            tell(engine_id, url)


class FleetBuilder:
    """Builds a `Fleet` on the running event loop."""

    def __init__(self, config: Config, *, timers: Timers, reports: ReportReader) -> None:
        self._config = config
        self._timers = timers
        self._reports = reports
        self._kv_store = SimKvStore()
        self.fleet = Fleet(pools=(), drivers={}, models={}, urls={}, keepers=[])

    async def build(self) -> Fleet:
        """Make all drivers, and start the engines that dsched launches itself.

        Raises:
            ConfigError: a kind of engine or pool that this version cannot drive, a missing
                tokenizer, or an engine that cannot be started.
        """
        config = self._config
        if config.pools:
            pools = [self._build_pool(name, pool) for name, pool in sorted(config.pools.items())]
        elif config.launch.engine == "sim":
            pools = [self._build_sim_pool()]
        else:
            pools = [await self._launch_pool(config.launch.engine)]
        self.fleet.pools = tuple(pools)
        return self.fleet

    # ---- pools of the configuration

    def _build_pool(self, name: str, pool: PoolConfig) -> PoolSpec:
        kinds: set[str] = {engine.kind for engine in pool.engines}
        specs = []
        for index, engine in enumerate(pool.engines):
            engine_id = EngineId(self._config.engine_id(name, index))
            model = engine.model or pool.model.name
            if engine.kind == "sim":
                self._add_sim(engine_id, model, _sim_config(self._config.sim, engine))
            else:
                self._add_server(engine_id, engine, model=model)
            specs.append(
                EngineSpec(
                    engine_id=engine_id,
                    model=model,
                    ep_group=engine.ep_group,
                    is_elastic=engine.elastic_ep,
                )
            )
        if pool.role != "prefill":
            self.fleet.models[pool.model.name] = self._served_model(name, pool, kinds)
        return PoolSpec(
            name=name,
            role=PoolRole(pool.role),
            model=pool.model.name,
            engines=tuple(specs),
            max_model_len=pool.model.max_model_len,
        )

    def _served_model(self, pool_name: str, pool: PoolConfig, kinds: set[str]) -> ServedModel:
        model = pool.model
        if model.tokenizer is not None:
            return load_model(
                model.name,
                Path(model.tokenizer),
                config=model,
                token_cache_bytes=self._config.front_door.token_cache_bytes,
            )
        if kinds == {"sim"}:
            return self._sim_model(model.name)
        raise ConfigError(
            f"$.pools.{pool_name}.model.tokenizer: needed for engines that are not simulated; "
            "give the model's folder or its tokenizer.json"
        )

    def _sim_model(self, name: str) -> ServedModel:
        return sim_model(name, token_cache_bytes=self._config.front_door.token_cache_bytes)

    def _add_server(self, engine_id: EngineId, engine: EngineConfig, *, model: str) -> None:
        if engine.url is None:
            raise ConfigError(f"engine {engine_id}: a {engine.kind} engine needs a url")
        budget_ms = self._config.scheduler.step_budget_ms
        make_driver = SglangDriver if engine.kind == "sglang" else VllmDriver
        driver = make_driver(
            engine_id=engine_id,
            url=engine.url,
            model=model,
            hints=EngineHints(
                num_dp_ranks=engine.num_dp_ranks,
                kv_capacity_tokens=engine.kv_capacity_tokens,
                max_running_requests=engine.max_running_requests,
            ),
            reports=self._reports,
            step_budget_ns=None if budget_ms is None else int(budget_ms * 1e6),
        )
        self.fleet.drivers[engine_id] = driver
        self.fleet.urls[engine_id] = driver.url

    def _add_sim(self, engine_id: EngineId, model: str, config: SimEngineConfig) -> None:
        sim = self._config.sim
        engine = SimEngine(config, model=build_sim_model(), cost=sim_cost(sim))
        self.fleet.drivers[engine_id] = SimDriver(
            engine_id,
            engine,
            self._timers,
            model_name=model,
            expert_load=self._sim_expert_load(),
            expert_slots=self._sim_expert_slots(config.num_dp_ranks),
            kv_store=self._kv_store,
        )

    def _sim_expert_load(self) -> SimExpertLoad | None:
        sim = self._config.sim
        if sim.moe_layers == 0:
            return None
        return SimExpertLoad(
            num_layers=sim.moe_layers,
            num_experts=sim.num_experts,
            top_k=min(SIM_TOP_K, sim.num_experts),
            seed=self._config.seed + len(self.fleet.drivers),
        )

    def _sim_expert_slots(self, num_ranks: int) -> SimExpertSlots | None:
        sim = self._config.sim
        if sim.moe_layers == 0:
            return None
        num_slots = -(-(sim.num_experts + sim.redundant_experts) // num_ranks) * num_ranks
        return SimExpertSlots(
            num_layers=sim.moe_layers,
            num_experts=sim.num_experts,
            num_slots=num_slots,
            num_ranks=num_ranks,
        )

    # ---- engines that dsched starts itself

    def _build_sim_pool(self) -> PoolSpec:
        sim = self._config.sim
        specs = []
        for index in range(self._config.launch.replicas):
            engine_id = EngineId(f"sim-{index}")
            self._add_sim(engine_id, sim.model, _sim_config(sim, None))
            specs.append(EngineSpec(engine_id=engine_id, model=sim.model))
        self.fleet.models[sim.model] = self._sim_model(sim.model)
        return PoolSpec(name=LAUNCH_POOL, model=sim.model, engines=tuple(specs))

    async def _launch_pool(self, kind: Literal["vllm", "sglang"]) -> PoolSpec:
        launch = self._config.launch
        if launch.model is None:
            raise ConfigError(
                f"$.launch.model: --engine {kind} needs --model FOLDER, or --model tiny to try it "
                "out"
            )
        folder = await self._model_folder(kind, launch.model)
        name = folder.name
        policy_variables = chunk_weights_environment(self._config.policies.chunk_weights)

        async def launch_server(server: ServerPlan, port: int) -> LocalEngine:
            return await LAUNCHERS[kind](
                folder,
                engine_id=server.engine_id,
                port=port,
                agent_endpoint=self._reports.endpoint,
                state_dir=Path(self._config.state_dir),
                served_model_name=name,
                extra_args=(*server.args, *launch.args),
                python=launch.python,
                step_budget_ms=self._config.scheduler.step_budget_ms,
                variables={**server.variables, **policy_variables},
            )

        specs = []
        for index in range(launch.replicas):
            replica = f"{kind}-{index}"
            keeper = EngineKeeper(
                replica,
                plan=self._planner(kind, EngineId(replica)),
                launch=launch_server,
                on_moved=self.fleet.move,
                clock=SystemClock(),
            )
            # First: it also ends what a start that is broken off has made.
            self.fleet.keepers.append(keeper)
            await keeper.start()
            for server in keeper.plans:
                engine_id, url = server.engine_id, keeper.servers[server.engine_id].url
                self._add_server(engine_id, EngineConfig(kind=kind, url=url), model=name)
                specs.append(EngineSpec(engine_id=engine_id, model=name, ep_group=server.ep_group))
        chat = ModelConfig(
            name=name,
            chat_format=launch.chat_format,
            tool_call_format=launch.tool_call_format,
            reasoning_format=launch.reasoning_format,
        )
        cache_bytes = self._config.front_door.token_cache_bytes
        self.fleet.models[name] = load_model(
            name, folder, config=chat, token_cache_bytes=cache_bytes
        )
        return PoolSpec(name=LAUNCH_POOL, model=name, engines=tuple(specs))

    def _planner(self, kind: Literal["vllm", "sglang"], engine_id: EngineId) -> PlanServers:
        """Return what says which servers make up one engine, with a free port in each answer."""
        launch = self._config.launch

        def plan() -> Sequence[ServerPlan]:
            if kind == "sglang":
                server = plan_server(
                    engine_id,
                    num_dp_ranks=launch.data_parallel_size,
                    is_expert_parallel=launch.expert_parallel,
                )
                return (server,)
            return plan_servers(
                engine_id,
                num_dp_ranks=launch.data_parallel_size,
                is_expert_parallel=launch.expert_parallel,
                load_balancer=launch.load_balancer,
                rpc_port=free_port(),
            )

        return plan

    async def _model_folder(self, kind: Literal["vllm", "sglang"], stated: str) -> Path:
        if stated != TINY_MODEL or Path(stated).is_dir():
            return Path(stated)
        folder = Path(self._config.state_dir) / "models" / TINY_MODEL
        find_python = find_sglang_python if kind == "sglang" else find_vllm_python
        return await make_tiny_model(folder, python=find_python(self._config.launch.python))


def sim_model(name: str, *, token_cache_bytes: int = 0) -> ServedModel:
    """Tokenizer and chat template of the simulated engines."""
    tokenizer = build_sim_tokenizer()
    cache = make_token_cache(name, token_cache_bytes)
    renderer = TemplateRenderer(tokenizer, chat_template=CHAT_TEMPLATE, cache=cache)
    return ServedModel(name=name, tokenizer=tokenizer, renderer=renderer, token_cache=cache)


def _sim_config(sim: SimConfig, engine: EngineConfig | None) -> SimEngineConfig:
    """Size of one simulated engine: what the engine says, else the `sim` section."""
    hints: Mapping[str, int | None] = {}
    if engine is not None:
        hints = {
            "num_dp_ranks": engine.num_dp_ranks,
            "kv_capacity_tokens": engine.kv_capacity_tokens,
            "max_running_requests": engine.max_running_requests,
        }
    try:
        return SimEngineConfig(
            num_dp_ranks=hints.get("num_dp_ranks") or sim.num_dp_ranks,
            kv_capacity_tokens=hints.get("kv_capacity_tokens") or sim.kv_capacity_tokens,
            max_running_requests=hints.get("max_running_requests") or sim.max_running_requests,
            max_step_tokens=sim.chunk_tokens,
            max_model_len=sim.max_model_len,
        )
    except ValueError as error:
        raise ConfigError(f"$.sim: {error}") from error


def sim_cost(sim: SimConfig) -> AffineStepCost:
    """What the steps of simulated engines cost."""
    return AffineStepCost(
        base_ns=sim.step_base_us * 1e3,
        per_decode_request_ns=sim.request_cost_us * 1e3,
        per_kv_token_ns=sim.kv_token_cost_ns,
        per_prefill_token_ns=sim.prefill_token_cost_us * 1e3,
    )
