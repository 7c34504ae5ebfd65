"""Server-sent events of one video, and the synchronous route, which waits for the same end."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from diptych.server.api.content import content
from diptych.server.api.submit import accept, parts
from diptych.server.api.videos import body_schema
from diptych.server.api.view import progress, video
from diptych.server.problems import Problem, not_found
from diptych.server.service import Service
from diptych.server.store.job import Job

router = APIRouter(prefix="/v1/videos")

LEAST_GAP = 0.25
COMMENT_EVERY = 15.0
QUEUE_LOOK = 2.0
"""Seconds between looks at the place in the queue, which changes without the job changing."""
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


@router.get("/{video_id}/events", summary="Follow a video")
async def events(request: Request, video_id: str) -> StreamingResponse:
    service, caller = parts(request)
    await asyncio.to_thread(service.job, video_id, caller)
    last = request.headers.get("last-event-id", "0")
    limit = service.settings.max_streams_per_key if service.keys else service.settings.max_streams
    if service.streams[caller.name] >= limit or service.streams.total() >= service.settings.max_streams:
        text = f"You follow {service.streams[caller.name]} videos already; close one first."
        raise Problem(429, "key_limit", text, headers={"Retry-After": "5"})
    first = int(last) if last.isascii() and last.isdigit() and len(last) < 16 else 0

    async def stream() -> AsyncIterator[bytes]:
        service.streams[caller.name] += 1
        try:
            yield b"retry: 2000\n\n"
            number = first
            async with contextlib.aclosing(follow(service, video_id)) as found:
                async for name, data in found:
                    if name == "":
                        yield b": still here\n\n"
                        continue
                    number += 1
                    text = json.dumps(data, ensure_ascii=False)
                    yield f"id: {number}\nevent: {name}\ndata: {text}\n\n".encode()
        finally:
            service.streams[caller.name] -= 1

    return StreamingResponse(stream(), media_type="text/event-stream", headers=_HEADERS)


async def follow(service: Service, job_id: str) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
    """`snapshot`, then `progress` and `preview` at most four times a second, then `completed`, `failed` or `deleted`.

    The end is told at once. An empty name is a sign of life. Ends early when the server stops.
    """
    with service.hub.watch(job_id) as changed:
        shown: dict[str, Any] = {}
        picture, sent = 0, 0.0
        while not service.hub.closing:
            changed.clear()
            job, position = await asyncio.to_thread(_look, service, job_id)
            if job is None:
                yield "deleted", {"id": job_id}
                return
            now = progress(job, position)
            wait = COMMENT_EVERY
            if not sent:
                yield "snapshot", video(job, position)
                shown, sent = now, time.monotonic()
            if job.terminal:
                yield job.status, video(job, position)
                return
            rest = sent + LEAST_GAP - time.monotonic()
            if now == shown and job.preview == picture:
                wait = QUEUE_LOOK if job.status == "queued" else COMMENT_EVERY
            elif rest > 0:
                wait = rest
            else:
                sent = time.monotonic()
                if now != shown:
                    shown = now
                    yield "progress", now
                if job.preview != picture:
                    picture = job.preview
                    data = await asyncio.to_thread(service.files.preview, job_id)
                    if data is not None:
                        yield "preview", _preview(job, data)
            if time.monotonic() - sent >= COMMENT_EVERY:
                sent = time.monotonic()
                yield "", {}
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), wait)


def _preview(job: Job, data: bytes) -> dict[str, Any]:
    address = "data:image/jpeg;base64," + base64.b64encode(data).decode()
    return {"id": job.id, "step": job.step, "image": address}


def _look(service: Service, job_id: str) -> tuple[Job | None, int | None]:
    job = service.store.get(job_id)
    return job, None if job is None else service.position(job)


@router.post("/sync", openapi_extra=body_schema(), summary="Make a clip and answer with its file")
async def sync_video(request: Request) -> Response:
    service, _ = parts(request)
    job_id = (await accept(request, "sync", n=1)).job.id
    job = await _until_over(service, job_id)
    if job is None:
        raise not_found(job_id)
    if not job.terminal:
        raise Problem(
            504,
            "sync_timeout",
            f"The video {job_id} is not finished yet; it goes on, ask for it later.",
            headers={"x-should-retry": "false"},
            extra={"video_id": job_id},
        )
    answer = await content(request, job_id)
    outcome = job.outcome or {}
    answer.headers["X-Model"] = job.spec["model"]
    answer.headers["X-Inference-Time-S"] = str(outcome.get("inference_time_s", ""))
    answer.headers["X-Stage-Durations"] = json.dumps(outcome.get("stage_durations", {}))
    answer.headers["X-Peak-Memory-MB"] = str(outcome.get("peak_memory_mb") or "")
    answer.headers["X-Video-Id"] = job_id
    answer.headers["X-Seed"] = str(job.spec["seeds"][0])
    answer.headers["X-Num-Frames"] = str(job.spec["num_frames"])
    answer.headers["X-Fps"] = f"{job.spec['fps']:g}"
    return answer


async def _until_over(service: Service, job_id: str) -> Job | None:
    """The job once it is terminal, or as it is when the time is over; None if it was deleted."""
    deadline = time.monotonic() + service.settings.sync_timeout
    with service.hub.watch(job_id) as changed:
        while True:
            changed.clear()
            job = await asyncio.to_thread(service.store.get, job_id)
            left = deadline - time.monotonic()
            if job is None or job.terminal or left <= 0 or service.hub.closing:
                return job
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)
