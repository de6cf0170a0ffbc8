"""The ledger stays exact whatever happens to reports, requests and engines."""

from collections.abc import Iterator

import numpy as np
import pytest

from dsched.drivers.wire import RankReport
from dsched.errors import InvariantError
from dsched.ids import DpRank, EngineId, RankId
from dsched.rng import stream
from dsched.routing import kernels as k
from dsched.routing.decode import DecodeRouter, RoutingRequest
from dsched.routing.ledger import LoadLedger, RankState, ReportOutcome


def rank_name(index: int) -> RankId:
    return RankId(EngineId("engine"), DpRank(index))


def report(
    seq: int,
    *,
    running: int = 0,
    kv: int = 0,
    waiting: int = 0,
    prefill: int = 0,
    incarnation: str = "a",
    capacity: int = 1000,
    step_ns: int = 0,
) -> RankReport:
    return RankReport(
        engine_id="engine",
        incarnation=incarnation,
        dp_rank=0,
        seq=seq,
        step=seq,
        num_running=running,
        num_waiting=waiting,
        num_kv_tokens=kv,
        num_waiting_prefill_tokens=prefill,
        kv_capacity_tokens=capacity,
        step_ns=step_ns,
    )


@pytest.fixture
def ledger() -> Iterator[LoadLedger]:
    made = LoadLedger()
    made.add_rank(rank_name(0), kv_capacity_tokens=1000, max_running_requests=16)
    yield made
    made.validate()


def other(ledger: LoadLedger) -> tuple[int, int]:
    load = ledger.load_of(0)
    return load.num_other_running, load.num_other_kv_tokens


def test_load_of_other_routers_is_what_a_report_shows_beyond_own(ledger: LoadLedger) -> None:
    ledger.book(0, "mine", num_prompt_tokens=100)
    ledger.add_tokens("mine", 1)
    assert ledger.apply_report(0, report(1, running=3, kv=401), 5) is ReportOutcome.APPLIED
    assert other(ledger) == (2, 300)
    assert ledger.report_time_ns(0) == 5


def test_a_report_that_does_not_show_a_dispatch_yet_takes_nothing_back(ledger: LoadLedger) -> None:
    """The bug of sglang PR #22614: work that was dispatched but not seen must keep counting."""
    ledger.book(0, "mine", num_prompt_tokens=100)
    ledger.apply_report(0, report(1), 0)
    load = ledger.load_of(0)
    assert (load.num_own_running, load.num_own_kv_tokens) == (1, 100)
    assert other(ledger) == (0, 0)


def test_a_report_that_still_shows_an_ended_request_invents_no_load(ledger: LoadLedger) -> None:
    ledger.book(0, "mine", num_prompt_tokens=100)
    ledger.add_tokens("mine", 1)
    ledger.release("mine")
    ledger.apply_report(0, report(1, running=1, kv=101), 0)
    assert other(ledger) == (0, 0)
    ledger.apply_report(0, report(2), 0)
    assert other(ledger) == (0, 0)


def test_foreign_load_that_went_is_let_go_even_while_own_dispatches_are_unseen(
    ledger: LoadLedger,
) -> None:
    ledger.apply_report(0, report(1, running=5, kv=500), 0)
    assert other(ledger) == (5, 500)
    ledger.book(0, "mine", num_prompt_tokens=50)
    second = 1_000_000_000
    ledger.apply_report(0, report(2, running=1, kv=50), second)
    ledger.add_tokens("mine", 1)
    for seq in (3, 4, 5):
        ledger.apply_report(0, report(seq, running=1, kv=51), seq * second)
    assert other(ledger) == (0, 0)


def test_a_report_that_is_late_by_no_more_than_said_invents_no_load() -> None:
    """The token stream is ahead of the reports by 20 steps; nobody else uses the rank."""
    step_ns = 40_000_000
    ledger = LoadLedger(max_report_lag_ns=25 * step_ns)
    ledger.add_rank(rank_name(0), kv_capacity_tokens=10**6, max_running_requests=64)
    rng = stream(5, "late reports")
    kv: dict[int, int] = {}
    made: list[RankReport] = []
    for step in range(400):
        for key in [key for key in kv if rng.random() < 0.1]:
            ledger.release(key)
            del kv[key]
        if rng.random() < 0.5:
            kv[step] = int(rng.integers(1, 20_000))
            ledger.book(0, step, num_prompt_tokens=kv[step])
        for key in kv:
            kv[key] += 1
            ledger.add_tokens(key, 1)
        made.append(report(step, running=len(kv), kv=sum(kv.values()), capacity=10**6))
        if step >= 20:
            ledger.apply_report(0, made[step - 20], step * step_ns)
            assert other(ledger) == (0, 0)
    ledger.validate()


