"""The simulator: what holds for every workload and every trace."""

import contextlib
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsched.costs.affine import AffineStepCost
from dsched.drivers.base import FinishReason
from dsched.drivers.wire import GenerateCommand, SamplingParams
from dsched.errors import TraceError
from dsched.sim.engine import KvPolicy, SimEngine, SimEngineConfig
from dsched.sim.model import SimModel
from dsched.sim.traces import read_trace

VOCAB = 40
MODELS = (
    SimModel(vocab_size=VOCAB),
    SimModel(vocab_size=VOCAB, eos_token_id=3, mean_output_tokens=12.0),
    SimModel(
        vocab_size=VOCAB,
        eos_token_id=3,
        mean_output_tokens=4.0,
        turn_token_id=5,
        min_output_tokens=6,
    ),
)
COST = AffineStepCost(base_ns=1_000, per_decode_request_ns=17, per_kv_token_ns=3)


@st.composite
def sampling_params(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        max_tokens=draw(st.integers(1, 40)),
        min_tokens=draw(st.sampled_from([0, 0, 5])),
        temperature=draw(st.sampled_from([None, 0.0, 0.8])),
        seed=draw(st.sampled_from([None, 1, 2])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.sampled_from([(), (), (7,), (1, 2, 3)])),
        logprobs=draw(st.sampled_from([None, None, 2])),
    )


@st.composite
def request_lists(draw: st.DrawFn) -> list[tuple[int, tuple[int, ...], SamplingParams, int]]:
    """(rank, prompt, sampling, step at which it arrives); prompts near the limits of a rank."""
    lengths = st.one_of(st.integers(1, 30), st.integers(60, 99))
    rows = draw(st.lists(st.tuples(st.integers(0, 2), lengths, st.integers(0, 12)), max_size=14))
    requests = []
    for rank, length, step in rows:
        first = draw(st.integers(0, VOCAB - 1))
        requests.append((rank, (first, *[5, 6] * length)[:length], draw(sampling_params()), step))
    return requests


