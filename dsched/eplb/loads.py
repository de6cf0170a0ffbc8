"""Read a load of any number type into integers that mean the same on every machine.

In:  [L, E] counts (or averages) of tokens routed to each expert. Out: [L, E] int64 in fixed point.

Ranks must compute the same placement from the same counts, also when one engine sums them in
int32 and another in float64, or multiplies them by the DP size. So a layer is first divided by its
greatest common divisor, which makes any whole multiple of it the same numbers, and then scaled by
a power of two to a total between 2**43 and 2**50: enough bits that a share, rounded down to an
integer, is exact to 1e-10 of a rank's load.

Pure. O(L E).
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dsched.jit import kernel

MIN_TOTAL_BITS = 44
"""Layers are scaled up until their total has this many bits."""
MAX_TOTAL_BITS = 50
"""Layers with more are scaled down: a share and an expert number must fit into one int64 key."""
FLOAT_BITS = 40
"""Bits that the greatest load of a layer keeps when loads are not whole numbers."""
MAX_EXACT = 1 << 53
"""Whole numbers up to here are exact in float64."""


def read_load(load: ArrayLike) -> NDArray[np.int64]:
    """Return the load as fixed-point integers, [L, E]; never a view of `load`.

    Raises:
        ValueError: not two axes, no experts, not numbers, or a value that is negative, infinite or
            NaN (named with its layer and expert).
    """
    array = np.asarray(load)
    if array.ndim != 2:
        raise ValueError(f"load has shape {array.shape}; it must be [layers, experts]")
    if array.shape[1] == 0:
        raise ValueError(f"load has shape {array.shape}; a layer has at least one expert")
    if array.dtype.kind == "f":
        array = integers_from_floats(array)
    elif array.dtype.kind not in "iub":
        raise ValueError(f"load has dtype {array.dtype}; it must be an integer or a float type")
    elif array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        array = integers_from_floats(array.astype(np.float64))
    weight = np.array(array, dtype=np.int64, order="C")
    bad = normalize(weight)
    if bad >= 0:
        layer, expert = divmod(bad, array.shape[1])
        raise ValueError(
            f"load of layer {layer}, expert {expert} is {array[layer, expert]}; "
            "a load must not be negative"
        )
    return weight


def integers_from_floats(array: NDArray[Any]) -> NDArray[Any]:
    """Return whole numbers in the proportions of `array`, exact where it holds whole numbers."""
    values = array.astype(np.float64)
    greatest = float(values.max(initial=0.0))
    if not (np.isfinite(greatest) and float(values.min(initial=0.0)) >= 0.0):
        wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0.0)))
        layer, expert = divmod(int(wrong[0]), array.shape[1])
        raise ValueError(
            f"load of layer {layer}, expert {expert} is {array[layer, expert]}; "
            "a load must be finite and not negative"
        )
    if greatest < MAX_EXACT and bool((values == np.floor(values)).all()):
        return values.astype(np.int64)
    _, exponent = np.frexp(values.max(axis=1, keepdims=True))
    scaled: NDArray[Any] = np.rint(np.ldexp(values, FLOAT_BITS - exponent)).astype(np.int64)
    return scaled


@kernel
def normalize(weight: NDArray[np.int64]) -> int:
    """Bring each layer to lowest terms and to a fixed scale, in place.

    Returns the flat index of the first negative value, or -1.
    """
    num_layers, num_experts = weight.shape
    for layer in range(num_layers):
        divisor = np.int64(0)
        greatest = np.int64(0)
        for expert in range(num_experts):
            value = weight[layer, expert]
            if value < 0:
                return int(layer * num_experts + expert)
            greatest = max(greatest, value)
            while divisor != 1 and value != 0:
                divisor, value = value, divisor % value
        if greatest == 0:
            continue
        greatest //= divisor
        drop = 0
        while (greatest >> drop) > ((1 << MAX_TOTAL_BITS) // num_experts):
            drop += 1
        total = np.int64(0)
        for expert in range(num_experts):
            weight[layer, expert] = weight[layer, expert] // divisor >> drop
            total += weight[layer, expert]
        lift = 0
        while (total << lift) < (1 << (MIN_TOTAL_BITS - 1)):
            lift += 1
        for expert in range(num_experts):
            weight[layer, expert] <<= lift
    return -1
