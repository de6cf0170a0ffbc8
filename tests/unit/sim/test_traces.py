"""read_trace: what each shape means, and what is refused."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from dsched.errors import TraceError
from dsched.rng import stream
from dsched.sim.traces import (
    Trace,
    place_conversations,
    read_trace,
    scale_rate,
    select,
    select_first,
    spread_ties,
    stagger_conversations,
)

SHARED = Path(os.environ.get("DSCHED_SHARED", Path(__file__).parents[4] / "shared"))
TR_01_OFFSETS_NS = [0, 1_000_000, 1_000_500, 1_500_999_600]


def write(tmp_path: Path, text: str, name: str = "trace.txt") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def read(tmp_path: Path, text: str) -> Trace:
    return read_trace(write(tmp_path, text))


def test_fractions_of_date_stamps_are_kept(tmp_path: Path) -> None:
    """TR-01: seven decimals of a second survive; cut to 10 ms they would be bursts."""
    trace = read(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:58.9990004,100,10\n"
        "2024-05-10 00:00:59.0000004,200,20\n"
        "2024-05-10 00:00:59.0000009,300,30\n"
        "2024-05-10 00:01:00.5000000,400,40\n",
    )

    assert trace.shape == "azure"
    assert trace.arrival_ns.tolist() == TR_01_OFFSETS_NS
    assert trace.num_prompt_tokens.tolist() == [100, 200, 300, 400]
    assert trace.num_output_tokens.tolist() == [10, 20, 30, 40]


@pytest.mark.parametrize("origin", ["0", "1000000000", "1732900000"])
def test_fractions_of_seconds_are_kept_far_from_zero(tmp_path: Path, origin: str) -> None:
    """TR-01: stamps of 1e9 seconds keep their nanoseconds, which a float would lose."""
    fractions = ("0", "0.001", "0.0010005", "1.5009996")
    whole = [str(int(origin) + int(each.partition(".")[0])) for each in fractions]
    stamps = [
        number + (f".{each.partition('.')[2]}" if "." in each else "")
        for number, each in zip(whole, fractions, strict=True)
    ]
    rows = "".join(f"{stamp},{10 + i},{1 + i}\n" for i, stamp in enumerate(stamps))

    trace = read(tmp_path, "t_s,input_tokens,output_tokens\n" + rows)

    assert trace.shape == "plain"
    assert trace.arrival_ns.tolist() == TR_01_OFFSETS_NS


def test_failed_calls_are_dropped_and_counted_by_reason(tmp_path: Path) -> None:
    """TR-03: rows read 6, kept 3, dropped 3 (zero output 3, of these zero input 1)."""
    trace = read(
        tmp_path,
        "t_s,input_tokens,output_tokens\n"
        "0,472,18\n5,1087,0\n5,417,276\n9,0,0\n12,1360,647\n45,185,0\n",
    )
    counts = trace.counts

    assert (counts.num_read, counts.num_kept, counts.num_dropped) == (6, 3, 3)
    assert (counts.num_zero_output, counts.num_zero_input, counts.num_zero_both) == (3, 1, 1)
    assert trace.num_prompt_tokens.sum() == 2249
    assert trace.num_output_tokens.sum() == 941
    assert trace.arrival_ns.tolist() == [0, 5_000_000_000, 12_000_000_000]


def test_row_without_input_alone_is_dropped(tmp_path: Path) -> None:
    """A call without a prompt cannot be replayed either."""
    trace = read(tmp_path, "t_s,input_tokens,output_tokens\n0,0,7\n1,3,7\n")

    assert trace.num_requests == 1
    assert (trace.counts.num_zero_input, trace.counts.num_zero_both) == (1, 0)


def test_first_row_is_the_origin_also_when_it_is_dropped(tmp_path: Path) -> None:
    """Offsets count from the first row of the file."""
    trace = read(tmp_path, "t_s,input_tokens,output_tokens\n10,5,0\n12,5,5\n")

    assert trace.arrival_ns.tolist() == [2_000_000_000]


def test_mooncake_csv_has_prefix_blocks(tmp_path: Path) -> None:
    """Run-length coded block hashes become one array with offsets."""
    trace = read(
        tmp_path,
        "t_ms,input_tokens,output_tokens,block512_ids\n0,2000,500,0-3\n3000.25,1537,490,0 14-16\n",
    )

    assert trace.shape == "mooncake_csv"
    assert trace.arrival_ns.tolist() == [0, 3_000_250_000]
    first, second = trace.prefix_blocks(0), trace.prefix_blocks(1)
    assert first is not None
    assert second is not None
    assert first.tolist() == [0, 1, 2, 3]
    assert second.tolist() == [0, 14, 15, 16]


def test_blocks_of_dropped_rows_are_dropped_too(tmp_path: Path) -> None:
    """Offsets stay in step with the kept rows."""
    trace = read(
        tmp_path,
        "t_ms,input_tokens,output_tokens,block512_ids\n0,600,5,1-2\n1,600,0,3-4\n2,600,5,5-6\n",
    )

    assert [trace.prefix_blocks(i).tolist() for i in range(2)] == [[1, 2], [5, 6]]  # type: ignore[union-attr]


def test_mooncake_json_lines(tmp_path: Path) -> None:
    """Mooncake's own form: milliseconds, exact also with a fraction; hash_ids may be missing."""
    trace = read(
        tmp_path,
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
        "\n"
        '{"timestamp": 27482.0005, "input_length": 100, "output_length": 1}\n',
    )

    assert trace.shape == "mooncake_jsonl"
    assert trace.arrival_ns.tolist() == [0, 500]
    assert trace.num_prompt_tokens.tolist() == [6955, 100]
    assert trace.prefix_blocks(0).tolist() == [46, 47]  # type: ignore[union-attr]
    assert trace.prefix_blocks(1).tolist() == []  # type: ignore[union-attr]


