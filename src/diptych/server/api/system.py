"""Models, health, metrics, and the studio page."""

from __future__ import annotations

import asyncio
from importlib import resources
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from diptych.errors import UserError
from diptych.server.api.submit import parts
from diptych.server.problems import Problem
from diptych.server.service import Service

router = APIRouter()

_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@router.get("/liveness", summary="200 while the HTTP loop runs")
@router.get("/livez", include_in_schema=False)
async def liveness() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz", summary="200 while jobs are taken")
@router.get("/health", include_in_schema=False)
@router.get("/health_generate", include_in_schema=False)
async def readiness(request: Request) -> JSONResponse:
    service: Service = request.app.state.service
    ready, reason = await asyncio.to_thread(service.readiness)
    return JSONResponse({"status": "ok" if ready else "unavailable", "reason": reason}, 200 if ready else 503)


@router.get("/v1/models", summary="What is served")
async def models(request: Request) -> dict[str, Any]:
    service, _ = parts(request)
    about = await asyncio.to_thread(service.about)
    return {"object": "list", "data": [_model(service, about, name) for name in service.settings.model_names()]}


@router.get("/v1/models/{name:path}", summary="One served model")
async def model(request: Request, name: str) -> dict[str, Any]:
    service, _ = parts(request)
    if name not in service.settings.accepted_models():
        raise Problem(404, "model_not_found", f"No model has the name {name[:80]!r}.", "model")
    return _model(service, await asyncio.to_thread(service.about), service.settings.model_names()[0])


def _model(service: Service, about: dict[str, Any], name: str) -> dict[str, Any]:
    s = service.settings
    defaults = about.get("defaults", {})
    tasks = ["t2va", *(["i2va"] if defaults.get("has_image") else [])]
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "diptych",
        "root": s.model_names()[0],
        "parent": None,
        "task_type": tasks[-1],
        "num_gpus": about.get("num_gpus"),
        "diptych": {
            "tasks": tasks,
            "distilled": defaults.get("distilled"),
            "defaults": defaults,
            "limits": {
                "max_video_tokens": s.max_video_tokens,
                "max_steps": s.max_steps,
                "max_work": s.max_work,
                "max_outputs": s.max_outputs,
                "max_image_mib": s.max_image_mib,
                "max_queue": s.max_queue,
            },
            "features": {
                "layout": about.get("layout", ""),
                "precision": s.precision,
                "text_precision": s.text_precision,
                "cache": s.cache or None,
                "previews": bool(s.preview_every),
                "replicas": s.replicas,
            },
        },
    }


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    if not service.settings.metrics:
        raise Problem(404, "not_found", "Metrics are switched off.")
    text = await asyncio.to_thread(service.metrics.render, service.store, service.engines())
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    return await studio(request, "docs.html")


@router.get("/", include_in_schema=False)
@router.get("/studio/{name}", include_in_schema=False)
async def studio(request: Request, name: str = "index.html") -> Response:
    """The page and its files: only names that the package holds."""
    service: Service = request.app.state.service
    data = _STUDIO.get(name) if service.settings.studio else None
    if data is None:
        raise Problem(404, "not_found", "There is no such page.")
    return Response(data, media_type=_KINDS[name.rsplit(".", 1)[-1]], headers={"Cache-Control": "no-cache"})


def _load_studio() -> dict[str, bytes]:
    folder = resources.files("diptych.server") / "studio"
    found = {f.name: f.read_bytes() for f in folder.iterdir() if f.name.rsplit(".", 1)[-1] in _KINDS}
    if "index.html" not in found:
        raise UserError("the studio page is missing from this installation; install diptych again")
    return found


_STUDIO = _load_studio()
