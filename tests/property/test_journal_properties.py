"""The token journal: what holds for every order of calls.

A model that knows only lists plays the same calls; the journal in memory must agree after each, and
the file after a flush, also when the file is lost in between.
"""

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dsched.drivers.wire import SamplingParams
from dsched.faults import MemoryJournal, SqliteJournal, journal_file, read_unfinished
from dsched.faults.journal_file import read_request
from dsched.ids import AttemptId, DpRank, EngineId, RankId, RequestId

TOKENS = st.lists(st.integers(0, (1 << 31) - 1), max_size=5)
NAMES = st.sampled_from(["a", "b", "c"])


class Model:
    """One request, as simply as it can be said."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int]] = []
        """(epoch, token id) of every emitted token."""
        self.epoch = 0
        self.is_fenced = True
        self.end: str | None = None


class JournalMachine(RuleBasedStateMachine):
    """Random calls on a few requests, old and new epochs mixed."""

    @initialize()
    def start(self) -> None:
        self.gather_flushes = journal_file.GATHER_FLUSHES
        journal_file.GATHER_FLUSHES = 3  # so that a short run meets it often
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "journal.sqlite3"
        self.journal = SqliteJournal(self.path, flush_interval_s=0.0001, max_batch_requests=2)
        self.models: dict[str, Model] = {}

    def teardown(self) -> None:
        journal_file.GATHER_FLUSHES = self.gather_flushes
        self.journal.validate()
        self.journal.close()
        self.folder.cleanup()

    @rule(name=NAMES, prompt=TOKENS)
    def open(self, name: str, prompt: list[int]) -> None:
        known = self.models.get(name)
        if known is not None and known.end is None:
            return
        self.models[name] = Model()
        self.journal.open_request(
            RequestId(name),
            model="m",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=9),
        )

    @rule(name=NAMES, step=st.integers(1, 3))
    def begin(self, name: str, step: int) -> None:
        model = self.models.get(name)
        if model is None or model.end is not None:
            return
        model.epoch += step
        model.is_fenced = False
        first_index = self.journal.begin_attempt(
            RequestId(name),
            attempt_id=AttemptId(f"{name}{model.epoch}"),
            epoch=model.epoch,
            target=RankId(EngineId("e"), DpRank(0)),
        )
        assert first_index == len(model.tokens)

    @rule(name=NAMES, tokens=TOKENS, age=st.integers(0, 2))
    def record(self, name: str, tokens: list[int], age: int) -> None:
        """Tokens of the newest epoch, or of one that may be over; the index is always its own."""
        model = self.models.get(name)
        epoch = max(model.epoch - age, 0) if model is not None else 1
        if model is None or model.epoch == 0:
            return
        counts = age == 0 and not model.is_fenced and model.end is None
        # A zombie counts on from where it was, which need not be where the request is.
        first_index = len(model.tokens) if counts else len(model.tokens) + age
        kept = self.journal.record(
            RequestId(name), epoch=epoch, first_index=first_index, token_ids=tokens
        )
        assert kept == counts
        if kept:
            model.tokens += [(epoch, token) for token in tokens]

    @rule(name=NAMES)
    def fence(self, name: str) -> None:
        self.journal.fence_attempt(RequestId(name))
        if name in self.models:
            self.models[name].is_fenced = True

    @rule(name=NAMES, reason=st.sampled_from(["stop", "length", "error"]))
    def finish(self, name: str, reason: str) -> None:
        self.journal.finish(RequestId(name), reason=reason)
        model = self.models.get(name)
        if model is not None and model.end is None:
            model.end = reason

    @precondition(lambda self: bool(self.models))
    @rule()
    def lose_the_file(self) -> None:
        assert self.journal.flush()  # the writer is idle, so that no file comes back half
        for file in list(self.path.parent.iterdir()):
            file.unlink(missing_ok=True)
        for name in [name for name, model in self.models.items() if model.end is not None]:
            del self.models[name]  # what had ended may be gone with the file

    @rule()
    def restart_reader(self) -> None:
        """After a flush, a reader of the file sees what the model says."""
        assert self.journal.flush()
        found = {record.request_id: record for record in read_unfinished(self.path)}
        expected = {name for name, model in self.models.items() if model.end is None}
        assert set(found) == expected
        for name, model in self.models.items():
            record = read_request(self.path, RequestId(name))
            assert record is not None
            assert record.finish_reason == model.end
            emitted = list(record.output_token_ids)
            assert emitted == [token for _, token in model.tokens]
            assert [record.epoch_of(i) for i in range(len(emitted))] == [
                epoch for epoch, _ in model.tokens
            ]

    @invariant()
    def memory_agrees(self) -> None:
        for name, model in getattr(self, "models", {}).items():
            if model.end is None:
                assert self.journal.output_token_ids(RequestId(name)) == tuple(
                    token for _, token in model.tokens
                )


TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@given(st.lists(TOKENS, min_size=1, max_size=20), st.lists(st.booleans(), max_size=20))
def test_cut_anywhere_the_answer_is_whole(chunks: list[list[int]], cuts: list[bool]) -> None:
    """However often an engine is lost between chunks, the answer is their concatenation."""
    journal = MemoryJournal()
    journal.open_request(
        RequestId("r"), model="m", prompt_token_ids=(), sampling=SamplingParams(max_tokens=9)
    )
    epoch = 0
    for number, chunk in enumerate(chunks):
        if number == 0 or (number < len(cuts) and cuts[number]):
            epoch += 1
            journal.begin_attempt(
                RequestId("r"),
                attempt_id=AttemptId(str(epoch)),
                epoch=epoch,
                target=RankId(EngineId("e"), DpRank(0)),
            )
        first_index = len(journal.output_token_ids(RequestId("r")))
        assert journal.record(RequestId("r"), epoch=epoch, first_index=first_index, token_ids=chunk)
        assert not journal.record(
            RequestId("r"), epoch=epoch - 1, first_index=first_index, token_ids=chunk
        )

    whole = tuple(token for chunk in chunks for token in chunk)
    assert journal.output_token_ids(RequestId("r")) == whole
    assert journal.status().num_fenced_tokens == len(whole)
