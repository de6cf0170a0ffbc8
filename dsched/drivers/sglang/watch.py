"""What an SGLang server says of itself, and how it is asked.

Sizes come from dsched's agents in its schedulers where there are any, else from `/server_info`.
Checked against SGLang 0.5.23.

- `/ready` is asked for health: it is cheap, and says no while the server is paused or warms up.
  `/health` computes a token and takes a second. A scheduler that dies takes the server with it; one
  that hangs is found by dsched's own progress checks.
- SGLang computes prompts whose token ids it has no embedding for, and dies of it. So the size of
  the vocabulary is asked for, and `SglangDialect` refuses such prompts. SGLang tells it only in a
  refusal: a question with an impossible `token_ids_logprob`, which reaches no scheduler. Other
  versions than the tried ones might compute it, and are not asked.
"""

import re
from typing import Final

import msgspec

from dsched.drivers import watch
from dsched.drivers.base import EngineCapabilities
from dsched.drivers.http import HttpPool
from dsched.drivers.http_driver import JSON_HEADERS
from dsched.drivers.sglang.plugin import TESTED_VERSIONS
from dsched.drivers.watch import (
    EngineFacts,
    EngineHints,
    ModelCard,
    ask_status,
    is_tried,
    status_problem,
)
from dsched.errors import DriverError, EngineUnreachableError

RESERVED_TOKENS: Final = 6
"""Of the context that no answer gets: SGLang refuses prompts within 6 tokens of it
(`max_req_input_len`), and a handoff's prompt holds what was answered before."""
INFO_TIMEOUT_S: Final = 10.0
"""`/server_info` asks every scheduler, which answer between two steps."""
INFO_PATHS: Final = ("/server_info", "/get_server_info")
"""The second is the name before 0.5.11."""
IMPOSSIBLE_TOKEN: Final = (1 << 31) - 1
PROBE: Final = msgspec.json.encode(
    {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [IMPOSSIBLE_TOKEN],
    }
)
_VALID_RANGE = re.compile(rb"valid range is \[0, (\d+)\)")


class _InternalState(msgspec.Struct):
    effective_max_running_requests_per_dp: int | None = None


class ServerInfo(msgspec.Struct):
    """What is read of `/server_info`."""

    version: str | None = None
    dp_size: int | None = None
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    enable_deterministic_inference: bool | None = None
    grammar_backend: str | None = None
    disaggregation_mode: str | None = None
    disaggregation_bootstrap_port: int | None = None
    internal_states: list[_InternalState] = []


class SglangInspector:
    """Implements `EngineInspector` for SGLang."""

    kind: str = "sglang"
    tried_versions: tuple[str, ...] = TESTED_VERSIONS

    async def health_problem(self, pool: HttpPool) -> str | None:
        """See `EngineInspector.health_problem`; servers without `/ready` are asked `/health`."""
        path = "/ready"
        status = await ask_status(pool, path)
        if status == 404:
            path = "/health"
            status = await ask_status(pool, path)
        return status_problem(path, status)

    async def inspect(
        self,
        pool: HttpPool,
        card: ModelCard,
        *,
        has_agents: bool,  # noqa: ARG002
    ) -> EngineFacts:
        """See `EngineInspector.inspect`; what requests may ask for is only told over HTTP."""
        info = await _ask_info(pool)
        vocab_size = None
        if info.version is not None and is_tried(info.version, TESTED_VERSIONS):
            vocab_size = await _ask_vocab_size(pool)
        return translate_info(
            info, context_tokens=card.max_model_len, vocab_size=vocab_size, host=pool.host
        )


def translate_info(
    info: ServerInfo, *, context_tokens: int | None, vocab_size: int | None, host: str
) -> EngineFacts:
    """Return the facts in dsched's words; `context_tokens` is the model's own context, `host` the
    server's.

    >>> facts = translate_info(
    ...     ServerInfo(dp_size=2), context_tokens=1_030, vocab_size=None, host="h"
    ... )
    >>> facts.max_model_len, facts.sizes.num_dp_ranks, facts.capabilities.can_seed
    (1024, 2, False)
    """
    running = [each.effective_max_running_requests_per_dp for each in info.internal_states]
    return EngineFacts(
        version=info.version,
        kv_meeting=translate_meeting(info, host=host),
        max_model_len=None if context_tokens is None else context_tokens - RESERVED_TOKENS,
        vocab_size=vocab_size,
        sizes=EngineHints(
            num_dp_ranks=info.dp_size,
            kv_capacity_tokens=info.max_total_num_tokens,
            max_running_requests=min((each for each in running if each), default=None)
            or info.max_running_requests,
        ),
        capabilities=EngineCapabilities(
            can_stream_logprobs=True,
            # Without it SGLang takes a seed and draws as it likes.
            can_seed=bool(info.enable_deterministic_inference),
            can_structured_output=info.grammar_backend not in (None, "none"),
            can_steer_dp_rank=True,
            can_migrate=False,
            can_prefill=info.disaggregation_mode != "decode",
        ),
    )


def translate_meeting(info: ServerInfo, *, host: str) -> tuple[str, int] | None:
    """Return where decode engines meet this prefill engine: beside its API, on its own port.

    >>> prefill = ServerInfo(disaggregation_mode="prefill", disaggregation_bootstrap_port=8_998)
    >>> translate_meeting(prefill, host="10.0.0.5")
    ('10.0.0.5', 8998)
    """
    port = info.disaggregation_bootstrap_port
    if info.disaggregation_mode != "prefill" or port is None:
        return None
    return host, port


async def _ask_info(pool: HttpPool) -> ServerInfo:
    for path in INFO_PATHS:
        status, _, body = await pool.fetch("GET", path, timeout_s=INFO_TIMEOUT_S)
        if status == 200:
            try:
                return msgspec.json.decode(body, type=ServerInfo)
            except msgspec.MsgspecError as error:
                raise DriverError(f"{path} is not SGLang's: {error}") from error
    return ServerInfo()


async def _ask_vocab_size(pool: HttpPool) -> int | None:
    try:
        _, _, body = await pool.fetch(
            "POST",
            "/generate",
            headers=JSON_HEADERS,
            body=PROBE,
            timeout_s=watch.HEALTH_TIMEOUT_S,
        )
    except EngineUnreachableError:
        raise
    except DriverError:
        return None
    found = _VALID_RANGE.search(body)
    return None if found is None else int(found[1])
