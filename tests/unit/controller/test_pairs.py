"""Separate pools in the controller: a prefill worker and a decode rank for each request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from dsched.clock import ManualClock
from dsched.controller import Controller, ControllerSettings, EngineSpec, PoolSpec
from dsched.controller.pools import PrefixSource
from dsched.controller.request import InferenceRequest, RequestError, RequestFinish
from dsched.drivers.base import (
    AttemptFinish,
    AttemptSink,
    EngineCapabilities,
    EngineDescription,
    EngineListener,
    FinishReason,
)
from dsched.drivers.wire import GenerateCommand, RankReport, SamplingParams
from dsched.errors import DriverError, EngineRefusedError, EngineUnreachableError
from dsched.faults import MemoryJournal
from dsched.faults.progress import ProgressLimits
from dsched.ids import AttemptId, AttemptIds, DpRank, EngineId, RankId, RequestId
from dsched.plugins import PolicyGuard, PolicySet, RankCandidate, RequestView, RoutingPolicies
from dsched.routing.peers import PeerPrefillMessage, PeerWorkerLoad
from dsched.states import PoolRole
from dsched.testing.recorders import RecordingStream

SECOND_NS = 1_000_000_000
MS = 1_000_000
SAMPLING = SamplingParams(max_tokens=50, min_tokens=3, temperature=0.0, logprobs=2)
VALIDATING = ControllerSettings(is_validating=True)
LEARNING = ControllerSettings(is_validating=True, progress=ProgressLimits())
SHORT = ControllerSettings(is_validating=True, max_local_prefill_tokens=5_000)
"""Every prompt is left to its decode rank."""
TOLD = {"remote_block_ids": [1, 2], "remote_engine_id": "x"}


@dataclass
class PairEngine:
    """A driver of one half; it does what the test says."""

    engine_id: EngineId
    kv_meeting: tuple[str, int] | None = None
    can_prefill: bool = True
    num_dp_ranks: int = 1
    commands: list[GenerateCommand] = field(default_factory=list)
    sinks: list[AttemptSink] = field(default_factory=list)
    aborted: list[AttemptId] = field(default_factory=list)
    listener: EngineListener | None = None

    def start(self, listener: EngineListener) -> None:
        self.listener = listener
        self.come_up()

    def come_up(self) -> None:
        assert self.listener is not None
        self.listener.on_engine_up(
            EngineDescription(
                engine_id=self.engine_id,
                kind="sim",
                model="m",
                max_model_len=5_000,
                vocab_size=100,
                num_dp_ranks=self.num_dp_ranks,
                kv_capacity_tokens=10_000,
                max_running_requests=8,
                capabilities=EngineCapabilities(
                    can_prefill=self.can_prefill, has_load_reports=True
                ),
                kv_meeting=self.kv_meeting,
            )
        )

    def go_down(self) -> None:
        assert self.listener is not None
        self.listener.on_engine_down(self.engine_id, "killed")
        for index in range(len(self.sinks)):
            self.fail(EngineUnreachableError("connection reset"), index)

    def generate(self, command: GenerateCommand, sink: AttemptSink) -> None:
        self.commands.append(command)
        self.sinks.append(sink)

    def abort(self, attempt_id: AttemptId) -> None:
        self.aborted.append(attempt_id)

    def close(self) -> None:
        pass

    def emit(self, *token_ids: int, index: int = -1) -> None:
        attempt_id = AttemptId(self.commands[index].attempt_id)
        self.sinks[index].on_tokens(attempt_id, token_ids, None)

    def finish(
        self,
        reason: FinishReason = FinishReason.LENGTH,
        *,
        told: dict[str, Any] | None = None,
        index: int = -1,
        num_cached_tokens: int = 0,
    ) -> None:
        finish = AttemptFinish(reason=reason, kv_transfer=told, num_cached_tokens=num_cached_tokens)
        self.sinks[index].on_finish(AttemptId(self.commands[index].attempt_id), finish)

    def prefill(self, index: int = -1) -> None:
        """Compute the prompt, and the token that nobody hears."""
        self.emit(99, index=index)
        self.finish(told=TOLD, index=index)

    def fail(self, error: DriverError, index: int = -1) -> None:
        self.sinks[index].on_failure(AttemptId(self.commands[index].attempt_id), error)


class Pair:
    """A controller over a prefill pool `p` and a decode pool `d`, ticked by hand."""

    def __init__(
        self,
        prefill: Sequence[PairEngine],
        decode: Sequence[PairEngine],
        settings: ControllerSettings = VALIDATING,
        *,
        prefixes: PrefixSource | None = None,
        policies: PolicySet | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.num_asked = 0
        self.journal = MemoryJournal()
        self.controller = Controller(
            pools=[
                PoolSpec(
                    name=name,
                    role=role,
                    model="m",
                    engines=tuple(EngineSpec(engine_id=e.engine_id, model="m") for e in engines),
                )
                for name, role, engines in (
                    ("p", PoolRole.PREFILL, prefill),
                    ("d", PoolRole.DECODE, decode),
                )
            ],
            drivers={engine.engine_id: engine for engine in (*prefill, *decode)},
            journal=self.journal,
            clock=self.clock,
            host=self,
            attempt_ids=AttemptIds(process_tag=1),
            settings=settings,
            prefixes=prefixes,
            policies=policies,
        )
        self.controller.start()
        self.controller.tick()

    def request_tick(self) -> None:
        self.num_asked += 1

    def request_tick_at(self, time_ns: int) -> None:
        pass

    def ask(self, request_id: str = "r", *, prompt_len: int = 300) -> RecordingStream:
        heard = RecordingStream()
        self.controller.submit(
            InferenceRequest(
                request_id=RequestId(request_id),
                model="m",
                prompt_token_ids=tuple(range(prompt_len)),
                sampling=SAMPLING,
            ),
            heard,
        )
        self.controller.tick()
        return heard

    def wait(self, duration_ns: int) -> None:
        self.clock.advance_to(self.clock.now_ns() + duration_ns)
        self.controller.tick()

    def loads(self) -> dict[str, tuple[int, int]]:
        """Running requests and KV tokens by pool."""
        return {
            name: (load.num_running, load.num_kv_tokens)
            for name, (load, _) in self.controller.capacities().items()
        }


def make(*names: str, **options: Any) -> list[PairEngine]:  # noqa: ANN401
    return [PairEngine(EngineId(name), **options) for name in names]


def test_a_request_goes_to_a_prefill_worker_and_then_to_its_decode_rank() -> None:
    """One token of the prompt's worker that nobody hears; what it says of the KV is passed on."""
    (p0,), (d0,) = make("p0"), make("d0")
    pair = Pair([p0], [d0])

    heard = pair.ask()

    (first,) = p0.commands
    assert (first.is_prefill, first.sampling.max_tokens, first.sampling.min_tokens) == (True, 1, 0)
    assert first.prompt_token_ids == tuple(range(300))
    assert not d0.commands, "the decode half waits for the prompt"
    assert pair.loads() == {"p": (1, 300), "d": (1, 300)}, "but its rank is booked"

    p0.prefill()

    (second,) = d0.commands
    assert (second.is_prefill, second.kv_transfer, second.sampling) == (False, TOLD, SAMPLING)
    assert second.attempt_id != first.attempt_id
    assert (pair.loads()["p"], heard.token_ids) == ((0, 0), [])

    d0.emit(7, 8)
    d0.finish(FinishReason.STOP, num_cached_tokens=299)
    pair.controller.tick()

    assert heard.token_ids == [7, 8]
    (end,) = heard.ends
    assert isinstance(end, RequestFinish)
    assert (end.num_handoffs, end.num_cached_tokens) == (0, 299)
    assert pair.controller.num_prefills == {"remote": 1}
    assert pair.loads() == {"p": (0, 0), "d": (0, 0)}
    assert pair.controller.num_fenced_tokens == 0


