"""The bytes of a video and its pictures: ranges, validators, and an open file that outlives a deletion."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from diptych.server.api.submit import parts
from diptych.server.problems import Problem, invalid, not_found
from diptych.server.store.job import Job

router = APIRouter(prefix="/v1/videos")

CHUNK = 1 << 18
_PICTURES = {
    "thumbnail": ("thumbnail.webp", "image/webp"),
    "spritesheet": ("spritesheet.jpg", "image/jpeg"),
    "waveform": ("waveform.png", "image/png"),
}
_RANGE = re.compile(r"bytes=\s*([0-9]{0,18})-([0-9]{0,18})", re.ASCII)


_VARIANT = {"name": "variant", "in": "query", "schema": {"type": "string", "default": "video"}}


@router.head("/{video_id}/content", include_in_schema=False)
@router.get(
    "/{video_id}/content", openapi_extra={"parameters": [_VARIANT]}, summary="Download a video or a picture of it"
)
async def content(request: Request, video_id: str) -> Response:
    service, caller = parts(request)
    job = await asyncio.to_thread(service.job, video_id, caller)
    name, media_type = _named(job, request.query_params.get("variant", "video"))
    if job.status == "failed":
        assert job.error is not None
        raise Problem(422, "generation_failed", job.error["message"])
    if job.status != "completed":
        raise Problem(404, "video_not_ready", f"The video is {job.status}; its file is not there yet.")
    path = service.files.output(job.id, job.attempt, name)
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except FileNotFoundError:
        if name == "waveform.png":
            raise Problem(404, "video_not_found", "This video has no sound, so no waveform.") from None
        raise not_found(video_id) from None
    return _serve(
        request, file, f'"{job.id[6:]}-{job.attempt}-{Path(name).stem}"', media_type, f"{job.id}{path.suffix}"
    )


def _named(job: Job, variant: str) -> tuple[str, str]:
    if variant in _PICTURES:
        return _PICTURES[variant]
    if variant in ("", "video"):
        variant = "0"
    if re.fullmatch(r"[0-9]", variant, re.ASCII) and int(variant) < job.spec["n"]:
        return f"{variant}.mp4", "video/mp4"
    outputs = "" if job.spec["n"] == 1 else f", 0 to {job.spec['n'] - 1}"
    raise invalid("variant", variant, f"video, thumbnail, spritesheet, waveform{outputs}")


def _serve(request: Request, file: IO[bytes], etag: str, media_type: str, name: str) -> Response:
    size = os.fstat(file.fileno()).st_size
    headers = {
        "Accept-Ranges": "bytes",
        "ETag": etag,
        "Content-Disposition": f'attachment; filename="{name}"',
        "Cache-Control": "private",
    }
    wanted = request.headers.get("if-none-match")
    if wanted is not None and (wanted.strip() == "*" or etag in {t.strip() for t in wanted.split(",")}):
        file.close()
        return Response(status_code=304, headers=headers)
    status, first, last = 200, 0, size - 1
    span = request.headers.get("range")
    if span is not None and request.headers.get("if-range", etag) == etag:
        match = _RANGE.fullmatch(span.strip())
        # What is no valid range is as if it were not there.
        if (
            match is not None
            and (match[1] or match[2])
            and not (match[1] and match[2] and int(match[2]) < int(match[1]))
        ):
            first, last = _bounds(match[1], match[2], size)
            if first > last:
                file.close()
                text = f"The file has {size} bytes."
                raise Problem(416, "range_not_satisfiable", text, headers={"Content-Range": f"bytes */{size}"})
            status = 206
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
    headers["Content-Length"] = str(last - first + 1)
    if request.method == "HEAD":
        file.close()
        return Response(status_code=status, headers=headers, media_type=media_type)
    return StreamingResponse(_chunks(file, first, last), status_code=status, headers=headers, media_type=media_type)


def _bounds(first: str, last: str, size: int) -> tuple[int, int]:
    """First and last byte; first > last when there are none."""
    if not first:
        count = int(last)
        return (max(size - count, 0), size - 1) if count else (1, 0)
    return int(first), min(int(last or size), size - 1)


async def _chunks(file: IO[bytes], first: int, last: int) -> AsyncIterator[bytes]:
    with file:
        file.seek(first)
        left = last - first + 1
        while left > 0:
            data = await asyncio.to_thread(file.read, min(CHUNK, left))
            if not data:
                return
            left -= len(data)
            yield data