@pytest.mark.parametrize("seq", [5, 4, 0])
def test_old_and_repeated_reports_are_dropped(ledger: LoadLedger, seq: int) -> None:
    ledger.apply_report(0, report(5, running=2, kv=20), 1)
    assert ledger.apply_report(0, report(seq, running=9, kv=90), 2) is ReportOutcome.OLD_SEQ
    assert other(ledger) == (2, 20)
    assert ledger.num_reports[ReportOutcome.OLD_SEQ] == 1
    assert ledger.report_time_ns(0) == 1


def test_reports_of_unknown_ranks_are_dropped(ledger: LoadLedger) -> None:
    for rank in (None, 7, -1):
        assert ledger.apply_report(rank, report(1), 0) is ReportOutcome.UNKNOWN_RANK
    ledger.remove_rank(0)
    assert ledger.apply_report(0, report(1), 0) is ReportOutcome.UNKNOWN_RANK
    assert ledger.num_reports[ReportOutcome.UNKNOWN_RANK] == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"running": -3},
        {"kv": float("nan")},
        {"kv": -1},
        {"waiting": -1},
        {"step_ns": float("nan")},
        {"running": 1 << 63},
    ],
)
def test_impossible_values_are_dropped(ledger: LoadLedger, wrong: dict) -> None:
    """RT-07 d: routing does not change, the drop is counted."""
    ledger.apply_report(0, report(1, running=2, kv=20), 0)
    assert ledger.apply_report(0, report(2, **wrong), 9) is ReportOutcome.BAD_VALUE
    assert other(ledger) == (2, 20)
    assert ledger.num_reports[ReportOutcome.BAD_VALUE] == 1


def test_a_restart_forgets_foreign_load_and_keeps_bookings(ledger: LoadLedger) -> None:
    ledger.book(0, "mine", num_prompt_tokens=10)
    ledger.apply_report(0, report(9, running=4, kv=400), 0)
    restarted = report(1, incarnation="b")
    assert ledger.apply_report(0, restarted, 1) is ReportOutcome.APPLIED
    load = ledger.load_of(0)
    assert (load.num_own_running, load.num_other_running) == (1, 0)
    late = report(10, running=4, kv=400)
    assert ledger.apply_report(0, late, 2) is ReportOutcome.OLD_INCARNATION
    assert other(ledger) == (0, 0)
    ledger.release("mine")


def test_an_incarnation_that_keeps_talking_alone_is_the_live_one(ledger: LoadLedger) -> None:
    """A very late message of an engine long gone looks like a restart; it must not win for good."""
    ledger.apply_report(0, report(5, incarnation="live", running=1, kv=10), 0)
    ledger.apply_report(0, report(3, incarnation="ghost"), 0)
    outcomes = [
        ledger.apply_report(0, report(seq, incarnation="live", running=1, kv=10), 0)
        for seq in (6, 7, 8)
    ]
    assert outcomes == [
        ReportOutcome.OLD_INCARNATION,
        ReportOutcome.OLD_INCARNATION,
        ReportOutcome.APPLIED,
    ]
    assert other(ledger) == (1, 10)


def test_a_hello_names_the_live_incarnation(ledger: LoadLedger) -> None:
    ledger.apply_report(0, report(5, incarnation="old"), 0)
    ledger.set_incarnation(0, "new")
    late = ledger.apply_report(0, report(6, incarnation="old"), 0)
    assert late is ReportOutcome.OLD_INCARNATION
    assert ledger.apply_report(0, report(1, incarnation="new"), 0) is ReportOutcome.APPLIED


def test_shared_prefixes_give_room_but_cost_as_read(ledger: LoadLedger) -> None:
    """Two requests share 400 tokens of KV: the rank holds 600, a step reads 1000."""
    for key in ("a", "b"):
        ledger.book(0, key, num_prompt_tokens=500)
        ledger.add_tokens(key, 1)
    assert not k.has_room(ledger.table, 0, 300)
    for seq in (1, 2, 3):
        ledger.apply_report(0, report(seq, running=2, kv=602), seq * 1_000_000_000)
    assert k.has_room(ledger.table, 0, 300)
    assert not k.has_room(ledger.table, 0, 399)
    assert ledger.load_of(0).num_own_kv_tokens == 1002


