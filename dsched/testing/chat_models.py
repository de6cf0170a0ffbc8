"""What tests of tool calls and reasoning need: small tokenizers, a template, a model with lines.

The tokenizers are the simulator's with a few more tokens, so every text goes in and comes out
unchanged; nothing is fetched. `ScriptedModel` says what a test wants it to say, as a function of
the tokens it is given, so an engine that takes over says the rest.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dsched.sim.tokenizer import EOS_TOKEN_ID, build_sim_tokenizer
from dsched.testing.engine_double import DoubleModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DEEPSEEK_EOS = "<｜end▁of▁sentence｜>"
DEEPSEEK_CONTROL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    DEEPSEEK_EOS,
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
    "<｜latest_reminder｜>",
)
DEEPSEEK_MARKUP_TOKENS = ("<think>", "</think>", "｜DSML｜")
"""Tokens that answers are read by; in DeepSeek's tokenizers they are not special."""

HERMES_TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{% if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}{{ '<|end|>' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{{ '<|user|><tool_response>' + message.content + '</tool_response><|end|>' }}"
    "{% else %}"
    "{{ '<|' + message.role + '|>' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if think %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)
"""A chat template with tools, written as models of the Hermes shape read them. The variable `think`
lets the prompt end inside of the reasoning."""


_VOCAB_SIZE = 1 << 16
"""Above every id of these tokenizers."""


def build_deepseek_tokenizer() -> "Tokenizer":
    """Make a tokenizer with the control tokens that DeepSeek's chat formats need."""
    from tokenizers import AddedToken

    tokenizer = build_sim_tokenizer()
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True, normalized=False) for each in DEEPSEEK_CONTROL_TOKENS]
    )
    tokenizer.add_tokens(
        [AddedToken(each, special=False, normalized=False) for each in DEEPSEEK_MARKUP_TOKENS]
    )
    return tokenizer


class ScriptedModel(DoubleModel):
    """Says its lines: the first to the first prompt, the next to the next one.

    Whatever comes with a known prompt and the beginning of its line is answered by the line's next
    token, whichever engine asks; after its last token a line goes on with `eos_token_id`.

    >>> model = ScriptedModel([[7, 8]], eos_token_id=1)
    >>> model.stream([5], 3), model.next_token([5, 7])
    ([7, 8, 1], 8)
    """

    def __init__(self, lines: Sequence[Sequence[int]], *, eos_token_id: int = EOS_TOKEN_ID) -> None:
        super().__init__(vocab_size=_VOCAB_SIZE, eos_token_id=eos_token_id)
        self._lines = [[*line, eos_token_id] for line in lines]
        self.prompts: list[list[int]] = []
        """In the order in which they came."""

    def next_token(self, tokens: Sequence[int]) -> int:
        """The token that follows `tokens`."""
        for prompt, line in zip(self.prompts, self._lines, strict=False):
            said = list(tokens[len(prompt) :])
            if list(tokens[: len(prompt)]) == prompt and said == line[: len(said)]:
                return line[min(len(said), len(line) - 1)]
        self.prompts.append(list(tokens))
        return self._lines[len(self.prompts) - 1][0]
