"""Detokenizer and StopFinder: whole characters, and stop strings wherever the pieces end."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dsched.frontdoor.format import token_bytes, token_text
from dsched.frontdoor.text import Detokenizer, StopFinder, StreamDetokenizer, TokenTexts
from dsched.sim.tokenizer import build_sim_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_sim_tokenizer()


Maker = Callable[..., Detokenizer]


@pytest.fixture(params=["looked up", "decoded"])
def make(request: pytest.FixtureRequest) -> Maker:
    """Both detokenizers keep the same rules."""
    if request.param == "decoded":
        return StreamDetokenizer
    return lambda tokenizer, prompt=(): TokenTexts(tokenizer).detokenizer(prompt)


def metaspace_tokenizer() -> Tokenizer:
    """One that leaves out the space before the first word, as Llama 2's does."""
    vocab = {"▁the": 0, "▁cat": 1, "s": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def test_character_comes_with_its_last_token(make: Maker, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("aé😀b", add_special_tokens=False).ids
    detokenizer = make(tokenizer)

    pieces = [detokenizer.feed(token_id) for token_id in ids]

    assert "".join(pieces) == "aé😀b"
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert pieces.count("") == len(ids) - 4


def test_space_between_prompt_and_answer_is_kept(make: Maker) -> None:
    """The first answer token follows a prompt, so its space belongs to the answer."""
    tokenizer = metaspace_tokenizer()
    alone, after = make(tokenizer), make(tokenizer, [0, 1, 0, 1, 0])

    assert (alone.feed(0), alone.feed(1)) == ("the", " cat")
    assert (after.feed(1), after.feed(2)) == (" cat", "s")


def test_prompt_text_is_not_answer_text(make: Maker, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("a prompt of some length").ids
    for count in range(len(prompt) + 1):
        assert make(tokenizer, prompt[:count]).feed(tokenizer.token_to_id("b")) == "b"


def test_prompt_that_ends_inside_a_character_is_continued(
    make: Maker, tokenizer: Tokenizer
) -> None:
    """An answer may complete what a prompt of token ids began."""
    ids = tokenizer.encode("some words €", add_special_tokens=False).ids
    detokenizer = make(tokenizer, ids[:-1])

    assert detokenizer.feed(ids[-1]) == "€"


@pytest.mark.parametrize("token_id", [-1, 1 << 31, 1 << 40, 99_999_999])
def test_id_outside_the_vocabulary_has_no_text(
    make: Maker, tokenizer: Tokenizer, token_id: int
) -> None:
    """An engine's mistake does not end a stream."""
    detokenizer = make(tokenizer)

    assert detokenizer.feed(token_id) == ""
    assert detokenizer.feed(tokenizer.token_to_id("b")) == "b"


def test_special_tokens_have_no_text(make: Maker, tokenizer: Tokenizer) -> None:
    assert make(tokenizer).feed(tokenizer.token_to_id("<|end|>")) == ""


def test_earliest_stop_string_cuts() -> None:
    finder = StopFinder(("later", "soon"))

    assert finder.feed("as soon as later") == "as "
    assert finder.is_found
    assert finder.feed("more") == ""


def test_overlapping_beginnings_are_held_back_and_given_back() -> None:
    finder = StopFinder(("aab",))

    assert [finder.feed("a") for _ in range(4)] == ["", "", "a", "a"]
    assert finder.feed("b") == ""
    assert finder.is_found


def test_text_held_back_is_flushed() -> None:
    finder = StopFinder(("abc",))

    assert finder.feed("xab") == "x"
    assert finder.flush() == "ab"
    assert finder.flush() == ""


@pytest.mark.parametrize("stops", [(), ("",), ("a", "")])
def test_empty_stop_string_is_refused(stops: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopFinder(stops)


def test_bytes_of_a_part_of_a_character(tokenizer: Tokenizer) -> None:
    """Log-probabilities name the bytes, so a client can join what no text can show."""
    ids = tokenizer.encode("€", add_special_tokens=False).ids

    raw = b"".join(token_bytes(tokenizer, each, token_text(tokenizer, each)) for each in ids)

    assert raw == "€".encode()
