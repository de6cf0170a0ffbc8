"""The models of the front door: name to tokenizer and renderer, and a tokenizer for simulations."""

from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from dsched.clock import wall_time_s
from dsched.frontdoor.renderer import Renderer, TemplateRenderer, load_renderer, load_tokenizer

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Special tokens of the built-in tokenizer, with ids 0, 1, 2."""
FIRST_WORD_ID = len(CONTROL_TOKENS) + 256
"""Ids from here on are whole words in the built-in tokenizer: any of them is good text."""

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "sh", "ch")
_VOWELS = ("a", "e", "i", "o", "u")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedModel:
    """How the text of one model becomes tokens and back."""

    name: str
    tokenizer: Tokenizer
    renderer: Renderer
    created_s: int = field(default_factory=wall_time_s)
    """Seconds since 1970, shown by `/v1/models`."""


def load_model(
    name: str, tokenizer_path: Path, *, template_path: Path | None = None
) -> ServedModel:
    """Read a model's tokenizer and chat template from its folder or `tokenizer.json`.

    Raises:
        ConfigError: a file is missing or cannot be used.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    renderer = load_renderer(tokenizer_path, tokenizer, template_path=template_path)
    return ServedModel(name=name, tokenizer=tokenizer, renderer=renderer)


def builtin_model(name: str, *, vocab_size: int = 4_096) -> ServedModel:
    """Return a model that needs no file: bytes, and made-up words for what a simulator emits."""
    tokenizer = builtin_tokenizer(vocab_size)
    return ServedModel(name=name, tokenizer=tokenizer, renderer=TemplateRenderer(tokenizer))


def builtin_tokenizer(vocab_size: int = 4_096) -> Tokenizer:
    """Make a byte tokenizer whose ids from `FIRST_WORD_ID` to `vocab_size - 1` are words.

    Every text can be encoded (a token a byte), and every id can be decoded.

    >>> tokenizer = builtin_tokenizer()
    >>> tokenizer.decode(tokenizer.encode("héllo").ids), tokenizer.decode([259, 260])
    ('héllo', ' baba babe')

    Raises:
        ValueError: `vocab_size` has no room for the control tokens and bytes, or is too large.
    """
    num_syllables = len(_ONSETS) * len(_VOWELS)
    largest = FIRST_WORD_ID + num_syllables**2
    if not FIRST_WORD_ID <= vocab_size <= largest:
        raise ValueError(f"vocab_size {vocab_size} is not from {FIRST_WORD_ID} to {largest}")
    vocab = {text: token_id for token_id, text in enumerate(CONTROL_TOKENS)}
    for text in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[text] = len(vocab)
    syllables = [onset + vowel for onset in _ONSETS for vowel in _VOWELS]
    for index in range(vocab_size - FIRST_WORD_ID):
        first, second = divmod(index, num_syllables)
        # "Ġ" is how byte-level vocabularies spell a space.
        vocab[f"Ġ{syllables[first]}{syllables[second]}"] = len(vocab)
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL_TOKENS])
    return tokenizer
