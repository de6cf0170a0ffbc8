"""The token cache: the ids are those of the whole text, for every tokenizer and every text."""

import json
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from dsched.frontdoor.deepseek import DeepseekRenderer
from dsched.frontdoor.renderer import Renderer, TemplateRenderer
from dsched.frontdoor.schema import parse_chat
from dsched.frontdoor.token_cache import PromptEncoder, TokenCache, encode_whole, entry_bytes
from dsched.frontdoor.token_cuts import find_cuts, firm_tokens, spelling_pattern
from dsched.testing.chat_models import (
    DEEPSEEK_CONTROL_TOKENS,
    DEEPSEEK_MARKUP_TOKENS,
    build_deepseek_tokenizer,
)
from tests.reference.tokenizers_of_models import CORPUS, MODELS

WORDS = " ".join(CORPUS).split(" ")
"""What the tokenizers know."""
SPACES = (" ", "  ", "\n", "\n\n\n", "\t", "\u3000", "▁", "", "\x1f")
ODD = ("e\u0301", "ﬁ", "İ", "😀", "\u200b", "<", "<|", "|>", "[", "<thi")


@cache
def made(name: str) -> tuple[Tokenizer, list[str]]:
    tokenizer = MODELS[name]()
    added = tokenizer.get_added_tokens_decoder().values()
    return tokenizer, sorted(token.content for token in added)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@given(data=st.data(), min_chars=st.sampled_from([1, 1, 6, 40]), is_alone=st.booleans())
@settings(max_examples=150, deadline=None)
def test_ids_are_those_of_the_whole_text(
    name: str, data: st.DataObject, min_chars: int, *, is_alone: bool
) -> None:
    """With an empty cache, with a full one, and with one that keeps forgetting."""
    tokenizer, added = made(name)
    fragments = st.one_of(
        st.sampled_from(added), st.sampled_from(WORDS), st.sampled_from(SPACES + ODD)
    )
    texts = data.draw(st.lists(st.lists(fragments, max_size=14).map("".join), max_size=4))
    kept = PromptEncoder(tokenizer, cache=TokenCache(1 << 20), min_chars=min_chars)
    forgetful = PromptEncoder(tokenizer, cache=TokenCache(400), min_chars=min_chars)

    for text in [*texts, *texts]:
        whole = tokenizer.encode(text, add_special_tokens=is_alone).ids
        for encoder in (kept, forgetful):
            assert encoder.encode(text, add_special_tokens=is_alone) == whole


@pytest.mark.parametrize("name", MODELS)
def test_tokenizers_of_known_models_are_cut(name: str) -> None:
    """A chat falls into its messages, and a second one finds them."""
    tokenizer, added = made(name)
    mark = next(
        each
        for each in added
        if each in ("<|im_start|>", "[INST]", "</s>", "[SEP]")
        or each == "<start_of_turn>"
        or each == "<｜User｜>"
        or each == "<|user|>"
    )
    store = TokenCache(1 << 20)
    encoder = PromptEncoder(tokenizer, cache=store)
    message = f"{mark} the quick brown fox " * 20 + "and jumps over it " * 20

    encoder.encode(f"{mark}one {message}", add_special_tokens=True)
    num_missed = store.num_missed_tokens
    encoder.encode(f"{mark}other {message}", add_special_tokens=True)

    assert store.num_hit_tokens > num_missed / 2


