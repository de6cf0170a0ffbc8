"""Where a text may be cut so that the ids of its parts, one after the other, are the ids of it all.

A Hugging Face tokenizer first looks for its added tokens (`<|im_end|>` and so on) in the whole
text; normalizer, pre-tokenizer and model then see what lies between two of them and nothing else.
So a text may be cut where an added token begins, if that token is found there whatever stands
around it: it overlaps no other added token, takes no whitespace on its left, and no added token
asks for the characters beside it (`single_word`). A part that begins with its token also begins as
it did inside the text: what the very beginning of a text gets (`prepend_scheme: first`) no other
part gets.

All of this holds for parts of tokenizers that were read for it, and only those are taken: another
kind of normalizer, pre-tokenizer, model or post-processor, dropout, truncation or padding, and
nothing is cut. What was read is tried once on a text, when the tokenizer is loaded.

In: a tokenizer. Out: `Cuts`. Pure; O(size of the tokenizer).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

MIN_SEGMENT_CHARS = 256
"""Shorter parts are joined with their neighbours, and shorter texts not looked up. Below: a lookup
costs what tokenising does. Above: short messages are found only among the same neighbours."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NORMALIZERS = _names(
    "BertNormalizer ByteLevel Lowercase NFC NFD NFKC NFKD Nmt Precompiled Prepend Replace Sequence "
    "Strip StripAccents"
)
_PRE_TOKENIZERS = _names(
    "BertPreTokenizer ByteLevel CharDelimiterSplit Digits FixedLength Metaspace Punctuation "
    "Sequence Split UnicodeScripts Whitespace WhitespaceSplit"
)
_MODELS = {
    "BPE": _names(
        "type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk "
        "byte_fallback ignore_merges vocab merges"
    ),
    "Unigram": _names("type unk_id vocab byte_fallback"),
    "WordLevel": _names("type unk_token vocab"),
    "WordPiece": _names("type unk_token continuing_subword_prefix max_input_chars_per_word vocab"),
}
"""Models by name, with the fields whose meaning is known: a new one might bring chance."""


