"""Simulated engines inside `dsched run`: from the configuration to drivers on wall time."""

import asyncio

from dsched.clock import Clock
from dsched.config import SimConfig
from dsched.costs.affine import AffineStepCost
from dsched.ids import EngineId
from dsched.sim.driver import SimDriver
from dsched.sim.engine import SimEngine, SimEngineConfig
from dsched.sim.loop import AsyncioTimers
from dsched.sim.tokenizer import build_sim_model


def engine_config(config: SimConfig) -> SimEngineConfig:
    """Translate the size of a simulated engine; `chunk_tokens` leaves decodes their own room."""
    return SimEngineConfig(
        num_dp_ranks=config.num_dp_ranks,
        kv_capacity_tokens=config.kv_capacity_tokens,
        max_running_requests=config.max_running_requests,
        max_step_tokens=config.chunk_tokens + config.max_running_requests,
        max_model_len=config.max_model_len,
    )


def step_cost(config: SimConfig) -> AffineStepCost:
    """Translate the cost of a step."""
    return AffineStepCost(
        base_ns=config.step_base_us * 1e3,
        per_decode_request_ns=config.request_cost_us * 1e3,
        per_kv_token_ns=config.kv_token_cost_ns,
        per_prefill_token_ns=config.prefill_token_cost_us * 1e3,
    )


def make_embedded_driver(
    engine_id: EngineId, config: SimConfig, *, clock: Clock, loop: asyncio.AbstractEventLoop
) -> SimDriver:
    """Make a simulated engine that takes real time and speaks readable words.

    Its tokens are those of `tokenizer.build_sim_tokenizer()`.
    """
    engine = SimEngine(engine_config(config), build_sim_model(), step_cost(config))
    return SimDriver(engine_id, engine, AsyncioTimers(clock, loop), model_name=config.model)
