"""Expert load on its way from an engine's worker to dsched, for the live picture.

An engine that rebalances with dsched's planner knows the load of each window in its workers, not
where its agent is. One worker of an EP group sends it from there, over a socket of its own, each
time that a placement was planned: every few minutes, some ten kilobytes. Nothing is planned on it.

What a worker must never do is disturb the engine: sending does not block, and whatever goes wrong
is counted and left at that. Loads travel as 16-bit shares of their layer's largest and that
largest, deflated.
"""

import zlib
from typing import Any, Final

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from dsched.config import AgentSettings
from dsched.drivers.agent import agent_identity, default_engine_id, new_incarnation
from dsched.drivers.base import ExpertLoad
from dsched.drivers.wire import MAX_EXPERT_CELLS, ExpertLoadReport

TOP: Final = 65_535
LINGER_MS: Final = 500
"""How long the end of the worker may wait for the last report."""
QUEUE_MESSAGES: Final = 2
"""Reports that wait for a dsched that is away; older ones say nothing new."""


def encode_expert_load(
    counts: NDArray[Any], *, engine_id: str, num_steps: int, balance: NDArray[np.float64] | None
) -> ExpertLoadReport:
    """Pack [L, E] counts.

    Raises:
        ValueError: they are no table, too large, negative or not finite.
    """
    loads = np.asarray(counts, np.float64)
    if loads.ndim != 2 or not 0 < loads.size <= MAX_EXPERT_CELLS:
        raise ValueError(f"expert load of shape {loads.shape} is no table of 1..{MAX_EXPERT_CELLS}")
    if not np.isfinite(loads).all() or loads.min() < 0:
        raise ValueError("expert load must be finite and not negative")
    largest = loads.max(axis=1)
    share = np.divide(loads, largest[:, None], out=np.zeros_like(loads), where=largest[:, None] > 0)
    return ExpertLoadReport(
        engine_id=engine_id,
        num_layers=loads.shape[0],
        num_experts=loads.shape[1],
        num_steps=num_steps,
        largest=tuple(int(value) for value in np.ceil(largest)),
        shares=zlib.compress(np.rint(share * TOP).astype("<u2").tobytes(), level=6),
        balance=None if balance is None else tuple(float(value) for value in balance),
    )


def decode_expert_load(report: ExpertLoadReport, *, now_ns: int) -> ExpertLoad:
    """Unpack a report that came over the network.

    Raises:
        ValueError: its parts do not fit each other.
    """
    shape = (report.num_layers, report.num_experts)
    size = report.num_layers * report.num_experts
    if size > MAX_EXPERT_CELLS or len(report.largest) != report.num_layers:
        raise ValueError(f"{len(report.largest)} layers do not fit a load of shape {shape}")
    if report.balance is not None and len(report.balance) != report.num_layers:
        raise ValueError(f"{len(report.balance)} balances do not fit {report.num_layers} layers")
    try:
        raw = zlib.decompressobj().decompress(report.shares, 2 * size + 1)
    except zlib.error as error:
        raise ValueError(f"shares are damaged: {error}") from error
    if len(raw) != 2 * size:
        raise ValueError(f"{len(raw)} bytes do not fit a load of shape {shape}")
    share = np.frombuffer(raw, "<u2").reshape(shape).astype(np.float64) / TOP
    counts = np.rint(share * np.array(report.largest, np.float64)[:, None]).astype(np.int64)
    balance = None if report.balance is None else np.array(report.balance, np.float64)
    return ExpertLoad(counts=counts, num_steps=report.num_steps, time_ns=now_ns, balance=balance)


class ExpertReporter:
    """Sends loads from a worker. Makes its socket with the first one; never raises for what the
    network does."""

    def __init__(self, settings: AgentSettings) -> None:
        self._endpoint = settings.endpoint
        self._engine_id = settings.engine_id or default_engine_id()
        self._socket: zmq.Socket[bytes] | None = None
        self.num_sent = 0
        self.num_failed = 0

    @property
    def is_on(self) -> bool:
        """There is a dsched to tell."""
        return self._endpoint is not None

    def send(
        self,
        counts: NDArray[Any],
        *,
        num_steps: int = 0,
        balance: NDArray[np.float64] | None = None,
    ) -> bool:
        """Send the [L, E] load of a window; `False` when it was not sent."""
        if self._endpoint is None:
            return False
        try:
            report = encode_expert_load(
                counts, engine_id=self._engine_id, num_steps=num_steps, balance=balance
            )
            self._open(self._endpoint).send(msgspec.msgpack.encode(report), zmq.NOBLOCK)
        except (ValueError, zmq.ZMQError):
            self.num_failed += 1
            return False
        self.num_sent += 1
        return True

    def close(self) -> None:
        """Let go of the socket. Idempotent."""
        if self._socket is not None:
            self._socket.close(LINGER_MS)
            self._socket = None

    def _open(self, endpoint: str) -> "zmq.Socket[bytes]":
        if self._socket is None:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            socket.linger = LINGER_MS
            socket.sndhwm = QUEUE_MESSAGES
            incarnation = f"experts-{new_incarnation()}"
            socket.setsockopt(zmq.IDENTITY, agent_identity(self._engine_id, incarnation, 0))
            socket.connect(endpoint)
            self._socket = socket
        return self._socket
