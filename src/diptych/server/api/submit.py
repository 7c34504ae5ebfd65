"""Taking a job in: read, check, and queue it, all or nothing."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from sqlalchemy.exc import OperationalError

from diptych.server.api import create
from diptych.server.api.fields import flatten, read_fields
from diptych.server.api.forms import Body, read_body
from diptych.server.api.reference import Reference, check_image, read_reference
from diptych.server.problems import Problem, invalid, not_found
from diptych.server.service import Caller, Service
from diptych.server.store.job import Job, is_id, new_id
from diptych.server.store.jobs import KeyReused, QueueFull, Replay

log = logging.getLogger(__name__)

_KEY = re.compile(r"[\x21-\x7e]{1,255}")


@dataclass(frozen=True)
class Taken:
    """A job that was queued, and how many wait before it; or, `replayed`, an earlier one and its place now."""

    job: Job
    position: int | None
    replayed: bool


def parts(request: Request) -> tuple[Service, Caller]:
    return request.app.state.service, request.scope["caller"]


async def accept(request: Request, route: str, source_id: str | None = None, **forced: Any) -> Taken:
    """Read, check and queue a job. Raises `Problem`."""
    service, caller = parts(request)
    key = request.headers.get("idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise Problem(400, "invalid_value", "Idempotency-Key takes 1 to 255 printable characters.", "Idempotency-Key")
    if source_id is not None:
        await asyncio.to_thread(service.job, source_id, caller)
    body = await read_body(request.headers.get("content-type", ""), request.stream())
    try:
        return await asyncio.to_thread(_take, service, caller, route, source_id, key, body, forced)
    except OperationalError as error:
        if "full" in str(error.orig):
            raise service.disk_full() from None
        raise
    finally:
        body.close()


def _take(service: Service, caller: Caller, *request: Any) -> Taken:
    """In one thread: each change of threads costs more than what it changes for."""
    job_id, replayed = _submit(service, caller, *request)
    job = service.job(job_id, caller)
    return Taken(job, service.position(job), replayed)


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
