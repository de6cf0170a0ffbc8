"""An engine's command line as a child that does not outlive its parent.

    python -m dsched.drivers.serve_child PARENT_PID MODULE ARGUMENT ...

Runs in the engine's Python. Asks the kernel for SIGTERM when the parent dies (Linux), then becomes
`python -m MODULE`: the wish survives `exec`, and nothing of dsched stays in the process.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Arrange for SIGTERM at the parent's death; end now if it has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:
            sys.exit("the process that asked for this engine has ended")


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])


if __name__ == "__main__":
    main()
