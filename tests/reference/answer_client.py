"""A client's connection that keeps what an `Answer` sends, and allows one end."""

from dataclasses import dataclass, field

from dsched.frontdoor.errors import ApiError


@dataclass
class Client:
    """The client's side of a connection."""

    chunks: list[bytes] = field(default_factory=list)
    num_ends: int = 0
    is_writable: bool = True

    def start_stream(self, status: int, headers: object, data: bytes) -> None:
        assert status == 200
        assert not self.chunks
        assert headers
        self.chunks.append(data)

    def write(self, data: bytes) -> None:
        assert not self.num_ends, "bytes after the end"
        self.chunks.append(data)

    def end_stream(self, data: bytes, *, is_kept_alive: bool = True) -> None:
        self.write(data)
        self.num_ends += 1

    def respond(self, status: int, headers: object, body: bytes) -> None:
        self.write(body)
        self.num_ends += 1

    def respond_error(self, error: ApiError, headers: object) -> None:
        self.write(error.body())
        self.num_ends += 1

    def abort(self) -> None:
        raise AssertionError("cut off")
