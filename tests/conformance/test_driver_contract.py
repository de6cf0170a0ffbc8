"""The driver contract (`dsched/drivers/base.py`): the same for every engine.

At the end of every test the `driver_case` fixture closes the driver and checks that each attempt
ended, that no sink heard a token or a second end after its end, and that logprobs fitted tokens.
"""

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest

from dsched.drivers.base import FinishReason, KvMover
from dsched.drivers.wire import GenerateCommand, RankReport, SamplingParams
from dsched.errors import EngineRefusedError, EngineUnreachableError
from dsched.ids import AttemptId
from dsched.testing.driver_cases import DriverCase
from dsched.testing.recorders import RecordingListener, RecordingSink

PROMPT = tuple(range(20, 60))


def test_engine_describes_itself(driver_case: DriverCase) -> None:
    """An engine that is up has said how large it is, in tokens and requests."""
    description = driver_case.description

    assert description.engine_id == driver_case.driver.engine_id
    assert description.num_dp_ranks >= 1
    assert description.max_model_len == 1_024
    assert description.kv_capacity_tokens >= description.max_model_len
    assert description.max_running_requests == 64
    assert description.capabilities.has_load_reports


async def test_tokens_are_the_engines_own_in_order(driver_case: DriverCase) -> None:
    """The stream is what the engine answers when it is asked without dsched."""
    expected = await driver_case.direct(PROMPT, 24)

    sink = driver_case.generate(PROMPT, max_tokens=24)
    await sink.ended()

    assert sink.token_ids == expected
    assert sink.finish is not None
    assert sink.finish.reason is FinishReason.LENGTH
    assert sink.finish.stop_token_id is None


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
async def test_max_tokens_is_kept(driver_case: DriverCase, max_tokens: int) -> None:
    """An answer without a stop has exactly `max_tokens` tokens."""
    sink = driver_case.generate(PROMPT, max_tokens=max_tokens)
    await sink.ended()

    assert len(sink.token_ids) == max_tokens


async def test_answer_continues_from_prompt_and_emitted_tokens(driver_case: DriverCase) -> None:
    """A second attempt with the emitted tokens behind the prompt goes on where the first was."""
    whole = driver_case.generate(PROMPT, max_tokens=12)
    await whole.ended()

    rest = driver_case.generate((*PROMPT, *whole.token_ids[:5]), max_tokens=7)
    await rest.ended()

    assert rest.token_ids == whole.token_ids[5:]


async def test_stop_token_ends_the_answer_and_is_no_output(driver_case: DriverCase) -> None:
    """The token that stops an answer is named, not handed out."""
    expected = await driver_case.direct(PROMPT, 12)
    stop = expected[6]
    length = expected.index(stop)

    sink = driver_case.generate(PROMPT, max_tokens=12, stop_token_ids=(stop,))
    await sink.ended()

    assert sink.token_ids == expected[:length]
    assert sink.finish is not None
    assert sink.finish.reason is FinishReason.STOP
    assert sink.finish.stop_token_id == stop


async def test_logprobs_come_with_their_tokens(driver_case: DriverCase) -> None:
    """Where asked for, each token has its logprob and the asked number of alternatives."""
    sink = driver_case.generate(PROMPT, max_tokens=5, logprobs=2)
    await sink.ended()

    assert [each.token_id for each in sink.logprobs] == sink.token_ids
    for entry in sink.logprobs:
        assert entry.logprob <= 0
        alternatives = [logprob for _, logprob in entry.top]
        assert len(alternatives) >= 2
        assert alternatives == sorted(alternatives, reverse=True)


async def test_abort_stops_the_tokens_and_frees_the_load(driver_case: DriverCase) -> None:
    """After `abort` comes `ABORT` and no token, and the engine holds nothing any more."""
    sink = driver_case.generate(PROMPT, max_tokens=900)
    await sink.wait(lambda each: len(each.token_ids) >= 3, 30)
    await driver_case.listener.wait(is_last_running(1), 10)

    driver_case.abort(sink)
    driver_case.abort(sink)
    num_tokens = len(sink.token_ids)
    await sink.ended(5)
    await driver_case.listener.wait(is_last_idle, 10)

    assert sink.finish is not None
    assert sink.finish.reason is FinishReason.ABORT
    assert len(sink.token_ids) == num_tokens < 900


