"""Make confidences mean what they say: of tokens with confidence .8, eight in ten are accepted.

Confidence heads are sure of themselves. The planner multiplies confidences into survivals, so
their errors multiply too. Two cures:

- offline, `fit_temperatures`: sequential temperature scaling (DSpark, §3.2.1). Position by
  position, one temperature T_k in sigmoid(logit(c) / T_k) is chosen that makes the *product* up to
  k least wrong, with the earlier ones frozen. Reads and writes the JSON files of SGLang and
  TensorRT-LLM.
- online, `OnlineCalibration`: the same form plus a shift, sigmoid(s_k * logit(c) + b_k), followed
  through accept and reject outcomes by a Newton step on the likelihood with forgetting.

Only verified tokens are observations. Which tokens are verified depends on their confidences, and
calibration is about outcomes given the confidence, so trimming hides tokens but does not bias what
is learned. (Counting a token as lost because one before it was rejected, although it was not
verified itself, would: the kept ones of its kind are hidden.)
"""

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from dsched.jit import kernel
from dsched.spec_decode.statistics import check_outcomes

NUM_BINS = 15
"""Bins of the expected calibration error, as DSpark's evaluation and SGLang use them."""

TEMPERATURES = np.logspace(-1.0, 1.0, 41)
"""Temperatures that are tried."""
TEMPERATURES.flags.writeable = False

MAX_LOGIT = 12.0
"""Confidences are kept this far from 0 and 1: a certain token would never be corrected."""


def expected_calibration_error(
    predicted: ArrayLike, outcome: ArrayLike, *, num_bins: int = NUM_BINS
) -> float:
    """Return the mean distance between prediction and frequency over equal-width bins.

    `predicted` in [0, 1] and `outcome` (0 or 1) of one shape. 0 for no observation.

    >>> expected_calibration_error([0.9, 0.9, 0.1, 0.1], [1, 1, 0, 0])
    0.09999999999999999
    """
    p, y = _as_pairs(predicted, outcome)
    if not p.size:
        return 0.0
    bins = np.minimum((p * num_bins).astype(np.int64), num_bins - 1)
    error = np.bincount(bins, weights=p - y, minlength=num_bins)
    return float(np.abs(error).sum() / p.size)


def brier_score(predicted: ArrayLike, outcome: ArrayLike) -> float:
    """Return the mean squared distance of prediction and outcome; 0 for no observation."""
    p, y = _as_pairs(predicted, outcome)
    return float(np.mean((p - y) ** 2)) if p.size else 0.0


class Temperatures(msgspec.Struct, frozen=True, kw_only=True):
    """Sequential temperature scaling: what the JSON files of SGLang and TensorRT-LLM hold."""

    temperatures: tuple[float, ...]
    """[K] divisors of the logits; above 1 makes confidences humbler."""
    dataset: str = ""
    num_samples: int = 0
    """Draft blocks they were fitted on."""
    ece_before: tuple[float, ...] = ()
    """[K] expected calibration error of the product up to each position, uncalibrated."""
    ece_after: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ValueError("temperatures is empty; one a draft position is needed")
        for value in self.temperatures:
            if not (np.isfinite(value) and value > 0.0):
                raise ValueError(f"temperature {value} is not positive")

    def apply(self, confidence: ArrayLike) -> NDArray[np.float64]:
        """Return calibrated confidences. `confidence` [..., K] in [0, 1].

        >>> Temperatures(temperatures=(1.0, 2.0)).apply([0.8, 0.8]).round(3).tolist()
        [0.8, 0.667]
        """
        values = _as_confidence(confidence)
        if values.ndim == 0 or values.shape[-1] != len(self.temperatures):
            raise ValueError(
                f"{len(self.temperatures)} temperatures do not fit confidences of shape "
                f"{values.shape}; one a draft position is needed"
            )
        return _sigmoid(_logit(values) / np.array(self.temperatures))

    def to_json(self) -> str:
        """Return the file that SGLang and TensorRT-LLM read."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> "Temperatures":
        """Read a file of SGLang, or of TensorRT-LLM, where the key may be `sts_temperatures`.

        Raises ValueError for anything else.
        """
        document = msgspec.json.decode(text)
        if isinstance(document, dict) and "sts_temperatures" in document:
            document["temperatures"] = document.pop("sts_temperatures")
        return msgspec.convert(document, cls)


def fit_temperatures(
    confidence: ArrayLike,
    accepted: ArrayLike,
    *,
    verified: ArrayLike | None = None,
    dataset: str = "",
) -> Temperatures:
    """Fit one temperature a position, left to right, to the outcomes of N draft blocks.

    `confidence` [N, K] in [0, 1]; `accepted` [N] draft tokens kept, or [N, K] whether each was
    (those behind a rejected one do not count); `verified` [N] verify lengths (default K).
    For each position the temperature in `TEMPERATURES` with the least expected calibration error of
    the product of calibrated confidences; of equal ones the nearest to 1.

    Raises ValueError, with the value and the rule.
    """
    values = _as_confidence(confidence)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"confidence has shape {values.shape}; it must be [blocks, positions]")
    num_blocks, num_positions = values.shape
    kept = np.asarray(accepted, dtype=np.int64)
    if kept.ndim == 2:
        kept = _leading_ones(kept)
    most = (
        np.full(num_blocks, num_positions)
        if verified is None
        else np.asarray(verified, dtype=np.int64)
    )
    check_outcomes(kept, most)
    if kept.shape != (num_blocks,) or most.max() > num_positions:
        raise ValueError(
            f"outcomes of {kept.size} blocks with up to {most.max()} verified tokens do not fit "
            f"confidences of shape {values.shape}"
        )
    logits = _logit(values)
    chosen, before, after = [], [], []
    raw, product = np.ones(num_blocks), np.ones(num_blocks)
    for k in range(num_positions):
        is_known = most > k
        is_kept = (kept > k)[is_known]
        raw = raw * values[:, k]
        before.append(expected_calibration_error(raw[is_known], is_kept))
        errors = [
            expected_calibration_error(
                (product * _sigmoid(logits[:, k] / temperature))[is_known], is_kept
            )
            for temperature in TEMPERATURES
        ]
        best = min(range(len(errors)), key=lambda i: (errors[i], abs(np.log(TEMPERATURES[i])), i))
        product = product * _sigmoid(logits[:, k] / TEMPERATURES[best])
        chosen.append(float(TEMPERATURES[best]))
        after.append(errors[best])
    return Temperatures(
        temperatures=tuple(chosen),
        dataset=dataset,
        num_samples=num_blocks,
        ece_before=tuple(before),
        ece_after=tuple(after),
    )


def _leading_ones(accepted: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N] tokens kept of [N, K] outcomes, 0 or 1."""
    wrong = (accepted != 0) & (accepted != 1)
    if wrong.any():
        raise ValueError(f"accepted holds {accepted[wrong][0]}; outcomes are 0 or 1")
    counts: NDArray[np.int64] = np.cumprod(accepted, axis=1).sum(axis=1)
    return counts


