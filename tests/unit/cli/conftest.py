"""Commands configure the log of their process; tests that call them in this one put it back."""

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """The log of a test's command goes to that test's stderr, which ends with it."""
    was_configured, config = structlog.is_configured(), structlog.get_config()
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.reset_defaults()
    if was_configured:
        structlog.configure(**config)
    root.handlers[:] = handlers
    root.setLevel(level)