def test_the_journal_names_both_halves() -> None:
    """Who computed the prompt, and who decodes."""
    (p0,), (d0,) = make("p0"), make("d0")
    pair = Pair([p0], [d0])
    pair.ask()
    p0.prefill()

    record = pair.journal.read_request(RequestId("r"))

    assert record is not None
    (attempt,) = record.attempts
    assert attempt.target == RankId(EngineId("d0"), DpRank(0))
    assert attempt.prefill == RankId(EngineId("p0"), DpRank(0))


def test_prompts_are_spread_over_the_workers_by_their_work() -> None:
    """Two short prompts share the worker that the long one left free."""
    prefill, decode = make("p0", "p1"), make("d0")
    pair = Pair(prefill, decode)

    pair.ask("long", prompt_len=4_000)
    pair.ask("short-0", prompt_len=200)
    pair.ask("short-1", prompt_len=200)

    assert sorted(len(engine.commands) for engine in prefill) == [1, 2]


def test_a_lost_worker_hands_its_prompts_to_another() -> None:
    """The decode rank stays booked; nothing reaches the client of the loss."""
    prefill, (d0,) = make("p0", "p1"), make("d0")
    pair = Pair(prefill, [d0])
    heard = pair.ask()
    first, second = sorted(prefill, key=lambda engine: -len(engine.commands))

    first.go_down()
    pair.controller.tick()

    assert len(second.commands) == 1
    second.prefill()
    d0.emit(1)
    d0.finish(FinishReason.STOP)
    assert (heard.token_ids, len(d0.commands)) == ([1], 1)
    assert pair.controller.num_prefills == {"failed": 1, "remote": 1, "missed": 1}
    assert pair.controller.num_handoffs == {}
    record = pair.journal.read_request(RequestId("r"))
    assert record is not None
    assert record.attempts[0].prefill == RankId(second.engine_id, DpRank(0))