def test_conversation_stamps_stay_relative(tmp_path: Path) -> None:
    """Each conversation starts at its own zero; another conversation may go back in time."""
    trace = read(
        tmp_path,
        "conv,k,t_s,input_tokens,output_tokens,cached_prefix_tokens\n"
        "7,0,0,100,5,0\n7,1,19,200,6,96\n9,0,0,300,7,0\n",
    )

    assert trace.shape == "conversations"
    assert trace.arrival_ns.tolist() == [0, 19_000_000_000, 0]
    assert trace.conversation_id is not None
    assert trace.conversation_id.tolist() == [7, 7, 9]
    assert trace.cached_prefix_tokens is not None
    assert trace.cached_prefix_tokens.tolist() == [0, 96, 0]


def test_extra_columns_and_any_order_of_columns(tmp_path: Path) -> None:
    """Columns are found by name; what is not known is left alone."""
    trace = read(tmp_path, "client,output_tokens,t_s,input_tokens\n29,1053,0.222,274\n")

    assert trace.num_prompt_tokens.tolist() == [274]
    assert trace.num_output_tokens.tolist() == [1053]


def test_shape_is_known_by_header_and_gzip_by_content(tmp_path: Path) -> None:
    """A name says nothing: a gzip file called .csv is read."""
    data = gzip.compress(b"Timestamp,Model,Request tokens,Response tokens\n5,x,472,18\n")
    path = tmp_path / "trace.csv"
    path.write_bytes(data)

    trace = read_trace(path)

    assert trace.shape == "burstgpt"
    assert trace.source == "trace.csv"
    assert trace.num_output_tokens.tolist() == [18]


def test_byte_order_mark_carriage_returns_and_blank_lines(tmp_path: Path) -> None:
    """What editors and spreadsheets leave behind does no harm."""
    trace = read(tmp_path, "\ufefft_s,input_tokens,output_tokens\r\n0,1,2\r\n\r\n1,3,4\r\n\r\n")

    assert trace.num_prompt_tokens.tolist() == [1, 3]


def test_zone_of_a_date_stamp_counts(tmp_path: Path) -> None:
    """The same moment in two zones is the same moment."""
    trace = read(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-02-29 23:59:59+00:00,1,1\n2024-03-01T01:00:00.5+01:00,1,1\n",
    )

    assert trace.arrival_ns.tolist() == [0, 1_500_000_000]


