"""The housekeeper thread: takes up what dead runners left, removes what has expired, sweeps files without a record."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from diptych.server.running.outcomes import ATTEMPTS
from diptych.server.settings import Settings
from diptych.server.store.files import Files
from diptych.server.store.job import Job, error, surely_dead
from diptych.server.store.jobs import JobStore
from diptych.server.store.runners import RunnerTable

log = logging.getLogger(__name__)

LOOK_EVERY = 2.0
SILENT_AFTER = 30.0
ORPHAN_AGE = 600.0
_INTERRUPTED = error("interrupted", "The server ended while the job was running.")


class Keeper(threading.Thread):
    """A runner is dead when its process is gone from this host, or its beat stood still for 30 s of our own time.

    Wall clocks, which may jump or differ between hosts, decide nothing here.
    """

    def __init__(
        self, settings: Settings, store: JobStore, files: Files, table: RunnerTable, notify: Callable[[str], None]
    ) -> None:
        super().__init__(name="keeper", daemon=True)
        self.settings, self.store, self.files, self.table, self.notify = settings, store, files, table, notify
        self.closing = threading.Event()
        self._beats: dict[str, tuple[int, float]] = {}
        self._swept = time.monotonic()

    def recover(self) -> None:
        """Once at start, before jobs are taken: what this host's dead processes left."""
        self._take_up()
        self._sweep()

    def run(self) -> None:
        while not self.closing.wait(min(LOOK_EVERY, self.settings.sweep_every)):
            try:
                self._take_up()
                if self.settings.queue_timeout:
                    self.store.fail_waiting(self.store.clock() - int(self.settings.queue_timeout * 1000))
                if time.monotonic() - self._swept >= self.settings.sweep_every:
                    self._swept = time.monotonic()
                    self._sweep()
            except Exception:
                log.exception("housekeeping")

    def _take_up(self) -> None:
        for job in self.store.running():
            if self._is_dead(job.runner or "", f"job {job.id}", job.beat):
                self._settle(job)
        for row in self.table.rows():
            if self._is_dead(row.id, row.id, row.beat):
                self.table.remove(row.id)

    def alive(self, row_id: str) -> bool:
        """Whether a runner of the table has been heard lately."""
        _, since = self._beats.get(row_id, (0, time.monotonic()))
        return not surely_dead(row_id) and time.monotonic() - since <= SILENT_AFTER

    def _is_dead(self, runner: str, what: str, beat: int) -> bool:
        if runner and surely_dead(runner):
            return True
        known, since = self._beats.get(what, (-1, 0.0))
        if known != beat:
            self._beats[what] = (beat, time.monotonic())
            return False
        return time.monotonic() - since > SILENT_AFTER

    def _settle(self, job: Job) -> None:
        """in_progress without an engine -> completed if its files were published, else queued again, failed or gone."""
        log.warning("job %s: its engine is gone", job.id)
        result = self.files.result(job.id, job.attempt)
        if result is not None and job.cancel != "delete":
            size = sum(f.stat().st_size for f in self.files.output(job.id, job.attempt, "result.json").parent.iterdir())
            if self.store.complete(job, result, size):
                self.notify(job.id)
                return
        again = self.settings.on_restart == "requeue" and job.attempt < ATTEMPTS
        if not (again and self.store.requeue(job)) and self.store.stop(job, _INTERRUPTED):
            self.files.remove(job.id)
        self.files.drop_work(job.id, job.attempt)
        self.notify(job.id)

    def _sweep(self) -> None:
        for job_id in self.store.expire():
            self.files.remove(job_id)
            self.notify(job_id)
        old = self.files.leftovers(ORPHAN_AGE)
        known = self.store.known(old)
        for job_id in old:
            if job_id not in known:
                self.files.remove(job_id)
        attempts = self.files.work_leftovers(0.0)  # before the jobs: a folder appears only after its claim
        working = {(job.id, job.attempt) for job in self.store.running()}
        for attempt in attempts:
            if attempt not in working:
                self.files.drop_work(*attempt)
