"""The cost models on public tables, where they are at hand; `test_prefill.py`, `test_decode.py` and
`test_curve.py` say the same of generated ones."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from dsched.costs import DecodeCostModel, PrefillCostModel, StepCostCurve

COSTS = Path(os.environ.get("DSCHED_SHARED", Path(__file__).parents[4] / "shared")) / "costs"

pytestmark = pytest.mark.skipif(
    not (COSTS / "aic_prefill.csv").exists(),
    reason="public tables not found; set DSCHED_SHARED to the folder that holds costs/",
)

CONFIGS = ("gb200_dsv3_ep64_4k", "gb200_v4pro_ep4_8k", "h200_dsv3_ep64_4k", "h200_v4flash_ep8_8k")


def read_rows(name: str, x: str, y: str, *, model: str, system: str, ep: int) -> np.ndarray:
    with (COSTS / name).open() as file:
        return np.array(
            [
                (float(row[x]), float(row[y]), float(row["step_ms"]) / 1e3)
                for row in csv.DictReader(file)
                if (row["model"], row["system"], row["ep"]) == (model, system, str(ep))
            ]
        )


@pytest.mark.parametrize("config", CONFIGS)
def test_tables_of_both_engines_are_one_curve_at_their_probes(config: str) -> None:
    """SGLang's steps a second and TensorRT-LLM's milliseconds are read to the same times."""
    sglang = StepCostCurve.from_json((COSTS / f"sps_{config}.sglang.json").read_text())
    trtllm = StepCostCurve.from_json((COSTS / f"sps_{config}.trtllm.json").read_text())

    probes = sglang.tier_tokens
    np.testing.assert_allclose(sglang.seconds(probes), trtllm.seconds(probes), rtol=1e-4)
    assert not sglang.is_flat


def test_additive_table_is_the_papers_line() -> None:
    """V4-Flash mixed: 15.24 ms and .0285 ms a token; 400 tokens take 26.64 ms, drafting apart."""
    path = COSTS / "sps_paperfit_v4flash_mixed.additive.sglang.json"

    curve = StepCostCurve.from_json(path.read_text())

    assert curve.seconds(400) * 1e3 == pytest.approx(26.64, abs=0.01)
    assert (curve.seconds(400, num_requests=128) - curve.seconds(400)) * 1e3 == pytest.approx(3.54)


@pytest.mark.parametrize(
    ("model", "system", "ep"), [("V4-Flash", "h200_sxm", 8), ("DSV3", "gb200", 64)]
)
def test_cell_that_was_not_seen_is_predicted(model: str, system: str, ep: int) -> None:
    """Without the row and the column of a cell, its prefill time is known to 8 %."""
    table = read_rows("aic_prefill.csv", "chunk", "past", model=model, system=system, ep=ep)
    is_known = (table[:, 0] != 2_048) & (table[:, 1] != 65_536)
    (measured,) = table[(table[:, 0] == 2_048) & (table[:, 1] == 65_536), 2]

    predicted = PrefillCostModel.fit(*table[is_known].T).predict(2_048, 65_536)

    assert predicted == pytest.approx(measured, rel=0.08)


def test_decode_of_a_batch_that_was_not_seen_is_predicted() -> None:
    """Without a batch size and a KV length, a decode step is known to 5 %."""
    table = read_rows(
        "aic_decode.csv", "batch_per_gpu", "kv", model="DSV3", system="h200_sxm", ep=64
    )
    batch, kv, seconds = table.T
    is_known = (batch != 64) & (kv != 8_192)
    (measured,) = seconds[(batch == 64) & (kv == 8_192)]

    model = DecodeCostModel.fit(
        batch[is_known], (batch * kv)[is_known], seconds[is_known], tiers=range(1, 1_025)
    )

    assert model.predict(64, 64 * 8_192) == pytest.approx(measured, rel=0.05)