HEAD = "t_s,input_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BLOCKS = "t_ms,input_tokens,output_tokens,block512_ids\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (HEAD + "0,1,1\n1,5,3,1\n", 3, "4 fields where the header has 3"),
        (HEAD + "0,1,1\n00:01.5,3,1\n", 3, "t_s '00:01.5' is not a decimal number"),
        (HEAD + '0,1,1\n"1,5",3,1\n', 3, "t_s '1,5' is not a decimal number"),
        (HEAD + "0,1,1\n5,2,2\n4.9,3,3\n", 4, "stamp '4.9' is before '5'"),
        (HEAD + "0,-5,1\n", 2, "input_tokens -5 is not within 0..2147483647"),
        (HEAD + "0,5,-1\n", 2, "output_tokens -1 is not within"),
        (HEAD + "0,5,2147483648\n", 2, "output_tokens 2147483648 is not within"),
        (HEAD + "0,5.5,1\n", 2, "input_tokens '5.5' is not a whole number"),
        (HEAD + "0,,1\n", 2, "input_tokens '' is not a whole number"),
        (HEAD + "0,٣,1\n", 2, "is not a whole number"),
        (HEAD + "-1,5,1\n", 2, "t_s '-1' is not a decimal number that is not negative"),
        (HEAD + "nan,5,1\n", 2, "t_s 'nan' is not"),
        (HEAD + "inf,5,1\n", 2, "t_s 'inf' is not"),
        (HEAD + "1e99,5,1\n", 2, "t_s '1e99' is not"),
        (HEAD + "9223372037,5,1\n", 2, "below 2**63 ns"),
        (HEAD + '0,"5,1\n', 2, "broken line"),
        (HEAD + "0,5,1\n1,\0,1\n", 3, "NUL"),
        ("time,in,out\n0,1,1\n", 1, "found columns 'time,in,out'; expected t_ms,input_tokens"),
        ("t_s,input_tokens\n0,1\n", 1, "found columns 't_s,input_tokens'"),
        ("", 1, "found columns ''"),
        ("t_s,t_s,input_tokens,output_tokens\n", 1, "column 't_s' appears 2 times"),
        (AZURE + "2024-13-10 00:00:00,1,1\n", 2, "is not a time such as"),
        (AZURE + "2024-02-30 00:00:00,1,1\n", 2, "is not a time such as"),
        (AZURE + "2024-05-10 24:00:00,1,1\n", 2, "is not a time such as"),
        (AZURE + "00:01.5,1,1\n", 2, "TIMESTAMP '00:01.5' is not a time such as"),
        (BLOCKS + "0,600,5,3-1\n", 2, "block512_ids '3-1' is not an id or a rising range"),
        (BLOCKS + "0,600,5,0-99999999999\n", 2, "rising range"),
        (BLOCKS + "0,600,5,x\n", 2, "block512_ids 'x'"),
        (BLOCKS + "0,600,5,0-2\n", 2, "3 prefix blocks for 600 input tokens"),
        ("conv,t_s,input_tokens,output_tokens\na,0,1,1\n", 2, "conv 'a' is not a whole number"),
        (
            "conv,t_s,input_tokens,output_tokens\n1,5,1,1\n2,0,1,1\n1,4,1,1\n",
            4,
            "stamp '4' is before '5'",
        ),
        (
            "conv,t_s,input_tokens,output_tokens,cached_prefix_tokens\n1,0,5,1,6\n",
            2,
            "cached_prefix_tokens 6 exceeds input_tokens 5",
        ),
        ('{"timestamp": 0}\n', 1, "found keys 'timestamp'; expected timestamp,input_length"),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"t\n', 2, "broken line"),
        ('{"timestamp": true, "input_length": 1, "output_length": 1}', 1, "timestamp 'True'"),
        ('{"timestamp": 0, "input_length": 1.5, "output_length": 1}', 1, "input_length"),
        (
            '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": 5}',
            1,
            "hash_ids 5 is not a list",
        ),
        ("{}\n", 1, "found keys ''"),
    ],
)
def test_broken_rows_name_file_line_value_and_rule(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    """A trace is never repaired silently."""
    path = write(tmp_path, text)

    with pytest.raises(TraceError) as caught:
        read_trace(path)

    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)


def test_bytes_that_are_not_text_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(HEAD.encode() + b"0,1,1\n1,\xff,1\n")

    with pytest.raises(TraceError, match=r"trace\.csv:3: byte 0xff is not UTF-8"):
        read_trace(path)


@pytest.mark.parametrize("cut", [5, 12, -4])
def test_cut_gzip_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress((HEAD + "0,1,1\n" * 50).encode())[:cut])

    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(path)


def test_missing_file_and_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere: cannot be read: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path)


def test_ties_spread_up_to_the_next_stamp_in_order(tmp_path: Path) -> None:
    """Rounded stamps become arrivals inside their interval; the order of rows stays."""
    rows = "".join(f"{3 * (i // 10)},{i + 1},1\n" for i in range(40))
    trace = read(tmp_path, HEAD + rows)

    spread = spread_ties(trace, stream(1, "jitter"))

    assert trace.tied_share() == pytest.approx(36 / 39)
    assert spread.tied_share() == 0
    assert np.all(np.diff(spread.arrival_ns) >= 0)
    assert np.all(spread.arrival_ns >= trace.arrival_ns)
    assert np.all(spread.arrival_ns - trace.arrival_ns < 3_000_000_000)
    assert spread.num_prompt_tokens.tolist() == list(range(1, 41))
    again = spread_ties(trace, stream(1, "jitter"))
    assert np.array_equal(spread.arrival_ns, again.arrival_ns)


