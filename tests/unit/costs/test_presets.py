"""Presets and cost files: each docstring is a sentence of its contract."""

from pathlib import Path

import numpy as np
import pytest

from dsched.costs import DecodeCostModel, PrefillCostModel, StepCostCurve
from dsched.costs.accuracy import held_out_error
from dsched.costs.presets import (
    load_cost_models,
    preset_names,
    preset_source,
    read_cost_file,
    write_cost_file,
)
from dsched.errors import ConfigError


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_plausible_machine(name: str) -> None:
    """A 2K chunk takes 50 ms to 3 s, context and batch cost something, no curve is flat."""
    prefill, decode = load_cost_models(name)

    assert 0.05 < prefill.predict(2_048, 0) < 3.0
    assert prefill.predict(2_048, 131_072) > 1.05 * prefill.predict(2_048, 0)
    assert 0.005 < decode.predict(8, 8 * 4_096) < decode.predict(256, 256 * 4_096) < 1.0
    assert not decode.is_flat


def test_presets_name_their_source() -> None:
    """Figures of others are shipped with their name."""
    assert "AIConfigurator" in preset_source()
    assert "deepseek-v4-flash/h200/ep8" in preset_names()


def test_without_a_name_there_is_a_start_to_learn_from() -> None:
    """Nobody has to calibrate before the first request."""
    prefill, decode = load_cost_models(None)

    assert prefill.online.num_steps == 0
    assert decode.predict(1, 100) > 0


def test_cost_file_keeps_both_models(tmp_path: Path) -> None:
    """What was written is what is read."""
    prefill = PrefillCostModel.from_coefficients(fixed_s=0.01, token_s=1e-4, attention_s=1e-9)
    decode = DecodeCostModel.from_curve(
        StepCostCurve.from_samples([1, 8], [0.01, 0.02]), kv_token_s=1e-9
    )
    path = tmp_path / "costs.json"

    write_cost_file(path, prefill, decode)
    again = load_cost_models(str(path))

    assert again[0].predict(512, 4_096) == prefill.predict(512, 4_096)
    assert again[1].predict(8, 9_999) == decode.predict(8, 9_999)


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    """The operator sees what there is."""
    with pytest.raises(ConfigError, match=r"deepseek-v9.*deepseek-v4-flash/h200/ep8"):
        load_cost_models("deepseek-v9/h200/ep8")


@pytest.mark.parametrize("text", ["nonsense", "{}", '{"prefill": {}, "decode": {}}'])
def test_broken_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    """A file that cannot be used is the operator's to mend."""
    path = tmp_path / "broken.json"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"broken\.json"):
        read_cost_file(path)
    with pytest.raises(ConfigError, match=r"missing\.json"):
        read_cost_file(tmp_path / "missing.json")


def test_held_out_error_sees_what_a_fit_cannot_know() -> None:
    """Exact samples of the model's own form have none; a lone spike shows, though a fit that saw
    it could follow it."""
    truth = PrefillCostModel.from_coefficients(fixed_s=0.01, token_s=1e-4, attention_s=1e-9)
    pairs = [(chunk, past) for chunk in (64, 256, 512, 1_024) for past in (0, 5_000, 50_000)]
    tokens, past = np.array(pairs).T
    seconds = np.array([truth.predict(*pair) for pair in pairs])

    assert held_out_error(PrefillCostModel.fit, tokens, past, seconds).max_pct < 0.01
    seconds[5] *= 2
    assert held_out_error(PrefillCostModel.fit, tokens, past, seconds).max_pct > 40


def test_too_few_samples_hold_nothing_out() -> None:
    """Nine samples are not five folds of two."""
    with pytest.raises(ValueError, match="9 samples cannot be dealt into 5 folds"):
        held_out_error(PrefillCostModel.fit, np.ones(9), np.ones(9), np.ones(9))
