"""How long a step of prefill chunks takes.

For a chunk of x tokens after P computed ones

    t = T0(X) + c·x·(P + x/2) + γ·P + Σ_h c_h·max(x, h)·P + d·Σ_i min(P + i, k) + e·[P + x > k]

summed over the chunks of the step, with T0 of all X tokens of the step counted once. T0 is
`a + b·X`, or a non-decreasing table where samples allow. c·x·(P + x/2) is dense attention; γ and
c_h are its floors (the context is read at least once, and in tiles of h queries); d and e are
sparse attention over the best k tokens. Nothing is negative.

The chunk that a time budget buys is the inverse in x, which is a quadratic between breakpoints.
Sources: SGLang's dynamic chunking (quadratic in the length, no context term), vLLM-Ascend's
profiling chunks; the tile and top-k terms are read off measured attention kernels.

While in use the model learns a factor for each part (`observe`, see `dsched.costs.online`).
"""

from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from dsched.costs import kernels
from dsched.costs.affine import AffineStepCost
from dsched.costs.online import OnlineFactors, OnlineState
from dsched.costs.prefill_fit import (
    NS,
    PrefillArrays,
    check_arrays,
    choose_knots,
    fit_arrays,
    has_enough_samples,
    price_free_tokens,
)
from dsched.costs.samples import (
    FitError,
    check_lengths,
    check_seconds,
    positive_seconds,
    whole_numbers,
)

MAX_CHUNK_TOKENS = 1 << 22
"""Largest chunk that `max_chunk` looks for: above any model's context."""
PARTS = ("fixed", "tokens", "attention", "topk")
"""Parts with a factor of their own."""

_DENSE = slice(kernels.ATTENTION, kernels.TOPK)
_SPARSE = slice(kernels.TOPK, kernels.TOPK_TOKENS)


