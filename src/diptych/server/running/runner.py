"""One thread for each engine: takes jobs from the store, feeds the engine process, and notes what became of them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from sqlalchemy.exc import OperationalError

from diptych.server.api.create import engine_fields
from diptych.server.metrics import Metrics
from diptych.server.running.messages import (
    Cancel,
    Failed,
    Finished,
    Loading,
    Ready,
    Run,
    Step,
    Stopped,
    Unloadable,
)
from diptych.server.running.outcomes import Outcomes
from diptych.server.running.process import ENGINE, EngineProcess
from diptych.server.running.progress import Tracker
from diptych.server.settings import Settings
from diptych.server.store.files import Files
from diptych.server.store.job import Job, runner_id
from diptych.server.store.jobs import JobStore
from diptych.server.store.runners import RunnerTable

log = logging.getLogger(__name__)

TICK = 0.25
BEAT_EVERY = 5.0
LAST_WAIT = 10.0
"""Seconds an engine may take to stop when the whole server stops."""


class Runner(threading.Thread):
    """`state`: loading, ready, busy, down or closed. `notify(job_id)` is called after each change of a job."""

    def __init__(
        self,
        index: int,
        settings: Settings,
        store: JobStore,
        files: Files,
        table: RunnerTable,
        metrics: Metrics,
        notify: Callable[[str], None],
        engine: str = ENGINE,
    ) -> None:
        super().__init__(name=f"runner-{index}", daemon=True)
        self.index, self.settings, self.engine = index, settings, engine
        self.store, self.files, self.table, self.metrics, self.notify = store, files, table, metrics, notify
        self.id = runner_id(index)
        self.state, self.reason = "loading", "the engine is loading"
        self.ready: Ready | None = None
        self.heard = time.monotonic()
        self.closing = threading.Event()
        self.outcomes = Outcomes(settings, store, files, metrics, self.closing)
        self.drain_until: float | None = None
        self._woken = False
        self._wake_out, self._wake_in = os.pipe()
        os.set_blocking(self._wake_in, False)

    # -- from other threads -----------------------------------------------------------------------

    def wake(self) -> None:
        """Look at the store now: a job arrived, or one is to stop."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full: it is awake already
            os.write(self._wake_in, b"!")

    def close(self, drain: float) -> None:
        """Take no more jobs; the running one may still take `drain` seconds. Join the thread afterwards."""
        self.drain_until = time.monotonic() + drain
        self.closing.set()
        self.wake()

    # -- the thread -------------------------------------------------------------------------------

    def run(self) -> None:
        pause = 1.0
        while not self.closing.is_set():
            process = EngineProcess(self.settings, self.index, self.engine)
            try:
                if self._load(process):
                    pause = 1.0
                    self._serve(process)
            except Exception:
                log.exception("runner %d", self.index)
            finally:
                process.end()
            if not self.closing.is_set():
                self._become("down", self.reason if self.state == "down" else "the engine is being restarted")
                self.metrics.restarts.inc()
                self.closing.wait(pause)
                pause = min(pause * 2, 60.0)
        self._become("closed", "the server is stopping")
        self.table.remove(self.id)

    def _load(self, process: EngineProcess) -> bool:
        if self.state != "down":
            self._become("loading", "the engine is loading")
        deadline = time.monotonic() + self.settings.load_timeout
        while not self.closing.is_set() and time.monotonic() < deadline:
            message = self._hear(process.pipe, TICK)
            if isinstance(message, Ready):
                self.ready = message
                self._become("ready", "")
                return True
            if isinstance(message, Loading):
                self._become("loading", f"the engine is loading ({message.what})")
            elif isinstance(message, Unloadable):
                log.error("the engine cannot be loaded: %s", message.reason)
                self._become("down", message.reason)
                return False
            elif isinstance(message, EOFError):
                self._become("down", "the engine process ended while loading")
                return False
        return False

    def _serve(self, process: EngineProcess) -> None:
        """Jobs, one after another, until the engine must be replaced or the server stops."""
        beat = 0.0
        while not self.closing.is_set():
            try:
                job = self.store.claim(self.id)
            except OperationalError as problem:
                log.error("the store cannot be used: %s", problem.orig)
                self.closing.wait(1.0)
                continue
            if job is not None:
                self._become("busy", "")
                if not self._work(process, job):
                    self._lost()
                    return
                self._become("ready", "")
                continue
            if time.monotonic() - beat > BEAT_EVERY:
                beat = time.monotonic()
                with contextlib.suppress(OperationalError):
                    self.table.beat(self.id)
            if isinstance(self._hear(process.pipe, 2 * TICK), EOFError):
                self._become("down", "the engine process ended")
                return

    def _work(self, process: EngineProcess, job: Job) -> bool:
        """One attempt at one job. Returns whether the engine can take the next one."""
        self.metrics.queue_wait.observe(max((job.started_ms or 0) - job.created_ms, 0) / 1000)
        self.notify(job.id)
        started = time.monotonic()
        tracker = Tracker(len(job.spec["seeds"]), self.settings.stall_timeout)
        try:
            process.send(self._order(job))
        except OSError:
            log.exception("job %s", job.id)
            self.outcomes.fail(job, "storage_failed", "The files of the clip could not be made.")
            self.notify(job.id)
            return True
        told, looked = time.monotonic(), 0.0
        stopping: float | None = None
        usable = True
        while True:
            message = self._hear(process.pipe, TICK)
            now = time.monotonic()
            try:
                if isinstance(message, Step) and message.job == job.id:
                    self._step(job, tracker, message)
                elif isinstance(message, Finished) and message.job == job.id:
                    self.outcomes.publish(job, message.result)
                    break
                elif isinstance(message, Stopped) and message.job == job.id:
                    self.outcomes.stopped(job)
                    break
                elif isinstance(message, Failed) and message.job == job.id:
                    usable = not message.fatal
                    if message.fatal:
                        self._lost()
                    self.outcomes.fail(job, message.code, message.message)
                    break
                elif isinstance(message, EOFError):
                    self._lost()
                    self.outcomes.died(job)
                    usable = False
                    break
                elif message is not None:
                    raise ValueError(f"an unexpected message: {message!r:.200}")
                elif now - tracker.heard > tracker.limit:
                    log.error("job %s stalled in %s", job.id, tracker.stage)
                    self._lost()
                    process.end()
                    why = f"The engine made no progress for {tracker.limit:.0f} s and was restarted."
                    self.outcomes.fail(job, "stalled", why)
                    usable = False
                    break
                elif stopping is not None and self.closing.is_set() and now - stopping > LAST_WAIT:
                    process.end()
                    self.outcomes.stopped(job)
                    usable = False
                    break
                if now - told > BEAT_EVERY:
                    told = now
                    self._beat(job)
                if stopping is None and (self._woken or now - looked > TICK):
                    looked = now
                    if self._must_stop(job, now):
                        stopping = now
                        process.send(Cancel(job.id))
            except Exception:
                # Whatever a message did to us, it ends its own job only.
                log.exception("job %s", job.id)
                self._lost()
                self.outcomes.fail(job, "engine_failed", "The engine sent what the server cannot use.")
                usable = False
                break
        if stopping is not None:
            self.metrics.cancel.observe(time.monotonic() - stopping)
        self.files.drop_work(job.id, job.attempt)
        self.notify(job.id)
        self.outcomes.count(job, time.monotonic() - started)
        return usable

    def _lost(self) -> None:
        """Before the job's end is told: who sees it fail sees that the engine is away."""
        self._become("down", "the engine is being restarted")

    def _beat(self, job: Job) -> None:
        with contextlib.suppress(OperationalError):
            self.store.tell(job)
            self.table.beat(self.id)

    def _must_stop(self, job: Job, now: float) -> bool:
        if self.drain_until is not None and now > self.drain_until:
            return True
        try:
            return self.store.asked_to_stop(job) != ""
        except OperationalError as problem:
            log.warning("the store cannot be read: %s", problem.orig)
            return False

    def _order(self, job: Job) -> Run:
        """What the engine is told. Raises `OSError` when its folders cannot be made."""
        spec = job.spec
        image = self.files.input_path(job.id)
        if spec["image"] is None:
            self.files.ensure(job.id)
        elif image is None:
            raise FileNotFoundError(f"the picture of job {job.id} is gone")
        return Run(
            job=job.id,
            request=engine_fields(spec),
            seeds=tuple(spec["seeds"]),
            image=image,
            folder=self.files.new_work(job.id, job.attempt),
            crf=spec["crf"],
            preset=spec["x264_preset"],
            preview_every=self.settings.preview_every,
            cache=spec.get("cache"),
        )

    def _step(self, job: Job, tracker: Tracker, step: Step) -> None:
        before = tracker.stage, tracker.heard
        live, seconds = tracker.take(step)
        if seconds is not None:
            self.metrics.step.observe(seconds)
        if before[0] not in (None, tracker.stage):
            log.debug("job %s: %s after %.2f s", job.id, tracker.stage, tracker.heard - before[1])
        if live is None:
            return
        try:
            if step.preview is not None:
                self.files.save_preview(job.id, step.preview)
                live["preview"] = step.done + 1000 * step.output
            self.store.tell(job, **live)
        except (OSError, OperationalError) as problem:
            log.warning("progress of job %s cannot be stored: %s", job.id, problem)
        self.notify(job.id)

    def _hear(self, pipe: Connection, timeout: float) -> Any:
        """The next message, None after `timeout` or a wake, or an `EOFError` as a value when the process is gone."""
        ready = wait([pipe, self._wake_out], timeout)
        self._woken = self._wake_out in ready
        if self._woken:
            os.read(self._wake_out, 4096)
        if pipe not in ready:
            self.heard = time.monotonic()
            return None
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            return EOFError()
        self.heard = time.monotonic()
        return message

    def _become(self, state: str, reason: str) -> None:
        if (state, reason) != (self.state, self.reason):
            level = logging.DEBUG if {state, self.state} == {"ready", "busy"} else logging.INFO
            told = reason if state == "loading" else f"{state} ({reason})" if reason else state
            log.log(level, "engine %d: %s", self.index, told)
        known, self.state, self.reason = self.state, state, reason
        if {known, state} == {"ready", "busy"}:
            return  # to other hosts both are ready
        about: dict[str, Any] = {}
        if self.ready is not None:
            about = {"defaults": self.ready.defaults, **self.ready.about}
        with contextlib.suppress(OperationalError):
            self.table.put(self.id, state, about | {"model": self.settings.model_names()[0], "reason": reason})