class OnlineCalibration:
    """State: a scale and a shift of the logit for each position, moved by each step's outcomes."""

    def __init__(
        self,
        num_positions: int,
        *,
        memory: float = 5_000.0,
        caution: float = 50.0,
        start: Temperatures | None = None,
    ) -> None:
        """Start from `start` (default: confidences as they are).

        `memory`: observations of a position after which one has lost most of its weight; fewer
        follow a change of traffic faster and are noisier. `caution`: observations that the start
        counts for.
        """
        if num_positions < 1:
            raise ValueError(f"num_positions is {num_positions}; at least 1 is needed")
        if start is not None and len(start.temperatures) != num_positions:
            raise ValueError(
                f"{len(start.temperatures)} temperatures do not fit {num_positions} positions"
            )
        if memory < 1.0 or caution <= 0.0:
            raise ValueError(f"memory {memory} must be at least 1 and caution {caution} positive")
        self.num_positions = num_positions
        self._keep = 1.0 - 1.0 / memory
        self._parameters = np.zeros((num_positions, 2))
        self._parameters[:, 0] = 1.0 if start is None else 1.0 / np.array(start.temperatures)
        # Of a confident drafter's token, p(1-p) is about a tenth.
        self._curvature = np.zeros((num_positions, 3))
        self._curvature[:, :2] = 0.1 * caution
        self._bins = np.zeros((num_positions, NUM_BINS, 2))
        self._squares = np.zeros((num_positions, 2))

    def apply(self, confidence: ArrayLike, *, verified: ArrayLike, accepted: ArrayLike) -> None:
        """Learn from one step: raw `confidence` [R, K], draft tokens verified and accepted [R]."""
        values = self._check(confidence)
        most = np.ascontiguousarray(verified, dtype=np.int64)
        kept = np.ascontiguousarray(accepted, dtype=np.int64)
        check_outcomes(kept, most)
        if len(kept) != len(values) or (most.size and most.max() > self.num_positions):
            raise ValueError(
                f"outcomes of {kept.size} requests with up to {most.max(initial=0)} verified "
                f"tokens do not fit confidences of shape {values.shape}"
            )
        score_outcomes(values, most, kept, self._parameters, self._keep, self._bins, self._squares)
        learn_outcomes(values, most, kept, self._parameters, self._curvature, self._keep)

    def calibrate(self, confidence: ArrayLike) -> NDArray[np.float64]:
        """Return `confidence` [R, K] as it should be read now."""
        values = self._check(confidence)
        scale, shift = self._parameters.T
        return _sigmoid(_logit(values) * scale + shift)

    @property
    def scale(self) -> NDArray[np.float64]:
        """[K] factors of the logits."""
        return self._parameters[:, 0].copy()

    @property
    def shift(self) -> NDArray[np.float64]:
        """[K] what is added to the scaled logits."""
        return self._parameters[:, 1].copy()

    @property
    def calibration_error(self) -> NDArray[np.float64]:
        """[K] recent expected calibration error of the product up to each position, measured
        before each outcome was learned from."""
        weights = self._squares[:, 1]
        error = np.abs(self._bins[:, :, 0]).sum(axis=1)
        return np.where(weights > 0.0, error / np.maximum(weights, 1e-300), 0.0)

    @property
    def brier(self) -> NDArray[np.float64]:
        """[K] recent Brier score of the product up to each position."""
        weights = self._squares[:, 1]
        return np.where(weights > 0.0, self._squares[:, 0] / np.maximum(weights, 1e-300), 0.0)

    def _check(self, confidence: ArrayLike) -> NDArray[np.float64]:
        values = np.ascontiguousarray(_as_confidence(confidence))
        if values.ndim != 2 or values.shape[1] != self.num_positions:
            raise ValueError(
                f"confidence has shape {values.shape}; "
                f"it must be [requests, {self.num_positions} positions]"
            )
        return values


