"""Names of things: requests, engines, DP ranks, attempts."""

from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
"""One client call. Ours, or the client's `X-Request-Id`."""

EngineId = NewType("EngineId", str)
"""One running engine deployment, unique in the cluster."""

DpRank = NewType("DpRank", int)
"""Position of a DP rank inside its engine, 0..D-1."""

AttemptId = NewType("AttemptId", str)
"""One try of one request on one rank: the id that the engine sees.

All attempt ids of all processes have one length, so none is a prefix of another: SGLang aborts by
prefix.
"""


class RankId(NamedTuple):
    """One DP rank of one engine: the target of routing. Sorts by engine, then rank."""

    engine_id: EngineId
    dp_rank: DpRank

    def __str__(self) -> str:
        return f"{self.engine_id}/{self.dp_rank}"


class AttemptIds:
    """Makes attempt ids that no other process makes and that never prefix each other.

    >>> ids = AttemptIds(process_tag=0xabc)
    >>> ids.next_id(), ids.next_id()
    ('ds-0000000000000abc-000000000000', 'ds-0000000000000abc-000000000001')
    """

    def __init__(self, *, process_tag: int) -> None:
        if not 0 <= process_tag < 1 << 64:
            raise ValueError(f"process_tag {process_tag} is not an unsigned 64-bit number")
        self._prefix = f"ds-{process_tag:016x}-"
        self._count = 0

    def next_id(self) -> AttemptId:
        attempt_id = AttemptId(f"{self._prefix}{self._count:012x}")
        self._count += 1
        return attempt_id
