"""A small tokenizer and the model that speaks it, both made in memory.

`dsched run` serves simulated engines by default, and what they stream should be readable: the
vocabulary holds some hundred common English words (one token each), all 256 bytes (so that every
text goes in and comes out unchanged) and the special tokens of a chat. Some characters are split
over two tokens inside their bytes, as real tokenizers do, so whoever streams text has to wait for
the second.

Everything is constant: no file, no download, the same ids in every process.
"""

from typing import TYPE_CHECKING

import numpy as np

from dsched.sim.model import SimModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BOS, EOS, SYSTEM, USER, ASSISTANT, END = SPECIAL_TOKENS = (
    "<|bos|>",
    "<|eos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
BOS_TOKEN_ID, EOS_TOKEN_ID, _, _, ASSISTANT_TOKEN_ID, _ = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Jinja template of a chat. Roles without a token of their own are spelled out in bytes."""

MIN_ANSWER_TOKENS = 64
"""Tokens of a chat answer before which the model never ends by itself. Below: short requests end
before their `max_tokens`. Above: an answer without a limit takes long."""
MEAN_FURTHER_TOKENS = 192.0
"""Mean length of what follows them."""

WORDS = """
the of and to in a is that for it as was with be by on not he his but at are this have from or had
an they which one you were all her she there would their we him been has when who will no more if
out so up said what its about than into them can only other time new some could these two may first
then do any like my now over such our man me even most made after also did many off before must well
back through years much where your way down should because long each just state those people too
little good world make very year still see own work men day get here old life both between being
under three never know same last another while us might great go come since against right came take
used himself few house use place during high without again home around small however found part
school every number water night point always thing think number young far set hand side put white
days head system better once course city program until next why light yet asked going need told
whole large matter power early open second later during turn several began door public field half
kind order done best become certain black clear close cold country dark deep early earth easy enough
evening face fall family fast feel fire fish follow food force form free friend front full garden
gave girl give glass gold green ground group grow hard hear heart heavy help hold hope horse hour
hundred idea island keep king land language late laugh law learn leave left letter level line list
listen live love machine map mark measure mind minute money month moon morning mother mountain move
music name nature near never north note notice ocean offer often orange paper past path pattern
peace perhaps person picture plain plan plant play possible present problem produce pull question
quick quiet quite rain reach read ready real reason record red rest rich ride river road rock room
round rule run safe sail sand science sea season seem sentence serve seven shape ship short show
silver simple sing sister sit sky sleep slow snow soft song soon sound south space speak spring
stand star start stay step stone stop story street strong study summer sun sure surface table talk
teach ten test thousand tree true try under unit valley village voice wait walk wall war warm watch
week west wheel wide wild wind window winter wish wood word write yellow
token expert rank step queue cache batch prompt answer engine router schedule balance
"""

_SPLIT_CHARACTERS = ((" caf", "é"), ("", "€"), ("", "日"), ("", "😀"))
"""What may come before the character, and the character; it is split after half of its bytes."""

_NUM_COMMAS = 24
_NUM_STOPS = 16
"""How often punctuation stands among the tokens to choose from; words stand there once."""


class SimVocabulary:
    """Token texts (in byte-level spelling) and the choices of the model."""

    def __init__(self) -> None:
        spell = _byte_spelling()
        self.token_ids: dict[str, int] = {}
        for token in (*SPECIAL_TOKENS, *spell):
            self._add(token)
        words = [f" {word}" for word in sorted(set(WORDS.split()))]
        ordinary = [self._add(_spelled(word, spell)) for word in words]
        for word in words:
            self._add(_spelled(word.strip(), spell))
            self._add(_spelled(word.strip().capitalize(), spell))
        ordinary += [self._add(spell[ord(",")])] * _NUM_COMMAS
        ordinary += [self._add(spell[ord(".")])] * _NUM_STOPS
        forced: dict[int, int] = {}
        for before, character in _SPLIT_CHARACTERS:
            data = character.encode()
            half = len(data) // 2 if len(data) != 3 else 2
            first = self._add("".join(spell[byte] for byte in data[:half]))
            second = self._add("".join(spell[byte] for byte in data[half:]))
            # Only tokens that end inside a character, or a word of ours, force the next one: no
            # complete text ends with them.
            forced[first] = second
            if before:
                start = self._add(_spelled(before, spell))
                forced[start] = first
                ordinary.append(start)
            else:
                ordinary.append(first)
        self.ordinary_tokens = np.array(ordinary, dtype=np.int32)
        self.forced_next = np.full(len(self.token_ids), -1, dtype=np.int32)
        for token_id, follower in forced.items():
            self.forced_next[token_id] = follower

    def _add(self, token: str) -> int:
        return self.token_ids.setdefault(token, len(self.token_ids))


def build_sim_tokenizer() -> "Tokenizer":
    """Make the tokenizer: every text decodes to itself; the beginning token is added."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = SimVocabulary()
    # Without merges a word is one token if it is in the vocabulary, else it is its bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.token_ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, BOS_TOKEN_ID)],
    )
    return tokenizer


def build_sim_model() -> SimModel:
    """Make the model that speaks the tokenizer's vocabulary and ends its turn in a chat."""
    vocabulary = SimVocabulary()
    return SimModel(
        vocab_size=len(vocabulary.token_ids),
        ordinary_tokens=vocabulary.ordinary_tokens,
        forced_next=vocabulary.forced_next,
        eos_token_id=EOS_TOKEN_ID,
        turn_token_id=ASSISTANT_TOKEN_ID,
        min_output_tokens=MIN_ANSWER_TOKENS,
        mean_output_tokens=MEAN_FURTHER_TOKENS,
    )


def _spelled(text: str, spell: list[str]) -> str:
    return "".join(spell[byte] for byte in text.encode())


def _byte_spelling() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's choice).

    Printable Latin-1 bytes stand for themselves, the others for the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spelling = []
    num_others = 0
    for byte in range(256):
        if byte in printable:
            spelling.append(chr(byte))
        else:
            spelling.append(chr(0x100 + num_others))
            num_others += 1
    return spelling
