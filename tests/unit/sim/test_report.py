"""What a replay measured: right values by hand, and never NaN."""

import json
from typing import Any

import numpy as np
import pytest

from dsched.sim.report import Quantiles, ReplayReport, RequestTimes, StepMeter
from dsched.sim.traces import RowCounts


def make_times(rows: list[tuple[int, int, int, int, int, bool]]) -> RequestTimes:
    """Rows of (arrival, first token, end, output tokens, rank, finished)."""
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    return RequestTimes(
        arrival_ns=columns[0],
        first_token_ns=columns[1],
        end_ns=columns[2],
        num_output_tokens=columns[3],
        rank=columns[4],
        is_finished=columns[5].astype(bool),
    )


TIMES = make_times(
    [
        (0, 10, 50, 5, 0, True),
        (20, 30, 30, 1, 1, True),
        (40, 70, 100, 4, 0, True),
        (60, -1, 60, 0, -1, False),
    ]
)


def make_report(times: RequestTimes, **fields: Any) -> ReplayReport:  # noqa: ANN401
    count = len(times.arrival_ns)
    values: dict[str, Any] = {
        "source": "t",
        "seed": 3,
        "policy": "two_term",
        "num_engines": 1,
        "num_dp_ranks": 2,
        "rows": RowCounts(
            num_read=count, num_dropped=0, num_zero_output=0, num_zero_input=0, num_zero_both=0
        ),
        "num_replayed": count,
        "times": times,
        "steps": StepMeter(idle_rank_ns=100.0),
        "num_preemptions": 0,
        "num_errors": {},
        "num_prompt_tokens": 7,
        "options": {"b": 1, "a": None},
    }
    return ReplayReport(**(values | fields))


def test_ttft_counts_finished_requests_only() -> None:
    assert TIMES.ttft_ns.tolist() == [10, 10, 30]


def test_tpot_is_the_mean_time_per_later_token() -> None:
    """An answer of one token has no later token: no division by zero."""
    assert TIMES.tpot_ns.tolist() == [10.0, 10.0]


def test_share_of_time_with_fewer_requests_than_ranks() -> None:
    """Present: 1 in [0,20), 2 in [20,30), 1 in [30,40), 2 in [40,50), 1 in [50,100)."""
    assert TIMES.makespan_ns == 100
    assert TIMES.share_below(1) == pytest.approx(0.0)
    assert TIMES.share_below(2) == pytest.approx(0.8)
    assert TIMES.share_below(3) == pytest.approx(1.0)


def test_near_idle_head_is_seen() -> None:
    """TR-03: ten hours of one short request a minute, then a burst: 4 ranks idle nearly always."""
    minute, second = 60_000_000_000, 1_000_000_000
    rows = [(i * minute, i * minute, i * minute + second, 1, 0, True) for i in range(600)]
    burst = 600 * minute
    rows += [(burst, burst, burst + 10 * second, 1, 0, True) for _ in range(1_000)]

    share = make_times(rows).share_below(4)

    assert share == pytest.approx(36_000 / 36_010)


def test_quantiles_of_nothing_are_absent() -> None:
    empty = Quantiles.from_ns(np.array([], dtype=np.int64))

    assert empty.as_json() == {
        "num_samples": 0,
        "mean_ms": None,
        "p50_ms": None,
        "p90_ms": None,
        "p99_ms": None,
    }


def test_quantiles_are_in_milliseconds() -> None:
    values = Quantiles.from_ns(np.arange(1, 102, dtype=np.int64) * 1_000_000)

    assert (values.num_samples, values.mean_ms, values.p50_ms) == (101, 51.0, 51.0)
    assert (values.p90_ms, values.p99_ms) == pytest.approx((91.0, 100.0))


def test_balance_is_mean_over_maximum_of_the_work_beyond_an_idle_step() -> None:
    """Step 1: work (300, 100); step 2: work (0, 200), all of it prefill on the second rank."""
    meter = StepMeter(idle_rank_ns=100.0)
    assert (meter.balance, meter.decode_balance) == (None, None)

    meter.add(np.array([400, 200]), np.array([400, 200]), duration_ns=400, num_tokens=2)
    meter.add(np.array([100, 300]), np.array([100, 100]), duration_ns=300, num_tokens=5)

    assert meter.balance == pytest.approx((200 + 100) / (300 + 200))
    assert meter.decode_balance == pytest.approx(200 / 300)
    assert (meter.num_steps, meter.busy_ns, meter.num_step_tokens) == (2, 700, 7)


def test_json_has_only_plain_values_and_is_the_same_every_time() -> None:
    for times in (TIMES, make_times([]), make_times([(5, 5, 5, 1, 0, True)])):
        report = make_report(times)
        text = json.dumps(report.as_json(), sort_keys=True, allow_nan=False)

        assert text == json.dumps(make_report(times).as_json(), sort_keys=True)
        assert json.loads(text)["simulated"] is True


def test_json_counts_by_hand() -> None:
    values = make_report(TIMES, num_errors={"overloaded": 1}).as_json()

    assert values["requests"]["num_finished"] == 3
    assert values["requests"]["num_errors"] == {"overloaded": 1}
    assert values["balance"]["requests_per_rank"] == [2, 1]
    assert values["tokens"] == {"num_output": 10, "num_prompt": 7}
    assert values["throughput"]["requests_per_s"] == pytest.approx(3 / 100e-9)
    assert values["throughput"]["output_tokens_per_s"] == pytest.approx(10 / 100e-9)
    assert list(values["options"]) == ["a", "b"]


def test_small_replays_list_every_request() -> None:
    """Times count from the first arrival; what did not happen is absent."""
    later = make_times([(105, 110, 150, 5, 1, True), (100, -1, 130, 0, -1, False)])
    columns = make_report(later).as_json()["per_request"]

    assert columns == {
        "arrival_ns": [5, 0],
        "first_token_ns": [10, None],
        "end_ns": [50, 30],
        "num_output_tokens": [5, 0],
        "rank": [1, None],
    }
    assert make_report(later, num_replayed=1_001).as_json()["per_request"] is None


def test_digest_changes_with_any_decision_or_time() -> None:
    moved = make_times([(0, 10, 50, 5, 1, True)])
    later = make_times([(0, 11, 50, 5, 0, True)])
    same = [make_times([(0, 10, 50, 5, 0, True)]).digest() for _ in range(2)]

    assert same[0] == same[1]
    assert len({same[0], moved.digest(), later.digest()}) == 3