@kernel
def _clipped_logit(c: float) -> float:
    if c <= 0.0:
        return -MAX_LOGIT
    if c >= 1.0:
        return MAX_LOGIT
    logit: float = np.log(c / (1.0 - c))
    return min(max(logit, -MAX_LOGIT), MAX_LOGIT)


@kernel
def learn_outcomes(
    confidence: NDArray[np.float64],
    verified: NDArray[np.int64],
    accepted: NDArray[np.int64],
    parameters: NDArray[np.float64],
    curvature: NDArray[np.float64],
    keep: float,
) -> None:
    """Move `parameters` [K, 2] (scale, shift) by one Newton step on the step's likelihood.

    `curvature` [K, 3] holds (scale-scale, shift-shift, scale-shift) of what was seen, forgotten by
    the factor `keep` with each observation.
    """
    for k in range(parameters.shape[0]):
        scale, shift = parameters[k]
        gradient_scale, gradient_shift = 0.0, 0.0
        c_ss, c_bb, c_sb = curvature[k]
        for r in range(confidence.shape[0]):
            if verified[r] <= k or accepted[r] < k:
                continue
            x = _clipped_logit(confidence[r, k])
            p = 1.0 / (1.0 + np.exp(-(scale * x + shift)))
            error = p - (1.0 if accepted[r] > k else 0.0)
            weight = p * (1.0 - p)
            gradient_scale += error * x
            gradient_shift += error
            c_ss = c_ss * keep + weight * x * x
            c_bb = c_bb * keep + weight
            c_sb = c_sb * keep + weight * x
        curvature[k, 0], curvature[k, 1], curvature[k, 2] = c_ss, c_bb, c_sb
        # A little of the identity keeps the step finite where all confidences are equal.
        a, d = c_ss + 1.0, c_bb + 1.0
        determinant = a * d - c_sb * c_sb
        scale -= (d * gradient_scale - c_sb * gradient_shift) / determinant
        shift -= (a * gradient_shift - c_sb * gradient_scale) / determinant
        parameters[k, 0] = min(max(scale, 0.1), 10.0)
        parameters[k, 1] = min(max(shift, -MAX_LOGIT), MAX_LOGIT)


@kernel
def score_outcomes(
    confidence: NDArray[np.float64],
    verified: NDArray[np.int64],
    accepted: NDArray[np.int64],
    parameters: NDArray[np.float64],
    keep: float,
    bins: NDArray[np.float64],
    squares: NDArray[np.float64],
) -> None:
    """Add the errors of the calibrated products to `bins` [K, N, 2] and `squares` [K, 2]."""
    num_bins = bins.shape[1]
    for r in range(confidence.shape[0]):
        product = 1.0
        for k in range(verified[r]):
            logit = _clipped_logit(confidence[r, k])
            product *= 1.0 / (1.0 + np.exp(-(parameters[k, 0] * logit + parameters[k, 1])))
            error = product - (1.0 if accepted[r] > k else 0.0)
            b = min(int(product * num_bins), num_bins - 1)
            for i in range(num_bins):
                bins[k, i, 0] *= keep
            bins[k, b, 0] += error
            squares[k, 0] = squares[k, 0] * keep + error * error
            squares[k, 1] = squares[k, 1] * keep + 1.0


def _as_confidence(confidence: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(confidence, dtype=np.float64)
    wrong = ~((values >= 0.0) & (values <= 1.0))
    if wrong.any():
        raise ValueError(f"confidence holds {values[wrong].flat[0]}; it must be in [0, 1]")
    return values


def _as_pairs(
    predicted: ArrayLike, outcome: ArrayLike
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    p = _as_confidence(predicted).ravel()
    y = np.asarray(outcome, dtype=np.float64).ravel()
    if p.shape != y.shape:
        raise ValueError(f"{p.size} predictions have {y.size} outcomes")
    return p, y


def _logit(values: NDArray[np.float64]) -> NDArray[np.float64]:
    edge = 1.0 / (1.0 + np.exp(MAX_LOGIT))
    clipped = np.clip(values, edge, 1.0 - edge)
    return np.log(clipped / (1.0 - clipped))


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-logits))
