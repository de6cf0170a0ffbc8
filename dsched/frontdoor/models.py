"""The models of the front door: how the text of each becomes tokens and back."""

from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from dsched.clock import wall_time_s
from dsched.config import ModelConfig
from dsched.errors import ConfigError
from dsched.frontdoor.deepseek import DeepseekRenderer
from dsched.frontdoor.renderer import Renderer, load_renderer, load_tokenizer
from dsched.frontdoor.text import TokenTexts
from dsched.frontdoor.token_cache import TokenCache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServedModel:
    """How the text of one model becomes tokens and back."""

    name: str
    tokenizer: Tokenizer
    renderer: Renderer
    created_s: int = field(default_factory=wall_time_s)
    """Seconds since 1970, shown by `/v1/models`."""
    token_cache: TokenCache | None = None
    """What the renderer looks prompts up in; `None` if it tokenises all of them whole."""
    texts: TokenTexts = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "texts", TokenTexts(self.tokenizer))


def load_model(
    name: str,
    tokenizer_path: Path,
    *,
    config: ModelConfig | None = None,
    token_cache_bytes: int = 0,
) -> ServedModel:
    """Read a model's tokenizer and chat template from its folder or `tokenizer.json`; `config` says
    how its chats are rendered and read. With `token_cache_bytes` prompts are looked up in a cache.

    Raises:
        ConfigError: a file is missing or cannot be used, or keys contradict each other.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    config = config or ModelConfig(name=name)
    cache = make_token_cache(name, token_cache_bytes)
    renderer = _make_renderer(tokenizer_path, tokenizer, config, cache)
    return ServedModel(name=name, tokenizer=tokenizer, renderer=renderer, token_cache=cache)


def make_token_cache(model: str, max_bytes: int) -> TokenCache | None:
    """Make the token cache of one model; 0 bytes are none."""
    return TokenCache(max_bytes, model=model) if max_bytes else None


def _make_renderer(
    path: Path, tokenizer: Tokenizer, config: ModelConfig, cache: TokenCache | None
) -> Renderer:
    if config.chat_format == "template":
        return load_renderer(
            path,
            tokenizer,
            template_path=Path(config.chat_template) if config.chat_template else None,
            tool_call_format=config.tool_call_format,
            reasoning_format=config.reasoning_format,
            cache=cache,
        )
    for key in ("chat_template", "tool_call_format", "reasoning_format"):
        if getattr(config, key) is not None:
            raise ConfigError(f"{key}: has no meaning with chat_format {config.chat_format}")
    return DeepseekRenderer(tokenizer, chat_format=config.chat_format, cache=cache)