async def test_abort_of_unknown_and_ended_attempts_is_ignored(driver_case: DriverCase) -> None:
    """Aborting what does not run changes nothing, for nobody."""
    ended = driver_case.generate(PROMPT, max_tokens=2)
    await ended.ended()

    driver_case.driver.abort(AttemptId("ds-ffffffffffffffff-ffffffffffff"))
    driver_case.abort(ended)
    sink = driver_case.generate(PROMPT, max_tokens=8)
    await sink.ended()

    assert sink.token_ids == await driver_case.direct(PROMPT, 8)
    assert ended.finish is not None
    assert ended.finish.reason is FinishReason.LENGTH


async def test_moved_attempt_goes_on_elsewhere_with_its_kv(driver_case: DriverCase) -> None:
    """`can_migrate`: no token is lost or repeated, and at most the last one is computed again."""
    driver = driver_case.driver
    if not driver_case.description.capabilities.can_migrate:
        pytest.skip("this engine cannot hand KV over (can_migrate)")
    assert isinstance(driver, KvMover)
    first = driver_case.generate(PROMPT, max_tokens=40)
    await first.wait(lambda each: len(each.token_ids) >= 5, 30)
    assert first.attempt_id is not None

    driver.move_out(first.attempt_id)
    await first.ended(5)
    driver.move_out(first.attempt_id)

    assert first.finish is not None
    assert (first.finish.reason, first.violations) == (FinishReason.MOVED, [])
    told = dict(first.finish.kv_transfer or {})
    num_left = 40 - len(first.token_ids)
    prompt = (*PROMPT, *first.token_ids)
    second = driver_case.generate(
        prompt, max_tokens=num_left, dp_rank=driver_case.description.num_dp_ranks - 1,
        kv_transfer=told,
    )  # fmt: skip
    await second.ended(30)
    assert first.token_ids + second.token_ids == await driver_case.direct(PROMPT, 40)
    assert second.finish is not None
    assert second.finish.num_cached_tokens == len(prompt) - 1


async def test_twenty_at_once_do_not_mix(driver_case: DriverCase) -> None:
    """Concurrent attempts each get their own answer, in whichever batch they run."""
    prompts = [tuple(range(10 + index, 30 + 2 * index)) for index in range(20)]
    expected = [await driver_case.direct(prompt, 16) for prompt in prompts]

    sinks = [driver_case.generate(prompt, max_tokens=16) for prompt in prompts]
    await asyncio.gather(*(sink.ended() for sink in sinks))

    assert [sink.token_ids for sink in sinks] == expected


async def test_one_abort_among_many_stops_only_itself(driver_case: DriverCase) -> None:
    """The neighbours of an aborted attempt are served to their end."""
    prompts = [tuple(range(10 + index, 40 + index)) for index in range(6)]
    expected = [await driver_case.direct(prompt, 30) for prompt in prompts]

    sinks = [driver_case.generate(prompt, max_tokens=30) for prompt in prompts]
    await sinks[2].wait(lambda each: len(each.token_ids) >= 1, 30)
    driver_case.abort(sinks[2])
    await asyncio.gather(*(sink.ended() for sink in sinks))

    for index, sink in enumerate(sinks):
        length = len(sink.token_ids)
        assert sink.token_ids == expected[index][:length]
        assert length == 30 or index == 2


async def test_prompt_longer_than_the_model_is_refused(driver_case: DriverCase) -> None:
    """A refusal is the engine's word, with its status, and costs nobody else anything."""
    sink = driver_case.generate([7] * 1_200, max_tokens=4)
    await sink.ended()

    assert isinstance(sink.error, EngineRefusedError)
    assert sink.error.status == 400
    assert "1200" in str(sink.error)
    assert sink.token_ids == []


async def test_token_outside_the_vocabulary_is_refused(driver_case: DriverCase) -> None:
    sink = driver_case.generate([7, 600_000, 8], max_tokens=4)
    await sink.ended()

    assert isinstance(sink.error, EngineRefusedError)
    assert sink.error.status == 400


async def test_one_attempt_id_is_used_once(driver_case: DriverCase) -> None:
    """A second attempt under a running id is a caller's mistake."""
    sink = driver_case.generate(PROMPT, max_tokens=200)
    command = GenerateCommand(
        attempt_id=sink.attempt_id,
        epoch=1,
        dp_rank=0,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=1),
    )

    with pytest.raises(ValueError, match="was"):
        driver_case.driver.generate(command, RecordingSink())

    driver_case.abort(sink)


