"""The step-time tables that engines keep: SGLang's two, TensorRT-LLM's, and dsched's own.

Only the files' forms, with their own field names; what they mean as a curve is decided in
`dsched.costs.curve`. Which form a file has is told by its keys, as SGLang itself does. Fields of
an engine's table that dsched has no use for are ignored: they are that engine's to add.

Forms as of SGLang 0.5.23 and TensorRT-LLM 1.4.0rc4.
"""

from typing import Any

import msgspec


class SglangTable(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang `SpsCostTable`: steps a second at probed batch sizes in tokens."""

    sample_batch_tokens: list[int]
    sample_steps_per_sec: list[float]
    max_batch_tokens: int


class SglangAdditiveTable(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang `SpsAdditiveCostTable`: bias + alpha(requests) + theta(tokens), in seconds."""

    bias_seconds: float
    bs_probes: list[int]
    alpha_seconds: list[float]
    m_probes: list[int]
    theta_seconds: list[float]


class TrtllmTable(msgspec.Struct, frozen=True, kw_only=True):
    """TensorRT-LLM `SpsCostTable`: milliseconds at token counts and at batch sizes."""

    token_counts: list[int]
    step_time_ms: list[float]
    fixed_overhead_ms: float = 0.0
    batch_sizes: list[int] = []
    batch_overhead_ms: list[float] = []
    minimum_predicted_gain: float = 0.01


class DschedTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `StepCostCurve` as it is: nothing is fitted again on reading."""

    tier_tokens: list[int]
    tier_ns: list[int]
    slope_ns: float
    is_flat: bool = False
    misfit: float = 0.0
    overhead_requests: list[int] = []
    overhead_ns: list[int] = []


CurveTable = DschedTable | SglangTable | SglangAdditiveTable | TrtllmTable

_KEY_OF_FORM: tuple[tuple[str, type[Any]], ...] = (
    ("tier_tokens", DschedTable),
    ("bias_seconds", SglangAdditiveTable),
    ("sample_batch_tokens", SglangTable),
    ("token_counts", TrtllmTable),
)


def read_table(text: str | bytes) -> CurveTable:
    """Read a table of any of the four forms.

    Raises ValueError with the place for text that is not JSON, lacks a field or has one of the
    wrong type, and with the keys for a form that is not known.
    """
    try:
        value = msgspec.json.decode(text)
        keys = sorted(value) if isinstance(value, dict) else []
        for key, form in _KEY_OF_FORM:
            if key in keys:
                table: CurveTable = msgspec.convert(value, form)
                return table
    except msgspec.DecodeError as error:
        raise ValueError(f"cost table: {error}") from error
    known = ", ".join(key for key, _ in _KEY_OF_FORM)
    raise ValueError(f"cost table has keys {keys}; one of {known} was expected")
