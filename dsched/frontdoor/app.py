"""Everything of the public port that is not on the token path: models, health, metrics.

`/live` says that the process serves, `/ready` that requests can be answered, `/health` both with
the reason: an orchestrator restarts on the first and routes on the second.
"""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dsched.controller.request import ControlPlane, ModelInfo
from dsched.frontdoor.errors import ApiError, echo
from dsched.frontdoor.models import ServedModel
from dsched.metrics import CONTENT_TYPE

RETRY_AFTER_S = 1

NotReadyReason = Callable[[], str | None]


def make_app(
    *,
    control: ControlPlane,
    models: Mapping[str, ServedModel],
    not_ready_reason: NotReadyReason,
    metrics_text: Callable[[], bytes],
) -> Starlette:
    """Return the ASGI application."""

    async def live(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def ready(_: Request) -> Response:
        return _readiness(not_ready_reason())

    async def health(_: Request) -> Response:
        return _health(control, not_ready_reason())

    async def list_models(_: Request) -> Response:
        known = sorted(control.models().items())
        data = [_model_document(info, models.get(name)) for name, info in known]
        return JSONResponse({"object": "list", "data": data})

    async def get_model(request: Request) -> Response:
        name = request.path_params["name"]
        info = control.models().get(name)
        if info is None:
            message = f"The model {echo(name)!r} does not exist"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(_model_document(info, models.get(name)))

    async def metrics(_: Request) -> Response:
        return Response(metrics_text(), headers={"content-type": CONTENT_TYPE})

    return Starlette(
        routes=[
            Route("/live", live),
            Route("/ready", ready),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/v1/models", list_models),
            Route("/v1/models/{name:path}", get_model),
        ],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error},
    )


def _readiness(reason: str | None) -> Response:
    if reason is None:
        return JSONResponse({"status": "ready"})
    headers = {"retry-after": str(RETRY_AFTER_S)}
    return JSONResponse({"status": "not_ready", "reason": reason}, 503, headers)


def _health(control: ControlPlane, reason: str | None) -> Response:
    known = control.models()
    missing = sorted(name for name, info in known.items() if not info.is_available)
    document = {
        "live": True,
        "ready": reason is None,
        "degraded": bool(missing),
        "reason": reason,
        "unavailable_models": missing,
    }
    return JSONResponse(document, 200 if reason is None else 503)


def _model_document(info: ModelInfo, served: ServedModel | None) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": 0 if served is None else served.created_s,
        "owned_by": "dsched",
        "max_model_len": info.max_model_len,
        "is_available": info.is_available,
    }


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refusal = ApiError(error.status_code, str(error.detail))
    return Response(
        refusal.body(), error.status_code, dict(error.headers or {}), "application/json"
    )


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.status, media_type="application/json")
