"""Creating, listing, reading, cancelling and deleting videos."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from diptych.server.api.fields import FIELDS
from diptych.server.api.submit import Taken, accept, parts
from diptych.server.api.view import video
from diptych.server.problems import Problem, invalid
from diptych.server.service import Service
from diptych.server.store.job import Job, is_id

router = APIRouter(prefix="/v1/videos")

_SCHEMA = {
    "type": "object",
    "required": ["prompt"],
    "properties": {name: field.schema() for name, field in FIELDS.items()},
}


def body_schema(required: bool = True) -> dict[str, Any]:
    """For OpenAPI: the same fields as multipart and as JSON."""
    schema = _SCHEMA if required else {k: v for k, v in _SCHEMA.items() if k != "required"}
    content = {kind: {"schema": schema} for kind in ("multipart/form-data", "application/json")}
    return {"requestBody": {"required": True, "content": content}}


@router.post("", openapi_extra=body_schema(), summary="Queue a clip")
async def create_video(request: Request) -> JSONResponse:
    return shown(request, await accept(request, "create"))


@router.post("/{video_id}/remix", openapi_extra=body_schema(), summary="Queue a clip like another one")
async def remix_video(request: Request, video_id: str) -> JSONResponse:
    return shown(request, await accept(request, "remix", source_id=video_id))


@router.post("/edits", openapi_extra=body_schema(), summary="Remix the video that is named in the body")
async def edit_video(request: Request) -> JSONResponse:
    return shown(request, await accept(request, "edits"))


@router.post("/extensions", summary="Not supported")
async def extend_video(request: Request) -> JSONResponse:
    raise Problem(400, "unsupported_operation", "This server does not extend videos; make a longer one with seconds.")


@router.post("/characters", summary="Not supported")
async def create_character(request: Request) -> JSONResponse:
    raise Problem(400, "unsupported_operation", "This model has no characters; describe them in the prompt.")


@router.get("/characters/{character_id}", summary="Not supported")
async def retrieve_character(character_id: str) -> JSONResponse:
    raise Problem(404, "character_not_found", f"No character has the id {character_id[:80]!r}.", "character_id")


_LIST = [
    ("limit", {"type": "integer", "minimum": 0, "maximum": 100, "default": 20}),
    ("order", {"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
    ("after", {"type": "string"}),
    ("status", {"type": "string", "enum": ["queued", "in_progress", "completed", "failed"]}),
]
_LIST_SCHEMA = {"parameters": [{"name": name, "in": "query", "schema": schema} for name, schema in _LIST]}


@router.get("", openapi_extra=_LIST_SCHEMA, summary="List videos")
async def list_videos(request: Request) -> dict[str, Any]:
    service, caller = parts(request)
    query = request.query_params
    unknown = sorted(set(query) - {"after", "limit", "order", "status"})
    if unknown:
        raise Problem(400, "unknown_parameter", f"{unknown[0][:64]!r} is no parameter of a list.", unknown[0][:64])
    limit, order, after, status = (
        query.get("limit", "20"),
        query.get("order", "desc"),
        query.get("after"),
        query.get("status"),
    )
    if not re.fullmatch(r"[0-9]{1,3}", limit, re.ASCII) or int(limit) > 100:
        raise invalid("limit", limit, "a whole number from 0 to 100")
    if order not in ("asc", "desc"):
        raise invalid("order", order, "asc or desc")
    if status not in (None, "queued", "in_progress", "completed", "failed"):
        raise invalid("status", status, "queued, in_progress, completed or failed")
    if after is not None and not is_id(after):
        raise invalid("after", after, "the id of a video", "invalid_cursor")
    jobs, more = await asyncio.to_thread(
        service.store.page,
        key=caller.scope,
        after=after,
        limit=int(limit),
        ascending=order == "asc",
        status=status,  # type: ignore[arg-type]
    )
    data = [video(job) for job in jobs]
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more and bool(data)}


@router.get("/{video_id}", summary="A video's state")
async def retrieve_video(request: Request, video_id: str) -> JSONResponse:
    return await answer(request, video_id)


@router.post("/{video_id}/cancel", summary="Stop a video")
async def cancel_video(request: Request, video_id: str) -> JSONResponse:
    service, caller = parts(request)
    job = await asyncio.to_thread(service.job, video_id, caller)
    if await asyncio.to_thread(service.store.ask_stop, job.id, "cancel") == "in_progress":
        service.wake()
    service.hub.notify(job.id)
    return await answer(request, video_id)


@router.delete("/{video_id}", summary="Stop and remove a video")
async def delete_video(request: Request, video_id: str) -> dict[str, Any]:
    service, caller = parts(request)
    job = await asyncio.to_thread(service.job, video_id, caller)
    with service.hub.watch(job.id) as changed:
        found = await asyncio.to_thread(service.store.ask_stop, job.id, "delete")
        if found == "in_progress":
            service.wake()
            await _until_gone(service, job, changed)
        elif found is not None:
            await asyncio.to_thread(service.files.remove, job.id)
    service.hub.notify(job.id)
    return {"id": job.id, "deleted": True, "object": "video.deleted"}


async def _until_gone(service: Service, job: Job, changed: asyncio.Event) -> None:
    """Until the engine has let go of the job and record and files are removed. Raises `Problem` 409 after a while."""
    deadline = asyncio.get_running_loop().time() + service.settings.cancel_timeout
    while await asyncio.to_thread(service.store.get, job.id) is not None:
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            text = "The video is being stopped; ask again."
            raise Problem(409, "cancellation_pending", text, headers={"Retry-After": "2"})
        try:
            await asyncio.wait_for(changed.wait(), min(left, 1.0))
        except TimeoutError:
            continue
        changed.clear()


async def answer(request: Request, job_id: str) -> JSONResponse:
    """The job object, and when to ask again."""
    service, caller = parts(request)

    def look() -> Taken:
        job = service.job(job_id, caller)
        return Taken(job, service.position(job), replayed=False)

    return _answer(service, await asyncio.to_thread(look))


def shown(request: Request, taken: Taken) -> JSONResponse:
    """A job just made, as it was taken in, though it may be running by now; or an earlier one as it is."""
    if not taken.replayed:
        job = taken.job
        job = replace(job, status="queued", progress=0, completed_ms=None, expires_ms=None, error=None, outcome=None)
        taken = replace(taken, job=job)
    return _answer(parts(request)[0], taken)


def _answer(service: Service, taken: Taken) -> JSONResponse:
    headers = {} if taken.job.terminal else {"openai-poll-after-ms": str(service.settings.poll_after_ms)}
    if taken.replayed:
        headers["Idempotent-Replayed"] = "true"
    return JSONResponse(video(taken.job, taken.position), headers=headers)
