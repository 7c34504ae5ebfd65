"""The job store: every method is one transaction and one arrow of the state machine in docs/operating.md.

A runner's changes carry its name: once a job is no longer its own (recovered by another, deleted), they change nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from diptych.server.store.database import Database
from diptych.server.store.job import TERMINAL, Clock, Job, Status, Stop, error, wall_ms
from diptych.server.store.tables import jobs, keys
from diptych.server.store.together import Refusal, Together

log = logging.getLogger(__name__)

KEY_LIFE_MS = 86_400_000


@dataclass(frozen=True)
class Replay:
    """An Idempotency-Key: `body` is the digest of the request it was first used with."""

    scope: str
    key: str
    body: str


class QueueFull(Refusal):
    """No place: `own` tells whether the caller's share or the whole queue is full."""

    def __init__(self, own: bool, waiting: int) -> None:
        self.own, self.waiting = own, waiting


class KeyReused(Refusal):
    """The Idempotency-Key was used before with another body."""


class JobStore:
    """All reads and transitions of jobs. `clock` gives unix milliseconds."""

    def __init__(self, database: Database, *, ttl_ms: int, clock: Clock = wall_ms) -> None:
        self.db, self.ttl_ms, self.clock = database, ttl_ms, clock
        self._together = Together(database)

    # -- clients ----------------------------------------------------------------------------------

    def submit(
        self,
        job_id: str,
        *,
        spec: dict[str, Any],
        key: str = "",
        priority: int = 0,
        remixed_from: str | None = None,
        max_queue: int,
        max_queue_per_key: int | None,
        replay: Replay | None = None,
    ) -> tuple[str, bool]:
        """Queue a job. Returns its id and whether it is an earlier one with the same Idempotency-Key.

        Raises `QueueFull` or `KeyReused`, and then leaves nothing behind.
        """
        now = self.clock()
        values = {
            "id": job_id, "key": key, "priority": priority, "status": "queued", "cancel": "", "created_ms": now,
            "spec": json.dumps(spec), "remixed_from": remixed_from, "attempt": 0, "beat": 0, "turn": 0, "version": 1,
            "progress": 0, "preview": 0, "bytes": 0,
        }  # fmt: skip

        def queue(c: Connection) -> tuple[str, bool]:
            if replay is not None and (known := _replayed(c, replay)):
                return known, True
            waiting = _count(c, jobs.c.status == "queued")
            if waiting >= max_queue:
                raise QueueFull(False, waiting)
            if max_queue_per_key is not None:
                own = _count(c, jobs.c.status == "queued", jobs.c.key == key)
                if own >= max_queue_per_key:
                    raise QueueFull(True, own)
            c.execute(sa.insert(jobs), values)
            if replay is not None:
                row = {"scope": replay.scope, "key": replay.key, "job": job_id, "body": replay.body}
                c.execute(sa.insert(keys), row | {"created_ms": now})
            return job_id, False

        try:
            return self._together.run(queue)
        except IntegrityError:
            assert replay is not None, "two jobs have one id"
            with self.db.read() as c:
                known = _replayed(c, replay)
            assert known is not None
            return known, True

    def replayed(self, replay: Replay) -> str | None:
        """The job made with this Idempotency-Key, if any. Raises `KeyReused`."""
        with self.db.read() as c:
            return _replayed(c, replay)

    def get(self, job_id: str) -> Job | None:
        """A job, unless it is unknown or expired."""
        return next(iter(self.select([jobs.c.id == job_id, self._alive()])), None)

    def page(
        self, *, key: str | None, after: str | None, limit: int, ascending: bool, status: Status | None
    ) -> tuple[list[Job], bool]:
        """Jobs in the order of their ids from `after` on, and whether more follow. `key` None sees all keys."""
        where = [self._alive()]
        if key is not None:
            where.append(jobs.c.key == key)
        if status is not None:
            where.append(jobs.c.status == status)
        if after is not None:
            where.append(jobs.c.id > after if ascending else jobs.c.id < after)
        order = jobs.c.id.asc() if ascending else jobs.c.id.desc()
        found = self.select(where, order=order, limit=limit + 1)
        return found[:limit], len(found) > limit

    def ask_stop(self, job_id: str, how: Stop) -> Status | None:
        """Cancel or delete. Returns the status found; only an `in_progress` job is not yet stopped afterwards."""
        with self.db.write() as c:
            row = c.execute(sa.select(jobs.c.status).where(jobs.c.id == job_id, self._alive())).first()
            if row is None:
                return None
            status = cast(Status, row.status)
            mine = sa.and_(jobs.c.id == job_id, jobs.c.status == status)
            if status == "in_progress":
                wanted = sa.literal(how) if how == "delete" else _cancel_unless_delete()
                changed = c.execute(sa.update(jobs).where(mine).values(cancel=wanted)).rowcount
            elif how == "delete":
                changed = c.execute(sa.delete(jobs).where(mine)).rowcount
            elif status == "queued":
                changed = c.execute(sa.update(jobs).where(mine).values(self._failed(_CANCELLED))).rowcount
            else:
                changed = 1
        return status if changed else self.ask_stop(job_id, how)  # another process moved it in between

    # -- runners ----------------------------------------------------------------------------------

    def claim(self, runner: str) -> Job | None:
        """Take the next job: highest priority, then the key with the least running and longest unserved, then age."""
        with self.db.write(exclusive=True, durable=False) as c:
            group = (jobs.c.key, jobs.c.priority)
            heads = c.execute(
                sa.select(*group, sa.func.min(jobs.c.seq).label("seq"))
                .where(jobs.c.status == "queued")
                .group_by(*group)
            ).all()
            if not heads:
                return None
            turn = c.scalar(sa.select(sa.func.max(jobs.c.turn))) or 0
            share = {key: (0, 0) for key, _, _ in heads}
            if len(heads) > 1:
                busy = sa.func.sum(sa.case((jobs.c.status == "in_progress", 1), else_=0))
                rows = c.execute(sa.select(jobs.c.key, busy, sa.func.max(jobs.c.turn)).group_by(jobs.c.key))
                share |= {key: (int(running), int(last)) for key, running, last in rows}
            seq = min(heads, key=lambda h: (-h.priority, *share[h.key], h.seq)).seq
            row = c.execute(
                sa.update(jobs)
                .where(jobs.c.seq == seq, jobs.c.status == "queued")
                .values(
                    status="in_progress", runner=runner, started_ms=self.clock(), attempt=jobs.c.attempt + 1,
                    beat=jobs.c.beat + 1, turn=turn + 1, version=jobs.c.version + 1, progress=1,
                    stage=None, step=None, total_steps=None, eta_ms=None,
                )
                .returning(jobs)
            ).first()  # fmt: skip
            if row is None:
                return None
            try:
                return Job.from_row(row)
            except (ValueError, TypeError):
                log.exception("job %s has an unreadable record", row.id)
                reason = error("engine_failed", "The stored request cannot be read.")
                c.execute(sa.update(jobs).where(jobs.c.seq == seq).values(self._failed(reason)))
                return None

    def tell(self, job: Job, **live: Any) -> Stop | str | None:
        """A sign of life, with progress if any. Returns the stop asked for, "" for none, None if no longer ours."""
        values: dict[str, Any] = {"beat": jobs.c.beat + 1, **live}
        if live:
            values["version"] = jobs.c.version + 1
        with self.db.write(durable=False) as c:
            row = c.execute(sa.update(jobs).where(_ours(job)).values(values).returning(jobs.c.cancel)).first()
        return None if row is None else str(row.cancel)

    def asked_to_stop(self, job: Job) -> Stop | str | None:
        """As `tell`, without telling."""
        with self.db.read() as c:
            row = c.execute(sa.select(jobs.c.cancel).where(_ours(job))).first()
        return None if row is None else str(row.cancel)

    def complete(self, job: Job, outcome: dict[str, Any], size: int) -> bool:
        """in_progress -> completed. False: no longer ours, or to be deleted; the caller drops its files."""
        done = {
            "status": "completed", "outcome": json.dumps(outcome), "bytes": size, "progress": 100,
            "stage": None, "step": None, "eta_ms": None, **self._finished(),
        }  # fmt: skip
        with self.db.write() as c:
            return bool(c.execute(sa.update(jobs).where(_ours(job), jobs.c.cancel != "delete").values(done)).rowcount)

    def stop(self, job: Job, reason: dict[str, Any]) -> bool:
        """in_progress -> failed with `reason`, or `cancelled` if asked, or gone. Tells whether the record is gone."""
        with self.db.write() as c:
            if c.execute(sa.delete(jobs).where(_ours(job), jobs.c.cancel == "delete")).rowcount:
                return True
            c.execute(sa.update(jobs).where(_ours(job), jobs.c.cancel == "cancel").values(self._failed(_CANCELLED)))
            c.execute(sa.update(jobs).where(_ours(job)).values(self._failed(reason)))
            return c.execute(sa.select(jobs.c.id).where(jobs.c.id == job.id)).first() is None

    def requeue(self, job: Job, *, unstarted: bool = False) -> bool:
        """in_progress -> queued, at its old place. `unstarted`: the attempt does not count."""
        back = {
            "status": "queued", "runner": None, "started_ms": None, "progress": 0, "stage": None, "step": None,
            "eta_ms": None, "version": jobs.c.version + 1, "attempt": jobs.c.attempt - int(unstarted),
        }  # fmt: skip
        with self.db.write() as c:
            return bool(c.execute(sa.update(jobs).where(_ours(job), jobs.c.cancel == "").values(back)).rowcount)

    # -- housekeeping -----------------------------------------------------------------------------

    def running(self) -> list[Job]:
        return self.select([jobs.c.status == "in_progress"])

    def fail_waiting(self, before_ms: int) -> int:
        """queued -> failed for jobs that have waited since before `before_ms`."""
        reason = error("queue_timeout", "The job waited longer than this server allows.")
        with self.db.write() as c:
            old = sa.and_(jobs.c.status == "queued", jobs.c.created_ms < before_ms)
            return c.execute(sa.update(jobs).where(old).values(self._failed(reason))).rowcount

    def expire(self) -> list[str]:
        """Remove the records whose time is over; returns their ids, whose files then go too."""
        now = self.clock()
        with self.db.write() as c:
            over = sa.and_(jobs.c.status.in_(TERMINAL), jobs.c.expires_ms <= now)
            gone = [row.id for row in c.execute(sa.delete(jobs).where(over).returning(jobs.c.id))]
            orphan = sa.not_(sa.exists().where(jobs.c.id == keys.c.job))
            c.execute(sa.delete(keys).where(keys.c.created_ms < now - KEY_LIFE_MS, orphan))
        return gone

    def known(self, ids: Iterable[str]) -> set[str]:
        with self.db.read() as c:
            return set(c.scalars(sa.select(jobs.c.id).where(jobs.c.id.in_(list(ids)))))

    def versions(self, ids: Iterable[str]) -> dict[str, int]:
        """The version of each of these jobs that still exists: what watchers compare."""
        with self.db.read() as c:
            rows = c.execute(sa.select(jobs.c.id, jobs.c.version).where(jobs.c.id.in_(list(ids)), self._alive()))
            return {row.id: row.version for row in rows}

    def ahead(self, job: Job) -> int:
        """Jobs that were queued before this one and still wait."""
        with self.db.read() as c:
            return _count(c, jobs.c.status == "queued", jobs.c.seq < job.seq)

    def counts(self) -> tuple[dict[str, int], int]:
        """Jobs by status, and bytes stored."""
        with self.db.read() as c:
            rows = c.execute(sa.select(jobs.c.status, sa.func.count(), sa.func.sum(jobs.c.bytes)).group_by("status"))
            found = [(str(s), int(n), int(b or 0)) for s, n, b in rows]
        zero = dict.fromkeys(("queued", "in_progress", "completed", "failed"), 0)
        return zero | {s: n for s, n, _ in found}, sum(b for _, _, b in found)

    def recent_seconds(self, limit: int = 20) -> list[float]:
        """How long the latest completed jobs ran."""
        query = sa.select(jobs.c.completed_ms - jobs.c.started_ms).where(jobs.c.status == "completed")
        with self.db.read() as c:
            return [max(ms, 0) / 1000 for ms in c.scalars(query.order_by(jobs.c.turn.desc()).limit(limit))]

    def select(self, where: list[Any], order: Any = jobs.c.seq, limit: int | None = None) -> list[Job]:
        """Jobs that can be read; one that cannot is logged and left out."""
        with self.db.read() as c:
            rows = c.execute(sa.select(jobs).where(*where).order_by(order).limit(limit)).all()
        found = []
        for row in rows:
            try:
                found.append(Job.from_row(row))
            except (ValueError, TypeError):
                log.exception("job %s has an unreadable record", row.id)
        return found

    def _alive(self) -> Any:
        return sa.or_(jobs.c.expires_ms.is_(None), jobs.c.expires_ms > self.clock())

    def _finished(self) -> dict[str, Any]:
        now = self.clock()
        expires = now + self.ttl_ms if self.ttl_ms else None
        return {"completed_ms": now, "expires_ms": expires, "runner": None, "version": jobs.c.version + 1}

    def _failed(self, reason: dict[str, Any]) -> dict[str, Any]:
        return {"status": "failed", "error": json.dumps(reason), "stage": None, "eta_ms": None, **self._finished()}


_CANCELLED = error("cancelled", "The job was cancelled.")


def _ours(job: Job) -> Any:
    return sa.and_(
        jobs.c.id == job.id,
        jobs.c.status == "in_progress",
        jobs.c.runner == job.runner,
        jobs.c.attempt == job.attempt,
    )


def _cancel_unless_delete() -> Any:
    return sa.case((jobs.c.cancel == "delete", "delete"), else_="cancel")


def _count(c: Connection, *where: Any) -> int:
    return int(c.scalar(sa.select(sa.func.count()).select_from(jobs).where(*where)) or 0)


def _replayed(c: Connection, replay: Replay) -> str | None:
    row = c.execute(
        sa.select(keys.c.job, keys.c.body).where(keys.c.scope == replay.scope, keys.c.key == replay.key)
    ).first()
    if row is None:
        return None
    if row.body != replay.body:
        raise KeyReused
    return str(row.job)
