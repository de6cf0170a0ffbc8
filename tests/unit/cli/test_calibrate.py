"""`dsched calibrate`: each docstring is a sentence of its contract."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from dsched.cli import calibrate_sources
from dsched.cli.calibrate import parse_conditions, read_csv
from dsched.cli.calibrate_sources import sweep
from dsched.cli.main import main
from dsched.clock import SystemClock
from dsched.costs import DecodeCostModel, PrefillCostModel, StepCostCurve
from dsched.costs.affine import AffineStepCost
from dsched.costs.presets import load_cost_models
from dsched.errors import ConfigError
from dsched.ids import EngineId
from dsched.sim.driver import SimDriver
from dsched.sim.engine import SimEngine, SimEngineConfig
from dsched.sim.loop import AsyncioTimers
from dsched.sim.model import SimModel

PREFILL = PrefillCostModel.from_coefficients(fixed_s=0.01, token_s=1e-4, attention_s=1e-9)
DECODE = DecodeCostModel.from_curve(
    StepCostCurve.from_samples([1, 8, 64], [0.01, 0.012, 0.03]), kv_token_s=2e-9
)


@pytest.fixture
def tables(tmp_path: Path) -> tuple[Path, Path]:
    """Exact steps of two machines, one twice as slow, as CSV files."""
    prefill = ["machine,chunk,past,step_ms"]
    decode = ["machine,batch_per_gpu,kv,step_ms"]
    for name, scale in (("fast", 1e3), ("slow", 2e3)):
        prefill += [
            f"{name},{chunk},{past},{PREFILL.predict(chunk, past) * scale}"
            for chunk in (64, 256, 1_024, 4_096)
            for past in (0, 4_096, 65_536)
        ]
        for batch in (1, 8, 64):
            for kv in (100, 1_000, 10_000, 50_000):
                seconds = DECODE.predict(batch, batch * kv)
                decode.append(f"{name},{batch},{kv},{seconds * scale}")
    paths = tmp_path / "prefill.csv", tmp_path / "decode.csv"
    for path, lines in zip(paths, (prefill, decode), strict=True):
        path.write_text("\n".join(lines) + "\n")
    return paths


def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *args: str
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["dsched", "calibrate", *args])
    monkeypatch.setenv("COLUMNS", "150")
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capfd.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.mark.slow
def test_files_become_models_that_engines_can_load(
    tables: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Fitted to the rows that were asked for, with the error on samples not seen, and a plot."""
    prefill, decode = map(str, tables)
    out, image = tmp_path / "costs.json", tmp_path / "fit.png"

    status, text, _ = run(
        monkeypatch, capfd,
        "--prefill", prefill, "--decode", decode, "--where", "machine=slow",
        "-o", str(out), "--plot", str(image),
    )  # fmt: skip

    assert status == 0
    assert "prefill" in text
    assert "0.0" in text
    models = load_cost_models(str(out))
    assert models[0].predict(512, 9_999) == pytest.approx(2 * PREFILL.predict(512, 9_999), rel=1e-3)
    assert models[1].predict(8, 9_999) == pytest.approx(2 * DECODE.predict(8, 9_999), rel=1e-3)
    assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "give one source"),
        (("--prefill", "a.csv", "--engine", "http://127.0.0.1:1"), "give one source"),
        (("--prefill", "missing.csv"), "missing.csv: No such file"),
        (("--prefill", "x.csv", "--where", "broken"), "COLUMN=VALUE"),
    ],
)
def test_mistakes_are_one_line(
    args: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Exit status 2 and a sentence, no traceback."""
    status, _, err = run(monkeypatch, capfd, *args)

    assert status == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_out_needs_both_kinds(
    tables: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """An engine needs both models; half a file is not written."""
    out = tmp_path / "costs.json"

    status, _, err = run(monkeypatch, capfd, "--prefill", str(tables[0]), "-o", str(out))

    assert status == 2
    assert "prefill and decode" in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk,past\n1,2\n", "no column 'step_ms'"),
        ("", "it has none"),
        ("chunk,past,step_ms\n1,2,x\n", r"table\.csv:2"),
        ("chunk,past,step_ms\n1,2\n", r"table\.csv:2"),
        ("chunk,past,step_ms\n", "no rows match"),
    ],
)
def test_tables_that_cannot_be_read_are_named(tmp_path: Path, text: str, message: str) -> None:
    """File, line and column are in the message."""
    path = tmp_path / "table.csv"
    path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        read_csv(path, ("chunk", "past", "step_ms"), {})


def test_condition_on_a_missing_column_is_refused(tmp_path: Path) -> None:
    """A misspelled column does not silently match nothing."""
    path = tmp_path / "table.csv"
    path.write_text("chunk,past,step_ms\n1,2,3\n")

    with pytest.raises(ConfigError, match="no column 'gpu'"):
        read_csv(path, ("chunk", "past", "step_ms"), parse_conditions(["gpu=h200"]))


def test_values_that_cannot_be_steps_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model's own words, with the value."""
    path = tmp_path / "table.csv"
    path.write_text("chunk,past,step_ms\n64,0,10\n128,0,-5\n")

    status, _, err = run(monkeypatch, capfd, "--prefill", str(path))

    assert status == 2
    assert "seconds holds -0.005" in err


def make_driver(loop: asyncio.AbstractEventLoop) -> SimDriver:
    """An engine whose steps take 1 ms, 20 us a prompt token and 0.2 ms a decode, on wall time."""
    cost = AffineStepCost(
        base_ns=1e6,
        per_decode_request_ns=2e5,
        per_kv_token_ns=0,
        per_prefill_token_ns=2e4,
        per_prefill_context_ns=0,
    )
    config = SimEngineConfig(
        num_dp_ranks=1,
        max_running_requests=16,
        max_step_tokens=2_048,
        max_model_len=4_096,
        prefix_cache_tokens=100_000,
    )
    engine = SimEngine(config, SimModel(vocab_size=1_000), cost)
    return SimDriver(EngineId("sim"), engine, AsyncioTimers(SystemClock(), loop))


def test_sweep_measures_an_engine_through_its_driver() -> None:
    """Longer chunks take longer, cached contexts are seen as such, larger batches too."""

    async def measure() -> tuple[calibrate_sources.StepSamples, calibrate_sources.StepSamples]:
        driver = make_driver(asyncio.get_running_loop())
        return await sweep(
            driver, chunks=(64, 1_024), pasts=(0, 512), batches=(1, 8, 99), contexts=(32, 9_999),
            repeats=1,
        )  # fmt: skip

    prefill, decode = asyncio.run(measure())

    seconds = {
        (int(chunk), int(past)): float(time)
        for chunk, past, time in zip(prefill.tokens, prefill.context, prefill.seconds, strict=True)
    }
    # A step takes what the simulated engine says, or longer on a busy machine.
    assert seconds[1_024, 0] > 0.020
    assert seconds[64, 0] > 0.002
    assert any(past for _, past in seconds), "no prompt found its beginning in the cache"
    # A batch above the engine's limit, and a context above its length, are not tried.
    assert decode.tokens.tolist() == [1, 8]
    assert decode.seconds[0] > 0.001
    assert np.isfinite(decode.seconds).all()


def test_engine_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep gives up after a while instead of waiting for ever."""
    monkeypatch.setattr(calibrate_sources, "READY_TIMEOUT_S", 0.01)

    class SilentDriver(SimDriver):
        def start(self, listener: object) -> None:
            pass

    async def measure() -> None:
        driver = make_driver(asyncio.get_running_loop())
        driver.__class__ = SilentDriver
        await sweep(driver)

    with pytest.raises(ConfigError, match="engine sim did not answer"):
        asyncio.run(measure())


def test_aiconfigurator_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra the message says what to install; across nodes it is not asked."""
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", None)
    with pytest.raises(ConfigError, match=r"dsched\[costs\]"):
        calibrate_sources.aiconfigurator_samples("m", "h200_sxm", 8, backend="sglang")


def test_aiconfigurator_answers_become_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its isl includes the prefix and its times are milliseconds; its errors name the model."""

    class Handle:
        @classmethod
        def compile(cls, model: str, system: str, backend: str, **sizes: int) -> "Handle":
            if model == "unknown":
                raise ValueError("no such model")
            assert (system, backend) == ("h200_sxm", "sglang")
            assert sizes == {"attention_dp_size": 8, "moe_tp_size": 1, "moe_ep_size": 8}
            return cls()

        def predict_prefill_latency(self, batch: int, isl: int, prefix: int) -> float:
            return PREFILL.predict(isl - prefix, prefix) * 1e3

        def predict_decode_latency(self, batch: int, isl: int, osl: int) -> float:
            return DECODE.predict(batch, batch * isl) * 1e3

    module = type(sys)("aiconfigurator_core.sdk.engine")
    module.EngineHandle = Handle
    for name in ("aiconfigurator_core", "aiconfigurator_core.sdk"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", module)

    ask = calibrate_sources.aiconfigurator_samples
    prefill, decode = ask("m", "h200_sxm", 8, backend="sglang")

    model = PrefillCostModel.fit(prefill.tokens, prefill.context, prefill.seconds)
    assert model.predict(700, 20_000) == pytest.approx(PREFILL.predict(700, 20_000), rel=1e-4)
    assert decode.seconds[0] == DECODE.predict(int(decode.tokens[0]), int(decode.context[0]))
    with pytest.raises(ConfigError, match="unknown on h200_sxm: no such model"):
        ask("unknown", "h200_sxm", 8, backend="sglang")
    with pytest.raises(ConfigError, match="within one node"):
        ask("m", "h200_sxm", 64, backend="sglang")
