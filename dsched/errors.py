"""Every exception that dsched raises on purpose.

The branches answer one question: who has to act? The operator (`ConfigError`), the author of a
plug-in (`PolicyError`), the engine's side (`DriverError`), or us (`InvariantError`).
Wrong arguments from a Python caller are plain `ValueError`s and `TypeError`s.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio


class DschedError(Exception):
    """Base class; catching it catches nothing that another library raised."""


class ConfigError(DschedError):
    """The configuration cannot be used. Raised before any engine is contacted; fix the file."""


class TraceError(DschedError):
    """A request trace cannot be read. Raised by the trace readers; fix or choose the file."""


class PolicyError(DschedError):
    """An operator's policy raised, or chose something it was not offered."""

    def __init__(self, policy_name: str, reason: str) -> None:
        super().__init__(f"policy {policy_name!r}: {reason}")
        self.policy_name = policy_name
        self.reason = reason


class DriverError(DschedError):
    """The engine could not be reached or refused a plan. Expected; always handled."""


class EngineUnreachableError(DriverError):
    """The engine's socket is closed, refused or broke in the middle. Evidence of a dead engine."""


class EngineRefusedError(DriverError):
    """The engine is alive and said no to one request; `status` is its HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class StalePlanError(DriverError):
    """The plan was made for a membership epoch that has ended. Plan again; do not retry it."""


class RegistryError(DschedError):
    """The registry could not be read or written. dsched serves on from its last view."""


class JournalError(DschedError):
    """The token journal cannot be written. dsched serves on and promises no durability."""


class InvariantError(DschedError):
    """dsched broke one of its own rules. A bug: never caught inside the core."""


def task_fault(task: "asyncio.Task[Any]") -> Exception | None:
    """Return what ended a task that is done, if it is a fault of ours, which must not go unheard.

    Neither being cancelled is one, nor a second Ctrl-C, which ends the process wherever it is.
    """
    error = None if task.cancelled() else task.exception()
    return error if isinstance(error, Exception) else None
