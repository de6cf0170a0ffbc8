"""Read public request traces: when requests came and how long they were.

In:  a file. Out: a `Trace`, one array a column, every time in integer nanoseconds.

The shape of a file is known by its header (CSV) or its keys (JSON lines), never by its name:

| shape | columns or keys | origin |
|---|---|---|
| `mooncake_csv` | t_ms, input_tokens, output_tokens, block512_ids | compact Mooncake |
| `conversations` | conv, t_s, input_tokens, output_tokens, cached_prefix_tokens | compact agentic |
| `plain` | t_s, input_tokens, output_tokens | anything, by hand |
| `plain_ms` | t_ms, input_tokens, output_tokens | anything, by hand |
| `azure` | TIMESTAMP, ContextTokens, GeneratedTokens | Azure/AzurePublicDataset |
| `burstgpt` | Timestamp, Request tokens, Response tokens | HPMLL/BurstGPT |
| `mooncake_jsonl` | timestamp (ms), input_length, output_length, hash_ids | kvcache-ai/Mooncake |

Other columns (`client`, `k`, ...) may stand beside them. A gzip file is known by its first bytes.

Stamps are read digit by digit, not through floats: a float of 1e9 seconds has lost the
nanoseconds, and a stamp cut to 10 ms turns close arrivals into a burst. `arrival_ns` counts from
the first row of the file, so a trace with wall-clock stamps starts at 0 like any other. The one
exception is `conversations`: there a stamp counts from the start of its own conversation, and it
is kept so; `place_conversations` puts the conversations on one time line.

Public traces hold failed calls: rows without output, some without input. They are dropped and
counted, by reason. Whatever else is wrong (unsorted stamps, negative lengths, a missing column, a
broken line) is a `TraceError` with file, line, value and rule: a trace that was silently repaired
measures something else than it says.
"""

import csv
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dsched.errors import TraceError

PREFIX_BLOCK_TOKENS = 512
"""Tokens in one prefix block of the Mooncake shapes."""

MAX_TRACE_BYTES = 1 << 30
"""Largest file, unpacked. Above it a trace does not fit the arrays it is read into comfortably."""

