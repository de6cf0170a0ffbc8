"""Every request that is open, and where it is: waiting, on an engine, or between two attempts.

State: changed only by its own methods. A request is in exactly one place; `validate` says so.
"""

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from dsched.controller.run import Phase, RequestRun
from dsched.errors import InvariantError
from dsched.ids import AttemptId, EngineId, RequestId

MAX_STALE_DEADLINES = 1_024
"""Deadlines of runs that wait no more, kept behind one that does. Below: they are cleared away more
often than it pays. Above: memory."""


class RunTable:
    """The open requests of one controller."""

    def __init__(self) -> None:
        self._open: dict[RequestId, RequestRun] = {}
        self._num_of_tenant: dict[str, int] = {}
        self._waiting: dict[RequestId, RequestRun] = {}
        """Runs that no rank has; the routers hold them between ticks."""
        self._deadlines: list[tuple[int, RequestId]] = []
        """A heap: when each of them has waited too long, and some that wait no more. Almost all
        are placed in the tick in which they begin to wait, so an entry is dropped when it comes to
        the front, not when its run is placed."""
        self._running: dict[AttemptId, RequestRun] = {}
        """Runs that an engine computes now, by attempt."""

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._open

    def __iter__(self) -> Iterator[RequestRun]:
        """Every open run, oldest first, as of now."""
        return iter(list(self._open.values()))

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    # ---- reading

    def get(self, request_id: RequestId) -> RequestRun | None:
        return self._open.get(request_id)

    def waiting(self, request_id: RequestId) -> RequestRun:
        """A run that waits; its id comes from a router that holds it."""
        return self._waiting[request_id]

    def running(self, attempt_id: AttemptId) -> RequestRun | None:
        """The run that an attempt computes for; `None` once the attempt counts no more."""
        return self._running.get(attempt_id)

    def on_engine(self, engine_id: EngineId) -> list[RequestRun]:
        """Runs that an engine computes now, its prefill halves included."""
        return [run for run in self._running.values() if run.worker_on(engine_id) is not None]

    def num_of_tenant(self, tenant: str) -> int:
        """Open requests of a tenant."""
        return self._num_of_tenant.get(tenant, 0)

    def next_deadline_ns(self) -> int | None:
        """When the first of those that wait has waited too long."""
        deadlines = self._deadlines
        while deadlines and not self._is_due(deadlines[0]):
            heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def _is_due(self, entry: tuple[int, RequestId]) -> bool:
        """Whether a deadline is still that of a run that waits."""
        run = self._waiting.get(entry[1])
        return run is not None and run.deadline_ns == entry[0]

    def next_overdue(self, now_ns: int) -> RequestRun | None:
        """A run that has waited too long; end it, then ask again."""
        deadline_ns = self.next_deadline_ns()
        if deadline_ns is None or deadline_ns > now_ns:
            return None
        return self._waiting[self._deadlines[0][1]]

    # ---- changes

    def open(self, run: RequestRun) -> None:
        self._open[run.request.request_id] = run
        tenant = run.request.tenant
        self._num_of_tenant[tenant] = self._num_of_tenant.get(tenant, 0) + 1

    def wait(self, run: RequestRun, deadline_ns: int) -> None:
        """No rank has it until a plan says so, or until the deadline."""
        request_id = run.request.request_id
        run.phase = Phase.WAITING
        run.attempt = None
        run.deadline_ns = deadline_ns
        self._waiting[request_id] = run
        heappush(self._deadlines, (deadline_ns, request_id))
        if len(self._deadlines) > 2 * len(self._waiting) + MAX_STALE_DEADLINES:
            self._deadlines = list(filter(self._is_due, self._deadlines))
            heapify(self._deadlines)

    def stop_waiting(self, run: RequestRun) -> bool:
        """`False` if it did not wait."""
        request_id = run.request.request_id
        return self._waiting.pop(request_id, None) is not None

    def begin_attempt(self, run: RequestRun, attempt_id: AttemptId) -> None:
        self._running[attempt_id] = run

    def end_attempt(self, attempt_id: AttemptId) -> None:
        """The attempt counts no more; its engine may still hold something for it."""
        self._running.pop(attempt_id, None)

    def close(self, run: RequestRun) -> None:
        run.phase = Phase.ENDED
        del self._open[run.request.request_id]
        tenant = run.request.tenant
        self._num_of_tenant[tenant] -= 1
        if not self._num_of_tenant[tenant]:  # clients choose the names: keep no others
            del self._num_of_tenant[tenant]

    def validate(self, *, undecided: Iterable[RequestId]) -> None:
        """Check that no request is in two places; the next tick decides about `undecided`."""
        skipped = frozenset(undecided)
        for request_id, run in self._open.items():
            if request_id in skipped:
                continue
            if run.phase is Phase.ENDED:
                raise InvariantError(f"request {request_id} ended and is still kept")
            if run.phase is not Phase.PREFILLING and (run.phase is Phase.RUNNING) != (
                run.attempt is not None and run.attempt.attempt_id in self._running
            ):
                raise InvariantError(f"request {request_id}: {run.phase.name} and not in its place")
            if run.prefill is not None and run.prefill.attempt_id not in self._running:
                raise InvariantError(f"request {request_id}: its prefill half is not in its place")
            if (run.phase is Phase.WAITING) != (request_id in self._waiting):
                raise InvariantError(
                    f"request {request_id}: phase {run.phase.name} is not its place"
                )
        num_due = len(set(filter(self._is_due, self._deadlines)))
        if num_due != len(self._waiting):
            raise InvariantError(f"{num_due} deadlines for {len(self._waiting)} waiting requests")