def test_a_rank_can_lose_capacity_by_report(ledger: LoadLedger) -> None:
    ledger.apply_report(0, report(1, capacity=200), 0)
    assert not k.has_room(ledger.table, 0, 201)
    assert k.has_room(ledger.table, 0, 200)


def test_validate_finds_a_sum_that_is_off(ledger: LoadLedger) -> None:
    ledger.book(0, "a", num_prompt_tokens=5)
    ledger.table[k.OWN_KV, 0] += 1
    with pytest.raises(InvariantError, match="rank 0: row 1 says 6, its bookings 5"):
        ledger.validate()
    ledger.table[k.OWN_KV, 0] -= 1


def test_silence_changes_nothing() -> None:
    """RT-07 b, c: without reports the own ledger spreads; a silent rank is not preferred."""
    router = DecodeRouter()
    for index in range(4):
        router.add_rank(rank_name(index), kv_capacity_tokens=10_000, max_running_requests=64)
    for rank in (0, 1, 2):
        router.apply_report(rank, report(1, capacity=10_000), 0)
    counts = [0] * 4
    minute_later = 60_000_000_000
    for index in range(40):
        decision = router.pick(RoutingRequest(num_prompt_tokens=100), minute_later)
        assert decision.rank is not None
        counts[decision.rank] += 1
        router.book(decision.rank, index, num_prompt_tokens=100, now_ns=minute_later)
    assert counts == [10, 10, 10, 10]
    assert router.report_age_ns(0, minute_later) == minute_later
    assert router.report_age_ns(3, minute_later) is None
    router.validate()


class Soak:
    """Simulated hours of traffic over engines that restart and reports that go astray."""

    NUM_RANKS = 4

    def __init__(self, seed: int) -> None:
        self.rng = stream(seed, "soak")
        self.router = DecodeRouter(max_hold_ns=30_000_000_000)
        self.truth: list[dict[str, int]] = [{} for _ in range(self.NUM_RANKS)]
        """KV tokens of every attempt that lives in each engine, ours and foreign."""
        self.mine: dict[str, int] = {}
        """Ours, as the router was told: key -> rank."""
        self.incarnation = [0] * self.NUM_RANKS
        self.seq = [0] * self.NUM_RANKS
        self.mail: list[tuple[int, int, RankReport]] = []
        """(when it arrives, rank, report)."""
        self.count = 0
        self.settled_ns = 0
        for index in range(self.NUM_RANKS):
            self.router.add_rank(
                rank_name(index), kv_capacity_tokens=200_000, max_running_requests=32
            )

    def run(self, num_seconds: int) -> None:
        for second in range(num_seconds):
            now_ns = second * 1_000_000_000
            self.arrivals(now_ns)
            self.growth_and_ends(now_ns)
            if self.rng.random() < 1e-4:
                self.restart(int(self.rng.integers(self.NUM_RANKS)), now_ns)
            if second % 3 == 0:
                self.publish(second)
            self.deliver(second, now_ns)
            if second % 5000 == 0:
                self.check()

    def arrivals(self, now_ns: int) -> None:
        for _ in range(int(self.rng.poisson(0.5))):
            self.count += 1
            key = f"r{self.count}"
            tokens = int(self.rng.integers(1, 20_000))
            if self.rng.random() < 0.2:
                self.truth[int(self.rng.integers(self.NUM_RANKS))][f"foreign{key}"] = tokens
                continue
            request = RoutingRequest(num_prompt_tokens=tokens)
            assert self.router.hold(request, key, now_ns)
        while (held := self.router.next_held(now_ns)) is not None:
            rank, key = held.decision.rank, str(held.request_key)
            assert rank is not None
            tokens = next(
                one.num_prompt_tokens
                for one in self.router._held._held.values()
                if one.request_key == key
            )
            self.router.book(rank, key, num_prompt_tokens=tokens, now_ns=now_ns)
            self.truth[rank][key] = tokens
            self.mine[key] = rank

    def growth_and_ends(self, now_ns: int) -> None:
        for attempts in self.truth:
            for key in list(attempts):
                grown = int(self.rng.integers(1, 40))
                attempts[key] += grown
                if key in self.mine:
                    self.router.add_tokens(key, grown)
                if self.rng.random() < 0.05:  # ended, or its client aborted
                    del attempts[key]
                    self.end(key)
                    self.end(key)  # a second terminal call must not count twice
        for key in ("never", "heard", "of"):
            self.router.add_tokens(key, 3)

    def end(self, key: str) -> None:
        if self.mine.pop(key, None) is not None:
            assert self.router.release(key)
        else:
            assert not self.router.release(key)

    def restart(self, rank: int, now_ns: int) -> None:
        self.incarnation[rank] += 1
        self.seq[rank] = 0
        self.router.set_rank_state(rank, RankState.DOWN)
        for key in list(self.truth[rank]):
            del self.truth[rank][key]
            self.end(key)
        self.router.set_rank_state(rank, RankState.UP)

    def publish(self, second: int) -> None:
        for rank, attempts in enumerate(self.truth):
            self.seq[rank] += 1
            made = report(
                self.seq[rank],
                running=len(attempts),
                kv=sum(attempts.values()),
                incarnation=f"{rank}-{self.incarnation[rank]}",
                capacity=200_000,
            )
            if self.rng.random() < 0.2:
                continue  # lost
            delay = 0 if self.rng.random() < 0.7 else int(self.rng.integers(1, 60))
            self.mail.append((second + delay, rank, made))
            if self.rng.random() < 0.1:  # repeated
                self.mail.append((second + delay + int(self.rng.integers(5)), rank, made))

    def deliver(self, second: int, now_ns: int) -> None:
        due = [entry for entry in self.mail if entry[0] <= second]
        if due:
            self.mail = [entry for entry in self.mail if entry[0] > second]
        for index in self.rng.permutation(len(due)):
            _, rank, made = due[index]
            self.router.apply_report(rank, made, now_ns)

    def check(self) -> None:
        self.router.validate()
        for rank, attempts in enumerate(self.truth):
            own = [tokens for key, tokens in attempts.items() if key in self.mine]
            load = self.router.load_of(rank)
            assert (load.num_own_running, load.num_own_kv_tokens) == (len(own), sum(own))

    def settle(self) -> None:
        """Everything ends or stands still, and reports get through again."""
        self.settled_ns += 1_000_000_000_000_000
        for second in range(4):
            for rank, attempts in enumerate(self.truth):
                self.seq[rank] += 1
                made = report(
                    self.seq[rank],
                    running=len(attempts),
                    kv=sum(attempts.values()),
                    incarnation=f"{rank}-{self.incarnation[rank]}",
                    capacity=200_000,
                )
                self.router.apply_report(rank, made, self.settled_ns + second * 1_000_000_000)