@pytest.mark.parametrize(
    "error",
    [
        EngineUnreachableError("connection reset"),
        EngineRefusedError(503, "full"),
        EngineRefusedError(400, "no such thing"),
        DriverError("the engine failed"),
    ],
)
def test_without_another_worker_the_decode_rank_computes_the_prompt(error: DriverError) -> None:
    """Whatever the only worker has against it: the answer comes, without KV to fetch."""
    (p0,), (d0,) = make("p0"), make("d0")
    pair = Pair([p0], [d0])
    heard = pair.ask()

    p0.fail(error)
    pair.controller.tick()

    (command,) = d0.commands
    assert (command.kv_transfer, command.kv_meeting) == (None, None)
    assert command.sampling == SAMPLING
    d0.emit(4)
    d0.finish(FinishReason.STOP)
    assert heard.token_ids == [4]
    assert isinstance(heard.ends[0], RequestFinish)


def test_a_pool_without_workers_up_decodes_all_by_itself() -> None:
    (p0,), (d0,) = make("p0"), make("d0")
    pair = Pair([p0], [d0])
    p0.go_down()
    pair.controller.tick()

    pair.ask()

    assert (p0.commands, len(d0.commands)) == ([], 1)
    assert pair.controller.num_prefills == {"no_worker": 1}
    assert pair.controller.not_ready_reason() is None


def test_kv_that_does_not_arrive_is_computed_again() -> None:
    """The engine says so before its first token: one more attempt, on its own, on any rank."""
    (p0,), (d0,) = make("p0"), make("d0")
    pair = Pair([p0], [d0])
    heard = pair.ask()
    p0.prefill()

    d0.fail(DriverError("the engine failed: KV load failure"))
    pair.controller.tick()

    assert [command.kv_transfer for command in d0.commands] == [TOLD, None]
    d0.emit(5)
    d0.finish(FinishReason.STOP)
    assert heard.token_ids == [5]
    (end,) = heard.ends
    assert isinstance(end, RequestFinish)
    assert (end.num_handoffs, end.guarantee) == (0, None), "the client saw nothing of it"
    assert pair.controller.num_prefills == {"remote": 1, "transfer_failed": 1}


