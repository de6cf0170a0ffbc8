"""The simulated engine: D DP ranks that step together, as in wide expert parallelism.

Every layer of a wide-EP model exchanges tokens between all ranks, so no rank can run ahead: **a
step takes as long as its slowest rank**, and a rank without work waits in it. That is what makes
placement matter, and it is the one thing about engines that this simulator insists on.

Each rank batches continuously. In a step it computes one token for each of its decoding requests
(always: a delayed decode is a gap in a stream), then prefill chunks in order of admission, up to
`max_step_tokens` in all. Waiting requests are admitted in order of arrival while KV tokens and
`max_running_requests` allow. How KV is promised is a choice:

- `preempt`: a request holds the KV of the tokens it has. When the decodes of a rank do not fit,
  the youngest running request is preempted: its KV is freed, it goes to the head of the queue and
  later computes prompt and emitted tokens again (no token is emitted twice).
- `reserve`: a request holds prompt plus `max_tokens` from admission on, and nobody is preempted.

`SimEngine` knows no clock. `begin_step` returns how long the step takes, `complete_step` applies
it, and `take_output` hands out what was emitted since it was last called: several steps' tokens
at once if nobody needed to see them earlier. `SimDriver` puts it on a time line.

Decoding requests live in a struct of arrays (one row each), so a step costs some thirty numpy
calls whatever the number of ranks; only ranks with prefill work cost Python time of their own.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsched.drivers.base import FinishReason
from dsched.drivers.wire import GenerateCommand, SamplingParams, TokenLogprob
from dsched.errors import EngineRefusedError, InvariantError
from dsched.sim.model import SimModel
from dsched.sim.prefix import PrefixCache

INITIAL_ROWS = 64
"""Rows of the decode arrays at the start; they double when full."""


class StepCost(Protocol):
    """Step time [D] of each rank if it stepped alone, in ns, from the work [D] of each."""

    def step_ns(
        self,
        num_prefill_tokens: NDArray[np.int64],
        prefill_context_tokens: NDArray[np.int64],
        num_decode_requests: NDArray[np.int64],
        num_kv_tokens: NDArray[np.int64],
    ) -> NDArray[np.int64]: ...


class KvPolicy(StrEnum):
    """What a running request holds KV for."""

    PREEMPT = "preempt"
    RESERVE = "reserve"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimEngineConfig:
    """Size and rules of a simulated engine."""

    num_dp_ranks: int = 4
    kv_capacity_tokens: int = 1_048_576
    """KV tokens of one rank."""
    max_running_requests: int = 256
    """Of one rank."""
    max_step_tokens: int = 1_024
    """Decode and prefill tokens of one rank in one step. Above: a chunk delays every stream of
    the engine. Below: prompts take many steps."""
    max_model_len: int = 131_072
    """Tokens of prompt and output together; also limited by what one rank can hold."""
    kv_policy: KvPolicy = KvPolicy.PREEMPT
    prefix_cache_tokens: int = 0
    """Tokens of ended prompts that a rank remembers beside its KV tokens; 0 turns reuse off."""

    def __post_init__(self) -> None:
        for name in ("num_dp_ranks", "max_running_requests", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        if self.max_step_tokens <= self.max_running_requests:
            raise ValueError(
                f"max_step_tokens {self.max_step_tokens} must exceed max_running_requests "
                f"{self.max_running_requests}, or decodes leave no room for prefill"
            )
        if self.kv_capacity_tokens < 1:
            raise ValueError(f"kv_capacity_tokens {self.kv_capacity_tokens} must be at least 1")
        if self.prefix_cache_tokens < 0:
            raise ValueError(f"prefix_cache_tokens {self.prefix_cache_tokens} is negative")

    @property
    def max_request_tokens(self) -> int:
        """Longest prompt and output together: a request must fit a rank by itself."""
        return min(self.max_model_len, self.kv_capacity_tokens)


class SimAttempt:
    """One request inside the engine."""

    __slots__ = (
        "admitted_seq",
        "attempt_id",
        "chain",
        "finish",
        "first_end",
        "last_token",
        "logprob_chain",
        "max_output_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_held_tokens",
        "num_output_tokens",
        "num_prompt_tokens",
        "num_transferred_tokens",
        "output",
        "prompt_token_ids",
        "rank",
        "row",
        "salt",
        "sampling",
        "stop_token_id",
    )

    def __init__(
        self,
        command: GenerateCommand,
        *,
        chain: int,
        salt: int,
        first_end: int | None,
        max_output_tokens: int,
        num_transferred_tokens: int,
    ) -> None:
        self.attempt_id = command.attempt_id
        self.rank: int = command.dp_rank
        self.prompt_token_ids = command.prompt_token_ids
        self.sampling: SamplingParams = command.sampling
        self.chain = chain
        self.logprob_chain = chain
        self.salt = salt
        self.first_end = first_end
        """Output tokens from which on the model may end by itself; `None`: never."""
        self.last_token = command.prompt_token_ids[-1] if command.prompt_token_ids else 0
        self.num_prompt_tokens = len(command.prompt_token_ids)
        self.max_output_tokens = max_output_tokens
        self.num_output_tokens = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_transferred_tokens = num_transferred_tokens
        """Leading tokens whose KV another engine computed and that is here."""
        self.num_held_tokens = 0
        self.admitted_seq = -1
        self.row: int | None = None
        self.output: list[int] = []
        """Emitted, not yet taken."""
        self.finish: FinishReason | None = None
        self.stop_token_id: int | None = None

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose KV must exist before the next can be computed."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_pending_tokens(self) -> int:
        return self.num_known_tokens - self.num_computed_tokens


@dataclass(slots=True)
class _Chunk:
    attempt: SimAttempt
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankLoads:
    """Load of every rank [D], as reports carry it."""

    num_running: NDArray[np.int64]
    num_waiting: NDArray[np.int64]
    num_kv_tokens: NDArray[np.int64]
    """Computed; what is promised to prompts and reserved beyond is not in it."""
    num_waiting_prefill_tokens: NDArray[np.int64]


class SimEngine:
    """State of one engine; see the module's docstring. Not thread-safe."""

    def __init__(self, config: SimEngineConfig, model: SimModel, cost: StepCost) -> None:
        self.config = config
        self.model = model
        self._cost = cost
        ranks = config.num_dp_ranks
        self._attempts: dict[str, SimAttempt] = {}
        self._waiting: list[deque[SimAttempt]] = [deque() for _ in range(ranks)]
        self._prefilling: list[list[SimAttempt]] = [[] for _ in range(ranks)]
        self._prefill_ranks: set[int] = set()
        """Ranks with waiting or prefilling requests; always walked in sorted order."""
        self._caches = [PrefixCache(config.prefix_cache_tokens) for _ in range(ranks)]
        self._num_decoding = np.zeros(ranks, dtype=np.int64)
        self._num_prefilling = np.zeros(ranks, dtype=np.int64)
        self._num_waiting = np.zeros(ranks, dtype=np.int64)
        self._held = np.zeros(ranks, dtype=np.int64)
        self._decode_context = np.zeros(ranks, dtype=np.int64)
        self._pending_prefill = np.zeros(ranks, dtype=np.int64)
        self._computed_prefill = np.zeros(ranks, dtype=np.int64)
        self._rows: list[SimAttempt] = []
        self._chain = np.zeros(INITIAL_ROWS, dtype=np.uint64)
        self._salt = np.zeros(INITIAL_ROWS, dtype=np.uint64)
        self._last = np.zeros(INITIAL_ROWS, dtype=np.int32)
        self._left = np.zeros(INITIAL_ROWS, dtype=np.int64)
        self._may_end_at = np.zeros(INITIAL_ROWS, dtype=np.int64)
        """A row may end by itself once `_left` is at or below this."""
        self._with_stops: dict[str, SimAttempt] = {}
        """Rows with stop tokens; few, so they are looked at one by one."""
        self._unspilled: list[NDArray[np.int32]] = []
        """Tokens of the last steps, all with the rows that are there now."""
        self._fresh: dict[str, SimAttempt] = {}
        """Attempts with output or an end that nobody took yet, in order."""
        self._chunks: list[_Chunk] = []
        self._is_stepping = False
        self._admitted_count = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self.last_rank_ns = np.zeros(ranks, dtype=np.int64)
        """[D] what the last step would have taken on each rank alone."""
        self.last_decode_ns = np.zeros(ranks, dtype=np.int64)
        """[D] the same without its prefill chunks."""
        self.last_step_tokens = np.zeros(ranks, dtype=np.int64)
        """[D] tokens computed in the last step."""

    # --- requests --------------------------------------------------------------------------

    def submit(self, command: GenerateCommand, *, num_transferred_tokens: int = 0) -> None:
        """Put an attempt in the queue of its rank.

        `num_transferred_tokens`: leading tokens of the prompt whose KV came from another engine.

        Raises:
            EngineRefusedError: the rank does not exist, the prompt does not fit the model or
                holds a token outside the vocabulary, or the attempt id was used.
        """
        config = self.config
        if command.dp_rank >= config.num_dp_ranks:
            raise EngineRefusedError(
                400, f"DP rank {command.dp_rank} does not exist; ranks are 0..{len(self._held) - 1}"
            )
        if command.attempt_id in self._attempts:
            raise EngineRefusedError(409, f"attempt id {command.attempt_id!r} is in use")
        num_prompt = len(command.prompt_token_ids)
        if not 1 <= num_prompt < config.max_request_tokens:
            raise EngineRefusedError(
                400,
                f"a prompt of {num_prompt} tokens does not fit: the model takes 1 to "
                f"{config.max_request_tokens - 1} prompt tokens",
            )
        try:
            chain = self.model.prompt_chain(command.prompt_token_ids)
        except ValueError as error:
            raise EngineRefusedError(400, str(error)) from error
        attempt = SimAttempt(
            command,
            chain=chain,
            salt=self.model.salt(command.sampling),
            first_end=self._first_end(command),
            max_output_tokens=min(
                command.sampling.max_tokens, config.max_request_tokens - num_prompt
            ),
            num_transferred_tokens=num_transferred_tokens,
        )
        self._attempts[attempt.attempt_id] = attempt
        self._enqueue(attempt, at_head=False)

    def _first_end(self, command: GenerateCommand) -> int | None:
        if command.sampling.ignore_eos:
            return None
        first_end = self.model.first_end(command.prompt_token_ids)
        return None if first_end is None else max(first_end, command.sampling.min_tokens)

    def abort(self, attempt_id: str) -> bool:
        """Drop an attempt, its KV and its output that nobody took; `False` if it is not there."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return False
        self._spill()
        self._leave(attempt)
        del self._attempts[attempt_id]
        self._fresh.pop(attempt_id, None)
        return True

    def num_known_tokens(self, attempt_id: str) -> int | None:
        """Prompt and emitted tokens of an attempt that decodes; `None` for any other."""
        attempt = self._attempts.get(attempt_id)
        if attempt is None or attempt.row is None:
            return None
        self._spill()
        return attempt.num_known_tokens

    def clear(self) -> list[str]:
        """Lose everything, as a killed engine does; return the ids of what was there."""
        lost = list(self._attempts)
        for attempt_id in lost:
            self.abort(attempt_id)
        self._chunks.clear()
        self._is_stepping = False
        for cache in self._caches:
            cache.clear()
        return lost

    @property
    def is_idle(self) -> bool:
        """No attempt is waiting or running."""
        return not self._attempts

    @property
    def is_stepping(self) -> bool:
        return self._is_stepping

    # --- steps -----------------------------------------------------------------------------

    def begin_step(self) -> int | None:
        """Choose the work of the next step; return its duration in ns, `None` without work."""
        if self._is_stepping:
            raise InvariantError("begin_step during a step")
        if self.is_idle:
            return None
        self._preempt_to_fit()
        if self.config.kv_policy is KvPolicy.PREEMPT:
            self._held += self._num_decoding
        num_prefill = np.zeros_like(self._held)
        prefill_context = np.zeros_like(self._held)
        for rank in sorted(self._prefill_ranks):
            budget = self.config.max_step_tokens - int(self._num_decoding[rank])
            for chunk in self._plan_chunks(rank, budget):
                before = chunk.attempt.num_computed_tokens
                num_prefill[rank] += chunk.num_tokens
                prefill_context[rank] += chunk.num_tokens * (before + chunk.num_tokens // 2)
                self._chunks.append(chunk)
        num_decodes, num_kv = self._num_decoding, self._decode_context + self._num_decoding
        nothing = np.zeros_like(self._held)
        self.last_decode_ns = self._cost.step_ns(nothing, nothing, num_decodes, num_kv)
        self.last_rank_ns = self.last_decode_ns
        if self._chunks:
            self.last_rank_ns = self._cost.step_ns(
                num_prefill, prefill_context, num_decodes, num_kv
            )
        self.last_step_tokens = num_prefill + self._num_decoding
        if not self.last_step_tokens.any():
            raise InvariantError("attempts are there, but no rank can work on any")
        self._is_stepping = True
        return int(self.last_rank_ns.max())

    def complete_step(self) -> bool:
        """Apply the step; return whether an attempt got its first token or ended."""
        if not self._is_stepping:
            raise InvariantError("complete_step without a step")
        self._is_stepping = False
        self.num_steps += 1
        self._decode_context += self._num_decoding
        has_news = self._complete_chunks()
        if not self._rows:
            return has_news
        return self._emit() or has_news

    def take_output(self) -> Iterator[SimAttempt]:
        """Hand out the attempts with output since the last call, oldest news first.

        The caller empties `output` (or calls `take_logprobs`); `finish` says how it ended.
        """
        self._spill()
        fresh = self._fresh
        self._fresh = {}
        yield from fresh.values()

    def take_logprobs(self, attempt: SimAttempt) -> list[TokenLogprob]:
        """Log-probabilities of the tokens in `attempt.output`, in order."""
        found = []
        for token in attempt.output:
            attempt.logprob_chain, logprob = self.model.logprob(
                attempt.logprob_chain, token, attempt.sampling.logprobs or 0
            )
            found.append(logprob)
        return found

    def loads(self) -> RankLoads:
        return RankLoads(
            num_running=self._num_decoding + self._num_prefilling,
            num_waiting=self._num_waiting.copy(),
            num_kv_tokens=self._decode_context + self._computed_prefill,
            num_waiting_prefill_tokens=self._pending_prefill.copy(),
        )

    # --- queue -----------------------------------------------------------------------------

    def _enqueue(self, attempt: SimAttempt, *, at_head: bool) -> None:
        queue = self._waiting[attempt.rank]
        if at_head:
            queue.appendleft(attempt)
        else:
            queue.append(attempt)
        self._num_waiting[attempt.rank] += 1
        self._pending_prefill[attempt.rank] += attempt.num_pending_tokens
        self._prefill_ranks.add(attempt.rank)

    def _plan_chunks(self, rank: int, budget: int) -> Iterator[_Chunk]:
        """Chunks of the requests in prefill, then of newly admitted ones, within `budget`."""
        for attempt in self._prefilling[rank]:
            if budget == 0:
                return
            num_tokens = min(budget, attempt.num_pending_tokens)
            budget -= num_tokens
            yield _Chunk(attempt, num_tokens)
        queue = self._waiting[rank]
        while budget and queue and self._fits(queue[0]):
            attempt = queue.popleft()
            self._admit(attempt)
            num_tokens = min(budget, attempt.num_pending_tokens)
            budget -= num_tokens
            yield _Chunk(attempt, num_tokens)

    def _need(self, attempt: SimAttempt) -> int:
        if self.config.kv_policy is KvPolicy.RESERVE:
            return attempt.num_prompt_tokens + attempt.max_output_tokens
        return attempt.num_known_tokens

    def _fits(self, attempt: SimAttempt) -> bool:
        rank, config = attempt.rank, self.config
        num_running = self._num_decoding[rank] + self._num_prefilling[rank]
        if num_running >= config.max_running_requests:
            return False
        return bool(self._held[rank] + self._need(attempt) <= config.kv_capacity_tokens)

    def _admit(self, attempt: SimAttempt) -> None:
        rank = attempt.rank
        self._num_waiting[rank] -= 1
        self._num_prefilling[rank] += 1
        attempt.num_held_tokens = self._need(attempt)
        self._held[rank] += attempt.num_held_tokens
        attempt.admitted_seq = self._admitted_count
        self._admitted_count += 1
        self._prefilling[rank].append(attempt)
        # The last token is always computed: its result is the first output token.
        cached = min(
            max(
                self._caches[rank].num_cached_tokens(attempt.prompt_token_ids),
                attempt.num_transferred_tokens,
            ),
            attempt.num_known_tokens - 1,
        )
        attempt.num_computed_tokens = cached
        if attempt.num_output_tokens == 0:
            attempt.num_cached_tokens = cached
        self._pending_prefill[rank] -= cached
        self._computed_prefill[rank] += cached

    def _preempt_to_fit(self) -> None:
        """Take the youngest requests out of ranks whose decodes would not fit."""
        if self.config.kv_policy is KvPolicy.RESERVE:
            return
        over = self._held + self._num_decoding > self.config.kv_capacity_tokens
        if not over.any():
            return
        self._spill()
        for rank in np.flatnonzero(over).tolist():
            running = self._prefilling[rank] + [row for row in self._rows if row.rank == rank]
            running.sort(key=lambda attempt: attempt.admitted_seq)
            while self._held[rank] + self._num_decoding[rank] > self.config.kv_capacity_tokens:
                youngest = running.pop()
                self._leave(youngest)
                youngest.num_computed_tokens = youngest.num_transferred_tokens = 0
                self._enqueue(youngest, at_head=True)
                self.num_preemptions += 1

    def _leave(self, attempt: SimAttempt) -> None:
        """Take an attempt out of its queue or batch and free its KV. Rows must be spilled."""
        rank = attempt.rank
        if attempt.row is not None:
            attempt.num_held_tokens = self._held_by_row(attempt)
            self._decode_context[rank] -= attempt.num_known_tokens - 1
            self._num_decoding[rank] -= 1
            self._remove_row(attempt)
        elif attempt.admitted_seq >= 0:
            self._prefilling[rank].remove(attempt)
            self._num_prefilling[rank] -= 1
            self._computed_prefill[rank] -= attempt.num_computed_tokens
            self._pending_prefill[rank] -= attempt.num_pending_tokens
            self._chunks = [chunk for chunk in self._chunks if chunk.attempt is not attempt]
        else:
            self._waiting[rank].remove(attempt)
            self._num_waiting[rank] -= 1
            self._pending_prefill[rank] -= attempt.num_pending_tokens
        self._held[rank] -= attempt.num_held_tokens
        attempt.num_held_tokens = 0
        attempt.admitted_seq = -1
        self._forget_prefill(rank)

    def _forget_prefill(self, rank: int) -> None:
        if not self._waiting[rank] and not self._prefilling[rank]:
            self._prefill_ranks.discard(rank)

    def _held_by_row(self, attempt: SimAttempt) -> int:
        """KV tokens of a decoding attempt; during a step that of the token in the making too."""
        if self.config.kv_policy is KvPolicy.RESERVE:
            return attempt.num_held_tokens
        return attempt.num_known_tokens - 1 + self._is_stepping

    # --- tokens ----------------------------------------------------------------------------

    def _complete_chunks(self) -> bool:
        """Apply prefill chunks; return whether a prompt was completed and joined the rows."""
        chunks, self._chunks = self._chunks, []
        has_joined = False
        for chunk in chunks:
            attempt, rank = chunk.attempt, chunk.attempt.rank
            attempt.num_computed_tokens += chunk.num_tokens
            self._pending_prefill[rank] -= chunk.num_tokens
            self._computed_prefill[rank] += chunk.num_tokens
            if attempt.num_pending_tokens:
                continue
            if not has_joined:
                self._spill()
                has_joined = True
            self._caches[rank].remember(attempt.prompt_token_ids)
            self._prefilling[rank].remove(attempt)
            self._num_prefilling[rank] -= 1
            self._forget_prefill(rank)
            self._num_decoding[rank] += 1
            self._decode_context[rank] += attempt.num_known_tokens
            self._computed_prefill[rank] -= attempt.num_known_tokens
            self._add_row(attempt)
        return has_joined

    def _emit(self) -> bool:
        """One token for every row; return whether a request ended."""
        n = len(self._rows)
        chain, last = self._chain[:n], self._last[:n]
        tokens = self.model.next_tokens(chain, self._salt[:n], last)
        stops = self._find_stops(tokens)
        self._chain[:n] = self.model.absorb(chain, tokens)
        self._last[:n] = tokens
        self._left[:n] -= 1
        self._unspilled.append(tokens)
        ended = np.flatnonzero(self._left[:n] == 0).tolist()
        if stops:
            ended = sorted({*ended, *stops})
        if not ended:
            return False
        self._spill()
        # From the last row down: removal fills the gap with the last row.
        for row in reversed(ended):
            attempt = self._rows[row]
            self._leave(attempt)
            if row in stops:
                attempt.output.pop()
                attempt.num_output_tokens -= 1
                attempt.stop_token_id = stops[row]
            attempt.finish = FinishReason.STOP if row in stops else FinishReason.LENGTH
            del self._attempts[attempt.attempt_id]
        return True

    def _find_stops(self, tokens: NDArray[np.int32]) -> dict[int, int]:
        """Rows that end before `tokens`, each with the token that ends it."""
        stops: dict[int, int] = {}
        n = len(tokens)
        for attempt in self._with_stops.values():
            row = attempt.row
            assert row is not None
            token = int(tokens[row])
            has_minimum = self._left[row] <= _left_at_minimum(attempt)
            if has_minimum and token in attempt.sampling.stop_token_ids:
                stops[row] = token
        eos = self.model.eos_token_id
        if eos is not None:
            ends = self.model.ends(self._chain[:n], self._salt[:n], self._last[:n])
            ends &= self._left[:n] <= self._may_end_at[:n]
            stops.update((row, eos) for row in np.flatnonzero(ends).tolist())
        return stops

    def _spill(self) -> None:
        """Move the tokens of the last steps to their attempts, before rows change or are read."""
        if not self._unspilled:
            return
        columns = np.stack(self._unspilled, axis=1).tolist()
        num_steps = len(self._unspilled)
        self._unspilled.clear()
        for attempt, tokens in zip(self._rows, columns, strict=True):
            attempt.output += tokens
            attempt.num_output_tokens += num_steps
            self._fresh[attempt.attempt_id] = attempt

    def _add_row(self, attempt: SimAttempt) -> None:
        row = len(self._rows)
        if row == len(self._chain):
            for name in ("_chain", "_salt", "_last", "_left", "_may_end_at"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate((array, np.zeros_like(array))))
        self._rows.append(attempt)
        attempt.row = row
        self._chain[row] = attempt.chain
        self._salt[row] = attempt.salt
        self._last[row] = attempt.last_token
        self._left[row] = attempt.max_output_tokens - attempt.num_output_tokens
        first_end = attempt.first_end
        self._may_end_at[row] = -1 if first_end is None else attempt.max_output_tokens - first_end
        if attempt.sampling.stop_token_ids:
            self._with_stops[attempt.attempt_id] = attempt

    def _remove_row(self, attempt: SimAttempt) -> None:
        row, moved = attempt.row, self._rows.pop()
        assert row is not None
        attempt.chain = int(self._chain[row])
        attempt.last_token = int(self._last[row])
        attempt.row = None
        self._with_stops.pop(attempt.attempt_id, None)
        if moved is not attempt:
            source = len(self._rows)
            self._rows[row] = moved
            moved.row = row
            for array in (self._chain, self._salt, self._last, self._left, self._may_end_at):
                array[row] = array[source]

    # --- checks ----------------------------------------------------------------------------

    def validate(self) -> None:
        """Count everything again from the attempts. O(attempts + ranks)."""
        self._spill()
        ranks = range(self.config.num_dp_ranks)
        held = np.zeros_like(self._held)
        context = np.zeros_like(self._held)
        pending = np.zeros_like(self._held)
        computed = np.zeros_like(self._held)
        for attempt in self._attempts.values():
            if attempt.row is not None:
                held[attempt.rank] += self._held_by_row(attempt)
                context[attempt.rank] += attempt.num_known_tokens - 1
            else:
                held[attempt.rank] += attempt.num_held_tokens
                pending[attempt.rank] += attempt.num_pending_tokens
                computed[attempt.rank] += attempt.num_computed_tokens
        found = {
            "held": (held, self._held),
            "context": (context, self._decode_context),
            "computed": (computed, self._computed_prefill),
            "pending": (pending, self._pending_prefill),
            "decoding": (
                np.bincount([row.rank for row in self._rows], minlength=len(held)),
                self._num_decoding,
            ),
            "prefilling": (
                np.array([len(self._prefilling[rank]) for rank in ranks]),
                self._num_prefilling,
            ),
            "waiting": (np.array([len(self._waiting[rank]) for rank in ranks]), self._num_waiting),
        }
        for name, (counted, kept) in found.items():
            if not np.array_equal(counted, kept):
                raise InvariantError(f"{name}: counted {counted.tolist()}, kept {kept.tolist()}")
        if (self._held > self.config.kv_capacity_tokens).any():
            raise InvariantError(
                f"KV tokens {self._held.max()} exceed {self.config.kv_capacity_tokens}"
            )
        busy = {rank for rank in ranks if self._waiting[rank] or self._prefilling[rank]}
        if busy != self._prefill_ranks:
            raise InvariantError(f"prefill ranks {self._prefill_ranks}, counted {busy}")


def _left_at_minimum(attempt: SimAttempt) -> int:
    """Output tokens still allowed when `min_tokens` are out."""
    return attempt.max_output_tokens - attempt.sampling.min_tokens
