"""How well a model predicts steps that it was not fitted on.

Samples are dealt into folds by a fixed shuffle; each fold is predicted by a fit to the others.
Repeats of one shape fall into different folds, so give medians of repeats where there are any.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsched.costs.samples import FitError
from dsched.rng import stream

NUM_FOLDS = 5


class CostModel(Protocol):
    """What both cost models can do."""

    def predict(self, num_tokens: int, num_context_tokens: int, /) -> float: ...


Fit = Callable[[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]], CostModel]
"""Fits (tokens, context, seconds), each [N]."""


def held_out_error(
    fit: Fit,
    num_tokens: NDArray[np.int64],
    num_context_tokens: NDArray[np.int64],
    seconds: NDArray[np.float64],
    *,
    num_folds: int = NUM_FOLDS,
) -> FitError:
    """Return the error over all samples [N], each predicted by a fit without its fold.

    Raises ValueError for fewer than two samples a fold: too little to hold anything out.
    """
    count = len(seconds)
    if count < 2 * num_folds:
        raise ValueError(f"{count} samples cannot be dealt into {num_folds} folds of at least 2")
    fold = stream(0, "costs.folds").permutation(count) % num_folds
    predicted = np.zeros(count)
    for each in range(num_folds):
        known = fold != each
        model = fit(num_tokens[known], num_context_tokens[known], seconds[known])
        for i in np.flatnonzero(~known).tolist():
            predicted[i] = model.predict(int(num_tokens[i]), int(num_context_tokens[i]))
    return FitError.of(predicted, seconds)