MAX_TOKENS = np.iinfo(np.int32).max
"""Largest length of a prompt or an output."""

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
MAX_NS = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """What happened to the rows of a trace. `num_read == num_kept + num_dropped`."""

    num_read: int
    num_dropped: int
    """Rows without output tokens, without input tokens, or both."""
    num_zero_output: int
    """Of the dropped: rows without output tokens (failed calls)."""
    num_zero_input: int
    """Of the dropped: rows without input tokens."""
    num_zero_both: int
    """Of the dropped: rows that are counted in both."""

    @property
    def num_kept(self) -> int:
        return self.num_read - self.num_dropped


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Requests in the order of their rows. N requests; arrays are read-only."""

    source: str
    """Name of the file without its folder, or of the generator."""
    shape: str
    """Which of the shapes above, or `generated`."""
    arrival_ns: NDArray[np.int64]
    """[N] arrival after the first row (`conversations`: after the conversation's start)."""
    num_prompt_tokens: NDArray[np.int32]
    """[N] at least 1."""
    num_output_tokens: NDArray[np.int32]
    """[N] at least 1."""
    counts: RowCounts
    conversation_id: NDArray[np.int64] | None = None
    """[N] where the file has it."""
    cached_prefix_tokens: NDArray[np.int32] | None = None
    """[N] prompt tokens seen earlier in the same conversation, where the file has it."""
    block_ids: NDArray[np.int64] | None = None
    """Hashes of the prompts' prefix blocks of 512 tokens, request after request."""
    block_offsets: NDArray[np.int64] | None = None
    """[N + 1] request i owns `block_ids[block_offsets[i]:block_offsets[i + 1]]`."""
    max_concurrency: int | None = None
    """Closed loop: at most this many requests at once, the next when one ends."""

    def __post_init__(self) -> None:
        for array in (
            self.arrival_ns,
            self.num_prompt_tokens,
            self.num_output_tokens,
            self.conversation_id,
            self.cached_prefix_tokens,
            self.block_ids,
            self.block_offsets,
        ):
            if array is not None:
                array.flags.writeable = False

    @property
    def num_requests(self) -> int:
        return len(self.arrival_ns)

    def prefix_blocks(self, index: int) -> NDArray[np.int64] | None:
        """Return the hashes of request `index`'s prefix blocks, or `None` without such a column."""
        if self.block_ids is None or self.block_offsets is None:
            return None
        return self.block_ids[self.block_offsets[index] : self.block_offsets[index + 1]]

    def tied_share(self) -> float:
        """Share of requests that came at the same nanosecond as the request before."""
        if self.num_requests < 2:
            return 0.0
        return float(np.mean(np.diff(self.arrival_ns) == 0))


def read_trace(path: str | Path) -> Trace:
    """Read a trace of any of the shapes above.

    Raises:
        TraceError: the file cannot be read, its header is not known, or a row breaks a rule.
    """
    text = _read_text(Path(path))
    rows = _Rows(str(path))
    read = _read_jsonl if text.lstrip().startswith("{") else _read_csv
    shape = read(text, rows)
    return rows.to_trace(source=Path(path).name, shape=shape)


def spread_ties(trace: Trace, rng: np.random.Generator) -> Trace:
    """Spread requests with equal stamps evenly at random up to the next stamp, order kept.

    Mooncake's stamps are rounded to about three seconds; replayed as they are, every request is
    part of a burst that never happened.
    """
    if trace.num_requests == 0:
        return trace
    stamps, first, sizes = np.unique(trace.arrival_ns, return_index=True, return_counts=True)
    if len(stamps) == trace.num_requests:
        return trace
    if np.any(np.diff(trace.arrival_ns) < 0):
        raise ValueError("spread_ties needs sorted stamps; place the conversations first")
    gaps = np.diff(stamps)
    last_gap = int(np.median(gaps)) if len(gaps) else NS_PER_S
    gap_of_row = np.repeat(np.append(gaps, last_gap), sizes)
    offset = (rng.random(trace.num_requests) * gap_of_row).astype(np.int64)
    # Sorting inside a group keeps the file's order; a lone request keeps its stamp.
    group = np.repeat(np.arange(len(stamps)), sizes)
    offset = offset[np.lexsort((offset, group))]
    offset[first[sizes == 1]] = 0
    return replace(trace, arrival_ns=trace.arrival_ns + offset)


def place_conversations(trace: Trace, start_ns: Mapping[int, int]) -> Trace:
    """Put conversations on one time line: each starts at `start_ns[conversation_id]`.

    Returns a trace whose stamps count from 0 and are sorted; equal stamps keep the file's order.

    Raises:
        ValueError: the trace has no conversations, or one has no start.
    """
    if trace.conversation_id is None:
        raise ValueError(f"{trace.source} has no conversation column")
    ids = np.unique(trace.conversation_id)
    missing = [int(conversation) for conversation in ids if int(conversation) not in start_ns]
    if missing:
        raise ValueError(f"conversation {missing[0]} has no start time")
    starts = np.array([start_ns[int(conversation)] for conversation in ids], dtype=np.int64)
    arrival_ns = trace.arrival_ns + starts[np.searchsorted(ids, trace.conversation_id)]
    order = np.argsort(arrival_ns, kind="stable")
    return select(replace(trace, arrival_ns=arrival_ns), order)


def stagger_conversations(trace: Trace, rng: np.random.Generator, *, mean_gap_s: float) -> Trace:
    """Start the conversations one after another, with exponential gaps between the starts."""
    if trace.conversation_id is None:
        raise ValueError(f"{trace.source} has no conversation column")
    if not 0 <= mean_gap_s < MAX_NS / NS_PER_S:
        raise ValueError(f"mean_gap_s {mean_gap_s} must not be negative, and must be finite")
    ids, first = np.unique(trace.conversation_id, return_index=True)
    in_file_order = ids[np.argsort(first)]
    gaps = np.rint(rng.exponential(mean_gap_s, len(ids)) * NS_PER_S).astype(np.int64)
    starts = np.cumsum(gaps) - gaps[:1]
    placed = dict(zip(in_file_order.tolist(), starts.tolist(), strict=True))
    return place_conversations(trace, placed)


def scale_rate(trace: Trace, factor: float) -> Trace:
    """Let requests come `factor` times as fast."""
    if not 0 < factor < np.inf:
        raise ValueError(f"rate scale {factor} must be positive and finite")
    if factor == 1:
        return trace
    return replace(trace, arrival_ns=np.rint(trace.arrival_ns / factor).astype(np.int64))


def select(trace: Trace, order: NDArray[np.int64]) -> Trace:
    """Return the requests `order` [M] of `trace`, in that order; the row counts stay."""
    block_ids = block_offsets = None
    if trace.block_ids is not None and trace.block_offsets is not None:
        lengths = np.diff(trace.block_offsets)[order]
        block_offsets = np.concatenate(([0], np.cumsum(lengths)))
        starts = np.repeat(trace.block_offsets[:-1][order] - block_offsets[:-1], lengths)
        block_ids = trace.block_ids[starts + np.arange(block_offsets[-1])]
    return replace(
        trace,
        arrival_ns=trace.arrival_ns[order],
        num_prompt_tokens=trace.num_prompt_tokens[order],
        num_output_tokens=trace.num_output_tokens[order],
        conversation_id=None if trace.conversation_id is None else trace.conversation_id[order],
        cached_prefix_tokens=(
            None if trace.cached_prefix_tokens is None else trace.cached_prefix_tokens[order]
        ),
        block_ids=block_ids,
        block_offsets=block_offsets,
    )


def select_first(trace: Trace, count: int) -> Trace:
    """Return the first `count` requests of `trace`, all of them if there are fewer."""
    if count < 0:
        raise ValueError(f"count {count} must not be negative")
    return select(trace, np.arange(min(count, trace.num_requests)))


# --- files ------------------------------------------------------------------------------------


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            with gzip.open(file) if is_gzip else file as source:
                data = source.read(MAX_TRACE_BYTES + 1)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot be read: {reason}") from error
    if len(data) > MAX_TRACE_BYTES:
        raise TraceError(f"{path}: larger than {MAX_TRACE_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(
            f"{path}:{line}: byte {data[error.start]:#04x} is not UTF-8; a trace is text"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _CsvShape:
    name: str
    time_column: str
    parse_time: Callable[[str], int | None]
    """Nanoseconds since any origin, or `None` when the text is no stamp."""
    time_rule: str
    input_column: str = "input_tokens"
    output_column: str = "output_tokens"
    also: tuple[str, ...] = ()
    """Further columns that tell this shape from the one below it."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.time_column, self.input_column, self.output_column, *self.also)


def _read_csv(text: str, rows: "_Rows") -> str:
    if "\0" in text:
        raise rows.error(
            text.count("\n", 0, text.index("\0")) + 1, "holds a NUL byte; a trace is text"
        )
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    records = _csv_records(reader, rows)
    header_line, header = next(records, (1, []))
    names = [name.strip() for name in header]
    shape = _pick_shape(names, header_line, rows)
    column = {name: index for index, name in enumerate(names)}
    time_at, input_at, output_at = (column[name] for name in shape.columns[:3])
    conv_at = column.get("conv")
    cached_at = column.get("cached_prefix_tokens")
    blocks_at = column.get("block512_ids")
    for line, cells in records:
        if len(cells) != len(names):
            raise rows.error(line, f"{len(cells)} fields where the header has {len(names)}")
        stamp = cells[time_at].strip()
        time_ns = shape.parse_time(stamp)
        if time_ns is None:
            raise rows.error(line, f"{shape.time_column} {stamp!r} is not {shape.time_rule}")
        num_prompt = rows.tokens(line, shape.input_column, cells[input_at])
        rows.add(
            line,
            time_ns=time_ns,
            stamp=stamp,
            num_prompt=num_prompt,
            num_output=rows.tokens(line, shape.output_column, cells[output_at]),
            conversation=None if conv_at is None else rows.integer(line, "conv", cells[conv_at]),
            cached=(
                None
                if cached_at is None
                else rows.tokens(line, "cached_prefix_tokens", cells[cached_at])
            ),
            blocks=(None if blocks_at is None else _unpack_blocks(rows, line, cells[blocks_at])),
        )
    return shape.name


def _csv_records(reader: Any, rows: "_Rows") -> Iterator[tuple[int, list[str]]]:  # noqa: ANN401
    """Lines that are not blank, each with the number of its first physical line."""
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise rows.error(line, f"broken line: {error}") from error
        if any(cell.strip() for cell in cells):
            yield line, cells


def _pick_shape(names: Sequence[str], line: int, rows: "_Rows") -> _CsvShape:
    for name in names:
        if names.count(name) > 1:
            raise rows.error(line, f"column {name!r} appears {names.count(name)} times")
    for shape in _CSV_SHAPES:
        if set(shape.columns) <= set(names):
            return shape
    expected = "; or ".join(",".join(shape.columns) for shape in _CSV_SHAPES)
    raise rows.error(
        line, f"unknown header: found columns {','.join(names)!r}; expected {expected}"
    )


_RUN = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)


def _unpack_blocks(rows: "_Rows", line: int, text: str) -> list[int]:
    """`"0 14-17"` -> `[0, 14, 15, 16, 17]`."""
    ids: list[int] = []
    for run in text.split():
        match = _RUN.fullmatch(run)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if not 0 <= last - first < MAX_TOKENS // PREFIX_BLOCK_TOKENS:
            raise rows.error(line, f"block512_ids {run!r} is not an id or a rising range of ids")
        ids.extend(range(first, last + 1))
    return ids


_JSON_KEYS = ("timestamp", "input_length", "output_length")


def _read_jsonl(text: str, rows: "_Rows") -> str:
    decoder = msgspec.json.Decoder(dict[str, Any], float_hook=Decimal)
    for line, record in enumerate(text.split("\n"), start=1):
        if not record.strip():
            continue
        try:
            item = decoder.decode(record)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise TraceError(f"{rows.path}:{line}: broken line: {error}") from error
        if any(key not in item for key in _JSON_KEYS):
            found = ",".join(sorted(item))
            raise rows.error(line, f"found keys {found!r}; expected {','.join(_JSON_KEYS)}")
        stamp = str(item["timestamp"])
        time_ns = None if isinstance(item["timestamp"], bool) else _parse_ms(stamp)
        if time_ns is None:
            raise rows.error(line, f"timestamp {stamp!r} is not {_DECIMAL_RULE}")
        rows.add(
            line,
            time_ns=time_ns,
            stamp=stamp,
            num_prompt=rows.tokens(line, "input_length", item["input_length"]),
            num_output=rows.tokens(line, "output_length", item["output_length"]),
            conversation=None,
            cached=None,
            blocks=_check_hash_ids(rows, line, item.get("hash_ids", [])),
        )
    return "mooncake_jsonl"


def _check_hash_ids(rows: "_Rows", line: int, value: object) -> list[int]:
    if not isinstance(value, list):
        raise rows.error(line, f"hash_ids {value!r} is not a list")
    return [rows.integer(line, "hash_ids", item) for item in value]


# --- values -----------------------------------------------------------------------------------

_DECIMAL_RULE = "a decimal number that is not negative, with a point and below 2**63 ns"
_DATE_RULE = "a time such as 2024-05-10 00:00:58.9990004"
_DECIMAL = re.compile(r"\+?(\d{1,25}\.?\d{0,40}|\.\d{1,40})([eE][+-]?\d{1,2})?", re.ASCII)
_DATE = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,18}))?"
    r"(?:Z|([+-])(\d\d):?(\d\d))?",
    re.ASCII,
)


def _parse_decimal(text: str, unit_ns: int) -> int | None:
    """`text` units in nanoseconds, rounded to the nearest; `None` when it is no such number."""
    if not _DECIMAL.fullmatch(text):
        return None
    try:
        value = (Decimal(text) * unit_ns).quantize(Decimal(1), rounding=ROUND_HALF_EVEN)
    except InvalidOperation:
        return None
    return int(value) if value <= MAX_NS else None


def _parse_s(text: str) -> int | None:
    return _parse_decimal(text, NS_PER_S)


def _parse_ms(text: str) -> int | None:
    return _parse_decimal(text, NS_PER_MS)


def _parse_date(text: str) -> int | None:
    match = _DATE.fullmatch(text)
    if match is None:
        return None
    hour, minute, second = int(match[4]), int(match[5]), int(match[6])
    try:
        day = date(int(match[1]), int(match[2]), int(match[3])).toordinal()
    except ValueError:
        return None
    zone_minutes = int(match[8] + match[9]) * 60 + int(match[8] + match[10]) if match[8] else 0
    if hour > 23 or minute > 59 or second > 59:
        return None
    seconds = ((day * 24 + hour) * 60 + minute - zone_minutes) * 60 + second
    fraction = _parse_decimal(f"0.{match[7]}", NS_PER_S) if match[7] else 0
    return seconds * NS_PER_S + (fraction or 0)


_CSV_SHAPES = (
    _CsvShape(
        name="mooncake_csv",
        time_column="t_ms",
        parse_time=_parse_ms,
        time_rule=_DECIMAL_RULE,
        also=("block512_ids",),
    ),
    _CsvShape(
        name="conversations",
        time_column="t_s",
        parse_time=_parse_s,
        time_rule=_DECIMAL_RULE,
        also=("conv",),
    ),
    _CsvShape(name="plain", time_column="t_s", parse_time=_parse_s, time_rule=_DECIMAL_RULE),
    _CsvShape(name="plain_ms", time_column="t_ms", parse_time=_parse_ms, time_rule=_DECIMAL_RULE),
    _CsvShape(
        name="azure",
        time_column="TIMESTAMP",
        parse_time=_parse_date,
        time_rule=_DATE_RULE,
        input_column="ContextTokens",
        output_column="GeneratedTokens",
    ),
    _CsvShape(
        name="burstgpt",
        time_column="Timestamp",
        parse_time=_parse_s,
        time_rule=_DECIMAL_RULE,
        input_column="Request tokens",
        output_column="Response tokens",
    ),
)

_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


class _Rows:
    """Collects checked rows; every complaint carries the file and the line."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._origin_ns: int | None = None
        self._last: dict[int | None, tuple[int, str]] = {}
        self._arrival_ns: list[int] = []
        self._prompt: list[int] = []
        self._output: list[int] = []
        self._conversation: list[int] = []
        self._cached: list[int] = []
        self._block_ids: list[int] = []
        self._block_offsets: list[int] = [0]
        self._has_blocks = False
        self._num_read = 0
        self._num_zero_output = 0
        self._num_zero_input = 0
        self._num_zero_both = 0

    def error(self, line: int, message: str) -> TraceError:
        return TraceError(f"{self.path}:{line}: {message}")

    def integer(self, line: int, name: str, value: object) -> int:
        if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18:
            return value
        raise self.error(line, f"{name} {value!r} is not a whole number of at most 18 digits")

    def tokens(self, line: int, name: str, value: object) -> int:
        count = self.integer(line, name, value)
        if not 0 <= count <= MAX_TOKENS:
            raise self.error(line, f"{name} {count} is not within 0..{MAX_TOKENS}")
        return count

    def add(
        self,
        line: int,
        *,
        time_ns: int,
        stamp: str,
        num_prompt: int,
        num_output: int,
        conversation: int | None,
        cached: int | None,
        blocks: list[int] | None,
    ) -> None:
        last_ns, last_stamp = self._last.get(conversation, (time_ns, stamp))
        if time_ns < last_ns:
            raise self.error(
                line, f"stamp {stamp!r} is before {last_stamp!r}; stamps must not go back"
            )
        self._last[conversation] = (time_ns, stamp)
        if self._origin_ns is None:
            self._origin_ns = 0 if conversation is not None else time_ns
        if cached is not None and cached > num_prompt:
            raise self.error(
                line, f"cached_prefix_tokens {cached} exceeds input_tokens {num_prompt}"
            )
        max_blocks = -(-num_prompt // PREFIX_BLOCK_TOKENS)
        if blocks is not None and len(blocks) > max_blocks:
            raise self.error(
                line,
                f"{len(blocks)} prefix blocks for {num_prompt} input tokens; "
                f"blocks of {PREFIX_BLOCK_TOKENS} tokens leave at most {max_blocks}",
            )
        self._num_read += 1
        if num_prompt == 0 or num_output == 0:
            self._num_zero_input += num_prompt == 0
            self._num_zero_output += num_output == 0
            self._num_zero_both += num_prompt == 0 and num_output == 0
            return
        self._arrival_ns.append(time_ns - self._origin_ns)
        self._prompt.append(num_prompt)
        self._output.append(num_output)
        if conversation is not None:
            self._conversation.append(conversation)
        if cached is not None:
            self._cached.append(cached)
        if blocks is not None:
            self._has_blocks = True
            self._block_ids.extend(blocks)
            self._block_offsets.append(len(self._block_ids))

    def to_trace(self, *, source: str, shape: str) -> Trace:
        has_conversation = len(self._conversation) == len(self._prompt) > 0
        has_cached = len(self._cached) == len(self._prompt) > 0
        return Trace(
            source=source,
            shape=shape,
            arrival_ns=np.array(self._arrival_ns, dtype=np.int64),
            num_prompt_tokens=np.array(self._prompt, dtype=np.int32),
            num_output_tokens=np.array(self._output, dtype=np.int32),
            counts=RowCounts(
                num_read=self._num_read,
                num_dropped=self._num_read - len(self._prompt),
                num_zero_output=self._num_zero_output,
                num_zero_input=self._num_zero_input,
                num_zero_both=self._num_zero_both,
            ),
            conversation_id=(
                np.array(self._conversation, dtype=np.int64) if has_conversation else None
            ),
            cached_prefix_tokens=np.array(self._cached, dtype=np.int32) if has_cached else None,
            block_ids=np.array(self._block_ids, dtype=np.int64) if self._has_blocks else None,
            block_offsets=(
                np.array(self._block_offsets, dtype=np.int64) if self._has_blocks else None
            ),
        )
