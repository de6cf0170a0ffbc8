"""The models of the front door: how the text of each becomes tokens and back."""

from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from dsched.clock import wall_time_s
from dsched.frontdoor.renderer import Renderer, load_renderer, load_tokenizer
from dsched.frontdoor.text import TokenTexts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedModel:
    """How the text of one model becomes tokens and back."""

    name: str
    tokenizer: Tokenizer
    renderer: Renderer
    created_s: int = field(default_factory=wall_time_s)
    """Seconds since 1970, shown by `/v1/models`."""
    texts: TokenTexts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", TokenTexts(self.tokenizer))


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
