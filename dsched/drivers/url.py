"""The address of an engine, as an operator writes it."""

from dsched.drivers.http import parse_base_url
from dsched.errors import ConfigError


def normalize_engine_url(url: str) -> str:
    """Return `url` as the root of the engine's HTTP API: no slash and no `/v1` at the end.

    Raises:
        ConfigError: no scheme, another scheme than http, or no host.

    >>> normalize_engine_url("http://10.0.0.5:8100/v1/")
    'http://10.0.0.5:8100'
    >>> normalize_engine_url("10.0.0.5:8100")
    Traceback (most recent call last):
        ...
    dsched.errors.ConfigError: engine URL '10.0.0.5:8100' has no scheme; write 'http://10.0.0.5:8100'
    """
    text = url.strip()
    if "://" not in text:
        raise ConfigError(f"engine URL {url!r} has no scheme; write 'http://{text}'")
    if text.lower().startswith("https://"):
        raise ConfigError(
            f"engine URL {url!r}: https is not spoken to engines; put them on a private network"
        )
    root = text.rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parse_base_url(root)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return root
