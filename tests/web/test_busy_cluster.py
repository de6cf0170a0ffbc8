"""The web page over `dsched run` with 128 simulated DP ranks under load: every second, and awake.

Chromium's own record of the page's main thread is read. Processor time is what counts: on a machine
that runs other things too, the time on the clock says what they do.
"""

import asyncio
from pathlib import Path

import pytest

from dsched.testing.browser import Page, main_thread_tasks
from dsched.testing.sim_load import keep_busy, run_simulated

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]

BLOCKED_MS = 50.0
WATCHED_S = 10.0


async def test_page_under_128_busy_ranks(browser: Page, tmp_path: Path) -> None:
    """Fresh each second, no task of 50 ms, and what it shows is what the cluster does."""
    args = (
        *("--launch-replicas", "8", "--sim-num-dp-ranks", "16", "--sim-step-base-us", "60000"),
        *("--sim-kv-capacity-tokens", "8192", "--sim-max-model-len", "8000"),
    )
    with run_simulated(tmp_path, *args) as run:
        async with keep_busy(run, num_clients=60, mean_tokens=100):
            await browser.start_trace()
            await browser.open(run.admin_url, width=1_380, height=1_000)
            await browser.wait_for("document.body?.dataset.ready", timeout_s=60)
            first = await browser.evaluate("({seq: latest.seq, now: latest.time_s})")
            await browser.evaluate(
                "(() => { window.gaps = []; let last = latest.time_s; setInterval(() => {"
                " if (latest.time_s !== last) { gaps.push(latest.time_s - last);"
                " last = latest.time_s; } }, 20); })()"
            )
            await asyncio.sleep(WATCHED_S)
            gaps = await browser.evaluate("gaps")
            await browser.wait_for("document.getElementById('status').innerText === 'live'")
            seen = await browser.evaluate(
                "({ranks: past.keys.length, columns: past.count, period: latest.period_s,"
                " running: latest.pools[0].num_running, tokens: latest.pools[0].num_kv_tokens,"
                " experts: latest.expert_load.length, now: latest.time_s, seq: latest.seq})"
            )
            trace = await browser.stop_trace()

    tasks = main_thread_tasks(trace)
    worst = sorted(((cpu, wall) for wall, cpu in tasks), reverse=True)[:3]
    assert len(tasks) > 200, "the trace has no tasks of the page"
    assert worst[0][0] < BLOCKED_MS, f"(processor, clock) ms of the longest tasks: {worst}"
    assert seen["period"] == 1.0
    # Each sample is shown, and there is one a second, give or take what else the machine does.
    assert len(gaps) >= 0.8 * (seen["seq"] - first["seq"]) - 1
    assert sorted(gaps)[len(gaps) // 2] < 2.0, f"seconds between updates: {gaps}"
    assert seen["now"] - first["now"] > WATCHED_S / 2
    assert seen["ranks"] == 128
    assert seen["columns"] >= len(gaps)
    assert seen["running"] > 10
    assert seen["tokens"] > 1_000
    assert seen["experts"] > 0
    assert browser.errors == []
