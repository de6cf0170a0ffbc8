"""Token cache: what is found again, what is kept, and which tokenizers are left alone."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tokenizers import AddedToken, Tokenizer, normalizers

from dsched.cli.engines import sim_model
from dsched.cli.metric_sources import token_cache_samples
from dsched.frontdoor.deepseek import DeepseekRenderer
from dsched.frontdoor.errors import ApiError
from dsched.frontdoor.models import load_model
from dsched.frontdoor.schema import parse_chat
from dsched.frontdoor.token_cache import PromptEncoder, TokenCache, encode_whole, entry_bytes
from dsched.frontdoor.token_cuts import MIN_SEGMENT_CHARS, find_cuts, firm_tokens
from dsched.metrics import CATALOG
from dsched.sim.tokenizer import build_sim_tokenizer
from dsched.testing.chat_models import DEEPSEEK_CONTROL_TOKENS, DEEPSEEK_MARKUP_TOKENS
from tests.reference.tokenizers_of_models import qwen


def message(word: str, role: str = "user") -> str:
    return f"<|{role}|>{word} " + f"{word} goes on and on. " * 30 + "<|end|>"


@pytest.fixture
def store() -> TokenCache:
    return TokenCache(1 << 20)


@pytest.fixture
def encoder(store: TokenCache) -> PromptEncoder:
    return PromptEncoder(build_sim_tokenizer(), cache=store)


def letters(part: str) -> list[int]:
    return list(map(ord, part))


def test_next_turn_pays_for_what_is_new(encoder: PromptEncoder, store: TokenCache) -> None:
    """All messages of a chat are found when it comes again with one more."""
    chat = "<|bos|>" + message("rule", "system") + message("one") + message("two")
    encoder.encode(chat, add_special_tokens=False)
    num_missed = store.num_missed_tokens
    new = message("three")

    ids = encoder.encode(chat + new, add_special_tokens=False)

    num_new = len(encode_whole(build_sim_tokenizer(), new, add_special_tokens=False))
    # The mark at its end was the same in the message before.
    assert store.num_missed_tokens - num_missed == num_new - 1
    assert ids == encode_whole(build_sim_tokenizer(), chat + new, add_special_tokens=False)


def test_a_message_is_found_wherever_it_stands(encoder: PromptEncoder, store: TokenCache) -> None:
    """Users who share a system prompt, or a document, share its ids."""
    shared = message("shared")
    encoder.encode("<|bos|>" + message("one") + shared, add_special_tokens=False)
    num_hits = store.num_hit_tokens

    encoder.encode("<|bos|><|user|>short<|end|>" + shared, add_special_tokens=False)

    num_shared = len(encode_whole(build_sim_tokenizer(), shared, add_special_tokens=False))
    assert store.num_hit_tokens - num_hits >= num_shared - 1


def test_short_texts_are_not_kept(encoder: PromptEncoder, store: TokenCache) -> None:
    """A lookup would cost what tokenising does."""
    encoder.encode("a" * (MIN_SEGMENT_CHARS - 1), add_special_tokens=True)

    assert (len(store), store.num_bytes, store.num_missed_tokens) == (0, 0, 0)


def test_least_recently_used_part_makes_room() -> None:
    """A part that is asked for again stays; what was longest unused goes."""
    size = entry_bytes("a", (97,))
    store = TokenCache(4 * size)
    for part in ("a", "b", "c", "d", "a", "e"):
        store.ids_of([part], letters)

    assert [part for part, _ in store.items()] == ["c", "d", "a", "e"]
    assert store.num_bytes == 4 * size


def test_part_that_would_push_out_the_others_is_not_kept() -> None:
    """One long document, seen once, does not cost every chat its place."""
    size = entry_bytes("a", (97,))
    store = TokenCache(4 * size)
    store.ids_of(["a"], letters)

    assert store.ids_of(["abc"], letters) == [97, 98, 99]
    assert [part for part, _ in store.items()] == ["a"]
    assert store.num_bytes == size


def test_numbers_are_ids_already(store: TokenCache) -> None:
    """They are neither looked up nor counted."""
    assert store.ids_of([7, "a", 8, "a"], letters) == [7, 97, 8, 97]
    assert (store.num_hit_tokens, store.num_missed_tokens) == (1, 1)


def test_lock_is_free_while_a_text_is_tokenised(store: TokenCache) -> None:
    """Another thread is served in the middle of it."""

    def encode(part: str) -> list[int]:
        other = threading.Thread(target=store.ids_of, args=(["b"], letters), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive()
        return letters(part)

    assert store.ids_of(["a"], encode) == [97]
    assert {part for part, _ in store.items()} == {"a", "b"}


def test_threads_get_the_same_ids() -> None:
    """Many threads over a cache that forgets all the time; its books still balance."""
    tokenizer = build_sim_tokenizer()
    chats = ["".join(message(f"w{n}") for n in range(start, start + 6)) for start in range(8)]
    expected = [encode_whole(tokenizer, chat, add_special_tokens=True) for chat in chats]
    store = TokenCache(40_000)
    encoder = PromptEncoder(tokenizer, cache=store)
    wrong: list[int] = []

    def work(first: int) -> None:
        for turn in range(24):
            number = (first + turn) % len(chats)
            if encoder.encode(chats[number], add_special_tokens=True) != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
    assert 0 < store.num_bytes <= store.max_bytes
    assert store.num_bytes == sum(entry_bytes(*each) for each in store.items())
    # All tokens but the one that the post-processor adds to each prompt.
    num_tokens = 4 * 3 * sum(len(ids) - 1 for ids in expected)
    assert store.num_hit_tokens + store.num_missed_tokens == num_tokens


def test_ids_share_their_numbers(encoder: PromptEncoder) -> None:
    """A long chat is kept at the cost of a reference a token."""
    ids = encoder.encode(message("zebra") + message("other"), add_special_tokens=False)

    assert max(ids) > 256, "Python shares smaller numbers by itself"
    assert len(set(map(id, ids))) == len(set(ids))


def add_single_word(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("word", single_word=True)])


def add_dropout(tokenizer: Tokenizer) -> None:
    tokenizer.model.dropout = 0.1


def add_vanishing(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("\n", normalized=True)])
    tokenizer.normalizer = normalizers.Strip()


def encode_specials(tokenizer: Tokenizer) -> None:
    tokenizer.encode_special_tokens = True


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda tokenizer: tokenizer.enable_truncation(10), "it has truncation"),
        (lambda tokenizer: tokenizer.enable_padding(), "it has padding"),
        (add_dropout, "its model has dropout"),
        (add_single_word, "an added token is only found as a word"),
        (encode_specials, "it encodes special tokens as text"),
        (add_vanishing, "an added token is normalized to nothing"),
    ],
)
def test_tokenizers_that_cannot_be_cut_are_left_alone(
    spoil: Callable[[Tokenizer], None], reason: str
) -> None:
    """Nothing is looked up or kept, and the log says why, without a word of a prompt."""
    tokenizer = qwen()
    spoil(tokenizer)
    store = TokenCache(1 << 20, model="m")

    with capture_logs() as logs:
        encoder = PromptEncoder(tokenizer, cache=store)
    if spoil is not add_vanishing:  # the library may take all memory there is for a text
        encoder.encode("<|im_start|>word " * 100, add_special_tokens=True)

    event = {"event": "token_cache.unused", "log_level": "info", "model": "m", "reason": reason}
    assert logs == [event]
    assert (len(store), store.num_missed_tokens) == (0, 0)


def test_tokens_of_normalized_text_are_no_cuts() -> None:
    """The text has to be normalized whole; without a normalizer they are found where they are."""
    tokenizer = qwen()
    tokenizer.add_tokens([AddedToken("<turn>", normalized=True)])
    with_normalizer = find_cuts(tokenizer).pattern
    tokenizer.normalizer = normalizers.Sequence([])  # as DeepSeek's files have it
    without = find_cuts(tokenizer).pattern

    assert with_normalizer is not None
    assert without is not None
    assert (with_normalizer.search("a<turn>"), with_normalizer.findall("a<|im_end|>")) == (
        None,
        ["<|im_end|>"],
    )
    assert without.findall("a<turn>") == ["<turn>"]


@pytest.mark.parametrize("early", ["<tu", "rn", "n>", "n>x", "x<"])
def test_tokens_of_normalized_text_yield_to_all_others(early: str) -> None:
    """They are looked for last, so a token that is looked for first may take a piece of one."""
    first = AddedToken(early, normalized=False)

    assert "<turn>" not in firm_tokens([AddedToken("<turn>", normalized=True), first])
    is_free = early != "x<"  # only what begins before it takes it from the longer one
    assert ("<turn>" in firm_tokens([AddedToken("<turn>", normalized=False), first])) == is_free


@pytest.mark.parametrize("text", [" <turn>", "<turn>\n"])
def test_tokens_with_space_at_their_ends_are_no_cuts(text: str) -> None:
    """A neighbour that strips may take it."""
    assert firm_tokens([AddedToken(text, normalized=False)]) == []


def test_two_tokens_with_one_spelling_are_no_cuts() -> None:
    """Which of them the library finds, and what that one does to its neighbours, is not known."""
    token = AddedToken("<turn>", normalized=False)

    assert firm_tokens([token]) == ["<turn>"]
    assert firm_tokens([token, token]) == []


def test_deepseek_tokens_that_a_tokenizer_lacks_are_refused_as_without_a_cache() -> None:
    """A spelling in the vocabulary that is no added token is not the format's token either."""
    tokenizer = build_sim_tokenizer()
    controls = [each for each in DEEPSEEK_CONTROL_TOKENS if each != "<｜System｜>"]
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in controls])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in DEEPSEEK_MARKUP_TOKENS])
    document = json.loads(tokenizer.to_str())
    document["model"]["vocab"]["<｜System｜>"] = 60_000
    tokenizer = Tokenizer.from_str(json.dumps(document))
    messages = [{"role": role, "content": "hi"} for role in ("system", "user", "system", "user")]
    body = parse_chat(json.dumps({"model": "m", "messages": messages}).encode())

    refusals = []
    for cache in (None, TokenCache(1 << 20)):
        renderer = DeepseekRenderer(tokenizer, chat_format="deepseek-v4.1", cache=cache)
        with pytest.raises(ApiError, match="<｜System｜>") as caught:
            renderer.render_chat(body)
        refusals.append(caught.value.body())

    assert refusals[0] == refusals[1]


