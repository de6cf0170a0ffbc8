"""The decision trace on the admin port: explain a request, and record to a file for a while.

| path | answers |
|---|---|
| `GET /admin/v1/explain/{request_id}` | the story of a request; `?format=text` for people |
| `GET /admin/v1/trace` | what the ring and the file have |
| `POST /admin/v1/trace/start` | begins a file in `state_dir`; body `{"name": "night.dtrace"}` |
| `POST /admin/v1/trace/stop` | closes it |

The admin API has no authentication, so a file can only be begun inside `state_dir`, under a name
without folders, and only where none is.
"""

import asyncio
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=128)]


class TraceControl(Protocol):
    """The trace of this process. Answers are plain values."""

    def explain(self, request_id: str) -> tuple[dict[str, object], str] | None:
        """JSON and text; `None` where nothing is known. Called on another thread."""
        ...

    def why_unknown(self, request_id: str) -> str:
        """What to say of a request that nothing is known of."""
        ...

    def status(self) -> dict[str, Any]: ...

    def start_file(self, name: str) -> dict[str, Any]:
        """Raises `ValueError`: tracing is off, a file is open, the name is taken, or the disk says
        no."""
        ...

    async def stop_file(self) -> dict[str, Any]:
        """Raises `ValueError` where no file is open."""
        ...


class StartBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to record to."""

    name: FileName


def trace_routes(control: TraceControl) -> list[Route]:
    """Return the routes."""

    async def explain(request: Request) -> Response:
        request_id = request.path_params["request_id"]
        found = await asyncio.to_thread(control.explain, request_id)
        if found is None:
            return JSONResponse({"error": control.why_unknown(request_id)}, 404)
        document, text = found
        if request.query_params.get("format") == "text":
            return PlainTextResponse(text)
        return Response(msgspec.json.encode(document), media_type="application/json")

    async def status(_: Request) -> Response:
        return JSONResponse(control.status())

    async def start(request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body(), type=StartBody)
        except msgspec.DecodeError as error:
            return JSONResponse({"error": str(error)}, 400)
        try:
            return JSONResponse(control.start_file(body.name))
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 409)

    async def stop(_: Request) -> Response:
        try:
            return JSONResponse(await control.stop_file())
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 409)

    return [
        Route("/admin/v1/explain/{request_id:path}", explain),
        Route("/admin/v1/trace", status),
        Route("/admin/v1/trace/start", start, methods=["POST"]),
        Route("/admin/v1/trace/stop", stop, methods=["POST"]),
    ]
