"""What the front door costs: requests per second, added latency, CPU per relayed token.

`dsched run` as it ships (front door, controller, vLLM driver, SQLite journal), logging errors only
as its peers do here, between a load generator and two dummy engines; side by side with the Rust
routers `sglang-router` and `vllm-router` from PyPI, round robin, and with no router at all. The
routers forward bytes; dsched reads, tokenises, routes, journals, detokenises and writes.
`bare relay` is the least that Python can do, on uvloop and httptools: bytes there and back, the
engines in turn, with an eye on where requests and answers end and on nothing else. `tokenize_us`
is what the library alone takes for such a prompt: part of dsched's CPU a request, and of no peer's.

All targets are measured in turns within one run, several times; a row's figure is the median.
CPU is that of the router's own process, all threads, from the kernel's counters.

The peers live in an environment of their own under `.dsched/`, made at the first run; where that
fails, they are left out with the reason.
"""

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _http_rig import PROMPT_CHARS, prompt_of
from _report import Row, arguments, half_quartile_range, report

ROOT = Path(__file__).parents[1]
RIG = Path(__file__).parent / "_http_rig.py"
PEER_VENV = ROOT / ".dsched" / "bench-routers"
PEERS = ("sglang-router", "vllm-router")
NUM_BACKENDS = 2
STREAMS = 64
STEP_MS = 20.0
"""A token per stream and step, as a decode rank of 50 tokens a second gives them."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
TARGET_CPU_US = 40


@dataclass(slots=True)
class Target:
    """One thing a client can talk to."""

    name: str
    port: int
    process: subprocess.Popen[bytes] | None = None
    requests_per_s: dict[int, list[float]] = field(default_factory=dict)
    p50_us: dict[int, list[float]] = field(default_factory=dict)
    cpu_us_per_token: list[float] = field(default_factory=list)
    cpu_us_per_request: list[float] = field(default_factory=list)
    events_per_token: list[float] = field(default_factory=list)

    def cpu_s(self) -> float:
        """CPU time of the process and its children so far."""
        if self.process is None:
            return 0.0
        total = 0
        for pid in process_tree(self.process.pid):
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total / CLOCK_TICKS


def process_tree(pid: int) -> list[int]:
    """Return `pid` and its descendants."""
    pids = [pid]
    for parent in pids:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                pids += map(int, task.read_text().split())
    return pids


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def rig(*args: object) -> dict[str, Any]:
    """Run one mode of the rig and return what it prints."""
    command = [sys.executable, str(RIG), *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=400)
    result: dict[str, Any] = json.loads(done.stdout)
    if result["num_errors"]:
        raise SystemExit(f"{' '.join(map(str, args))}: {result['num_errors']} errors")
    return result


@contextlib.contextmanager
def running(command: Sequence[object], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a group of its own; end the group at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield process
        finally:
            pids = process_tree(process.pid)
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            for pid in pids[1:]:
                with contextlib.suppress(OSError):
                    os.kill(pid, 9)


def wait_until_served(port: int, *, path: str = "/health", seconds: float = 60) -> bool:
    """Wait until a target answers 200 to `path` and to a completion."""
    end_s = time.monotonic() + seconds
    body = json.dumps({"model": "tiny", "prompt": "one two", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data=body)
    request.add_header("content-type", "application/json")
    while time.monotonic() < end_s:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2)
            urllib.request.urlopen(request, timeout=2)
            return True
        time.sleep(0.1)
    return False


def dsched_config(folder: Path, port: int, backends: Sequence[int]) -> Path:
    """Write the configuration of a `dsched run` over the dummy engines."""
    from dsched.sim.tokenizer import build_sim_tokenizer

    build_sim_tokenizer().save(str(folder / "tokenizer.json"))
    engines = [{"kind": "vllm", "url": f"http://127.0.0.1:{each}"} for each in backends]
    for engine in engines:
        engine |= {"max_running_requests": 4_096, "kv_capacity_tokens": 1 << 30}
    config = {
        "state_dir": str(folder),
        "front_door": {"port": port},
        "admin": {"port": 0},
        "logging": {"level": "error"},
        "agent": {"endpoint": f"tcp://127.0.0.1:{free_port()}"},
        "pools": {
            "default": {
                "model": {"name": "tiny", "tokenizer": str(folder / "tokenizer.json")},
                "engines": engines,
            }
        },
    }
    path = folder / "dsched.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def peer_python() -> Path | None:
    """Return the peers' interpreter; make their environment if it is missing."""
    python = PEER_VENV / "bin" / "python"
    if python.exists():
        return python
    print(f"making {PEER_VENV.relative_to(ROOT)} for {', '.join(PEERS)} ...")
    try:
        subprocess.run([sys.executable, "-m", "venv", PEER_VENV], check=True, timeout=120)
        install = [python, "-m", "pip", "install", "--quiet", *PEERS]
        subprocess.run(install, check=True, timeout=600, capture_output=True)
    except (subprocess.SubprocessError, OSError) as error:
        shutil.rmtree(PEER_VENV, ignore_errors=True)
        print(f"peers left out: {error}")
        return None
    return python


def peer_command(name: str, port: int, backends: Sequence[int]) -> list[object] | None:
    """Return how a peer is started; `None` and a printed reason where it is not installed."""
    python = peer_python()
    binary = PEER_VENV / "bin" / name
    if python is None or not binary.exists():
        print(f"{name} left out: it is not installed")
        return None
    urls = [f"http://127.0.0.1:{each}" for each in backends]
    launch = ["launch"] if name == "sglang-router" else []
    options: list[object] = ["--host", "127.0.0.1", "--port", port, "--worker-urls", *urls]
    options += ["--policy", "round_robin", "--log-level", "error", "--prometheus-port", free_port()]
    return [binary, *launch, *options]


