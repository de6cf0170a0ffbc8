"""What a client is told when a request cannot be served, in OpenAI's JSON shape."""

import msgspec

from dsched.controller.request import RequestError
from dsched.errors import DschedError

_MAX_ECHO_CHARS = 200
"""Longest piece of a client's own input that an error message repeats."""


class ApiError(DschedError):
    """A request was refused. Raised while it is read; the client has to act, nobody else."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        guarantee: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.guarantee = guarantee

    @classmethod
    def from_request_error(cls, error: RequestError) -> "ApiError":
        return cls(
            error.status,
            error.message,
            param=error.param,
            code=error.code,
            retry_after_s=error.retry_after_s,
            guarantee=error.guarantee,
        )

    def body(self) -> bytes:
        """Return the JSON document.

        >>> ApiError(400, "n must be 1", param="n").body().decode()
        '{"error":{"message":"n must be 1","type":"invalid_request_error","param":"n","code":null}}'
        """
        content = {
            "message": self.message,
            "type": error_type(self.status),
            "param": self.param,
            "code": self.code,
        }
        if self.guarantee is not None:
            content["guarantee"] = self.guarantee
        return msgspec.json.encode({"error": content})

    def headers(self) -> list[tuple[bytes, bytes]]:
        if self.retry_after_s is None:
            return []
        return [(b"retry-after", b"%d" % max(1, self.retry_after_s))]


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for input that breaks a rule."""
    return ApiError(400, message, param=param, code=code)


def error_type(status: int) -> str:
    """Return OpenAI's word for the class of an error."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def echo(text: str) -> str:
    """Return a client's own text, cut to a length that an error message can hold."""
    return text if len(text) <= _MAX_ECHO_CHARS else text[:_MAX_ECHO_CHARS] + "..."
