"""What the decision trace costs: CPU a request of the controller, and of the whole front door.

`added_us_per_request`: a controller in this process serves requests over a driver that answers at
once (64 at a time, 8 tokens each, a report of every fourth rank between two batches), with the ring
and without, in turns; the difference of the two fastest repeats, in CPU time of the thread.

`cost_pct`: that over the CPU that a request costs a whole front door without the ring, served in
this process as `benchmarks/frontdoor.py` configures it. `measured_cost_pct` is the same measured
directly: the front door's CPU a request with the ring over without, in turns, median of the pairs;
on shared cores it scatters by several percent. `--skip-front-door` leaves both out.
"""

import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import frontdoor
import uvloop
from _report import Row, arguments, half_quartile_range, report

from dsched.cli.service import Service
from dsched.clock import SystemClock
from dsched.config_load import LoadedConfig, load_config
from dsched.controller import Controller, ControllerSettings, EngineSpec, PoolSpec
from dsched.controller.request import InferenceRequest, RequestError, RequestFinish
from dsched.drivers.base import (
    AttemptFinish,
    AttemptSink,
    EngineCapabilities,
    EngineDescription,
    EngineListener,
    FinishReason,
)
from dsched.drivers.wire import GenerateCommand, RankReport, SamplingParams, TokenLogprob
from dsched.faults import MemoryJournal
from dsched.ids import AttemptId, AttemptIds, EngineId, RequestId
from dsched.logs import configure_logging, stay_quiet_unless_configured
from dsched.trace import RingRecorder, null_recorder

ENGINE = EngineId("e")
BATCH = 64
TOKENS = 8
SAMPLING = SamplingParams(max_tokens=TOKENS, temperature=0.0)
PROMPT = tuple(range(100))
TARGET_PCT = 3.0


class EchoDriver:
    """An engine that answers when it is asked to."""

    engine_id = ENGINE

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._sinks: list[tuple[AttemptId, AttemptSink]] = []

    def start(self, listener: EngineListener) -> None:
        listener.on_engine_up(
            EngineDescription(
                engine_id=ENGINE,
                kind="sim",
                model="m",
                max_model_len=10_000,
                vocab_size=None,
                num_dp_ranks=self._num_ranks,
                kv_capacity_tokens=1 << 20,
                max_running_requests=256,
                capabilities=EngineCapabilities(has_load_reports=True),
            )
        )

    def generate(self, command: GenerateCommand, sink: AttemptSink) -> None:
        self._sinks.append((AttemptId(command.attempt_id), sink))

    def abort(self, attempt_id: AttemptId) -> None:
        """Nothing runs between two batches."""

    def close(self) -> None:
        self._sinks.clear()

    def answer(self) -> None:
        """Send every token, one at a time to each request as a step does, and end."""
        sinks, self._sinks = self._sinks, []
        for token in range(TOKENS):
            for attempt_id, sink in sinks:
                sink.on_tokens(attempt_id, (token,), None)
        for attempt_id, sink in sinks:
            sink.on_finish(attempt_id, AttemptFinish(reason=FinishReason.LENGTH))


