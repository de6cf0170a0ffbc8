"""Requests that lost their engine: who waits for the ration, and what is being computed again.

State beside the controller's: `dsched.faults.ration` decides, this remembers. Requests that were
moved on purpose (a drain) are counted too, for their prompts cost the same.
"""

from collections.abc import Sequence

from dsched.controller.run import RequestRun
from dsched.faults.ration import LostRequest, RationPlan, RationView, plan_ration
from dsched.ids import AttemptId, RequestId
from dsched.trace import Recorder


class Handoffs:
    """One pool's lost requests."""

    def __init__(self, pool: str, *, tokens_per_rank: int | None, recorder: Recorder) -> None:
        self._pool = pool
        self._recorder = recorder
        self._tokens_per_rank = tokens_per_rank
        self._waiting: dict[RequestId, tuple[RequestRun, int]] = {}
        self._under_way: dict[AttemptId, int] = {}
        self._num_tokens_under_way = 0
        self._planned_for: tuple[int, int, int] | None = None
        """What the last plan that released nobody was made from; the same gives the same again."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens_under_way(self) -> int:
        """Prompt tokens sent again whose first new token has not come."""
        return self._num_tokens_under_way

    def add(self, run: RequestRun, now_ns: int) -> None:
        """Let a lost request wait for its turn."""
        self._planned_for = None
        self._waiting[run.request.request_id] = (run, now_ns)

    def drop(self, request_id: RequestId) -> bool:
        """Forget one that waits (its client left); `False` if it does not wait here."""
        self._planned_for = None
        return self._waiting.pop(request_id, None) is not None

    def take(self, num_ranks_up: int, now_ns: int) -> Sequence[RequestRun]:
        """Those whose turn it is, in order; they wait here no longer."""
        if not self._waiting:
            return ()
        made_from = (len(self._waiting), self._num_tokens_under_way, num_ranks_up)
        if made_from == self._planned_for:
            return ()
        view = RationView(
            waiting=[
                LostRequest(
                    request_id=request_id,
                    lost_ns=lost_ns,
                    num_tokens=run.num_known_tokens,
                )
                for request_id, (run, lost_ns) in self._waiting.items()
            ],
            num_tokens_under_way=self._num_tokens_under_way,
            num_ranks_up=num_ranks_up,
        )
        plan: RationPlan = plan_ration(view, tokens_per_rank=self._tokens_per_rank)
        self._planned_for = None if plan.released else made_from
        self._recorder.on_ration(
            self._pool,
            view,
            tokens_per_rank=self._tokens_per_rank,
            released=plan.released,
            now_ns=now_ns,
        )
        return [self._waiting.pop(request_id)[0] for request_id in plan.released]

    def begin(self, attempt_id: AttemptId, num_tokens: int) -> None:
        """An attempt computes so many tokens again."""
        self._under_way[attempt_id] = num_tokens
        self._num_tokens_under_way += num_tokens

    def end(self, attempt_id: AttemptId) -> bool:
        """Its first token came, or its end; `True` if that may make room for one that waits."""
        num_tokens = self._under_way.pop(attempt_id, 0)
        self._num_tokens_under_way -= num_tokens
        return bool(num_tokens and self._waiting)
