"""Endings of an attempt when the store fails for a while, or someone else was quicker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from diptych.server.metrics import Metrics
from diptych.server.running import outcomes
from diptych.server.running.outcomes import Outcomes
from diptych.server.settings import load
from diptych.server.store.database import Database
from diptych.server.store.files import Files
from diptych.server.store.job import Job, new_id, wall_ms
from diptych.server.store.jobs import JobStore


class World:
    """A store, files and one claimed job whose clip lies ready in its work folder."""

    def __init__(self, folder: Path) -> None:
        database = Database(f"sqlite:///{folder / 'jobs.db'}")
        database.migrate()
        self.store = JobStore(database, ttl_ms=0)
        self.files = Files(folder)
        job_id = new_id(wall_ms())
        self.files.create(job_id, None)
        self.store.submit(job_id, spec={"image": None}, max_queue=9, max_queue_per_key=None)
        job = self.store.claim("runner")
        assert job is not None
        self.job: Job = job
        (self.files.new_work(job.id, job.attempt) / "0.mp4").write_bytes(b"clip")
        self.outcomes = Outcomes(load(["x"]), self.store, self.files, Metrics(), threading.Event())

    @property
    def clip(self) -> Path:
        return self.files.output(self.job.id, self.job.attempt, "0.mp4")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(outcomes, "RETRY_SECONDS", 0.01)
    found = World(tmp_path)
    yield found
    found.store.db.close()


def failing(times: int, real: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """`real`, but its first calls raise: before it did its work, or `after`, as when only the answer is lost."""
    left = [times]

    def call(*args: Any) -> Any:
        if left[0]:
            left[0] -= 1
            if after:
                real(*args)
            raise OperationalError("COMMIT", {}, Exception("the database is away"))
        return real(*args)

    return call


@pytest.mark.parametrize("after", [False, True])
def test_a_clip_is_completed_although_the_database_is_away_for_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    monkeypatch.setattr(world.store, "complete", failing(2, world.store.complete, after=after))
    world.outcomes.publish(world.job, {})
    job = world.store.get(world.job.id)
    assert job is not None
    assert job.status == "completed"
    assert world.clip.read_bytes() == b"clip"


def test_a_clip_whose_deletion_was_asked_for_is_not_published(world: World) -> None:
    world.store.ask_stop(world.job.id, "delete")
    world.outcomes.publish(world.job, {})
    assert world.store.get(world.job.id) is None
    assert not world.clip.exists()


def test_a_clip_of_a_lost_attempt_is_dropped_and_the_new_attempt_goes_on(world: World) -> None:
    assert world.store.requeue(world.job)
    again = world.store.claim("other")
    assert again is not None
    world.outcomes.publish(world.job, {})
    job = world.store.get(world.job.id)
    assert job is not None
    assert (job.status, job.attempt, job.runner) == ("in_progress", 2, "other")
    assert not world.clip.exists()


def test_a_disk_that_fails_at_the_last_moment_fails_the_job(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "no space")

    monkeypatch.setattr(world.files, "publish", full)
    world.outcomes.publish(world.job, {})
    job = world.store.get(world.job.id)
    assert job is not None
    assert job.error is not None
    assert job.error["code"] == "storage_failed"