def test_lone_stamps_are_not_spread(tmp_path: Path) -> None:
    trace = read(tmp_path, HEAD + "0,1,1\n1,1,1\n1,1,1\n2,1,1\n")

    spread = spread_ties(trace, stream(1, "jitter"))

    assert spread.arrival_ns[[0, 3]].tolist() == [0, 2_000_000_000]
    assert spread.arrival_ns[1] < spread.arrival_ns[2]


CONVERSATIONS = (
    "conv,t_s,input_tokens,output_tokens\n5,0,1,1\n5,10,2,1\n3,0,3,1\n3,1,4,1\n3,30,5,1\n"
)


def test_conversations_are_merged_on_one_time_line(tmp_path: Path) -> None:
    trace = read(tmp_path, CONVERSATIONS)

    placed = place_conversations(trace, {5: 0, 3: 9_500_000_000})

    assert placed.num_prompt_tokens.tolist() == [1, 3, 2, 4, 5]
    assert (placed.arrival_ns / 1e9).tolist() == [0, 9.5, 10, 10.5, 39.5]


def test_conversation_without_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="conversation 5 has no start time"):
        place_conversations(read(tmp_path, CONVERSATIONS), {3: 0})


def test_staggered_conversations_begin_at_zero_in_file_order(tmp_path: Path) -> None:
    trace = read(tmp_path, CONVERSATIONS)

    placed = stagger_conversations(trace, stream(2, "conversations"), mean_gap_s=100.0)

    assert placed.arrival_ns[0] == 0
    assert np.all(np.diff(placed.arrival_ns) >= 0)
    assert placed.conversation_id is not None
    starts = {c: placed.arrival_ns[placed.conversation_id == c].min() for c in (3, 5)}
    assert starts[5] == 0 < starts[3]


def test_scaled_rate_divides_times(tmp_path: Path) -> None:
    trace = read(tmp_path, HEAD + "0,1,1\n10,1,1\n")

    assert scale_rate(trace, 4.0).arrival_ns.tolist() == [0, 2_500_000_000]
    with pytest.raises(ValueError, match="rate scale 0"):
        scale_rate(trace, 0)


def test_select_keeps_columns_together(tmp_path: Path) -> None:
    trace = read(tmp_path, BLOCKS + "0,600,5,1-2\n1,100,6,9\n2,700,7,5-6\n")

    chosen = select(trace, np.array([2, 0]))

    assert chosen.num_output_tokens.tolist() == [7, 5]
    assert [chosen.prefix_blocks(i).tolist() for i in range(2)] == [[5, 6], [1, 2]]  # type: ignore[union-attr]
    assert select_first(trace, 2).num_output_tokens.tolist() == [5, 6]
    assert select_first(trace, 9).num_requests == 3


def test_arrays_are_read_only(tmp_path: Path) -> None:
    trace = read(tmp_path, HEAD + "0,1,1\n")

    with pytest.raises(ValueError, match="read-only"):
        trace.arrival_ns[0] = 5


@pytest.mark.parametrize(
    ("name", "shape", "num_read", "num_dropped"),
    [
        ("mooncake_conversation.csv", "mooncake_csv", 12_031, 0),
        ("azure2023_conv.csv", "plain", 19_366, 0),
        ("servegen_deepseek_r1_sample.csv", "plain", 20_000, 0),
        ("weka_claude_code_half.csv", "conversations", 25_226, 19),
    ],
)
def test_public_traces_are_read_whole(
    name: str, shape: str, num_read: int, num_dropped: int
) -> None:
    """The row counts are those of the traces' own description."""
    path = SHARED / "traces" / name
    if not path.exists():
        pytest.skip(f"the trace {name} is not beside this checkout")

    trace = read_trace(path)

    assert (trace.shape, trace.counts.num_read) == (shape, num_read)
    assert trace.counts.num_dropped == num_dropped
    if trace.block_ids is not None and trace.block_offsets is not None:
        # Its blocks of 512 tokens cover each prompt exactly.
        assert np.array_equal(np.diff(trace.block_offsets), -(-trace.num_prompt_tokens // 512))
