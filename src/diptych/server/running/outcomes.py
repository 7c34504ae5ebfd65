"""What becomes of an attempt: each ending as transitions of the store and moves of files, in the safe order."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from sqlalchemy.exc import OperationalError

from diptych.server.metrics import Metrics
from diptych.server.settings import Settings
from diptych.server.store.files import Files
from diptych.server.store.job import Job, error
from diptych.server.store.jobs import JobStore

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""How often a job is run with --on-restart requeue."""
RETRY_SECONDS = 1.0
_INTERRUPTED = error("interrupted", "The server was stopped while the job was running.")
_DIED = error("engine_failed", "The engine ended while it was making the clip.")


class Outcomes:
    """Endings of the jobs of one runner; `closing` tells whether the server stops."""

    def __init__(
        self, settings: Settings, store: JobStore, files: Files, metrics: Metrics, closing: threading.Event
    ) -> None:
        self.settings, self.store, self.files, self.metrics = settings, store, files, metrics
        self.closing = closing

    def publish(self, job: Job, result: dict[str, Any]) -> None:
        """Files into place, then `completed`; both undone if the job is no longer ours or was to be deleted."""
        try:
            size = self.files.publish(job.id, job.attempt)
        except FileNotFoundError:
            self._end(job, _INTERRUPTED)
            return
        except OSError:
            log.exception("job %s", job.id)
            self.fail(job, "storage_failed", "The files of the clip could not be stored.")
            return
        for stage, seconds in result.get("stage_durations", {}).items():
            self.metrics.stage.labels(stage).observe(seconds)
        if result.get("peak_memory_mb"):
            self.metrics.peak_memory.labels("max").set(result["peak_memory_mb"] * 1e6)
        if not self._insist(lambda: self.store.complete(job, result, size) or self._is_completed(job)):
            self.files.drop_output(job.id, job.attempt)
            self._end(job, _INTERRUPTED)

    def stopped(self, job: Job) -> None:
        """The engine let go of it, because it was asked to or because the server stops."""
        again = self.closing.is_set() and self.settings.on_restart == "requeue"
        if not (again and self._insist(lambda: self.store.requeue(job, unstarted=True))):
            self._end(job, _INTERRUPTED)

    def died(self, job: Job) -> None:
        """The engine process ended under it."""
        log.error("the engine process ended during job %s", job.id)
        again = self.settings.on_restart == "requeue" and job.attempt < ATTEMPTS
        if not (again and self._insist(lambda: self.store.requeue(job))):
            self._end(job, _DIED)

    def fail(self, job: Job, code: str, message: str) -> None:
        if code == "output_invalid":
            self.metrics.invalid.labels("check").inc()
        self._end(job, error(code, message))

    def count(self, job: Job, seconds: float) -> None:
        """Into the metrics and the log, if it has ended for good."""
        now = self.store.get(job.id)
        if now is None or not now.terminal:
            return
        self.metrics.requests.labels(now.status, "i2va" if now.spec["image"] else "t2va").inc()
        self.metrics.latency.observe(max((now.completed_ms or 0) - now.created_ms, 0) / 1000)
        why = ""
        if now.error is not None:
            why = f" ({now.error['code']})"
            self.metrics.failed.labels(now.error["code"]).inc()
        log.info("job %s %s%s after %.2f s", now.id, now.status, why, seconds)

    def _end(self, job: Job, reason: dict[str, Any]) -> None:
        """To `failed`, unless the job was to be deleted: then its files go after its record."""
        if self._insist(lambda: self.store.stop(job, reason)):
            self.files.remove(job.id)

    def _is_completed(self, job: Job) -> bool:
        """Whether an earlier try went through although its answer was lost."""
        now = self.store.get(job.id)
        return now is not None and now.status == "completed" and now.attempt == job.attempt

    def _insist(self, transition: Callable[[], bool]) -> bool:
        """Make a transition, as often as it takes: a disk may be full, or a database away, for a while."""
        while True:
            try:
                return transition()
            except OperationalError as problem:
                if self.closing.is_set():
                    raise
                log.error("the store cannot be written: %s", problem.orig)
                self.closing.wait(RETRY_SECONDS)