class Cuts(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """How texts of one tokenizer may be cut."""

    reason: str | None = None
    """Why they may not be; `None` if they may."""
    pattern: re.Pattern[str] | None = None
    """Finds the tokens that a part may begin with; `None` without any."""
    min_chars: int = MIN_SEGMENT_CHARS
    before_ids: tuple[int, ...] = ()
    """What the post-processor puts before a text that stands for itself."""
    after_ids: tuple[int, ...] = ()
    """What it puts behind."""

    def split(self, text: str) -> list[str]:
        """Cut `text` into parts of at least `min_chars`, where that is possible.

        A part that is long by itself is never joined with another, so that it stays the same part
        whatever stands around it. Parts do not depend on what follows the next cut, so a text that
        grows keeps all of its parts but the last. O(characters).
        """
        if self.pattern is None:
            return [text]
        parts = []
        begin = last = 0
        for start in (*(match.start() for match in self.pattern.finditer(text)), len(text)):
            if begin < last and start - last >= self.min_chars:
                parts.append(text[begin:last])
                begin = last
            if start - begin >= self.min_chars:
                parts.append(text[begin:start])
                begin = start
            last = start
        if begin < len(text):
            parts.append(text[begin:])
        return parts


class _AddedToken(msgspec.Struct):
    content: str
    single_word: bool = False
    lstrip: bool = False
    normalized: bool = True


class _Document(msgspec.Struct):
    """What decides about cuts in a `tokenizer.json`."""

    model: dict[str, msgspec.Raw]
    added_tokens: list[_AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None
    truncation: dict[str, Any] | None = None
    padding: dict[str, Any] | None = None


def find_cuts(tokenizer: Tokenizer, *, min_chars: int = MIN_SEGMENT_CHARS) -> Cuts:
    """Return how texts of `tokenizer` may be cut into parts of `min_chars`, or why not."""
    try:
        document = msgspec.json.decode(tokenizer.to_str(), type=_Document)
    except msgspec.MsgspecError as error:
        return Cuts(reason=f"its file has another form: {error}")
    reason = _refusal(document)
    if reason is None:
        reason = _refusal_of(tokenizer, document.added_tokens)
    if reason is not None:
        return Cuts(reason=reason)
    tokens = [token for token in document.added_tokens if token.content]
    if any(each["type"] != "Sequence" for each in _flat(document.normalizer)):
        # Those are looked for when the text has been normalized: a cut inside it is another text.
        tokens = [token for token in tokens if not token.normalized]
    firm = firm_tokens(tokens)
    before_ids, after_ids = _special_ids(document.post_processor)
    cuts = Cuts(
        pattern=spelling_pattern(firm) if firm else None,
        min_chars=min_chars,
        before_ids=before_ids,
        after_ids=after_ids,
    )
    try:
        holds = _holds(cuts, tokenizer, firm)
    except (KeyboardInterrupt, SystemExit):
        raise
    except (
        BaseException
    ) as error:  # the library raises bare Exception, and worse for its own faults
        return Cuts(reason=f"it could not encode a text: {error}")
    return cuts if holds else Cuts(reason="a text in parts got other ids than the whole")


def _refusal(document: _Document) -> str | None:
    for name in ("truncation", "padding"):
        if getattr(document, name) is not None:
            return f"it has {name}"
    kind = msgspec.json.decode(document.model.get("type", msgspec.Raw(b"null")))
    fields = _MODELS.get(kind)
    if fields is None:
        return f"its model is {kind}"
    if not fields.issuperset(document.model):
        return f"its model has {', '.join(sorted(document.model.keys() - fields))}"
    if msgspec.json.decode(document.model.get("dropout", msgspec.Raw(b"null"))):
        return "its model has dropout"
    for what, part, known in (
        ("normalizer", document.normalizer, _NORMALIZERS),
        ("pre-tokenizer", document.pre_tokenizer, _PRE_TOKENIZERS),
        ("post-processor", document.post_processor, _POST_PROCESSORS),
    ):
        for each in _flat(part):
            if each["type"] not in known:
                return f"its {what} is {each['type']}"
    if any(token.single_word for token in document.added_tokens):
        return "an added token is only found as a word"
    return None


def _refusal_of(tokenizer: Tokenizer, tokens: Sequence[_AddedToken]) -> str | None:
    if tokenizer.encode_special_tokens:
        return "it encodes special tokens as text"
    normalizer = tokenizer.normalizer
    if normalizer is not None:
        texts = [token.content for token in tokens if token.normalized and token.content]
        if not all(map(normalizer.normalize_str, texts)):
            # The library then finds it everywhere, and may take all memory there is for one text.
            return "an added token is normalized to nothing"
    return None


def _flat(part: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    """Return a part and, of a sequence, its members."""
    if part is None:
        return
    yield part
    if part["type"] == "Sequence":
        members = next(value for value in part.values() if isinstance(value, list))
        for each in members:
            yield from _flat(each)


def firm_tokens(tokens: Sequence[_AddedToken]) -> list[str]:
    """Return the tokens that are found wherever they stand: no other of `tokens` can hold one, or
    overlap its beginning, and none reaches to its left. Those of normalized text are looked for
    last: no other may overlap one at all. O(tokens * characters of all tokens)."""
    contents = {token.content for token in tokens}
    if len(contents) < len(tokens):
        return []  # which of two with one spelling is found is not ours to know
    together = "\0".join(contents)
    ends = {text[place:] for text in contents for place in range(1, len(text))}
    early = [token.content for token in tokens if not token.normalized]
    beginnings = {text[:place] for text in early for place in range(1, len(text))}
    firm = []
    for token in tokens:
        text = token.content
        if token.lstrip or text != text.strip() or "\0" in text or together.count(text) > 1:
            continue
        places = range(1, len(text))
        if any(text[:place] in ends for place in places):
            continue
        if token.normalized and (
            any(each in text for each in early)
            or any(text[place:] in beginnings for place in places)
        ):
            continue
        firm.append(text)
    return firm


def spelling_pattern(spellings: Iterable[str]) -> re.Pattern[str]:
    """Compile an expression that finds any of `spellings`, where several begin the longest.

    Common beginnings are looked at once: a plain alternation of a thousand reserved tokens tries
    all of them wherever one might begin.

    >>> spelling_pattern(["<a>", "<ab>", "x"]).findall("<ab><a>xx<b>")
    ['<ab>', '<a>', 'x', 'x']
    """
    return re.compile(_alternation(sorted(set(spellings))))


def _alternation(texts: Sequence[str]) -> str:
    """Return an expression for sorted, distinct texts; one of them may be empty."""
    if len(texts) == 1:
        return re.escape(texts[0])
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[:1], []).append(text)
    is_optional = groups.pop("", None) is not None
    choices = []
    for group in groups.values():
        # Of sorted texts the first and the last have in common what all have.
        length = _num_common(group[0], group[-1])
        rest = _alternation([text[length:] for text in group])
        choices.append(re.escape(group[0][:length]) + rest)
    if len(choices) == 1 and not is_optional:
        return choices[0]
    return f"(?:{'|'.join(choices)}){'?' if is_optional else ''}"


def _num_common(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next(
        (place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
    )


_Ids = tuple[int, ...]


def _template_ids(part: Mapping[str, Any]) -> tuple[_Ids, _Ids]:
    sides: tuple[list[int], list[int]] = ([], [])
    side = sides[0]
    for piece in part["single"]:
        if "SpecialToken" in piece:
            side += part["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
        else:
            side = sides[1]
    return tuple(sides[0]), tuple(sides[1])


def _bert_ids(part: Mapping[str, Any]) -> tuple[_Ids, _Ids]:
    return (part["cls"][1],), (part["sep"][1],)


def _no_ids(_: Mapping[str, Any]) -> tuple[_Ids, _Ids]:
    return (), ()


_POST_PROCESSORS = {
    "BertProcessing": _bert_ids,
    "ByteLevel": _no_ids,
    "RobertaProcessing": _bert_ids,
    "Sequence": _no_ids,
    "TemplateProcessing": _template_ids,
}
"""Post-processors by name, with what says which ids they put before and behind a text."""


def _special_ids(part: Mapping[str, Any] | None) -> tuple[_Ids, _Ids]:
    before, after = _Ids(), _Ids()
    for each in _flat(part):
        more_before, more_after = _POST_PROCESSORS[each["type"]](each)
        before, after = more_before + before, after + more_after
    return before, after


def _holds(cuts: Cuts, tokenizer: Tokenizer, firm: Sequence[str]) -> bool:
    """Try the cuts on a text with some of the tokens between words, space and other scripts."""
    words = "It's 12  words,\n日本 é A" * (MIN_SEGMENT_CHARS // 10)
    text = words + "".join(f"{token}\n {words} " for token in firm[:8])
    whole = tokenizer.encode_batch_fast([text], add_special_tokens=True)[0].ids
    parts = tokenizer.encode_batch_fast(cuts.split(text), add_special_tokens=False)
    ids = [token_id for part in parts for token_id in part.ids]
    return bool(whole == [*cuts.before_ids, *ids, *cuts.after_ids])