def test_an_error_after_the_first_token_is_no_failed_transfer() -> None:
    (p0,), (d0,) = make("p0"), make("d0")
    pair = Pair([p0], [d0])
    heard = pair.ask()
    p0.prefill()
    d0.emit(5)

    d0.fail(DriverError("the engine failed"))
    pair.controller.tick()

    assert len(d0.commands) == 1
    assert isinstance(heard.ends[0], RequestError)


def test_a_lost_decode_engine_is_handed_off_through_a_new_pair() -> None:
    """Prompt and emitted tokens are computed by a worker again, the old KV is not asked for."""
    (p0,), decode = make("p0"), make("d0", "d1")
    pair = Pair([p0], decode)
    heard = pair.ask()
    p0.prefill()
    first, second = sorted(decode, key=lambda engine: -len(engine.commands))
    first.emit(1, 2)

    first.go_down()
    pair.controller.tick()

    assert p0.commands[1].prompt_token_ids == (*range(300), 1, 2)
    p0.prefill()
    (command,) = second.commands
    assert command.prompt_token_ids == (*range(300), 1, 2)
    second.emit(3)
    second.finish(FinishReason.STOP)
    assert heard.token_ids == [1, 2, 3]
    assert pair.controller.num_handoffs == {("continue", "engine_lost"): 1}


def test_a_decode_rank_that_goes_away_meanwhile_is_replaced() -> None:
    """The prompt is not computed twice: its KV goes to the other rank."""
    (p0,), decode = make("p0"), make("d0", "d1")
    pair = Pair([p0], decode)
    heard = pair.ask()
    booked = next(
        EngineId(status.engine_id)
        for status in pair.controller.engine_statuses()
        if status.pool == "d" and status.ranks[0].num_running
    )
    lost, other = sorted(decode, key=lambda engine: engine.engine_id != booked)
    lost.go_down()
    pair.controller.tick()

    p0.prefill()
    pair.controller.tick()

    assert (len(p0.commands), lost.commands) == (1, [])
    (command,) = other.commands
    assert command.kv_transfer == TOLD
    other.emit(9)
    other.finish(FinishReason.STOP)
    assert heard.token_ids == [9]
    assert pair.loads()["d"] == (0, 0)


def test_kv_that_has_waited_too_long_is_not_asked_for() -> None:
    """No decode rank for a while: the prompt is computed again instead."""
    settings = ControllerSettings(is_validating=True, max_transfer_age_ns=SECOND_NS)
    (p0,), (d0,) = make("p0"), make("d0")
    pair = Pair([p0], [d0], settings)
    heard = pair.ask()
    d0.go_down()
    pair.controller.tick()
    p0.prefill()
    pair.controller.tick()

    pair.wait(2 * SECOND_NS)
    d0.come_up()
    pair.controller.tick()

    assert len(p0.commands) == 2
    p0.prefill()
    d0.emit(9)
    d0.finish(FinishReason.STOP)
    assert heard.token_ids == [9]
    assert pair.controller.num_prefills["expired"] == 1


def test_a_client_that_leaves_during_prefill_frees_both_halves() -> None:
    (p0,), (d0,) = make("p0"), make("d0")
    pair = Pair([p0], [d0])
    heard = pair.ask()

    pair.controller.cancel(RequestId("r"))
    pair.controller.tick()

    assert p0.aborted == [p0.commands[0].attempt_id]
    assert (d0.commands, d0.aborted, heard.ends) == ([], [], [])
    assert pair.loads()["d"] == (0, 0), "an attempt that no engine was told of is gone at once"
    p0.finish(FinishReason.ABORT)
    assert pair.loads()["p"] == (0, 0)
    assert pair.controller.num_open_requests == 0


