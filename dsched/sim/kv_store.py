"""KV that simulated prefill engines keep for decode engines, and the links it moves over.

In:  prompts that were computed; what a decode engine was told to fetch. Out: when their KV is
there, or that it is gone.

Each engine has one link in, which carries one transfer after the other at full speed: a transfer
ends `tokens * bytes / bandwidth` after the later of now and the end of the one before it. Fetched
KV is forgotten, like what an engine frees when its peer says that it has it.

State: mutable, one for all simulated engines of a process. Time is an argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsched.ids import EngineId

NS_PER_S = 1_000_000_000
KEY = "sim_kv"
"""Field of `AttemptFinish.kv_transfer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLinkConfig:
    """How fast KV moves between engines. Assumed figures, see docs/routing.md."""

    token_bytes: int = 70_000
    link_bytes_per_s: float = 50e9
    latency_ns: int = 1_000_000
    """Of each transfer, before its first byte."""

    def __post_init__(self) -> None:
        if self.token_bytes < 0 or self.latency_ns < 0 or not self.link_bytes_per_s > 0:
            raise ValueError(
                f"token_bytes {self.token_bytes} and latency_ns {self.latency_ns} must not be "
                f"negative, and link_bytes_per_s {self.link_bytes_per_s} must be positive"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFetch:
    """KV on its way."""

    num_tokens: int
    ready_ns: int
    """When all of it is there."""


@dataclass(frozen=True, slots=True)
class _Kept:
    engine_id: EngineId
    num_tokens: int
    prompt_token_ids: tuple[int, ...] | None
    """`None` for a request that was moved: nobody here knows its tokens, but their number."""

    def is_of(self, prompt_token_ids: tuple[int, ...]) -> bool:
        if self.prompt_token_ids is None:
            return len(prompt_token_ids) == self.num_tokens
        return prompt_token_ids == self.prompt_token_ids


class SimKvStore:
    """KV that waits, by number.

    >>> store = SimKvStore()
    >>> told = store.keep(EngineId("p"), (1, 2, 3))
    >>> store.fetch(told, (1, 2, 3), to=EngineId("d"), now_ns=0)
    KvFetch(num_tokens=3, ready_ns=1004200)
    >>> store.fetch(told, (1, 2, 3), to=EngineId("d"), now_ns=0) is None
    True
    """

    def __init__(self, config: KvLinkConfig | None = None) -> None:
        self._config = config or KvLinkConfig()
        self._kept: dict[int, _Kept] = {}
        self._count = 0
        self._link_free_ns: dict[EngineId, int] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, engine_id: EngineId, prompt_token_ids: tuple[int, ...]) -> dict[str, Any]:
        """Keep the KV of a prompt; return what its decode engine has to be told."""
        return self._keep(_Kept(engine_id, len(prompt_token_ids), prompt_token_ids))

    def keep_moved(self, engine_id: EngineId, num_tokens: int) -> dict[str, Any]:
        """Keep the KV of a request that moves, with that many tokens of prompt and answer."""
        return self._keep(_Kept(engine_id, num_tokens, None))

    def _keep(self, kept: _Kept) -> dict[str, Any]:
        self._count += 1
        self._kept[self._count] = kept
        return {KEY: self._count}

    def fetch(
        self,
        told: Mapping[str, Any],
        prompt_token_ids: tuple[int, ...],
        *,
        to: EngineId,
        now_ns: int,
    ) -> KvFetch | None:
        """Begin to move KV to an engine; `None` if it is gone or belongs to another prompt."""
        kept = self._kept.pop(told.get(KEY, 0), None)
        if kept is None or not kept.is_of(prompt_token_ids):
            return None
        num_tokens = len(prompt_token_ids)
        ready_ns = self.move(num_tokens, to=to, now_ns=now_ns)
        return KvFetch(num_tokens=num_tokens, ready_ns=ready_ns)

    def move(self, num_tokens: int, *, to: EngineId, now_ns: int) -> int:
        """Put a transfer on an engine's link; return when it ends."""
        config = self._config
        start_ns = max(now_ns, self._link_free_ns.get(to, 0))
        bytes_ns = round(num_tokens * config.token_bytes / config.link_bytes_per_s * NS_PER_S)
        end_ns = start_ns + config.latency_ns + bytes_ns
        self._link_free_ns[to] = end_ns
        return end_ns

    def forget_engine(self, engine_id: EngineId) -> None:
        """The engine died with all that it kept."""
        self._kept = {
            number: kept for number, kept in self._kept.items() if kept.engine_id != engine_id
        }

    def clear(self) -> None:
        """Everything that waits has expired."""
        self._kept.clear()