class Changed:
    """A tokenizer of a library that has more than ours."""

    encode_special_tokens = False

    def __init__(self, old: str, new: str) -> None:
        self.text = qwen().to_str().replace(old, new)

    def to_str(self) -> str:
        return self.text


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"type":"NFC"', '"type":"Shuffle"', "its normalizer is Shuffle"),
        ('"type":"Split"', '"type":"Shuffle"', "its pre-tokenizer is Shuffle"),
        ('"type":"BPE"', '"type":"Shuffle"', "its model is Shuffle"),
        ('"dropout":null', '"dropout":null,"nbest":8', "its model has nbest"),
        ('"added_tokens":[', '"added_tokens":[0,', "its file has another form"),
    ],
)
def test_unknown_parts_are_not_cut(old: str, new: str, reason: str) -> None:
    """What a later version of the library brings is not taken for what is known."""
    cuts = find_cuts(Changed(old, new))  # type: ignore[arg-type]

    assert cuts.reason is not None
    assert cuts.reason.startswith(reason)


def test_a_tokenizer_that_does_not_keep_its_word_is_not_cut() -> None:
    """Reading its parts is one thing, trying them another."""
    true = qwen()

    class Odd(Changed):
        """Says of every text how long it is."""

        normalizer = None

        def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> list[object]:
            whole = true.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [
                type("E", (), {"ids": [len(text), *each.ids]})
                for text, each in zip(texts, whole, strict=True)
            ]

    assert find_cuts(Odd("", "")).reason == "a text in parts got other ids than the whole"  # type: ignore[arg-type]


