"""The `dsched` command: finds the subcommand, imports only that, and makes one line of our errors.

Exit status: 0 well, 2 for what the operator can mend, 130 after Ctrl-C. An `InvariantError` is our
own mistake and keeps its traceback.
"""

import contextlib
import os
import sys

import typer

from dsched import __version__
from dsched.cli.lazy import CommandRow, GroupRow, LazyGroup
from dsched.errors import DschedError, InvariantError

EXIT_OPERATOR_ERROR = 2
EXIT_INTERRUPTED = 130

PANEL_SERVE = "Serve"
PANEL_LOOK = "Look"
PANEL_TRY = "Try out"

SIM_COMMANDS = tuple(
    CommandRow(name=name, target=f"dsched.cli.sim_{name}:{name}", help=text, panel="Commands")
    for name, text in (
        ("serve", "Replay a request trace: TTFT, TPOT, throughput and balance."),
        ("decode", "Compare routing policies on the decode ranks."),
        ("prefill", "Compare chunk sizes and prefill routing."),
        ("eplb", "Compare expert placements over load windows."),
        ("spec", "Compare verify lengths of speculative decoding."),
        ("faults", "Serve under crashes, freezes and lost messages."),
    )
)

TRACE_COMMANDS = tuple(
    CommandRow(name=name, target=f"dsched.cli.trace:{name}", help=text, panel="Commands")
    for name, text in (
        ("start", "Record every decision to a file."),
        ("stop", "Close the file."),
        ("status", "Say what is kept and what is being recorded."),
    )
)

POLICY_COMMANDS = (
    CommandRow(
        name="new",
        target="dsched.cli.policy_new:new",
        help="Write a complete policy package with its test.",
        panel="Commands",
    ),
    CommandRow(
        name="test",
        target="dsched.cli.policy_try:try_policy",
        help="Replay a workload with a policy and with dsched's own rules.",
        panel="Commands",
    ),
)

COMMANDS: tuple[CommandRow | GroupRow, ...] = (
    CommandRow(
        name="run",
        target="dsched.cli.run:run",
        help="Serve an OpenAI-compatible API over engines, simulated ones by default.",
        panel=PANEL_SERVE,
    ),
    CommandRow(
        name="check",
        target="dsched.cli.check:check",
        help="Check a configuration and print its effective values with their origins.",
        panel=PANEL_SERVE,
    ),
    CommandRow(
        name="drain",
        target="dsched.cli.drain:drain",
        help="Take an engine out of service without an error for any client.",
        panel=PANEL_SERVE,
    ),
    CommandRow(
        name="undrain",
        target="dsched.cli.drain:undrain",
        help="Put a drained engine back into service.",
        panel=PANEL_SERVE,
    ),
    CommandRow(
        name="workers",
        target="dsched.cli.workers:workers",
        help="List engines and DP ranks with state and load.",
        panel=PANEL_LOOK,
    ),
    CommandRow(
        name="top",
        target="dsched.cli.top:top",
        help="Watch engines and DP ranks live.",
        panel=PANEL_LOOK,
    ),
    CommandRow(
        name="explain",
        target="dsched.cli.explain:explain",
        help="Tell why a request went where it went.",
        panel=PANEL_LOOK,
    ),
    GroupRow(
        name="trace",
        rows=TRACE_COMMANDS,
        help="Record the decisions of a running dsched to a file.",
        panel=PANEL_LOOK,
    ),
    GroupRow(
        name="sim",
        rows=SIM_COMMANDS,
        help="Replay traces through simulated engines on virtual time: no GPU, no network.",
        panel=PANEL_TRY,
    ),
    CommandRow(
        name="replay",
        target="dsched.cli.replay:replay",
        help="Decide again what a recorded run decided.",
        panel=PANEL_TRY,
    ),
    CommandRow(
        name="calibrate",
        target="dsched.cli.calibrate:calibrate",
        help="Fit a cost model to measured steps.",
        panel=PANEL_TRY,
    ),
    GroupRow(
        name="policy",
        rows=POLICY_COMMANDS,
        help="Start a policy of your own, and try it offline.",
        panel=PANEL_TRY,
    ),
    CommandRow(
        name="version",
        target="dsched.cli.main:version",
        help="Print the version.",
        panel=PANEL_LOOK,
    ),
)

MAIN_HELP = """Load balancer and scheduler for MoE serving with wide expert parallelism.

dsched decides; the engines (vLLM, SGLang) compute.
"""

MAIN_EPILOG = """Examples:

dsched run [dim]# simulated engines, http://127.0.0.1:8000[/dim]

dsched run -c cluster.yaml --front-door-port 9000

dsched check -c cluster.yaml --origins

dsched workers --json
"""


def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def make_command() -> LazyGroup:
    """Return the whole command; nothing of the subcommands is imported yet."""
    return LazyGroup(
        "dsched", COMMANDS, help=MAIN_HELP, epilog=MAIN_EPILOG, rich_markup_mode="rich"
    )


def find_policies_here() -> None:
    """Let policies be imported from the folder that the command is called in, as Python itself does
    for a script; installed modules come first."""
    with contextlib.suppress(OSError):  # the folder may be gone
        folder = os.getcwd()
        if not {folder, ""} & set(sys.path):
            sys.path.append(folder)


def main() -> None:
    """Run the command line; the console script `dsched`."""
    find_policies_here()
    try:
        make_command().main(prog_name="dsched")
    except InvariantError:
        raise
    except DschedError as error:
        print(f"dsched: {error}", file=sys.stderr)
        sys.exit(EXIT_OPERATOR_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # `dsched check | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