def test_a_drained_worker_finishes_or_hands_over() -> None:
    """Nothing new goes there; after the deadline its prompts go to another."""
    prefill, (d0,) = make("p0", "p1"), make("d0")
    pair = Pair(prefill, [d0])
    heard = pair.ask("a")
    first, second = sorted(prefill, key=lambda engine: -len(engine.commands))

    pair.controller.drain(first.engine_id, deadline_ns=SECOND_NS)
    pair.controller.tick()
    pair.ask("b")
    assert (len(first.commands), len(second.commands)) == (1, 1)
    pair.wait(2 * SECOND_NS)
    pair.controller.tick()

    assert first.aborted == [first.commands[0].attempt_id]
    assert len(second.commands) == 2
    second.prefill()
    d0.emit(1)
    d0.finish(FinishReason.STOP)
    assert heard.token_ids == [1]


def test_a_frozen_worker_is_noticed_by_its_missing_progress() -> None:
    progress = ProgressLimits(
        decode_timeout_ns=SECOND_NS, prefill_timeout_ns=SECOND_NS, prefill_token_ns=0
    )
    settings = ControllerSettings(is_validating=True, progress=progress)
    prefill, (d0,) = make("p0", "p1"), make("d0")
    pair = Pair(prefill, [d0], settings)
    heard = pair.ask()
    frozen, other = sorted(prefill, key=lambda engine: -len(engine.commands))

    for _ in range(15):
        pair.wait(SECOND_NS // 10)

    assert frozen.aborted == [frozen.commands[0].attempt_id]
    other.prefill()
    frozen.prefill()  # it wakes up; what it says counts no more
    d0.emit(3)
    d0.finish(FinishReason.STOP)
    assert (heard.token_ids, len(d0.commands)) == ([3], 1)


def test_a_half_that_its_engine_forgot_is_placed_elsewhere() -> None:
    """The engines go on; only this prompt, or its KV, does not come."""
    settings = ControllerSettings(is_validating=True, max_transfer_age_ns=SECOND_NS)
    prefill, (d0,) = make("p0", "p1"), make("d0")
    pair = Pair(prefill, [d0], settings)
    heard = pair.ask()
    first, second = sorted(prefill, key=lambda engine: -len(engine.commands))

    pair.wait(60 * SECOND_NS)
    pair.controller.tick()
    assert first.aborted == [first.commands[0].attempt_id]
    second.prefill()
    pair.wait(2 * SECOND_NS)
    pair.controller.tick()

    assert d0.aborted == [d0.commands[0].attempt_id]
    assert [command.kv_transfer for command in d0.commands] == [TOLD, None]
    d0.emit(6)
    pair.wait(60 * SECOND_NS)
    d0.finish(FinishReason.STOP)
    assert heard.token_ids == [6]
    assert pair.controller.num_prefills == {"failed": 1, "remote": 1, "transfer_failed": 1}


def test_short_prompts_may_stay_with_their_decode_rank() -> None:
    settings = ControllerSettings(is_validating=True, max_local_prefill_tokens=100)
    (p0,), (d0,) = make("p0"), make("d0")
    pair = Pair([p0], [d0], settings)

    pair.ask("short", prompt_len=100)
    pair.ask("long", prompt_len=101)

    assert (len(d0.commands), len(p0.commands)) == (1, 1)
    assert pair.controller.num_prefills == {"short": 1}


def test_a_report_of_a_worker_keeps_prompts_away_from_it() -> None:
    """Work that another dsched sent there counts."""
    prefill, decode = make("p0", "p1"), make("d0")
    pair = Pair(prefill, decode)
    pair.controller.on_report(
        RankReport(
            engine_id="p0",
            incarnation="a",
            dp_rank=0,
            seq=1,
            step=1,
            num_running=1,
            num_waiting=3,
            num_kv_tokens=0,
            num_waiting_prefill_tokens=100_000,
            kv_capacity_tokens=10_000,
            step_ns=1,
        )
    )

    for name in "abc":
        pair.ask(name)

    assert [len(engine.commands) for engine in prefill] == [0, 3]


class TwoPairs:
    """Two controllers over the same two prefill workers, each with its own view of them."""

    def __init__(self, *, talk: bool) -> None:
        self.prefill = [make("p0", "p1"), make("p0", "p1")]
        self.pairs = [Pair(prefill, make("d0")) for prefill in self.prefill]
        self.talk = talk
        self.seq = 0

    def ask(self, index: int, prompt_len: int) -> None:
        self.pairs[index].ask(f"r{self.seq}", prompt_len=prompt_len)
        self.tell(index)

    def tell(self, index: int, *, is_full: bool = False) -> list[tuple[str, list[PeerWorkerLoad]]]:
        """Carry what one has to say to the other, as the channel does."""
        self.seq += 1
        news = list(self.pairs[index].controller.peering.prefill_news(is_full=is_full))
        for pool, loads in news:
            message = PeerPrefillMessage(
                peer=f"c{index}", seq=self.seq, is_full=is_full, workers=tuple(loads)
            )
            if self.talk:
                peering = self.pairs[1 - index].controller.peering
                assert peering.apply_prefills(pool, message)
                assert not peering.apply_prefills(pool, message), "the same again"
                assert not peering.apply_prefills("d", message), "no prefill pool"
        return news

    def num_tokens(self) -> list[int]:
        """Prompt tokens that each worker got, of both."""
        return [
            sum(len(c.prompt_token_ids) for half in self.prefill for c in half[worker].commands)
            for worker in (0, 1)
        ]


@pytest.mark.parametrize(("talk", "tokens"), [(True, [5_000, 5_000]), (False, [7_000, 3_000])])
def test_long_prompts_of_two_dscheds_go_to_two_workers(*, talk: bool, tokens: list[int]) -> None:
    """Without a report of either worker, and at the same time."""
    both = TwoPairs(talk=talk)

    for prompt_len in (3_500, 1_500):
        for index in (0, 1):
            both.ask(index, prompt_len)

    assert both.num_tokens() == tokens


def test_the_end_of_a_prompt_is_told_in_a_tick_and_a_peer_that_left_is_forgotten() -> None:
    both = TwoPairs(talk=True)
    first, second = both.pairs
    first.controller.peering.set_listened_to(is_listened_to=True)
    assert both.tell(0) == []

    both.ask(0, 3_500)
    second_view = second.controller._state.pools["p"].prefill
    assert second_view is not None
    assert second_view.backlog_ns(0).tolist()[0] > 0
    ((pool, (load,)),) = both.tell(0, is_full=True)
    assert (pool, load.rank_id.engine_id, load.age_ns) == ("p", "p0", 0)
    assert load.work_ns == load.head_ns == second_view.backlog_ns(0)[0]
    assert [name for name, loads in both.tell(1, is_full=True) if not loads] == ["p"]

    first.num_asked = 0
    both.prefill[0][0].prefill()
    assert first.num_asked > 0
    ((_, (ended,)),) = both.tell(0)
    assert (ended.work_ns, ended.head_ns) == (0, 0)
    assert not second_view.backlog_ns(0).any()

    both.ask(0, 3_500)
    second.controller.peering.forget("c0")
    assert not second_view.backlog_ns(0).any()


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    """What a worker has cached costs no work there; without a word all cost the same."""

    class Cached:
        """The second worker has all but one block."""

        def cached_tokens(self, prompt_token_ids: Sequence[int]) -> dict[RankId, int]:
            return {RankId(EngineId("p1"), DpRank(0)): len(prompt_token_ids) - 16}

    workers = []
    for prefixes in (None, Cached()):
        prefill, decode = make("p0", "p1"), make("d0", "d1")
        pair = Pair(prefill, decode, prefixes=prefixes)
        for number in range(6):
            pair.ask(f"r{number}", prompt_len=2_000)
        workers.append([len(engine.commands) for engine in prefill])

    assert workers == [[3, 3], [0, 6]]


class Prefixes:
    """What is said of caches, and which prompts were asked about."""

    def __init__(self, **cached: int) -> None:
        self.asked: list[int] = []
        self._cached = {RankId(EngineId(name), DpRank(0)): count for name, count in cached.items()}

    def cached_tokens(self, prompt_token_ids: Sequence[int]) -> dict[RankId, int]:
        self.asked.append(len(prompt_token_ids))
        return self._cached


class MostCached:
    """A routing policy: where most of the prompt is cached."""

    name = "most_cached"
    api_version = 1

    def __init__(self) -> None:
        self.offered: list[list[int]] = []

    def pick(self, request: RequestView, candidates: Sequence[RankCandidate]) -> int:
        self.offered.append([candidate.num_cached_tokens for candidate in candidates])
        return max(range(len(candidates)), key=lambda each: self.offered[-1][each])


def test_policies_see_what_a_decode_rank_has_cached() -> None:
    """Where engines publish their KV events; else it is 0, and nothing is looked up."""
    chosen = []
    policy = MostCached()
    for prefixes in (Prefixes(d1=288), None):
        decode = make("d0", "d1", "d2")
        guard = PolicyGuard(policy, budget_ns=None, clock=ManualClock())
        policies = PolicySet(routing=RoutingPolicies([(guard, 1.0)]))
        pair = Pair(make("p0"), decode, SHORT, prefixes=prefixes, policies=policies)
        pair.ask("a")
        pair.ask("b")
        policies.close()
        chosen.append([len(engine.commands) for engine in decode])

    assert policy.offered == [[0, 288, 0], [0, 288, 0], [0, 0, 0], [0, 0, 0]]
    assert chosen == [[0, 2, 0], [2, 0, 0]]


def test_caches_of_decode_ranks_are_not_looked_up_for_nobody() -> None:
    """Without a policy that chooses, a prompt's blocks are not worth their time."""
    prefixes = Prefixes(d1=288)
    pair = Pair(make("p0"), make("d0", "d1"), SHORT, prefixes=prefixes)

    pair.ask()

    assert prefixes.asked == []


def work_ns(pair: Pair) -> int:
    """What the prefill pool thinks of a prompt of 2 000 tokens."""
    router = pair.controller._state.pools["p"].prefill
    assert router is not None
    return router.estimate_work_ns(num_uncached_tokens=2_000, num_cached_tokens=0)


@pytest.mark.parametrize("share_cached", [0.0, 0.5])
def test_prompts_teach_what_they_cost(share_cached: float) -> None:
    """Ten times what the preset says: a millisecond for each token that was not cached. Each had
    its engine for itself."""
    (p0,), (d0,) = make("p0"), make("d0")
    pair = Pair([p0], [d0], LEARNING)
    before = work_ns(pair)
    for number, prompt_len in enumerate((500, 1_000, 2_000, 4_000) * 10):
        num_cached = int(share_cached * prompt_len)
        pair.ask(f"r{number}", prompt_len=prompt_len)
        pair.wait((prompt_len - num_cached) * MS)
        p0.finish(told=TOLD, num_cached_tokens=num_cached)
        pair.controller.tick()
        d0.finish()
        pair.controller.tick()

    assert before < 500 * MS
    assert work_ns(pair) == pytest.approx(2_000 * MS, rel=0.1)


def test_prompts_that_share_their_engine_teach_nothing() -> None:
    """Nor do aborted ones; and no pool changes what the other pools begin with."""
    (p0,), (d0,) = make("p0"), make("d0")
    pair = Pair([p0], [d0], LEARNING)
    before = work_ns(pair)
    for name in "ab":
        pair.ask(name, prompt_len=2_000)
    pair.wait(20 * SECOND_NS)
    for index in (0, 1):
        p0.prefill(index)
    pair.ask("c", prompt_len=2_000)
    pair.wait(20 * SECOND_NS)
    p0.finish(FinishReason.ABORT)

    assert work_ns(pair) == before


class TestMeeting:
    """Engines that meet for every request (SGLang): both halves at once."""

    def test_both_halves_are_told_one_room_that_names_the_rank(self) -> None:
        prefill = make("p0", kv_meeting=("host", 8_998), num_dp_ranks=4)
        decode = make("d0", can_prefill=False)
        pair = Pair(prefill, decode)

        for name in "abcdef":
            pair.ask(name)

        rooms = set()
        for first, second in zip(prefill[0].commands, decode[0].commands, strict=True):
            meeting = first.kv_meeting
            assert meeting is not None
            assert meeting == second.kv_meeting
            assert (meeting.host, meeting.port) == ("host", 8_998)
            assert meeting.room % 4 == first.dp_rank
            rooms.add(meeting.room)
        assert len(rooms) == 6

    def test_the_answer_comes_from_the_decode_half_alone(self) -> None:
        (p0,) = make("p0", kv_meeting=("h", 1))
        (d0,) = make("d0", can_prefill=False)
        pair = Pair([p0], [d0])
        heard = pair.ask()

        p0.prefill()
        d0.emit(1)
        d0.finish(FinishReason.STOP, num_cached_tokens=299)
        pair.controller.tick()

        assert heard.token_ids == [1]
        assert pair.loads() == {"p": (0, 0), "d": (0, 0)}
        assert pair.controller.num_prefills == {"remote": 1}

    def test_a_lost_prefill_half_takes_its_decode_half_along(self) -> None:
        """The decode rank would wait for KV that never comes; both are placed anew."""
        prefill = make("p0", "p1", kv_meeting=("h", 1))
        (d0,) = make("d0", can_prefill=False)
        pair = Pair(prefill, [d0])
        heard = pair.ask()
        first, second = sorted(prefill, key=lambda engine: -len(engine.commands))

        first.go_down()
        pair.controller.tick()

        assert d0.aborted == [d0.commands[0].attempt_id]
        assert (len(second.commands), len(d0.commands)) == (1, 2)
        assert d0.commands[1].kv_meeting == second.commands[0].kv_meeting
        d0.emit(8)
        d0.finish(FinishReason.STOP)
        assert heard.token_ids == [8]

    def test_a_lost_decode_half_takes_its_prefill_half_along(self) -> None:
        (p0,) = make("p0", kv_meeting=("h", 1))
        decode = make("d0", "d1", can_prefill=False)
        pair = Pair([p0], decode)
        pair.ask()
        first, second = sorted(decode, key=lambda engine: -len(engine.commands))

        first.go_down()
        pair.controller.tick()

        assert p0.aborted == [p0.commands[0].attempt_id]
        assert (len(p0.commands), len(second.commands)) == (2, 1)

    def test_without_workers_requests_are_refused_at_the_door(self) -> None:
        """Decode engines that compute no prompts cannot help."""
        (p0,) = make("p0", kv_meeting=("h", 1))
        (d0,) = make("d0", can_prefill=False)
        pair = Pair([p0], [d0])
        heard = pair.ask("a")

        p0.go_down()
        pair.controller.tick()
        late = pair.ask("b")

        for each in (heard, late):
            (end,) = each.ends
            assert isinstance(end, RequestError)
            assert (end.status, end.code) == (503, "no_engine")
        assert pair.controller.not_ready_reason() is not None

    def test_a_prompt_that_the_only_workers_refuse_is_refused_with_their_reason(self) -> None:
        (p0,) = make("p0", kv_meeting=("h", 1))
        (d0,) = make("d0", can_prefill=False)
        pair = Pair([p0], [d0])
        heard = pair.ask()

        p0.fail(EngineRefusedError(400, "token 99 is not one of mine"))
        pair.controller.tick()

        (end,) = heard.ends
        assert isinstance(end, RequestError)
        assert (end.status, end.message) == (400, "token 99 is not one of mine")


@pytest.mark.parametrize("role", [PoolRole.PREFILL, PoolRole.DECODE])
def test_half_a_pair_is_refused(role: PoolRole) -> None:
    with pytest.raises(ValueError, match=f"{role} pool 'x' needs a"):
        Controller(
            pools=[PoolSpec(name="x", role=role, model="m", engines=())],
            drivers={},
            journal=MemoryJournal(),
            clock=ManualClock(),
            host=Pair(make("p0"), make("d0")),
            attempt_ids=AttemptIds(process_tag=1),
        )
