"""Cost of the token journal: per recorded token, and rows into the file per second.

`record_us` is the CPU time of the recording thread (the event loop) per token when tokens come one
by one, as in decode. `total_us` adds the writer thread, that is all CPU time of the process, until
the file has everything. `rows_per_s` is how many pieces the writer commits a second of wall time
when it has no pause, one for each request and flush. The peer is a row and a transaction for each
token with the standard library's sqlite3, WAL, `synchronous=NORMAL`, in the recording thread.
"""

import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import TypeVar

from _report import Row, arguments, half_quartile_range, report

from dsched.drivers.wire import SamplingParams
from dsched.faults import MemoryJournal, SqliteJournal
from dsched.ids import AttemptId, DpRank, EngineId, RankId, RequestId

Result = TypeVar("Result")

NUM_STREAMS = 64
FLUSH_INTERVAL_S = 0.02
STEP_S = 0.005
"""Pause after each token of all streams: a decode step, so that the writer interleaves as it does
in service."""


def open_streams(journal: MemoryJournal) -> list[RequestId]:
    """Open the requests that the benchmark writes to."""
    ids = [RequestId(f"r{number}") for number in range(NUM_STREAMS)]
    for request_id in ids:
        journal.open_request(
            request_id,
            model="m",
            prompt_token_ids=tuple(range(1_000)),
            sampling=SamplingParams(max_tokens=1 << 20),
        )
        journal.begin_attempt(
            request_id,
            attempt_id=AttemptId(request_id),
            epoch=1,
            target=RankId(EngineId("e"), DpRank(0)),
        )
    return ids


def measure_tokens(journal: MemoryJournal, *, num_steps: int, step_s: float) -> tuple[float, float]:
    """Return µs a token on this thread, and of the whole process including the last flush."""
    ids = open_streams(journal)
    recording_s = 0.0
    process_start_s = time.process_time()
    for index in range(num_steps):
        start_s = time.thread_time()
        for request_id in ids:
            journal.record(request_id, epoch=1, first_index=index, token_ids=(index,))
        recording_s += time.thread_time() - start_s
        if step_s:
            time.sleep(step_s)
    if isinstance(journal, SqliteJournal):
        journal.flush()
    process_s = time.process_time() - process_start_s
    journal.close()
    num_tokens = num_steps * len(ids)
    return recording_s / num_tokens * 1e6, process_s / num_tokens * 1e6


def measure_rows(path: Path, *, num_rounds: int) -> float:
    """Return rows a second that reach the file, one token a row, flushed round by round."""
    journal = SqliteJournal(path, flush_interval_s=0.0)
    ids = open_streams(journal)
    journal.flush()
    start_s = time.perf_counter()
    for index in range(num_rounds):
        for request_id in ids:
            journal.record(request_id, epoch=1, first_index=index, token_ids=(index,))
        journal.flush()
    elapsed_s = time.perf_counter() - start_s
    journal.close()
    return num_rounds * len(ids) / elapsed_s


def measure_row_a_token(path: Path, *, num_tokens: int) -> tuple[float, float]:
    """Return µs a token and rows a second of the plain way: one transaction for each token."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("CREATE TABLE t (request TEXT, epoch INT, i INT, token INT)")
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for index in range(num_tokens):
            connection.execute("INSERT INTO t VALUES (?, 1, ?, ?)", ("r", index, index))
        cpu_s = time.process_time() - start_cpu_s
        return cpu_s / num_tokens * 1e6, num_tokens / (time.perf_counter() - start_s)


def repeat(function: Callable[[Path], Result], *, times: int) -> list[Result]:
    """Call with a fresh file path each time."""
    results = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            results.append(function(Path(folder) / "journal.sqlite3"))
    return results


def main() -> None:
    """Run and report."""
    options = arguments(__doc__.splitlines()[0]).parse_args()
    times = 5 if options.quick else 15
    num_steps = 200 if options.quick else 1_000

    memory = repeat(
        lambda _: measure_tokens(MemoryJournal(), num_steps=num_steps, step_s=0.0), times=times
    )
    file = repeat(
        lambda path: measure_tokens(
            SqliteJournal(path, flush_interval_s=FLUSH_INTERVAL_S),
            num_steps=num_steps,
            step_s=STEP_S,
        ),
        times=times,
    )
    rows = repeat(lambda path: measure_rows(path, num_rounds=num_steps), times=times)
    plain = repeat(lambda path: measure_row_a_token(path, num_tokens=5_000), times=times)
    plain_us = median(each[0] for each in plain)
    plain_rows = median(each[1] for each in plain)

    def row(metric: str, case: str, values: list[float], **target: float) -> Row:
        return Row(
            metric=metric,
            case=case,
            ours=median(values),
            spread=half_quartile_range(values),
            better="lower",
            target=target.get("target"),
            peers={"row_a_token": plain_us},
        )

    report(
        "journal",
        [
            row("record_us", "memory", [each[0] for each in memory], target=1.0),
            row("record_us", "sqlite/64 streams", [each[0] for each in file], target=1.0),
            row("total_us", "sqlite/64 streams", [each[1] for each in file], target=50.0),
            Row(
                metric="rows_per_s",
                case="sqlite/one token a row",
                ours=median(rows),
                spread=half_quartile_range(rows),
                better="higher",
                target=10_000,
                peers={"row_a_token": plain_rows},
            ),
        ],
        seeds=times,
        json_path=options.json,
    )


if __name__ == "__main__":
    main()
