"""Cost models to start from: a table of coefficients by model, GPU and EP size, or a file.

`presets.json` holds summaries of some twenty numbers that dsched fitted itself; its `source` says
to what. They are a start: online learning brings them to the machine at hand within some fifty
steps. Better is a file that `dsched calibrate` wrote from measured steps.
"""

from functools import cache
from importlib import resources
from pathlib import Path

import msgspec

from dsched.costs.curve import StepCostCurve
from dsched.costs.decode import DecodeCostModel
from dsched.costs.prefill import PrefillCostModel
from dsched.errors import ConfigError

UNKNOWN_MACHINE = "deepseek-v4-flash/h200/ep8"
"""Where learning starts when nothing was said: a fast model, so that the first chunks are not
small without need; a slow machine shows itself within a few steps."""


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model on a GPU, in the units that people quote."""

    prefill_fixed_ms: float
    prefill_token_us: float
    prefill_attention_ps: float
    """Picoseconds a pair of a token and a token it attends to."""
    decode_batches: list[int]
    decode_ms: list[float]
    """Step time of each batch size without KV."""
    decode_kv_token_ns: float


class PresetFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`presets.json`."""

    source: str
    models: dict[str, Preset]


class CostFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `dsched calibrate` writes: both models of one machine."""

    prefill: msgspec.Raw
    decode: msgspec.Raw


def preset_names() -> list[str]:
    """Return the names that `load_cost_models` knows, sorted: `model/gpu/epN`."""
    return sorted(_presets().models)


def preset_source() -> str:
    """Return where the presets come from."""
    return _presets().source


def load_cost_models(name: str | None) -> tuple[PrefillCostModel, DecodeCostModel]:
    """Return the models of a preset or of a file; `None` returns a start for learning.

    Raises ConfigError for a name that is neither, and for a file that cannot be used.

    >>> prefill, decode = load_cost_models("deepseek-v4-flash/h200/ep8")
    >>> 0.1 < prefill.predict(2048, 0) < 0.3, 0.01 < decode.predict(64, 64 * 4096) < 0.03
    (True, True)
    """
    preset = _presets().models.get(UNKNOWN_MACHINE if name is None else name)
    if preset is not None:
        return _models_of(preset)
    if name is None or not Path(name).is_file():
        raise ConfigError(
            f"costs {name!r} is neither a file nor a preset; presets: {', '.join(preset_names())}"
        )
    return read_cost_file(Path(name))


def read_cost_file(path: Path) -> tuple[PrefillCostModel, DecodeCostModel]:
    """Return the models that `write_cost_file` wrote. Raises ConfigError naming the file."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=CostFile)
        return (
            PrefillCostModel.from_json(bytes(content.prefill)),
            DecodeCostModel.from_json(bytes(content.decode)),
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def write_cost_file(path: Path, prefill: PrefillCostModel, decode: DecodeCostModel) -> None:
    """Write both models of one machine. Raises OSError if the file cannot be written."""
    content = CostFile(
        prefill=msgspec.Raw(prefill.to_json().encode()),
        decode=msgspec.Raw(decode.to_json().encode()),
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def _models_of(preset: Preset) -> tuple[PrefillCostModel, DecodeCostModel]:
    prefill = PrefillCostModel.from_coefficients(
        fixed_s=preset.prefill_fixed_ms / 1e3,
        token_s=preset.prefill_token_us / 1e6,
        attention_s=preset.prefill_attention_ps / 1e12,
    )
    largest = preset.decode_batches[-1]
    curve = StepCostCurve.from_samples(
        preset.decode_batches,
        [ms / 1e3 for ms in preset.decode_ms],
        tiers=[1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 32)],
    )
    return prefill, DecodeCostModel.from_curve(curve, kv_token_s=preset.decode_kv_token_ns / 1e9)


@cache
def _presets() -> PresetFile:
    text = resources.files("dsched.costs").joinpath("presets.json").read_bytes()
    return msgspec.json.decode(text, type=PresetFile)
