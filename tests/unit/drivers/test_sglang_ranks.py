"""The choice among the DP ranks of an SGLang server: named ranks stand, dead ones get nothing."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dsched.drivers.sglang.ranks import MAX_ERRORS, RankChoice, attach_ranks, live_ranks


class Controller:
    """What is used of SGLang's `DataParallelController`."""

    def __init__(
        self, tokens: Sequence[int], *, method: str = "TOTAL_TOKENS", dead: Sequence[int] = ()
    ) -> None:
        num_ranks = len(tokens)
        self.load_balance_method = SimpleNamespace(name=method)
        self.workers: list[object | None] = [object() for _ in range(num_ranks)]
        self.status = [rank not in dead for rank in range(num_ranks)]
        self._active_workers = list(range(num_ranks))
        self.dp_budget = SimpleNamespace(total_tokens=list(tokens), total_requests=[0] * num_ranks)
        self.refresh_load_budget_on_dispatch = False
        self.sent: list[int | None] = []
        self.dispatching: Any = self.own

    def own(self, request: Any) -> str:
        self.sent.append(request.routed_dp_rank)
        return "sent"

    def place(self, rank: int | None = None, num_tokens: int = 10) -> int | None:
        """Send one request as SGLang does; return its rank."""
        request = SimpleNamespace(routed_dp_rank=rank, input_ids=[1] * num_tokens)
        assert self.dispatching(request) == "sent"
        return self.sent[-1]


def test_named_live_rank_stands_whatever_its_load() -> None:
    controller = Controller([900, 0])
    choice = attach_ranks(controller)

    assert [controller.place(0), controller.place(1)] == [0, 1]
    assert choice is not None
    assert (choice.num_chosen, choice.num_redirected) == (0, 0)


def test_burst_spreads_by_tokens_before_the_next_snapshot() -> None:
    """20, 0, 0 tokens: two get one each, then the first is the lightest of equal ones."""
    controller = Controller([20, 0, 0])
    attach_ranks(controller)

    assert [controller.place(num_tokens=20) for _ in range(4)] == [1, 2, 0, 1]
    assert controller.refresh_load_budget_on_dispatch


def test_dead_rank_gets_nothing_even_if_named() -> None:
    """SGLang's own method would raise for it, and the server would end."""
    controller = Controller([0, 500, 400], dead=[0])
    choice = attach_ranks(controller)

    assert controller.place(0) == 2
    assert controller.place() == 2
    assert choice is not None
    assert (choice.num_redirected, choice.num_chosen) == (1, 1)


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_rank_that_is_not_there_is_replaced(rank: int) -> None:
    controller = Controller([5, 0])
    attach_ranks(controller)

    assert controller.place(rank) == 1


def test_liveness_is_everything_that_sglang_knows() -> None:
    """Status, elastic membership, the socket, and the process."""
    controller: Any = Controller([0] * 5, dead=[1])
    controller._active_workers = [4, 3, 2, 1]
    controller.workers[2] = None
    controller.scheduler_procs = [SimpleNamespace(is_alive=lambda: True)] * 3 + [
        SimpleNamespace(is_alive=lambda: False),
        None,
    ]

    assert live_ranks(controller) == [4]


def test_nobody_alive_is_left_to_sglang() -> None:
    controller = Controller([0, 0], dead=[0, 1])
    attach_ranks(controller)

    assert controller.place() is None
    assert controller.place(1) == 1


def test_split_sides_keep_their_common_rule() -> None:
    """The decode side computes the prefill rank from the bootstrap room."""
    controller = Controller([0, 0], method="FOLLOW_BOOTSTRAP_ROOM")

    assert attach_ranks(controller) is None
    assert controller.dispatching == controller.own


def test_unknown_controller_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    controller: Any = Controller([0, 0])
    del controller.dp_budget

    assert attach_ranks(controller) is None
    assert "lacks dp_budget" in caplog.text


def test_failures_leave_sglangs_choice_and_end_ours() -> None:
    controller: Any = Controller([0, 0])
    choice = attach_ranks(controller)
    controller.status = None

    assert [controller.place() for _ in range(MAX_ERRORS + 3)] == [None] * (MAX_ERRORS + 3)
    assert isinstance(choice, RankChoice)
    assert choice.num_errors == MAX_ERRORS