def settle_and_compare(soak: Soak) -> None:
    soak.check()
    for rank in range(soak.NUM_RANKS):
        for key in soak.truth[rank]:
            soak.router.add_tokens(key, 1)
            soak.truth[rank][key] += 1
    soak.settle()
    soak.check()
    for rank, attempts in enumerate(soak.truth):
        load = soak.router.load_of(rank)
        total = (
            load.num_own_running + load.num_other_running,
            load.num_own_kv_tokens + load.num_other_kv_tokens,
        )
        assert total == (len(attempts), sum(attempts.values()))
    for rank in range(soak.NUM_RANKS):
        soak.restart(rank, 0)
    assert soak.router.ledger.num_bookings == 0
    soak.settle()
    assert not soak.router.ledger.table[: k.SHARED_KV + 1, : soak.NUM_RANKS].any()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_hour_of_accidents_leaves_the_ledger_exact(seed: int) -> None:
    soak = Soak(seed)
    soak.run(3_600)
    settle_and_compare(soak)
    assert soak.router.ledger.num_reports[ReportOutcome.OLD_SEQ] > 50
    assert soak.count > 1_000


@pytest.mark.slow
def test_72_hours_of_accidents_leave_the_ledger_exact() -> None:
    """vllm#40279, llm-d-router#2295: after days of long answers nothing may have drifted."""
    soak = Soak(72)
    soak.run(72 * 3_600)
    settle_and_compare(soak)
    assert soak.count > 100_000
    assert sum(soak.incarnation) > 10
    assert soak.router.ledger.num_reports[ReportOutcome.OLD_INCARNATION] > 0


def test_loads_are_integers_to_the_end() -> None:
    """No float creeps into the sums, however large they grow."""
    ledger = LoadLedger()
    ledger.add_rank(rank_name(0), kv_capacity_tokens=1 << 60, max_running_requests=1 << 40)
    for index in range(100):
        ledger.book(0, index, num_prompt_tokens=(1 << 53) + index)
    for index in range(100):
        ledger.release(index)
    assert ledger.table.dtype == np.int64
    assert ledger.load_of(0).num_own_kv_tokens == 0