DEEPSEEK = build_deepseek_tokenizer()
QWEN = MODELS["qwen"]()
RENDERERS: dict[str, tuple[Renderer, Renderer]] = {
    "chatml": (TemplateRenderer(QWEN), TemplateRenderer(QWEN, cache=TokenCache(20_000))),
    "deepseek-v4": (
        DeepseekRenderer(DEEPSEEK, chat_format="deepseek-v4"),
        DeepseekRenderer(DEEPSEEK, chat_format="deepseek-v4", cache=TokenCache(20_000)),
    ),
    "deepseek-v4.1": (
        DeepseekRenderer(DEEPSEEK, chat_format="deepseek-v4.1"),
        DeepseekRenderer(DEEPSEEK, chat_format="deepseek-v4.1", cache=TokenCache(20_000)),
    ),
}
CONTROLS = (*DEEPSEEK_CONTROL_TOKENS, *DEEPSEEK_MARKUP_TOKENS, "<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize("name", RENDERERS)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["system", "user", "assistant"]),
            st.lists(st.sampled_from((*CONTROLS, *CORPUS, *SPACES[:5], "x")), max_size=8),
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=25, deadline=None)
def test_chats_get_the_ids_of_a_renderer_without_a_cache(
    name: str, messages: list[tuple[str, list[str]]]
) -> None:
    """Control tokens that a client writes stay text, found or not."""
    documents = [{"role": role, "content": "".join(texts)} for role, texts in messages]
    documents.append({"role": "user", "content": "go"})
    body = parse_chat(json.dumps({"model": "m", "messages": documents}).encode())
    plain, cached = RENDERERS[name]

    expected = plain.render_chat(body).token_ids

    assert [cached.render_chat(body).token_ids for _ in range(2)] == [expected] * 2


PIECES = st.one_of(
    st.text("ab|", min_size=1, max_size=3), st.text("ab< |>\n", min_size=1, max_size=5)
)
TOKENS = st.lists(
    st.builds(
        AddedToken,
        PIECES,
        lstrip=st.booleans(),
        rstrip=st.booleans(),
        normalized=st.booleans(),
        special=st.booleans(),
    ),
    max_size=5,
    unique_by=lambda token: token.content,
)
NORMALIZERS = (
    lambda: None,
    normalizers.NFC,
    lambda: normalizers.Prepend("a"),
    lambda: normalizers.Replace("b", "a"),
    lambda: normalizers.Strip(left=True, right=True),
    lambda: normalizers.Replace(" ", "<"),
)
PRE_TOKENIZERS = (
    lambda: None,
    pre_tokenizers.WhitespaceSplit,
    lambda: pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first"),
    lambda: pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always"),
    lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
    pre_tokenizers.Punctuation,
)
MERGES = [("a", "b"), ("<", "|"), ("ab", "<|"), ("▁", "a"), ("|", ">")]


def normalized_text(tokenizer: Tokenizer, token: AddedToken) -> str:
    is_changed = token.normalized and tokenizer.normalizer is not None
    return tokenizer.normalizer.normalize_str(token.content) if is_changed else token.content


