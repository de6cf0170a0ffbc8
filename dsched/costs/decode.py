"""How long a decode step takes: tokens in the batch and KV tokens that they attend to.

    t = T0(B) + c·KV

T0 is a `StepCostCurve`: non-decreasing over the graph shapes, looked up at the shape that a batch
of B tokens is padded to. KV is summed over the requests of the batch. Both are fitted together,
and while in use the model learns a factor for each (`observe`, see `dsched.costs.online`).
"""

from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from dsched.costs.curve import StepCostCurve
from dsched.costs.kernels import curve_ns
from dsched.costs.nnls import nonnegative_least_squares
from dsched.costs.online import OnlineFactors, OnlineState
from dsched.costs.samples import (
    FitError,
    check_lengths,
    check_seconds,
    check_tiers,
    pad_to_tier,
    positive_seconds,
    whole_numbers,
)

NS = 1e9
PARTS = ("tokens", "kv")
"""Parts with a factor of their own."""
SMALLEST_SHARE = 0.01
"""Share of the shortest sample that a step costs at least without any KV."""


class DecodeState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `DecodeCostModel` as JSON."""

    curve: msgspec.Raw
    kv_token_ns: float
    online: OnlineState | None = None


class DecodeCostModel:
    """Seconds of a decode (or verify) step. Made by `fit`, `from_curve` or `from_json`.

    `observe` changes it in place.
    """

    def __init__(
        self, curve: StepCostCurve, kv_token_ns: float, *, online: OnlineFactors | None = None
    ) -> None:
        if not (np.isfinite(kv_token_ns) and kv_token_ns >= 0):
            raise ValueError(f"kv_token_ns is {kv_token_ns}; it must not be negative")
        self.curve = curve
        """T0 as fitted, without learned factors."""
        self._kv_token_ns = kv_token_ns
        self._parts = np.zeros(len(PARTS))
        self.online = OnlineFactors(len(PARTS)) if online is None else online
        self.coefficients = np.zeros(2)
        """[factor of T0, nanoseconds a KV token], changed in place by `observe`; for kernels."""
        self._apply_factors()

    @property
    def is_flat(self) -> bool:
        """The samples did not rise with the tokens: do not conclude that tokens are free."""
        return self.curve.is_flat

    @classmethod
    def from_curve(
        cls, curve: StepCostCurve, *, kv_token_s: float = 0.0, forgetting: float | None = None
    ) -> "DecodeCostModel":
        """Return the model of a known curve and the seconds that one KV token adds."""
        online = None if forgetting is None else OnlineFactors(len(PARTS), forgetting=forgetting)
        return cls(curve, kv_token_s * NS, online=online)

    @classmethod
    def fit(
        cls,
        num_tokens: ArrayLike,
        num_kv_tokens: ArrayLike,
        seconds: ArrayLike,
        *,
        tiers: Iterable[int] | None = None,
        forgetting: float | None = None,
    ) -> "DecodeCostModel":
        """Fit to measured decode steps, in least squares of the relative error.

        `num_tokens` [N] tokens in the batch >= 1, `num_kv_tokens` [N] KV tokens of the whole batch
        >= 0, `seconds` [N] positive. `tiers` are the captured graph shapes (default: the sampled
        token counts). Raises ValueError for impossible samples and for fewer than two tiers.
        """
        tokens = whole_numbers(num_tokens, "num_tokens", minimum=1)
        kv = whole_numbers(num_kv_tokens, "num_kv_tokens", minimum=0)
        times = positive_seconds(seconds)
        if check_lengths(num_tokens=tokens, num_kv_tokens=kv, seconds=times) < 2:
            raise ValueError(f"{len(tokens)} samples cannot make a model; two are needed")
        grid = None if tiers is None else list(tiers)
        padded = tokens if grid is None else pad_to_tier(tokens, check_tiers(grid))
        sampled = np.unique(padded)
        if len(sampled) < 2:
            raise ValueError(
                f"all {len(tokens)} samples fall into one tier ({sampled[0]} tokens); "
                "a model needs samples of at least two tiers"
            )
        # Column j rises at tier j: with no negative rise the tiers cannot decrease.
        rises = (padded[:, None] >= sampled[None, :]).astype(np.float64)
        columns = np.column_stack((rises, kv.astype(np.float64)))
        solution = nonnegative_least_squares(columns / times[:, None], np.ones(len(times)))
        t0 = np.cumsum(solution[:-1])
        if t0[0] <= 0:
            # KV alone explains the smallest steps: their time is then that of no KV at all.
            t0 = np.maximum(t0, float(times.min()) * SMALLEST_SHARE)
        curve = StepCostCurve.from_samples(sampled, t0, tiers=grid)
        return cls.from_curve(curve, kv_token_s=float(solution[-1]), forgetting=forgetting)

    def predict(self, num_tokens: int, num_kv_tokens: int) -> float:
        """Return the seconds of a step of `num_tokens` (>= 1) over `num_kv_tokens` in all."""
        if num_kv_tokens < 0:
            raise ValueError(f"num_kv_tokens is {num_kv_tokens}; it must not be negative")
        factor, kv_token_ns = self.coefficients
        seconds = self.curve.seconds(num_tokens) * factor + num_kv_tokens * kv_token_ns / NS
        return float(seconds)

    def observe(
        self, seconds: float, num_tokens: int, num_kv_tokens: int, *, other_seconds: float = 0.0
    ) -> None:
        """Learn from a measured step. `other_seconds` of it went into something else (prefill).

        Raises ValueError for a time that cannot be; what was learned stays.
        """
        check_seconds(seconds)
        if num_tokens < 1:
            raise ValueError(f"a step computes at least 1 token, not {num_tokens}")
        self._parts[0] = curve_ns(*self.curve.arrays(), num_tokens)
        self._parts[1] = num_kv_tokens * self._kv_token_ns
        self.learn(self._parts, (seconds - other_seconds) * NS)

    def learn(self, parts_ns: NDArray[np.float64], measured_ns: float) -> None:
        """`observe` for a caller that already has the parts [2] of the step, see `PARTS`."""
        if measured_ns > 0:
            self.online.observe(parts_ns, measured_ns)
            self._apply_factors()

    def error(
        self, num_tokens: ArrayLike, num_kv_tokens: ArrayLike, seconds: ArrayLike
    ) -> FitError:
        """Return how far the model is from measured steps."""
        tokens = whole_numbers(num_tokens, "num_tokens", minimum=1).tolist()
        kv = whole_numbers(num_kv_tokens, "num_kv_tokens", minimum=0).tolist()
        predicted = np.array([self.predict(b, k) for b, k in zip(tokens, kv, strict=True)])
        return FitError.of(predicted, positive_seconds(seconds))

    def to_json(self) -> str:
        """Return the model and all that it has learned."""
        state = DecodeState(
            curve=msgspec.Raw(self.curve.to_json().encode()),
            kv_token_ns=self._kv_token_ns,
            online=self.online.save(),
        )
        return msgspec.json.encode(state).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "DecodeCostModel":
        """Return the model that `to_json` wrote. Raises ValueError for anything else."""
        try:
            state = msgspec.json.decode(text, type=DecodeState)
        except msgspec.DecodeError as error:
            raise ValueError(f"decode cost model: {error}") from error
        online = None
        if state.online is not None:
            online = OnlineFactors.restore(state.online, num_factors=len(PARTS))
        return cls(StepCostCurve.from_json(bytes(state.curve)), state.kv_token_ns, online=online)

    def _apply_factors(self) -> None:
        self.coefficients[0] = self.online.factors[0]
        self.coefficients[1] = self.online.factors[1] * self._kv_token_ns
