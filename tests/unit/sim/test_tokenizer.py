"""The simulated model's tokenizer: every text goes through, and what comes out is readable."""

import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from dsched.sim.tokenizer import (
    ASSISTANT_TOKEN_ID,
    BOS_TOKEN_ID,
    CHAT_TEMPLATE,
    EOS_TOKEN_ID,
    MIN_ANSWER_TOKENS,
    SPECIAL_TOKENS,
    SimVocabulary,
    build_sim_model,
    build_sim_tokenizer,
)

TOKENIZER = build_sim_tokenizer()
MODEL = build_sim_model()


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_every_text_decodes_to_itself(text: str) -> None:
    ids = TOKENIZER.encode(text).ids

    assert ids[0] == BOS_TOKEN_ID
    assert max(ids) < MODEL.vocab_size
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<|bos|>" + text


@pytest.mark.parametrize(
    "text", ["", "naïve café €5 日本 😀👍🏽", "a\x00b\r\n\t", "x" * 5_000, "é" * 99]
)
def test_difficult_texts_decode_to_themselves(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids

    assert TOKENIZER.decode(ids) == text


def test_common_words_are_single_tokens() -> None:
    assert len(TOKENIZER.encode("The water under the bridge").ids) == 1 + 4 + len(" bridge")
    assert TOKENIZER.get_vocab_size() == MODEL.vocab_size
    assert 1_000 < MODEL.vocab_size < 2_048


def test_special_tokens_are_single_ids_and_nobody_can_type_around_them() -> None:
    ids = TOKENIZER.encode("".join(SPECIAL_TOKENS), add_special_tokens=False).ids

    assert ids == list(range(len(SPECIAL_TOKENS)))
    assert TOKENIZER.decode(ids) == ""


def test_two_builds_are_equal() -> None:
    assert build_sim_tokenizer().to_str() == TOKENIZER.to_str()
    one, other = SimVocabulary(), SimVocabulary()
    assert one.token_ids == other.token_ids
    assert np.array_equal(one.ordinary_tokens, other.ordinary_tokens)


def answer(question: str, num_tokens: int) -> tuple[int, ...]:
    return MODEL.stream(TOKENIZER.encode(question).ids, num_tokens)


def test_answers_are_words_and_whole_characters() -> None:
    """Of 4,000 tokens, nine in ten are words; no character stays half."""
    text = TOKENIZER.decode(list(answer("tell me a story", 4_000)))

    assert "�" not in text.rstrip("�")
    for character in "é€日😀":
        assert character in text
    words = text.replace(",", " ").replace(".", " ").split()
    assert len(words) > 3_600
    assert np.mean([word.isascii() and word.isalpha() for word in words]) > 0.98


def test_some_characters_are_split_over_tokens() -> None:
    """Token by token some pieces are empty: the character is not whole yet."""
    decoder = DecodeStream(skip_special_tokens=True)
    tokens = answer("tell me a story", 2_000)

    pieces = [decoder.step(TOKENIZER, token) for token in tokens]

    assert sum(piece is None for piece in pieces) >= 3
    joined = "".join(piece or "" for piece in pieces)
    assert joined == TOKENIZER.decode(list(tokens)).rstrip("�")


def test_no_special_token_is_emitted_as_a_word() -> None:
    assert min(answer("x", 3_000)) >= len(SPECIAL_TOKENS)


def chat_ids(text: str) -> list[int]:
    template = jinja2.Environment(autoescape=False).from_string(CHAT_TEMPLATE)
    rendered = template.render(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "be "}, {"text": "brief"}]},
            {"role": "user", "content": text},
        ],
        add_generation_prompt=True,
    )
    expected = f"<|bos|><|system|>be brief<|end|><|user|>{text}<|end|><|assistant|>"
    assert rendered == expected
    return TOKENIZER.encode(rendered, add_special_tokens=False).ids


def test_chat_answers_end_by_themselves_and_completions_do_not() -> None:
    """A chat without a limit is not cut short and does not go on for ever."""
    ids = chat_ids("hello")
    lengths = [len(MODEL.stream(chat_ids(f"hello {n}"), 20_000)) for n in range(30)]

    assert (ids[0], ids[-1]) == (BOS_TOKEN_ID, ASSISTANT_TOKEN_ID)
    assert min(lengths) >= MIN_ANSWER_TOKENS
    assert max(lengths) < 2_000
    assert len(answer("hello", 3_000)) == 3_000
    assert MODEL.eos_token_id == EOS_TOKEN_ID