@pytest.mark.slow
@given(
    requests=request_lists(),
    model=st.sampled_from(MODELS),
    kv_policy=st.sampled_from(list(KvPolicy)),
    max_running=st.integers(1, 6),
    take_every=st.integers(1, 9),
    aborts=st.lists(st.tuples(st.integers(0, 13), st.integers(0, 40)), max_size=3),
    cache_tokens=st.sampled_from([0, 5_000]),
)
@settings(max_examples=120, deadline=None)
def test_engine_keeps_its_contract(
    requests: list[tuple[int, tuple[int, ...], SamplingParams, int]],
    model: SimModel,
    kv_policy: KvPolicy,
    max_running: int,
    take_every: int,
    aborts: list[tuple[int, int]],
    cache_tokens: int,
) -> None:
    """KV is conserved and never over capacity, steps are as long as their slowest rank, every
    request ends once, and its tokens are the model's."""
    config = SimEngineConfig(
        num_dp_ranks=3,
        kv_capacity_tokens=130,
        max_running_requests=max_running,
        max_step_tokens=24,
        max_model_len=110,
        kv_policy=kv_policy,
        prefix_cache_tokens=cache_tokens,
    )
    engine = SimEngine(config, model, COST)
    tokens: dict[str, list[int]] = {}
    finish: dict[str, tuple[FinishReason, int | None]] = {}
    aborted: set[str] = set()
    commands = {
        str(number): GenerateCommand(
            attempt_id=str(number),
            epoch=0,
            dp_rank=rank,
            prompt_token_ids=prompt,
            sampling=sampling,
        )
        for number, (rank, prompt, sampling, _) in enumerate(requests)
    }

    def take() -> None:
        for attempt in engine.take_output():
            assert attempt.attempt_id not in finish
            if attempt.sampling.logprobs is not None:
                logprobs = engine.take_logprobs(attempt)
                assert [each.token_id for each in logprobs] == attempt.output
            tokens.setdefault(attempt.attempt_id, []).extend(attempt.output)
            attempt.output = []
            if attempt.finish is not None:
                finish[attempt.attempt_id] = (attempt.finish, attempt.stop_token_id)

    for step in range(3_000):
        for number, (_, _, _, arrival) in enumerate(requests):
            if arrival == step:
                engine.submit(commands[str(number)])
        duration_ns = engine.begin_step()
        engine.validate()
        for number, when in aborts:
            if when == step and engine.abort(str(number)):
                aborted.add(str(number))
                engine.validate()
        if duration_ns is not None:
            assert duration_ns == engine.last_rank_ns.max()
            assert (engine.last_step_tokens <= config.max_step_tokens).all()
            engine.complete_step()
            engine.validate()
            assert (engine.loads().num_running <= max_running).all()
        if step % take_every == 0 or engine.is_idle:
            take()
        if engine.is_idle and step > 12:
            break
    else:
        pytest.fail("no progress")

    assert set(finish) | aborted == set(commands)
    assert not set(finish) & aborted
    assert engine.loads().num_kv_tokens.tolist() == [0, 0, 0]
    for attempt_id, command in commands.items():
        limit = min(command.sampling.max_tokens, 110 - len(command.prompt_token_ids))
        expected = model.stream(command.prompt_token_ids, limit, command.sampling)
        got = tuple(tokens.get(attempt_id, ()))
        if attempt_id in aborted:
            assert got == expected[: len(got)]
            continue
        assert got == expected
        reason, stop = finish[attempt_id]
        assert reason is (FinishReason.LENGTH if len(got) == limit else FinishReason.STOP)
        assert (stop is None) == (reason is FinishReason.LENGTH)


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=60).map(tuple),
    sampling=sampling_params(),
    model=st.sampled_from(MODELS),
    data=st.data(),
)
@settings(deadline=None)
def test_any_cut_continues_the_stream(
    prompt: tuple[int, ...], sampling: SamplingParams, model: SimModel, data: st.DataObject
) -> None:
    """Prompt plus any number of emitted tokens gives the rest; `min_tokens` shrinks with it."""
    whole = model.stream(prompt, 40, sampling)
    cut = data.draw(st.integers(0, len(whole)))
    rest = {"min_tokens": max(0, sampling.min_tokens - cut)}
    after = SamplingParams(
        **{name: getattr(sampling, name) for name in sampling.__struct_fields__} | rest
    )

    assert model.stream(prompt + whole[:cut], 40 - cut, after) == whole[cut:]


@given(
    stamps_ns=st.lists(st.integers(0, 1 << 62), min_size=1, max_size=20).map(sorted),
    lengths=st.lists(
        st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 5)), min_size=20, max_size=20
    ),
    unit=st.sampled_from([("t_s", 9), ("t_ms", 6)]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_stamps_survive_to_the_nanosecond(
    tmp_path: Path,
    stamps_ns: list[int],
    lengths: list[tuple[int, int]],
    unit: tuple[str, int],
) -> None:
    """Whatever stamps are written as decimals, their differences are read back exactly."""
    name, digits = unit
    path = tmp_path / "trace.csv"
    rows = [
        f"{Decimal(stamp).scaleb(-digits):f},{num_input},{num_output}\n"
        for stamp, (num_input, num_output) in zip(stamps_ns, lengths, strict=False)
    ]
    path.write_text(f"{name},input_tokens,output_tokens\n" + "".join(rows))

    trace = read_trace(path)

    kept = [
        stamp - stamps_ns[0]
        for stamp, (num_input, num_output) in zip(stamps_ns, lengths, strict=False)
        if num_input and num_output
    ]
    assert trace.arrival_ns.tolist() == kept
    assert trace.counts.num_read == len(stamps_ns)
    assert trace.counts.num_kept == len(kept)


ANY_BYTES = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
)


@pytest.mark.slow
@given(data=ANY_BYTES)
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
def test_any_bytes_are_a_trace_or_a_trace_error(tmp_path: Path, data: bytes) -> None:
    """No file makes the reader fail in any other way."""
    path = tmp_path / "trace"
    for head in (b"t_s,input_tokens,output_tokens\n", b"", b'{"timestamp": '):
        path.write_bytes(head + data)
        with contextlib.suppress(TraceError):
            assert np.all(read_trace(path).num_prompt_tokens > 0)
