"""SimModel: the next token depends on the tokens before it and on nothing else."""

import re

import numpy as np
import pytest

from dsched.drivers.wire import SamplingParams
from dsched.sim.model import SimModel, sim_token

PROMPT = tuple(range(40, 80))
MODEL = SimModel(vocab_size=500)
ENDING = SimModel(vocab_size=500, eos_token_id=7, mean_output_tokens=10.0)


def greedy(max_tokens: int = 100, **fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("cut", [0, 1, 7, 29, 30])
def test_continuation_equals_the_uninterrupted_stream(cut: int) -> None:
    """Prompt plus emitted tokens goes on exactly where the stream stood."""
    whole = MODEL.stream(PROMPT, 30)

    assert MODEL.stream(PROMPT + whole[:cut], 30 - cut) == whole[cut:]


def test_every_token_of_the_prompt_matters() -> None:
    """Changing, adding, dropping or swapping one token gives another stream."""
    whole = MODEL.stream(PROMPT, 8)
    others = [
        (41, *PROMPT[1:]),
        (*PROMPT[:-1], 80),
        (*PROMPT, 0),
        (0, *PROMPT),
        PROMPT[1:],
        PROMPT[:-1],
        (PROMPT[1], PROMPT[0], *PROMPT[2:]),
    ]

    assert all(MODEL.stream(other, 8) != whole for other in others)


def test_tokens_spread_over_the_vocabulary() -> None:
    """No token is preferred: 5,000 tokens of 50 kinds, each within a fifth of its share."""
    tokens = SimModel(vocab_size=50).stream((1, 2, 3), 5_000)

    counts = np.bincount(tokens, minlength=50)
    assert counts.min() > 60
    assert counts.max() < 140


def test_seed_matters_only_with_a_temperature() -> None:
    plain = MODEL.stream(PROMPT, 8)
    hot = [
        MODEL.stream(PROMPT, 8, SamplingParams(max_tokens=8, temperature=0.7, seed=seed))
        for seed in (None, 0, 1, -1)
    ]

    assert MODEL.stream(PROMPT, 8, greedy(seed=5)) == plain
    assert hot[0] == hot[1]
    assert len({plain, *hot}) == 4


def test_end_token_ends_the_stream_and_is_not_part_of_it() -> None:
    lengths = [len(ENDING.stream((*PROMPT, extra), 10_000)) for extra in range(300)]

    assert all(7 not in ENDING.stream((*PROMPT, extra), 500) for extra in range(20))
    assert np.mean(lengths) == pytest.approx(10.0, rel=0.2)
    assert len(set(lengths)) > 10


def test_ignored_end_goes_on_with_the_same_tokens() -> None:
    short = ENDING.stream(PROMPT, 10_000)

    long = ENDING.stream(PROMPT, len(short) + 20, greedy(ignore_eos=True))

    assert len(long) == len(short) + 20
    assert long[: len(short)] == short


def test_minimum_of_tokens_passes_over_ends() -> None:
    short = ENDING.stream(PROMPT, 10_000)

    longer = ENDING.stream(PROMPT, 10_000, greedy(min_tokens=len(short) + 1))

    assert len(longer) > len(short)


def test_stop_token_ends_the_stream_before_itself() -> None:
    tokens = MODEL.stream(PROMPT, 20)

    stopped = MODEL.stream(PROMPT, 20, greedy(stop_token_ids=(tokens[9], tokens[15])))

    assert stopped == tokens[: tokens.index(tokens[9])]


def test_answers_end_only_after_their_turn_began() -> None:
    """Without the token that begins an answer the model talks on; after it, never too early."""
    model = SimModel(
        vocab_size=500,
        eos_token_id=7,
        mean_output_tokens=2.0,
        turn_token_id=3,
        min_output_tokens=25,
    )
    chat = (*PROMPT, 3)

    whole = model.stream(chat, 1_000)

    assert len(model.stream(PROMPT, 400)) == 400
    assert 25 <= len(whole) < 100
    assert model.first_end(chat) == 25
    # A continuation ends where the uninterrupted answer ends, whatever was emitted before.
    for cut in (1, 24, 25, len(whole)):
        assert model.stream(chat + whole[:cut], 1_000) == whole[cut:]


def test_forced_tokens_follow_their_first_half() -> None:
    forced = np.full(20, -1, dtype=np.int32)
    forced[5] = 6
    model = SimModel(
        vocab_size=20,
        ordinary_tokens=np.array([1, 2, 5], dtype=np.int32),
        forced_next=forced,
        eos_token_id=0,
        mean_output_tokens=3.0,
    )

    for extra in range(7, 20):
        tokens = model.stream((1, 2, extra), 60)
        for index, token in enumerate(tokens):
            assert (token == 6) == (index > 0 and tokens[index - 1] == 5)
        assert len(tokens) == 60 or tokens[-1:] != (5,), "ended inside a character"
    assert model.stream((1, 2, 5), 1) == (6,)


def test_sim_token_is_the_greedy_stream() -> None:
    assert [sim_token(PROMPT, index, 500) for index in range(5)] == list(MODEL.stream(PROMPT, 5))


def test_logprobs_belong_to_the_tokens_and_continue() -> None:
    """A pure function of the tokens before, like the tokens; the chosen one stands first."""
    tokens = MODEL.stream(PROMPT, 6)
    chain = MODEL.prompt_chain(PROMPT)
    found = []
    for token in tokens:
        chain, logprob = MODEL.logprob(chain, token, 3)
        found.append(logprob)

    _, again = MODEL.logprob(MODEL.prompt_chain(PROMPT + tokens[:4]), tokens[4], 3)

    assert again == found[4]
    for token, logprob in zip(tokens, found, strict=True):
        assert logprob.token_id == token == logprob.top[0][0]
        assert len({token_id for token_id, _ in logprob.top}) == 3
        assert 0 >= logprob.logprob > logprob.top[1][1] > logprob.top[2][1]
    assert len({logprob.logprob for logprob in found}) == 6


def test_more_alternatives_than_tokens_gives_all_there_are() -> None:
    _, logprob = SimModel(vocab_size=3).logprob(1, 2, 9)

    assert sorted(token_id for token_id, _ in logprob.top) == [0, 1, 2]


@pytest.mark.parametrize("token", [-1, 500, 1 << 40, 1 << 70])
def test_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match="prompt token id"):
        MODEL.prompt_chain((1, token, 2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 0}, "vocab_size 0 is not within"),
        ({"eos_token_id": 1_024}, "eos_token_id 1024 is not below 1024"),
        ({"mean_output_tokens": 0.5}, "mean_output_tokens 0.5 must be at least 1"),
        ({"ordinary_tokens": np.array([], dtype=np.int32)}, "at least one"),
        ({"ordinary_tokens": np.array([1_024], dtype=np.int32)}, "ids below 1024"),
        ({"forced_next": np.array([-1], dtype=np.int32)}, "1 forced tokens for 1024"),
    ],
)
def test_impossible_models_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        SimModel(**fields)  # type: ignore[arg-type]