def test_models_come_with_a_cache_where_one_is_configured(tmp_path: Path) -> None:
    """0 bytes are no cache; prompts then are tokenised whole."""
    build_sim_tokenizer().save(str(tmp_path / "tokenizer.json"))
    text = message("one") * 2

    cached = load_model("m", tmp_path, token_cache_bytes=1 << 20)
    plain = load_model("m", tmp_path)

    assert cached.renderer.encode_text(text) == plain.renderer.encode_text(text)
    assert plain.token_cache is None
    assert cached.token_cache is not None
    assert cached.token_cache.num_missed_tokens > 0


def test_metrics_show_hits_misses_and_size() -> None:
    """Names and labels are the catalogue's; a model without a cache has none of them."""
    model = sim_model("m", token_cache_bytes=1 << 20)
    for _ in range(3):
        model.renderer.encode_text(message("one"))
    cache = model.token_cache
    assert cache is not None

    samples = list(token_cache_samples({"m": model, "other": sim_model("other")}))

    assert [(each.name, each.labels, each.value) for each in samples] == [
        ("dsched_token_cache_tokens_total", ("m", "hit"), cache.num_hit_tokens),
        ("dsched_token_cache_tokens_total", ("m", "miss"), cache.num_missed_tokens),
        ("dsched_token_cache_bytes", ("m",), cache.num_bytes),
    ]
    assert cache.num_hit_tokens == 2 * cache.num_missed_tokens > 0
    assert all(len(CATALOG[each.name].labels) == len(each.labels) for each in samples)
