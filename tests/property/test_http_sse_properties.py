"""SseSplitter: the same events wherever the stream is cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from dsched.drivers.http import SseSplitter

# Bytes that mean something to the format, and some that do not.
TEXT = st.text(alphabet='ab:d{}" é', max_size=12).map(str.encode)


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A stream of events and the data of each."""
    data, expected = b"", []
    for _ in range(draw(st.integers(0, 6))):
        newline = draw(st.sampled_from([b"\n", b"\r\n"]))
        lines = draw(st.lists(TEXT, min_size=1, max_size=3))
        for line in lines:
            if draw(st.booleans()):
                data += draw(st.sampled_from([b": ping", b"id: 7", b"event: x"])) + newline
            is_bare = line and not line.startswith(b" ") and draw(st.booleans())
            data += (b"data:" if is_bare else b"data: ") + line + newline
        data += newline
        expected.append(b"\n".join(lines))
    return data, expected


@given(streams(), st.lists(st.integers(0, 200), max_size=8))
def test_cuts_do_not_change_the_events(stream: tuple[bytes, list[bytes]], cuts: list[int]) -> None:
    data, expected = stream
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    splitter = SseSplitter()
    events: list[bytes] = []
    for start, end in itertools.pairwise(edges):
        events += splitter.feed(data[start:end])

    assert events == expected
    assert not splitter.has_partial
