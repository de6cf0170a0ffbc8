"""Show that the environment serves: start SGLang over a model folder, ask once, stop.

    .venv-sglang/bin/python tests/sglang/plugin/smoke.py MODEL_FOLDER

prints the seconds until it was healthy and the ids it answered. `--imports-only` checks without a
model that SGLang imports and takes the tests' CPU platform; `make sglang-env` runs that.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

ARGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"),
    *("--max-total-tokens", "8192", "--max-running-requests", "16"),
    *("--chunked-prefill-size", "128", "--mem-fraction-static", "0.3", "--host", "127.0.0.1"),
)
READY_TIMEOUT_S = 300
QUESTION = {
    "input_ids": [5, 6, 7],
    "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True},
}


def check_imports() -> None:
    """Raise unless SGLang sees the CPU platform."""
    from sglang.srt.platforms import current_platform

    if type(current_platform).__module__ != "dsched_sglang_cpu.platform":
        raise SystemExit(f"SGLang takes {type(current_platform)!r} as its platform")


def serve_once(model: str) -> None:
    """Start a server in a process group of its own, ask it once, end the group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, *ARGS]
    start = time.perf_counter()
    server = subprocess.Popen([*command, "--port", str(port)], start_new_session=True)
    try:
        while not is_healthy(port):
            if server.poll() is not None or time.perf_counter() - start > READY_TIMEOUT_S:
                raise SystemExit("the server did not become healthy")
            time.sleep(0.5)
        seconds = time.perf_counter() - start
        sys.stdout.write(f"healthy after {seconds:.0f} s: {ask(port)['output_ids']}\n")
    finally:
        os.killpg(server.pid, signal.SIGKILL)


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


def ask(port: int) -> dict[str, list[int]]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate",
        json.dumps(QUESTION).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder of a model")
    parser.add_argument("--imports-only", action="store_true")
    arguments = parser.parse_args()
    check_imports()
    if not arguments.imports_only:
        serve_once(arguments.model)
