"""Creating, listing, reading, cancelling and deleting videos."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from sqlalchemy.exc import OperationalError

from diptych.server.api import create
from diptych.server.api.fields import FIELDS, flatten, read_fields
from diptych.server.api.forms import Body, read_body
from diptych.server.api.reference import Reference, check_image, read_reference
from diptych.server.api.view import video
from diptych.server.problems import Problem, invalid, not_found
from diptych.server.service import Caller, Service
from diptych.server.store.job import Job, is_id, new_id
from diptych.server.store.jobs import KeyReused, QueueFull, Replay

router = APIRouter(prefix="/v1/videos")
log = logging.getLogger(__name__)

_KEY = re.compile(r"[\x21-\x7e]{1,255}")
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
    job_id, replayed = await accept(request, "create")
    return await answer(request, job_id, replayed)


@router.post("/{video_id}/remix", openapi_extra=body_schema(), summary="Queue a clip like another one")
async def remix_video(request: Request, video_id: str) -> JSONResponse:
    job_id, replayed = await accept(request, "remix", source_id=video_id)
    return await answer(request, job_id, replayed)


@router.post("/edits", openapi_extra=body_schema(), summary="Remix the video that is named in the body")
async def edit_video(request: Request) -> JSONResponse:
    job_id, replayed = await accept(request, "edits")
    return await answer(request, job_id, replayed)


@router.post("/extensions", summary="Not supported")
async def extend_video(request: Request) -> JSONResponse:
    raise Problem(400, "unsupported_operation", "This server does not extend videos; make a longer one with seconds.")


@router.post("/characters", summary="Not supported")
async def create_character(request: Request) -> JSONResponse:
    raise Problem(400, "unsupported_operation", "This model has no characters; describe them in the prompt.")


@router.get("/characters/{character_id}", summary="Not supported")
async def retrieve_character(character_id: str) -> JSONResponse:
    raise Problem(404, "character_not_found", f"No character has the id {character_id[:80]!r}.", "character_id")


@router.get("", summary="List videos")
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


def parts(request: Request) -> tuple[Service, Caller]:
    return request.app.state.service, request.scope["caller"]


async def answer(request: Request, job_id: str, replayed: bool = False) -> JSONResponse:
    """The job object, and when to ask again."""
    service, caller = parts(request)

    def look() -> tuple[Job, int | None]:
        job = service.job(job_id, caller)
        return job, service.position(job)

    job, position = await asyncio.to_thread(look)
    headers = {} if job.terminal else {"openai-poll-after-ms": str(service.settings.poll_after_ms)}
    if replayed:
        headers["Idempotent-Replayed"] = "true"
    return JSONResponse(video(job, position), headers=headers)


async def accept(request: Request, route: str, source_id: str | None = None, **forced: Any) -> tuple[str, bool]:
    """Read, check and queue a job; returns its id and whether it is an earlier one. Raises `Problem`."""
    service, caller = parts(request)
    key = request.headers.get("idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise Problem(400, "invalid_value", "Idempotency-Key takes 1 to 255 printable characters.", "Idempotency-Key")
    if source_id is not None:
        await asyncio.to_thread(service.job, source_id, caller)
    body = await read_body(request.headers.get("content-type", ""), request.stream())
    try:
        return await asyncio.to_thread(_submit, service, caller, route, source_id, key, body, forced)
    except OperationalError as error:
        if "full" in str(error.orig):
            raise service.disk_full() from None
        raise
    finally:
        body.close()


def _submit(
    service: Service,
    caller: Caller,
    route: str,
    source_id: str | None,
    key: str | None,
    body: Body,
    forced: dict[str, Any],
) -> tuple[str, bool]:
    values = flatten(body.values)
    if route == "edits":
        source_id = _edited(values, body)
    source = _source(service, caller, source_id) if source_id is not None else None
    given, ignored = read_fields(values)
    defaults = service.defaults()
    image = read_reference(body, given.pop("input_reference", None), service.settings)
    if source is not None:
        given = create.remix_fields(source.spec, given)
        image = image or _source_image(service, source)
    for name, wanted in forced.items():
        if given.setdefault(name, wanted) != wanted:
            raise invalid(name, given[name], f"{wanted} here")
    spec = create.normalise(given, ignored, image, defaults, service.settings)
    replay = None
    if key is not None:
        replay = Replay(f"{caller.name}|{route}", key, create.digest(spec, source_id or ""))
        try:
            known = service.store.replayed(replay)
        except KeyReused:
            raise _reused() from None
        if known is not None:
            return known, True
    service.admit()
    return _queue(service, caller, create.draw_seeds(spec), image, source_id, replay)


def _queue(
    service: Service,
    caller: Caller,
    spec: create.Spec,
    image: Reference | None,
    source_id: str | None,
    replay: Replay | None,
) -> tuple[str, bool]:
    """Files first, then the record: a record never lacks its input, and a folder without a record is swept."""
    job_id = new_id(service.store.clock())
    try:
        service.files.create(job_id, image.data if image else None)
        known, replayed = service.store.submit(
            job_id,
            spec=spec,
            key=caller.name,
            priority=caller.priority,
            remixed_from=source_id,
            max_queue=service.settings.max_queue,
            max_queue_per_key=service.settings.max_queue_per_key if service.keys else None,
            replay=replay,
        )
    except QueueFull as full:
        service.files.remove(job_id)
        reason = "key_limit" if full.own else "queue_full"
        service.metrics.rejected.labels(reason).inc()
        text = f"{'Your share of the' if full.own else 'The'} queue is full: {full.waiting} jobs wait."
        raise Problem(429, reason, text, headers={"Retry-After": str(service.seconds_until_place())}) from None
    except KeyReused:
        service.files.remove(job_id)
        raise _reused() from None
    except OSError as error:
        service.files.remove(job_id)
        raise service.disk_full() from error
    except BaseException:
        service.files.remove(job_id)
        raise
    if replayed:
        service.files.remove(job_id)
    else:
        log.info("job %s queued%s", job_id, f": {spec['prompt']!r}" if service.settings.log_prompts else "")
    service.wake()
    return known, replayed


def _reused() -> Problem:
    text = "This Idempotency-Key was used before with another request."
    return Problem(422, "idempotency_key_reused", text, "Idempotency-Key")


def _edited(values: dict[str, Any], body: Body) -> str:
    """The id in `video`, as `{id}` or text; an uploaded video cannot be edited."""
    named = values.pop("video", None)
    if isinstance(named, dict):
        named = named.get("id")
    body.files = [f for f in body.files if f[0] != "video" or named is None]
    if any(name == "video" for name, _ in body.files):
        text = "This model takes no video as input; name a finished one with video.id."
        raise Problem(400, "unsupported_operation", text, "video")
    if not isinstance(named, str):
        raise Problem(400, "invalid_value", "video is missing: name a finished video with video.id.", "video")
    return named


def _source(service: Service, caller: Caller, source_id: str) -> Job:
    if not is_id(source_id):
        raise not_found(source_id)
    source = service.job(source_id, caller)
    if source.status != "completed":
        raise Problem(
            400,
            "invalid_source_state",
            f"The video is {source.status}: only a completed one can be remixed.",
            "video_id",
        )
    return source


def _source_image(service: Service, source: Job) -> Reference | None:
    if source.spec["image"] is None:
        return None
    data = service.files.input(source.id)
    if data is None:
        raise not_found(source.id)
    return check_image(data, service.settings)