async def test_reports_count_what_was_asked(driver_case: DriverCase) -> None:
    """Running requests, their KV tokens and the ends are seen in the reports, in order."""
    listener = driver_case.listener
    num_before = len(listener.reports)
    prompts = [tuple(range(10 + index, 50 + index)) for index in range(8)]

    sinks = [driver_case.generate(prompt, max_tokens=120) for prompt in prompts]
    await listener.wait(is_last_running(8), 30)
    full = reports_of_rank_0(listener)[-1]
    await asyncio.gather(*(sink.ended() for sink in sinks))
    await listener.wait(is_last_idle, 10)

    assert 8 * 40 <= full.num_kv_tokens <= 8 * (40 + 120)
    assert full.kv_capacity_tokens == driver_case.description.kv_capacity_tokens
    reports = [each for each in listener.reports[num_before:] if each.dp_rank == 0]
    assert {each.engine_id for each in reports} == {driver_case.driver.engine_id}
    assert len({each.incarnation for each in reports}) == 1
    assert_rises([each.seq for each in reports], strictly=True)
    assert_rises([each.step for each in reports], strictly=False)
    assert max(each.num_running for each in reports) == 8
    worked = [each for each in reports if each.num_step_tokens]
    assert all(each.step_ns > 0 for each in worked)


async def test_waiting_requests_and_their_prompts_are_reported(driver_case: DriverCase) -> None:
    """What finds no place in the running set counts as waiting, with its prompt to compute."""
    listener = driver_case.listener

    sinks = [driver_case.generate(PROMPT, max_tokens=200) for _ in range(70)]
    await listener.wait(is_last_running(64), 60)
    await listener.wait(lambda each: reports_of_rank_0(each)[-1].num_waiting == 6, 30)
    report = reports_of_rank_0(listener)[-1]
    for sink in sinks:
        driver_case.abort(sink)
    await listener.wait(is_last_idle, 30)

    assert 6 * len(PROMPT) <= report.num_waiting_prefill_tokens <= 70 * len(PROMPT)


async def test_close_ends_everything_and_nobody_hears_more(driver_case: DriverCase) -> None:
    """`close` ends what runs; later calls are answered at once and change nothing."""
    sinks = [driver_case.generate(PROMPT, max_tokens=500) for _ in range(3)]
    await sinks[0].wait(lambda each: each.token_ids, 30)

    driver_case.driver.close()
    counts = [len(sink.token_ids) for sink in sinks]
    num_reports = len(driver_case.listener.reports)
    late = driver_case.generate(PROMPT, max_tokens=1)
    driver_case.driver.close()
    await asyncio.sleep(0.05)

    assert all(sink.is_ended for sink in sinks)
    assert [len(sink.token_ids) for sink in sinks] == counts
    assert isinstance(late.error, EngineUnreachableError)
    assert len(driver_case.listener.reports) == num_reports
    assert driver_case.listener.downs == []


async def test_killed_engine_fails_every_open_attempt(mortal_case: DriverCase) -> None:
    """Within two seconds of its death every attempt has failed and the listener knows."""
    case = mortal_case
    sinks = [case.generate(PROMPT, max_tokens=900) for _ in range(5)]
    await sinks[0].wait(lambda each: len(each.token_ids) >= 3, 60)

    await case.kill()
    await asyncio.gather(*(sink.ended(2) for sink in sinks))
    await case.listener.wait(lambda each: bool(each.downs), 2)
    late = case.generate(PROMPT, max_tokens=1)
    await late.ended(5)

    for sink in [*sinks, late]:
        assert isinstance(sink.error, EngineUnreachableError), sink.error
    assert [engine_id for engine_id, _ in case.listener.downs] == [case.driver.engine_id]


def reports_of_rank_0(listener: RecordingListener) -> list[RankReport]:
    """The reports of the rank that the tests send to, oldest first."""
    return [each for each in listener.reports if each.dp_rank == 0]


def is_last_running(count: int) -> Callable[[RecordingListener], bool]:
    """Whether the newest report of rank 0 has `count` running requests."""

    def check(listener: RecordingListener) -> bool:
        reports = reports_of_rank_0(listener)
        return bool(reports) and reports[-1].num_running == count

    return check


def is_last_idle(listener: RecordingListener) -> bool:
    """Whether the newest report of rank 0 shows an empty engine."""
    last = reports_of_rank_0(listener)[-1]
    return last.num_running == last.num_waiting == last.num_kv_tokens == 0 and (
        last.num_waiting_prefill_tokens == 0
    )


def assert_rises(values: list[int], *, strictly: bool) -> None:
    pairs = list(pairwise(values))
    assert all(after > before if strictly else after >= before for before, after in pairs), values
