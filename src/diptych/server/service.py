"""What all routes share: settings, store, files, engines, and the questions asked of them together."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from diptych.request import ClipDefaults
from diptych.server.hub import Hub
from diptych.server.metrics import Metrics
from diptych.server.problems import Problem, not_found
from diptych.server.running.keeper import Keeper
from diptych.server.running.process import ENGINE
from diptych.server.running.runner import Runner
from diptych.server.settings import Key, Settings
from diptych.server.store.database import Database
from diptych.server.store.files import Files
from diptych.server.store.job import Job, is_id
from diptych.server.store.jobs import JobStore
from diptych.server.store.runners import RunnerTable

log = logging.getLogger(__name__)

THREADS = 24


@dataclass(frozen=True)
class Caller:
    """Who asks: the name of the API key, or "" on a server without keys."""

    name: str = ""
    priority: int = 0
    sees_all: bool = True

    @property
    def scope(self) -> str | None:
        """The key whose jobs are visible; None for all."""
        return None if self.sees_all else self.name


class Service:
    """One server process. `engine` names the function that loads an engine, as `module:function`."""

    def __init__(self, settings: Settings, engine: str = ENGINE) -> None:
        self.settings = settings
        self.keys: list[Key] = settings.keys()
        self.files = Files(settings.state_dir)
        self.db = Database(settings.database_url())
        self.db.migrate()
        self.store = JobStore(self.db, ttl_ms=int(settings.ttl * 1000))
        self.table = RunnerTable(self.db)
        self.hub = Hub(self.store)
        self.metrics = Metrics()
        self.keeper = Keeper(settings, self.store, self.files, self.table, self.hub.notify)
        self.runners = [
            Runner(i, settings, self.store, self.files, self.table, self.metrics, self.hub.notify, engine)
            for i in range(settings.replicas)
        ]
        self.created = int(time.time())
        self.draining = False
        self.streams: Counter[str] = Counter()
        self._defaults: ClipDefaults | None = None
        self._hub_task: asyncio.Task[None] | None = None

    # -- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Settle what an earlier process left, then start engines and housekeeping."""
        # Python's own default is CPUs + 4 threads: two images being decoded would hold up every answer.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, "answer"))
        await asyncio.to_thread(self.keeper.recover)
        self._hub_task = asyncio.create_task(self.hub.run())
        self.keeper.start()
        for runner in self.runners:
            runner.start()

    def drain(self) -> None:
        """Take no more jobs and wait for the running ones, within the limit. Blocks; answers go on meanwhile."""
        self.draining = True
        for runner in self.runners:
            runner.close(self.settings.drain_timeout)
        for runner in self.runners:
            if runner.is_alive():
                runner.join()

    async def stop(self) -> None:
        await asyncio.to_thread(self.drain)
        self.keeper.closing.set()
        self.hub.close()
        if self.keeper.is_alive():
            await asyncio.to_thread(self.keeper.join)
        if self._hub_task is not None:
            await self._hub_task
        self.db.close()

    def wake(self) -> None:
        for runner in self.runners:
            runner.wake()

    # -- questions --------------------------------------------------------------------------------

    def caller(self, authorization: str) -> Caller | None:
        """Who sent this header; None if nobody we know. Every key is compared, in constant time."""
        if not self.keys:
            return Caller()
        scheme, _, secret = authorization.partition(" ")
        given = secret.strip().encode("utf-8", "replace") if scheme.lower() == "bearer" else b""
        found = None
        for key in self.keys:
            if hmac.compare_digest(given, key.secret.get_secret_value().encode()):
                found = Caller(key.name, key.priority, key.admin)
        return found

    def readiness(self) -> tuple[bool, str]:
        """Whether a job would be worked on now, and if not, why."""
        if self.draining:
            return False, "the server is stopping"
        if not self.runners:
            return self._remote_readiness()
        if not all(r.is_alive() for r in self.runners):
            return False, "a runner thread has ended"
        for runner in self.runners:
            if runner.state in ("ready", "busy") and time.monotonic() - runner.heard < self.settings.stall_timeout + 5:
                return True, ""
        return False, self.runners[0].reason or "the engine has not been heard for too long"

    def _remote_readiness(self) -> tuple[bool, str]:
        rows = self.table.rows()
        if any(row.state in ("ready", "busy") and self.keeper.alive(row.id) for row in rows):
            return True, ""
        return False, "no host has an engine that is ready"

    def defaults(self) -> ClipDefaults:
        """What the engines fill in. Raises `Problem` 503 while no engine has ever been ready."""
        if self._defaults is None:
            about = self.about().get("defaults")
            if about is None:
                raise self.unready(self.readiness()[1])
            self._defaults = ClipDefaults(**about)
        return self._defaults

    def about(self) -> dict[str, Any]:
        """What an engine, here or elsewhere, tells of itself; empty before any was ready."""
        for runner in self.runners:
            if runner.ready is not None:
                return {"defaults": runner.ready.defaults, **runner.ready.about}
        return next((row.about for row in self.table.rows() if "defaults" in row.about), {})

    def engines(self) -> dict[str, tuple[bool, float]]:
        return {str(r.index): (r.state in ("ready", "busy"), r.heard) for r in self.runners}

    def admit(self) -> None:
        """Raises `Problem` 503 when a new job could not be worked on or stored."""
        ready, reason = self.readiness()
        if not ready:
            self.metrics.rejected.labels("not_ready").inc()
            raise self.unready(reason)
        full = self.files.free_mib() < self.settings.min_free_mib
        if not full and self.settings.max_store_gib:
            full = self.store.counts()[1] > self.settings.max_store_gib * 2**30
        if full:
            raise self.disk_full()

    def unready(self, reason: str) -> Problem:
        down = any(r.state == "down" for r in self.runners)
        return Problem(
            503,
            "engine_down" if down else "not_ready",
            f"The server takes no jobs now: {reason or 'it is not ready'}.",
            headers={"Retry-After": "5"},
        )

    def disk_full(self) -> Problem:
        self.metrics.rejected.labels("storage_full").inc()
        return Problem(503, "storage_full", "The server's disk is full.", headers={"Retry-After": "60"})

    def seconds_until_place(self) -> int:
        """Whole seconds until the next queued job starts: what is left of the running job that is nearest its end."""
        recent = self.store.recent_seconds()
        usual = sum(recent) / len(recent) if recent else 10.0
        now = self.store.clock()
        left = [usual - max(now - (job.started_ms or now), 0) / 1000 for job in self.store.running()]
        return max(1, math.ceil(min(left, default=usual)))

    def job(self, job_id: str, caller: Caller) -> Job:
        """A job that the caller may see. Raises `Problem` 404."""
        job = self.store.get(job_id) if is_id(job_id) else None
        if job is None or caller.scope not in (None, job.key):
            raise not_found(job_id)
        return job

    def position(self, job: Job) -> int | None:
        return self.store.ahead(job) if job.status == "queued" else None