class Client:
    """Hears an answer and forgets it."""

    def on_tokens(
        self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        pass

    def on_finish(self, finish: RequestFinish) -> None:
        pass

    def on_error(self, error: RequestError) -> None:
        raise SystemExit(error.message)


class Host:
    """Ticks when the benchmark says so."""

    def request_tick(self) -> None:
        pass

    def request_tick_at(self, time_ns: int) -> None:
        pass


class Bench:
    """One controller under a steady load."""

    def __init__(self, num_ranks: int, recorder: RingRecorder | None) -> None:
        self._driver = EchoDriver(num_ranks)
        self._num_ranks = num_ranks
        self._number = 0
        self._seq = 0
        self._client = Client()
        self.controller = Controller(
            pools=[
                PoolSpec(name="p", model="m", engines=(EngineSpec(engine_id=ENGINE, model="m"),))
            ],
            drivers={ENGINE: self._driver},
            journal=MemoryJournal(max_retained_requests=100),
            clock=SystemClock(),
            host=Host(),
            attempt_ids=AttemptIds(process_tag=1),
            settings=ControllerSettings(),
            recorder=recorder,
        )
        self.controller.start()
        self.controller.tick()

    def run(self, num_batches: int) -> float:
        """CPU seconds of this thread for so many batches."""
        start_s = time.thread_time()
        for _ in range(num_batches):
            for _ in range(BATCH):
                self._number += 1
                self.controller.submit(
                    InferenceRequest(
                        request_id=RequestId(f"r{self._number}"),
                        model="m",
                        prompt_token_ids=PROMPT,
                        sampling=SAMPLING,
                    ),
                    self._client,
                )
            self.controller.tick()
            self._report()
            self._driver.answer()
            self.controller.tick()
        return time.thread_time() - start_s

    def _report(self) -> None:
        self._seq += 1
        for rank in range(self._seq % 4, self._num_ranks, 4):
            self.controller.on_report(
                RankReport(
                    engine_id=ENGINE,
                    incarnation="i",
                    dp_rank=rank,
                    seq=self._seq,
                    step=self._seq,
                    num_running=1,
                    num_waiting=0,
                    num_kv_tokens=100,
                    num_waiting_prefill_tokens=0,
                    kv_capacity_tokens=1 << 20,
                    step_ns=20_000_000,
                    num_step_tokens=1,
                )
            )


def controller_row(num_ranks: int, *, repeats: int, num_batches: int) -> Row:
    """The difference that the ring makes, and what there is without it."""
    with_ring = Bench(num_ranks, RingRecorder())
    without = Bench(num_ranks, None)
    for bench in (with_ring, without):
        bench.run(num_batches)
    pairs = [(with_ring.run(num_batches), without.run(num_batches)) for _ in range(repeats)]
    to_us: Callable[[float], float] = lambda seconds: seconds / num_batches / BATCH * 1e6  # noqa: E731
    on, off = (min(pair[side] for pair in pairs) for side in (0, 1))
    return Row(
        metric="added_us_per_request",
        case=f"D={num_ranks}",
        ours=to_us(on - off),
        spread=half_quartile_range([to_us(on - off) for on, off in pairs]),
        better="lower",
        peers={"without": to_us(off)},
    )


def front_door_rows(added: Sequence[Row], *, repeats: int, seconds: float) -> list[Row]:
    """CPU a request of a front door with and without the ring, and what `added` is of it."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsched-trace-")))
        ports = [frontdoor.free_port() for _ in range(frontdoor.NUM_BACKENDS)]
        for index, port in enumerate(ports):
            command = [sys.executable, frontdoor.RIG, "backend", port, "--step-ms", 20.0]
            stack.enter_context(frontdoor.running(command, folder / f"backend-{index}.log"))
            frontdoor.wait_until_served(port)
        config = load_config(
            frontdoor.dsched_config(folder, frontdoor.free_port(), ports), environment={}, flags={}
        )
        pairs = uvloop.run(measure_in_turns(config, repeats=repeats, seconds=seconds))
    on, off = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    ratios = [(with_us / without_us - 1) * 100 for with_us, without_us in pairs]
    shares = [
        Row(
            metric="cost_pct",
            case=row.case,
            ours=row.ours / off * 100,
            spread=None if row.spread is None else row.spread / off * 100,
            better="lower",
            target=TARGET_PCT,
        )
        for row in added
    ]
    return [
        Row(
            metric="cpu_us_per_request",
            case="front door, c=64",
            ours=on,
            spread=half_quartile_range([pair[0] for pair in pairs]),
            better="lower",
            peers={"without": off},
        ),
        *shares,
        Row(
            metric="measured_cost_pct",
            case="c=64",
            ours=statistics.median(ratios),
            spread=half_quartile_range(ratios),
            better="lower",
        ),
    ]


async def measure_in_turns(
    config: LoadedConfig, *, repeats: int, seconds: float
) -> list[tuple[float, float]]:
    """(with, without) CPU us a request of this process, one pair a repeat.

    One process, whose controller hears now a ring and now nobody: two processes differ by more
    than the ring costs.
    """
    configure_logging(config.config.logging)
    service = Service(config)
    await service.start()
    state = service.controller._state
    ring, nobody = state.recorder, null_recorder()
    try:
        while service.controller.not_ready_reason() is not None:
            await asyncio.sleep(0.05)
        pairs = []
        for repeat in range(repeats + 1):
            used: dict[bool, float] = {}
            for has_ring in (True, False) if repeat % 2 else (False, True):
                state.recorder = ring if has_ring else nobody
                used[has_ring] = await cpu_us_per_request(service, seconds)
            pairs.append((used[True], used[False]))
        return pairs[1:]  # the first warms up
    finally:
        await service.stop()


async def cpu_us_per_request(service: Service, seconds: float) -> float:
    """CPU of this process, all threads, under 64 clients of another one."""
    options = ("--clients", "64", "--seconds", str(seconds))
    port = str(service.front_door.bound_port)
    start_s = time.process_time()
    load = await asyncio.create_subprocess_exec(
        *(sys.executable, str(frontdoor.RIG), "load", port, *options),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await load.communicate()
    cpu_s = time.process_time() - start_s
    result = json.loads(output)
    if result["num_errors"]:
        raise SystemExit(f"{result['num_errors']} requests failed")
    # The rig's warm-up of 0.3 s costs CPU too.
    return float(cpu_s / (result["requests_per_s"] * (seconds + 0.3)) * 1e6)


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0])
    parser.add_argument("--skip-front-door", action="store_true", help="the controller only")
    given = parser.parse_args()
    stay_quiet_unless_configured()
    repeats = 5 if given.quick else 15
    rows = [
        controller_row(num_ranks, repeats=repeats, num_batches=num_batches)
        for num_ranks, num_batches in ((2, 40), (32, 40), (320, 20))
    ]
    if not given.skip_front_door:
        repeats = 5 if given.quick else 15
        rows += front_door_rows(rows, repeats=2 * repeats, seconds=1.0)
    report("trace", rows, seeds=repeats, json_path=given.json)


if __name__ == "__main__":
    main()