def measure_requests(targets: Sequence[Target], *, seconds: float, repeats: int) -> None:
    """Fill in requests per second, latency and CPU per request, in turns."""
    for repeat in range(repeats):
        # Another order each time, so that nobody always follows the same neighbour.
        turn = [*targets[repeat % len(targets) :], *targets[: repeat % len(targets)]]
        for num_clients in (1, 64):
            for target in turn:
                before_s = target.cpu_s()
                args = ("--clients", num_clients, "--seconds", seconds)
                result = rig("load", target.port, *args)
                cpu_s = target.cpu_s() - before_s
                target.requests_per_s.setdefault(num_clients, []).append(result["requests_per_s"])
                target.p50_us.setdefault(num_clients, []).append(result["p50_us"])
                if num_clients == 64:
                    # The warm-up of 0.3 s costs CPU too.
                    num_requests = result["requests_per_s"] * (seconds + 0.3)
                    target.cpu_us_per_request.append(cpu_s / num_requests * 1e6)


def measure_streams(targets: Sequence[Target], *, num_tokens: int, repeats: int) -> None:
    """Fill in CPU per token of long streams, in turns."""
    for _ in range(repeats):
        for target in targets:
            before_s = target.cpu_s()
            result = rig("streams", target.port, "--clients", STREAMS, "--tokens", num_tokens)
            cpu_s = target.cpu_s() - before_s
            target.cpu_us_per_token.append(cpu_s / result["num_tokens"] * 1e6)
            target.events_per_token.append(result["num_events"] / result["num_tokens"])


def measure_tokenizer(*, repeats: int) -> list[float]:
    """Return what tokenising one prompt takes, in microseconds, in one thread that does nothing
    else."""
    from dsched.frontdoor.renderer import encode_prompt
    from dsched.sim.tokenizer import build_sim_tokenizer

    tokenizer, prompt, num_prompts = build_sim_tokenizer(), prompt_of(PROMPT_CHARS), 2_000
    taken_us = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        for _ in range(num_prompts):
            encode_prompt(tokenizer, prompt)
        taken_us.append((time.perf_counter() - start_s) / num_prompts * 1e6)
    return taken_us


def rows_of(ours: Target, peers: Sequence[Target], direct: Target) -> list[Row]:
    """Return the figures in the form of all benchmarks."""
    median = statistics.median
    rows = [
        Row(
            metric="requests_per_s",
            case=f"c={clients}",
            ours=median(ours.requests_per_s[clients]),
            spread=half_quartile_range(ours.requests_per_s[clients]),
            better="higher",
            peers={each.name: median(each.requests_per_s[clients]) for each in [*peers, direct]},
        )
        for clients in (1, 64)
    ]
    for clients in (1, 64):
        base_us = median(direct.p50_us[clients])
        rows.append(
            Row(
                metric="added_p50_us",
                case=f"c={clients}",
                ours=median(ours.p50_us[clients]) - base_us,
                spread=half_quartile_range(ours.p50_us[clients]),
                better="lower",
                peers={each.name: median(each.p50_us[clients]) - base_us for each in peers},
            )
        )
    for metric, case, target in (
        ("cpu_us_per_request", "c=64", None),
        ("cpu_us_per_token", f"{STREAMS} streams, step {STEP_MS:.0f} ms", TARGET_CPU_US),
    ):
        values = {each.name: getattr(each, metric) for each in [ours, *peers]}
        rows.append(
            Row(
                metric=metric,
                case=case,
                ours=median(values[ours.name]),
                spread=half_quartile_range(values[ours.name]),
                better="lower",
                target=target,
                peers={each.name: median(values[each.name]) for each in peers},
            )
        )
    return rows


def main() -> None:
    given = arguments(__doc__.partition("\n")[0]).parse_args()
    repeats, seconds, num_tokens = (3, 1.0, 150) if given.quick else (7, 2.0, 400)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsched-bench-")))

        def start(name: str, command: Sequence[object], port: int) -> Target:
            log = folder / f"{name}.log"
            process = stack.enter_context(running(command, log))
            if not wait_until_served(port):
                raise SystemExit(f"{name} does not serve:\n{log.read_text()[-2000:]}")
            return Target(name, port, process)

        ports = [free_port() for _ in range(NUM_BACKENDS)]
        for index, port in enumerate(ports):
            command = [sys.executable, RIG, "backend", port, "--step-ms", STEP_MS]
            start(f"backend-{index}", command, port)
        direct = Target("no router", ports[0])
        port = free_port()
        config = dsched_config(folder, port, ports)
        cli = [sys.executable, "-m", "dsched.cli.main", "run", "-c", config, "--quiet"]
        ours = start("dsched", cli, port)
        port = free_port()
        relay = start("bare relay", [sys.executable, RIG, "relay", port, "--to", *ports], port)
        peers = [relay]
        for name in PEERS:
            port = free_port()
            peer = peer_command(name, port, ports)
            if peer is not None:
                peers.append(start(name, peer, port))
        measure_requests([direct, ours, *peers], seconds=seconds, repeats=repeats)
        measure_streams([ours, *peers], num_tokens=num_tokens, repeats=1 if given.quick else 3)
        tokenize_us = measure_tokenizer(repeats=repeats)
        rows = rows_of(ours, peers, direct)
        rows.append(
            Row(
                metric="tokenize_us",
                case=f"{PROMPT_CHARS} characters",
                ours=statistics.median(tokenize_us),
                spread=half_quartile_range(tokenize_us),
                better="lower",
            )
        )
    report("frontdoor", rows, seeds=repeats, json_path=given.json)
    share = statistics.median(ours.events_per_token)
    print(f"dsched wrote {share:.3f} events a token on the long streams")


if __name__ == "__main__":
    main()
