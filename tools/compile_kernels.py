"""Compile the numba kernels into their cache, by small runs of the simulations.

Compiling takes more than a minute of CPU, once a machine and version; without this the first tests
would do it, some of them in several processes at once. `make check` and `make test` run it after
installing.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

RUNS = (
    "sim eplb --layers 2 --experts 16 --slots 20 --ranks 4 --nodes 2 --windows 3",
    "sim spec --steps 20 --seeds 1 --requests 8",
    "sim decode --ranks 4 --steps 60 --warm-steps 10",
    "sim serve --requests 30 --ranks 4",
    "sim prefill --ranks 4",
    "sim faults --requests 20",
)
"""Together they meet almost every kernel. Longest first."""


def run(line: str) -> bool:
    """Run one simulation; tell and go on if it fails, for the tests say why."""
    command = [sys.executable, "-m", "dsched.cli.main", *line.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stdout.write(f"dsched {line}: exit status {done.returncode}\n{done.stderr[-2_000:]}\n")
    return done.returncode == 0


def main() -> None:
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        num_done = sum(threads.map(run, RUNS))
    sys.stdout.write(f"compiled the kernels of {num_done} of {len(RUNS)} simulations\n")


if __name__ == "__main__":
    main()
