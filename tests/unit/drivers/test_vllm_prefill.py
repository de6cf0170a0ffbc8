"""The prefill half of a pair in vLLM's words: one answer in one body, and its KV parameters."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from dsched.drivers.base import FinishReason
from dsched.drivers.vllm import VllmDriver
from dsched.drivers.vllm.protocol import PREFILL_PARAMS, PrefillReader, encode_request
from dsched.drivers.wire import GenerateCommand, SamplingParams
from dsched.errors import DriverError, EngineRefusedError
from dsched.ids import AttemptId, EngineId
from dsched.testing.recorders import RecordingListener, RecordingSink
from dsched.testing.vllm_double import VllmDouble

PROMPT = tuple(range(10, 40))


def make_command(name: str, **fields: object) -> GenerateCommand:
    sampling = SamplingParams(max_tokens=1)
    document = {"attempt_id": name, "epoch": 1, "dp_rank": 0, "prompt_token_ids": PROMPT}
    return GenerateCommand(**({"sampling": sampling} | document | fields))  # type: ignore[arg-type]


def body_of(command: GenerateCommand) -> dict[str, object]:
    found: dict[str, object] = msgspec.json.decode(encode_request(command, model=None))
    return found


def test_a_prefill_half_asks_for_one_body_and_for_its_kv_to_be_kept() -> None:
    """vLLM names the parameters only in answers that are not streamed."""
    body = body_of(make_command("a", is_prefill=True))

    assert (body["stream"], "stream_options" in body) == (False, False)
    assert body["kv_transfer_params"] == PREFILL_PARAMS
    assert body["max_tokens"] == 1


def test_a_decode_half_passes_on_what_the_prefill_engine_said() -> None:
    told = {"do_remote_prefill": True, "remote_block_ids": [3, 4]}

    assert body_of(make_command("a", kv_transfer=told))["kv_transfer_params"] == told
    assert "kv_transfer_params" not in body_of(make_command("a"))


def test_the_body_is_read_as_one_event() -> None:
    reader = PrefillReader(has_logprobs=False)
    body = {
        "choices": [{"index": 0, "text": "", "token_ids": [7], "finish_reason": "length"}],
        "usage": {"prompt_tokens_details": {"cached_tokens": 3}},
        "kv_transfer_params": {"remote_engine_id": "x"},
    }

    reader.feed([msgspec.json.encode(body)])

    assert reader.token_ids == [7]
    assert reader.end is not None
    assert reader.end.reason is FinishReason.LENGTH
    assert (reader.num_cached_tokens, reader.kv_transfer) == (3, {"remote_engine_id": "x"})


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"choices": []', b"[]"])
def test_a_body_that_is_none_of_vllms_fails(body: bytes) -> None:
    with pytest.raises(DriverError, match="not vLLM's"):
        PrefillReader(has_logprobs=False).feed([body])


@pytest.fixture
async def driver() -> AsyncIterator[tuple[VllmDriver, VllmDouble]]:
    """A driver of a double that keeps KV, up."""
    double = VllmDouble(engine_id=EngineId("p"), agent_endpoint=None)
    double.kept_kv = {}
    await double.start()
    made = VllmDriver(engine_id=EngineId("p"), url=double.url)
    listener = RecordingListener()
    made.start(listener)
    try:
        await listener.up(10)
        yield made, double
    finally:
        made.close()
        await double.kill()


async def test_the_driver_hands_the_parameters_on(driver: tuple[VllmDriver, VllmDouble]) -> None:
    """From a body to a finish; the same over HTTP as over a scripted reader."""
    made, double = driver
    sink = RecordingSink(AttemptId("half"))

    made.generate(make_command("half", is_prefill=True), sink)
    await sink.ended(10)

    assert sink.finish is not None
    assert (sink.finish.reason, len(sink.token_ids)) == (FinishReason.LENGTH, 1)
    told = dict(sink.finish.kv_transfer or {})
    assert told["do_remote_prefill"] is True
    second = RecordingSink(AttemptId("other"))
    sampling = SamplingParams(max_tokens=3)
    made.generate(make_command("other", sampling=sampling, kv_transfer=told), second)
    await second.ended(10)
    assert second.token_ids == double.model.stream(list(PROMPT), 3)
    assert double.num_prompt_tokens_loaded == len(PROMPT) - 1
    assert (sink.violations, second.violations) == ([], [])


async def test_an_aborted_half_and_a_refused_one_end_once(
    driver: tuple[VllmDriver, VllmDouble],
) -> None:
    made, _ = driver
    aborted, refused = (RecordingSink(AttemptId(name)) for name in ("aborted", "refused"))

    made.generate(make_command("aborted", is_prefill=True), aborted)
    made.abort(AttemptId("aborted"))
    made.generate(
        make_command("refused", is_prefill=True, prompt_token_ids=tuple([5] * 100_000)), refused
    )
    await aborted.ended(10)
    await refused.ended(10)

    assert aborted.finish is not None
    assert aborted.finish.reason is FinishReason.ABORT
    assert isinstance(refused.error, EngineRefusedError)
    assert (aborted.violations, refused.violations) == ([], [])