class PrefillState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `PrefillCostModel` as JSON."""

    knot_tokens: list[float]
    knot_ns: list[float]
    coefficients: list[float]
    is_flat: bool = False
    has_context_samples: bool = True
    online: OnlineState | None = None


class PrefillCostModel:
    """Seconds of a step of prefill chunks, and the chunk that a time buys.

    Made by `fit`, `from_coefficients` or `from_json`. `observe` changes it in place.
    """

    def __init__(
        self,
        base: PrefillArrays,
        *,
        is_flat: bool = False,
        has_context_samples: bool = True,
        online: OnlineFactors | None = None,
    ) -> None:
        check_arrays(base)
        self.base = base
        """The model as fitted, without learned factors."""
        self._parts = np.zeros(len(PARTS))
        self.online = OnlineFactors(len(PARTS)) if online is None else online
        self.is_flat = is_flat
        """The samples did not rise with the tokens; the price of a token is a guess, and high."""
        self.has_context_samples = has_context_samples
        """Samples with different contexts were fitted; otherwise the price of context comes from
        the curvature in the chunk alone."""
        self.arrays = base.copy()
        """The model with its learned factors, for kernels. The arrays stay the same objects."""
        self._apply_factors()

    @classmethod
    def from_coefficients(
        cls,
        *,
        fixed_s: float,
        token_s: float,
        attention_s: float,
        topk_s: float = 0.0,
        topk_tokens: int | None = None,
        forgetting: float | None = None,
    ) -> "PrefillCostModel":
        """Return `t = a + b·x + c·x·(P + x/2)`, with `d·Σ min(P + i, k)` if `topk_tokens` is k.

        All in seconds and not negative; `token_s` (b) positive: no token is free.

        >>> v4_flash = PrefillCostModel.from_coefficients(
        ...     fixed_s=16.6e-3, token_s=83.6e-6, attention_s=1.67e-10
        ... )
        >>> round(v4_flash.predict(2048, 131_072) * 1e3, 3)
        232.992
        >>> v4_flash.max_chunk(0.2, 131_072), v4_flash.max_chunk(0.2, 131_072, alignment=1)
        (1728, 1736)
        """
        base = PrefillArrays(
            knot_tokens=np.zeros(1), knot_ns=np.array([fixed_s * NS], dtype=np.float64)
        )
        base.coefficients[kernels.SLOPE] = token_s * NS
        base.coefficients[kernels.ATTENTION] = attention_s * NS
        base.coefficients[kernels.TOPK] = topk_s * NS
        base.coefficients[kernels.TOPK_TOKENS] = 0 if topk_tokens is None else topk_tokens
        online = None if forgetting is None else OnlineFactors(len(PARTS), forgetting=forgetting)
        return cls(base, online=online)

    @classmethod
    def from_affine(cls, cost: AffineStepCost) -> "PrefillCostModel":
        """Return what a simulated engine of that cost does; a token costs at least a nanosecond."""
        return cls.from_coefficients(
            fixed_s=cost.base_ns / NS,
            token_s=max(cost.per_prefill_token_ns, 1.0) / NS,
            attention_s=cost.per_prefill_context_ns / NS,
        )

    @classmethod
    def fit(
        cls,
        num_tokens: ArrayLike,
        num_past_tokens: ArrayLike,
        seconds: ArrayLike,
        *,
        topk_tokens: int | None = None,
        use_table: bool | None = None,
        forgetting: float | None = None,
    ) -> "PrefillCostModel":
        """Fit to measured steps of one chunk each, in least squares of the relative error.

        `num_tokens` [N] chunk sizes >= 1, `num_past_tokens` [N] context >= 0, `seconds` [N]
        positive. `topk_tokens` is k of a model with sparse attention. The table T0 is used when
        samples allow, or as `use_table` says; without different contexts it never is, since the
        bend of the table and that of attention cannot be told apart.

        Raises ValueError for impossible samples and for fewer than two chunk sizes.
        """
        tokens = whole_numbers(num_tokens, "num_tokens", minimum=1)
        past = whole_numbers(num_past_tokens, "num_past_tokens", minimum=0)
        times = positive_seconds(seconds)
        check_lengths(num_tokens=tokens, num_past_tokens=past, seconds=times)
        num_sizes = len(np.unique(tokens))
        if num_sizes < 2:
            raise ValueError(
                f"{len(tokens)} samples of {num_sizes} chunk sizes cannot price a token; "
                "two sizes are needed"
            )
        has_context = len(np.unique(past)) > 1
        knots = choose_knots(tokens, is_table=has_context and use_table is not False)
        if use_table is None and not has_enough_samples(len(tokens), len(knots)):
            knots = knots[:0]
        base = fit_arrays(tokens, past, times, knots, topk_tokens or 0, has_context=has_context)
        is_flat = price_free_tokens(base, int(tokens.max()))
        online = None if forgetting is None else OnlineFactors(len(PARTS), forgetting=forgetting)
        return cls(base, is_flat=is_flat, has_context_samples=has_context, online=online)

    def predict(
        self, num_tokens: int | Sequence[int], num_past_tokens: int | Sequence[int]
    ) -> float:
        """Return the seconds of one step: one chunk, or lists with one entry a chunk."""
        arrays = self.arrays
        chunks, pasts = _chunk_lists(num_tokens, num_past_tokens)
        ns = kernels.tokens_ns(
            arrays.knot_tokens,
            arrays.knot_ns,
            arrays.coefficients[kernels.SLOPE],
            float(sum(chunks)),
        )
        for chunk, past in zip(chunks, pasts, strict=True):
            ns += kernels.attention_ns(arrays.coefficients, float(past), float(chunk))
        return float(ns) / NS

    def max_chunk(
        self,
        budget_seconds: float,
        num_past_tokens: int,
        *,
        num_remaining_tokens: int | None = None,
        alignment: int = 64,
    ) -> int:
        """Return the largest chunk after `num_past_tokens` whose step fits the budget; maybe 0.

        Rounded down to `alignment` tokens, unless it is the last chunk (`num_remaining_tokens`).
        """
        if alignment < 1:
            raise ValueError(f"alignment is {alignment}; it must be at least 1 token")
        if not budget_seconds >= 0:
            raise ValueError(f"budget_seconds is {budget_seconds}; it must not be negative")
        limit = MAX_CHUNK_TOKENS if num_remaining_tokens is None else num_remaining_tokens
        if num_past_tokens < 0 or limit < 0:
            raise ValueError(f"{limit} tokens after {num_past_tokens} cannot be computed")
        arrays = self.arrays
        chunk = kernels.largest_chunk(
            arrays.knot_tokens,
            arrays.knot_ns,
            arrays.coefficients,
            0.0,
            float(num_past_tokens),
            limit,
            budget_seconds * NS - arrays.knot_ns[0],
        )
        if num_remaining_tokens is not None and chunk == num_remaining_tokens:
            return int(chunk)
        return int(chunk) // alignment * alignment

    def observe(
        self,
        seconds: float,
        num_tokens: int | Sequence[int],
        num_past_tokens: int | Sequence[int],
        *,
        other_seconds: float = 0.0,
    ) -> None:
        """Learn from a measured step. `other_seconds` of it went into something else (decodes).

        Raises ValueError for a time that cannot be; what was learned stays.
        """
        check_seconds(seconds)
        chunks, pasts = _chunk_lists(num_tokens, num_past_tokens)
        kernels.step_parts(
            self.base.knot_tokens,
            self.base.knot_ns,
            self.base.coefficients,
            np.asarray(chunks, dtype=np.int64),
            np.asarray(pasts, dtype=np.int64),
            0,
            self._parts,
        )
        self.learn(self._parts, (seconds - other_seconds) * NS)

    def learn(self, parts_ns: NDArray[np.float64], measured_ns: float) -> None:
        """`observe` for a caller that already has the parts [4] of the step, see `PARTS`."""
        if measured_ns > 0:
            self.online.observe(parts_ns, measured_ns)
            self._apply_factors()

    def error(
        self, num_tokens: ArrayLike, num_past_tokens: ArrayLike, seconds: ArrayLike
    ) -> FitError:
        """Return how far the model is from measured steps of one chunk each."""
        tokens = whole_numbers(num_tokens, "num_tokens", minimum=1).tolist()
        past = whole_numbers(num_past_tokens, "num_past_tokens", minimum=0).tolist()
        predicted = np.array([self.predict(x, p) for x, p in zip(tokens, past, strict=True)])
        return FitError.of(predicted, positive_seconds(seconds))

    def to_json(self) -> str:
        """Return the model and all that it has learned."""
        state = PrefillState(
            knot_tokens=self.base.knot_tokens.tolist(),
            knot_ns=self.base.knot_ns.tolist(),
            coefficients=self.base.coefficients.tolist(),
            is_flat=self.is_flat,
            has_context_samples=self.has_context_samples,
            online=self.online.save(),
        )
        return msgspec.json.encode(state).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "PrefillCostModel":
        """Return the model that `to_json` wrote. Raises ValueError for anything else."""
        try:
            state = msgspec.json.decode(text, type=PrefillState)
        except msgspec.DecodeError as error:
            raise ValueError(f"prefill cost model: {error}") from error
        base = PrefillArrays(
            knot_tokens=np.array(state.knot_tokens, dtype=np.float64),
            knot_ns=np.array(state.knot_ns, dtype=np.float64),
            coefficients=np.array(state.coefficients, dtype=np.float64),
        )
        online = None
        if state.online is not None:
            online = OnlineFactors.restore(state.online, num_factors=len(PARTS))
        return cls(
            base,
            is_flat=state.is_flat,
            has_context_samples=state.has_context_samples,
            online=online,
        )

    def _apply_factors(self) -> None:
        """Write base times factor into the arrays that kernels read."""
        fixed, tokens, attention, topk = self.online.factors
        base, arrays = self.base, self.arrays
        knot_ns = arrays.knot_ns
        np.subtract(base.knot_ns, base.knot_ns[0], out=knot_ns)
        knot_ns *= tokens
        knot_ns += base.knot_ns[0] * fixed
        arrays.coefficients[kernels.SLOPE] = base.coefficients[kernels.SLOPE] * tokens
        np.multiply(base.coefficients[_DENSE], attention, out=arrays.coefficients[_DENSE])
        np.multiply(base.coefficients[_SPARSE], topk, out=arrays.coefficients[_SPARSE])


def _chunk_lists(
    num_tokens: int | Sequence[int], num_past_tokens: int | Sequence[int]
) -> tuple[Sequence[int], Sequence[int]]:
    if np.ndim(num_tokens) == 0 and np.ndim(num_past_tokens) == 0:
        chunks: Sequence[int] = (cast("int", num_tokens),)
        pasts: Sequence[int] = (cast("int", num_past_tokens),)
    else:
        chunks = whole_numbers(num_tokens, "num_tokens", minimum=1).tolist()
        pasts = whole_numbers(num_past_tokens, "num_past_tokens", minimum=0).tolist()
    if len(chunks) != len(pasts):
        raise ValueError(f"{len(chunks)} chunks have {len(pasts)} contexts")
    for chunk, past in zip(chunks, pasts, strict=True):
        if chunk < 1 or past < 0:
            raise ValueError(f"a chunk of {chunk} tokens after {past} cannot be computed")
    return chunks, pasts
