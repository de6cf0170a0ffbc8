"""Expert load from a worker to dsched: what arrives is what was counted, and nothing else does
harm."""

import zlib
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsched.clock import ManualClock
from dsched.config import AgentSettings
from dsched.drivers.base import ExpertLoad
from dsched.drivers.eplb import plan_balance
from dsched.drivers.expert_report import ExpertReporter, decode_expert_load, encode_expert_load
from dsched.drivers.reports import MAX_MESSAGE_BYTES, ReportReader
from dsched.drivers.wire import AgentMessage, ExpertLoadReport
from dsched.eplb import ExpertPlacement, balancedness
from dsched.ids import EngineId


@given(
    hnp.arrays(
        np.int64,
        st.tuples(st.integers(1, 8), st.integers(1, 40)),
        elements=st.integers(0, 10**9),
    )
)
def test_loads_arrive_to_a_share_of_their_largest(counts: np.ndarray) -> None:
    """Within one 65 535th of the hottest expert of the layer, and a half for rounding."""
    report = encode_expert_load(counts, engine_id="e", num_steps=7, balance=None)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=AgentMessage)
    assert isinstance(sent, ExpertLoadReport)
    load = decode_expert_load(sent, now_ns=5)

    allowed = counts.max(axis=1, keepdims=True) / 65_535 + 1
    assert (abs(load.counts - counts) <= allowed).all()
    assert (load.num_steps, load.time_ns, load.is_simulated) == (7, 5, False)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.zeros((0, 4)), "no table"),
        (np.zeros(4), "no table"),
        (np.zeros((1_000, 1_000)), "no table"),
        (np.array([[1.0, np.nan]]), "finite"),
        (np.array([[1, -1]]), "not negative"),
    ],
)
def test_what_is_no_load_is_refused(counts: np.ndarray, message: str) -> None:
    """With the rule in the message."""
    with pytest.raises(ValueError, match=message):
        encode_expert_load(counts, engine_id="e", num_steps=0, balance=None)


def report(**changes: object) -> ExpertLoadReport:
    good = encode_expert_load(
        np.array([[1, 2], [3, 4]]), engine_id="e", num_steps=1, balance=np.array([0.5, 1.0])
    )
    return msgspec.structs.replace(good, **changes)


@pytest.mark.parametrize(
    "broken",
    [
        {"largest": (1,)},
        {"num_layers": 3},
        {"num_experts": 3},
        {"shares": b"no zlib"},
        {"shares": zlib.compress(b"\0" * 10_000_000)},
        {"shares": b""},
        {"balance": (1.0,)},
        {"num_layers": 131_072, "num_experts": 131_072},
    ],
)
def test_reports_that_do_not_add_up_are_dropped(broken: dict[str, object]) -> None:
    """Counted as malformed; a bomb is not unpacked; the reader goes on."""
    reader = ReportReader(endpoint="tcp://127.0.0.1:0", clock=ManualClock(9))
    heard: list[ExpertLoad] = []
    reader.subscribe(EngineId("e"), Hears(heard))
    reader.receive([b"x", msgspec.msgpack.encode(report(**broken))])
    reader.receive([b"x", msgspec.msgpack.encode(report())])

    assert reader.drops["malformed"] == 1
    assert [load.counts.tolist() for load in heard] == [[[1, 2], [3, 4]]]
    assert heard[0].time_ns == 9


class Hears:
    """Subscribes to one engine and wants expert loads only."""

    def __init__(self, heard: list[ExpertLoad]) -> None:
        self._heard = heard

    def on_expert_load(self, load: ExpertLoad) -> None:
        self._heard.append(load)

    def on_hello(self, hello: object) -> None:
        raise AssertionError(hello)

    on_report = on_goodbye = on_hello


def test_the_largest_report_fits_a_message() -> None:
    """61 layers of 1 024 experts, no two alike."""
    counts = np.random.default_rng(1).integers(0, 10**6, (61, 1_024))
    balance = np.full(61, 0.123456789)
    data = msgspec.msgpack.encode(
        encode_expert_load(counts, engine_id="e" * 128, num_steps=1, balance=balance)
    )

    assert len(data) < MAX_MESSAGE_BYTES


@pytest.fixture
def bound() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.rcvtimeo = 10_000
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    yield socket, f"tcp://127.0.0.1:{port}"
    context.destroy(linger=0)


def test_a_worker_sends_under_its_engines_name(bound: tuple[zmq.Socket[bytes], str]) -> None:
    """Two reports over one socket."""
    socket, endpoint = bound
    reporter = ExpertReporter(AgentSettings(endpoint=endpoint, engine_id="decode-0"))
    for steps in (1, 2):
        assert reporter.send(np.array([[5, 9]]), num_steps=steps, balance=np.array([0.7]))
        identity, payload = socket.recv_multipart()
        message = msgspec.msgpack.decode(payload, type=ExpertLoadReport)
        assert identity.startswith(b"decode-0/experts-")
        assert (message.engine_id, message.num_steps) == ("decode-0", steps)
    reporter.close()
    reporter.close()
    assert (reporter.num_sent, reporter.num_failed) == (2, 0)


def test_a_worker_never_waits_and_never_raises() -> None:
    """Nobody listens: the first few are kept, the rest dropped. Off without an endpoint."""
    away = ExpertReporter(AgentSettings(endpoint="tcp://127.0.0.1:9", engine_id="e"))
    sent = [away.send(np.ones((2, 4))) for _ in range(20)]
    assert not away.send(np.array([[-1]]))
    away._socket.close(0)  # type: ignore[union-attr]  # nothing of it shall linger
    off = ExpertReporter(AgentSettings(endpoint=None, engine_id="e"))

    assert sent[0]
    assert not sent[-1]
    assert away.num_failed > 0
    assert not off.is_on
    assert not off.send(np.ones((2, 4)))


@pytest.mark.parametrize("seed", range(5))
def test_balance_is_that_of_the_planner(seed: int) -> None:
    """The same as `dsched.eplb.balancedness` with equal copies."""
    rng = np.random.default_rng(seed)
    load = rng.integers(1, 1_000, (3, 8))
    slots = np.stack([rng.permutation(np.r_[np.arange(8), rng.integers(0, 8, 4)]) for _ in "123"])
    placement = ExpertPlacement(slot_expert=slots.astype(np.int32), num_ranks=4, num_experts=8)

    ours = plan_balance(load, slots, num_ranks=4)
    assert ours == pytest.approx(balancedness(placement, load))
