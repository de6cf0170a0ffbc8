"""`dsched replay TRACE`: decide again what a recorded run decided, and name the first difference.

Exit status 0 when every decision came out the same, 1 when one did not, 2 for a file that cannot be
used.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from dsched.cli.output import write_json
from dsched.errors import ConfigError
from dsched.trace import Changes, Difference, ReplayResult, TraceReader
from dsched.trace import replay as decide_again

EXIT_DIFFERENT = 1
S = 1_000_000_000
POLICY_PRICES = {"least_requests": (1.0, 0.0), "least_kv": (0.0, 1.0)}
SETTINGS = {
    "routing.request_cost_us": "what one more running request costs",
    "routing.kv_token_cost_ns": "what one more KV token costs",
    "routing.max_hold_s": "how long a request waits for room",
    "routing.policy": "least_requests or least_kv",
    "faults.reprefill_tokens_per_rank": "ration of re-prefill, 0 for none",
}
"""What `--set` can change."""


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A recorded file.")],
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Decide with another price or limit."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the result here; - for standard output.")
    ] = None,
) -> None:
    """Decide again what a recorded run decided, through the same code.

    Every decision starts from the recorded loads, so a difference does not cause the next one.
    --set takes routing.request_cost_us, routing.kv_token_cost_ns, routing.max_hold_s,
    routing.policy and faults.reprefill_tokens_per_rank; a price set this way holds for every rank
    all the time, instead of what was learned.
    """
    changes = parse_changes(set_ or [])
    reader = TraceReader(trace)
    result = decide_again(reader, changes)
    if reader.damage is not None:
        typer.echo(f"dsched: warning: {reader.damage}", err=True)
    if json is not None:
        write_json(as_document(result, reader), json)
    if json is None or str(json) != "-":
        for line in report_lines(result, reader):
            typer.echo(line)
    if not result.is_same:
        raise typer.Exit(EXIT_DIFFERENT)


def parse_changes(texts: list[str]) -> Changes:
    """Read the `--set` options.

    Raises:
        ConfigError: a key that replay cannot change, or a value that is none.

    >>> parse_changes(["routing.kv_token_cost_ns=30"]).kv_token_ns
    30.0
    """
    request_ns = kv_token_ns = None
    max_hold_ns = tokens_per_rank = None
    for text in texts:
        key, _, value = text.partition("=")
        if key == "routing.policy":
            if value not in POLICY_PRICES:
                raise ConfigError(f"--set {text}: replay knows {', '.join(POLICY_PRICES)}")
            request_ns, kv_token_ns = POLICY_PRICES[value]
        elif key == "routing.request_cost_us":
            request_ns = _number(text, value) * 1e3
        elif key == "routing.kv_token_cost_ns":
            kv_token_ns = _number(text, value)
        elif key == "routing.max_hold_s":
            max_hold_ns = int(_number(text, value) * S)
        elif key == "faults.reprefill_tokens_per_rank":
            tokens_per_rank = int(_number(text, value))
        else:
            raise ConfigError(f"--set {text}: replay can change {', '.join(SETTINGS)}")
    return Changes(
        request_ns=request_ns,
        kv_token_ns=kv_token_ns,
        max_hold_ns=max_hold_ns,
        tokens_per_rank=tokens_per_rank,
    )


def report_lines(result: ReplayResult, reader: TraceReader) -> list[str]:
    """What to print."""
    header = reader.header
    num_decisions = sum(result.num_decisions.values())
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in result.num_decisions.items() if count)
    lines = [
        f"{reader.path}: {result.num_records:,} records over {result.span_s:,.1f} s",
        f"made by dsched {header.dsched_version} ({header.source}, seed {header.seed})",
        f"decided again: {num_decisions:,}" + (f" ({kinds})" if kinds else ""),
    ]
    if result.num_passed:
        lines.append(f"passed over: {result.num_passed:,} before their pool's first keyframe")
    if result.first is None:
        lines.append("differences: 0")
        return lines
    different = sum(result.num_different.values())
    lines.append(f"differences: {different:,} ({different / num_decisions:.1%})")
    return lines + first_lines(result.first)


def first_lines(first: Difference) -> list[str]:
    """The first difference: which decision, which number, and what is behind it."""
    of_whom = f" of request {first.request_id}" if first.request_id else ""
    lines = [
        f"first: {first.kind}{of_whom}, record {first.record:,}, at {first.time_ns / S:.6f} s",
        f"  {first.name}: recorded {first.recorded}, now {first.replayed}",
    ]
    return lines + ([f"  {first.note}"] if first.note else [])


def as_document(result: ReplayResult, reader: TraceReader) -> dict[str, Any]:
    """The result as plain values."""
    first = result.first
    return {
        "trace": str(reader.path),
        "dsched_version": reader.header.dsched_version,
        "config_hash": reader.header.config_hash,
        "source": reader.header.source,
        "seed": reader.header.seed,
        "damage": reader.damage,
        "num_records": result.num_records,
        "span_s": result.span_s,
        "num_decisions": result.num_decisions,
        "num_different": result.num_different,
        "num_passed": result.num_passed,
        "first": None
        if first is None
        else {
            "record": first.record,
            "time_ns": first.time_ns,
            "kind": first.kind,
            "request_id": first.request_id or None,
            "name": first.name,
            "recorded": first.recorded,
            "replayed": first.replayed,
            "note": first.note or None,
        },
    }


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e12:
        raise ConfigError(f"--set {text}: {value!r} is not a number from 0 up")
    return number