def odd_tokenizer(tokens: Sequence[AddedToken], *, normalizer: int, pre: int) -> Tokenizer:
    """A tokenizer in which most tokens touch each other."""
    letters = ["a", "b", "<", "|", ">", "▁", "Ġ", "Ċ", " ", "\n", "?"]
    vocab = {text: number for number, text in enumerate([*letters, *map("".join, MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES, unk_token="?"))
    made_normalizer, made_pre = NORMALIZERS[normalizer](), PRE_TOKENIZERS[pre]()
    if made_normalizer is not None:
        tokenizer.normalizer = made_normalizer
    if made_pre is not None:
        tokenizer.pre_tokenizer = made_pre
    tokenizer.add_tokens(tokens)
    return Tokenizer.from_str(tokenizer.to_str())


@given(
    tokens=TOKENS,
    normalizer=st.sampled_from(range(len(NORMALIZERS))),
    pre=st.sampled_from(range(len(PRE_TOKENIZERS))),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_tokens_that_touch_are_no_cuts(
    tokens: list[AddedToken], normalizer: int, pre: int, data: st.DataObject
) -> None:
    """Whatever the added tokens are and do to their neighbours."""
    tokenizer = odd_tokenizer(tokens, normalizer=normalizer, pre=pre)
    # The library itself may take all memory for a text; `find_cuts` refuses such tokenizers.
    assume(all(normalized_text(tokenizer, token) for token in tokens))
    contents = [token.content for token in tokens] or ["a"]
    fragments = st.one_of(st.sampled_from(contents), st.text("ab< |>\n", max_size=3))
    text = data.draw(st.lists(fragments, max_size=8).map("".join))
    encoder = PromptEncoder(tokenizer, cache=TokenCache(1 << 20), min_chars=1)
    try:
        whole = encode_whole(tokenizer, text, add_special_tokens=False)
    except BaseException as error:
        # Tokens that strip and touch each other can make the library itself give up.
        assume("PanicException" not in type(error).__name__)
        raise

    ids = [encoder.encode(text, add_special_tokens=False) for _ in range(2)]

    assert ids == [whole] * 2


@given(st.lists(PIECES, min_size=1, max_size=8), st.text("ab< |>\n", max_size=30))
@example(["a", "ab", "abab"], "ababab")
def test_pattern_finds_the_longest_spelling(spellings: list[str], text: str) -> None:
    """The spelling that starts first and, of those, is longest; as the tokenizer's own search."""
    found = spelling_pattern(spellings).search(text)

    places = [(text.find(each), -len(each)) for each in spellings if each in text]
    expected = min(places, default=None)
    actual = None if found is None else (found.start(), -len(found[0]))
    assert actual == expected


@given(st.lists(st.text("ab<>", min_size=1, max_size=4), unique=True, max_size=6), st.data())
def test_firm_tokens_are_found_wherever_they_stand(
    contents: list[str], data: st.DataObject
) -> None:
    """No neighbour makes a firm token disappear from the search of all tokens."""
    tokens = [AddedToken(text, normalized=False) for text in contents]
    firm = firm_tokens(tokens)
    assume(firm)
    token = data.draw(st.sampled_from(firm))
    before, after = data.draw(st.text("ab<>", max_size=6)), data.draw(st.text("ab<>", max_size=6))

    text = before + token + after
    spans = [match.span() for match in spelling_pattern(contents).finditer(text)]

    assert (len(before), len(before) + len(token)) in spans


@given(
    st.lists(st.lists(st.sampled_from(["a", "bb", "c" * 40, "d" * 90]), max_size=6), max_size=12),
    st.integers(0, 1_200),
)
def test_cache_keeps_its_books(prompts: list[list[str]], max_bytes: int) -> None:
    """Never above its budget, every token counted once, the last used part never dropped first."""
    store = TokenCache(max_bytes)
    num_tokens = 0

    for parts in prompts:
        ids = store.ids_of(parts, lambda part: [ord(each) for each in part])
        num_tokens += len(ids)

        assert ids == [ord(each) for part in parts for each in part]
        assert store.num_bytes <= max_bytes
        assert store.num_bytes == sum(entry_bytes(*each) for each in store.items())
        assert store.num_hit_tokens + store.num_missed_tokens == num_tokens


@given(st.data())
@settings(max_examples=40)
def test_a_text_that_grows_keeps_its_parts(data: st.DataObject) -> None:
    """All parts but the last stand in the longer text too, long ones after any beginning."""
    tokenizer, _ = made("qwen")
    cuts = find_cuts(tokenizer, min_chars=30)
    messages = st.integers(0, 60).map(lambda length: "<|im_start|>" + "x" * length)
    texts = data.draw(st.lists(messages, min_size=1, max_size=8))
    before, after = (data.draw(st.lists(messages, max_size=3)) for _ in range(2))
    answer = "y" * data.draw(st.integers(0, 60))

    parts = cuts.split("".join(texts))
    grown = cuts.split("".join([*texts, answer, *after]))
    moved = cuts.split("".join(before + texts))

    assert "".join(parts) == "".join(texts)
    assert grown[: len(parts) - 1] == parts[:-1]
    assert all(text in moved for text in texts if len(text) >= 30)
    assert sum(len(part) < 30 for part in parts) <= sum(len(part) >= 30 for part in parts) + 1
