"""A job's files. A reader finds a file whole or not at all: written beside, synced, renamed.

jobs/ID/input        the reference image, as uploaded
jobs/ID/aN/          what attempt N made: 0.mp4 .. and previews, result.json
jobs/ID/preview.jpg  how the running attempt looks now
work/ID.aN/          what attempt N is making
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, cast

from diptych.server.store.job import is_id


class Files:
    """All paths are made here, from ids that `is_id` accepts and from constants: never from what a client sends."""

    def __init__(self, root: Path) -> None:
        self.root, self.jobs, self.work = root, root / "jobs", root / "work"
        for folder in (root, self.jobs, self.work):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def create(self, job_id: str, image: bytes | None) -> None:
        """Make a job's folder with its input, before its record."""
        folder = self._job(job_id)
        folder.mkdir(mode=0o700)
        if image is not None:
            _write(folder / "input", image)
            _sync(self.jobs)

    def ensure(self, job_id: str) -> None:
        """Make the folder of a job without input again: a power failure may have taken it."""
        self._job(job_id).mkdir(mode=0o700, exist_ok=True)

    def input(self, job_id: str) -> bytes | None:
        try:
            return (self._job(job_id) / "input").read_bytes()
        except FileNotFoundError:
            return None

    def input_path(self, job_id: str) -> Path | None:
        path = self._job(job_id) / "input"
        return path if path.exists() else None

    def new_work(self, job_id: str, attempt: int) -> Path:
        """An empty folder for one attempt."""
        folder = self._work(job_id, attempt)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder

    def drop_work(self, job_id: str, attempt: int) -> None:
        shutil.rmtree(self._work(job_id, attempt), ignore_errors=True)

    def publish(self, job_id: str, attempt: int) -> int:
        """Move a finished attempt into its place in one rename; returns its bytes.

        Raises `FileNotFoundError` if the job was deleted meanwhile: nothing brings its folder back.
        """
        work = self._work(job_id, attempt)
        size = sum(f.stat().st_size for f in work.iterdir())
        for file in work.iterdir():
            _sync(file)
        _sync(work)
        work.rename(self._job(job_id) / f"a{attempt}")
        _sync(self._job(job_id))
        (self._job(job_id) / "preview.jpg").unlink(missing_ok=True)
        return size

    def result(self, job_id: str, attempt: int) -> dict[str, Any] | None:
        """What the worker reported beside a published attempt."""
        try:
            return cast(dict[str, Any], json.loads(self.output(job_id, attempt, "result.json").read_text("utf-8")))
        except (FileNotFoundError, ValueError):
            return None

    def output(self, job_id: str, attempt: int, name: str) -> Path:
        return self._job(job_id) / f"a{attempt}" / name

    def save_preview(self, job_id: str, picture: bytes) -> None:
        target = self._job(job_id) / "preview.jpg"
        beside = target.with_suffix(".part")
        beside.write_bytes(picture)
        beside.rename(target)

    def preview(self, job_id: str) -> bytes | None:
        try:
            return (self._job(job_id) / "preview.jpg").read_bytes()
        except FileNotFoundError:
            return None

    def drop_output(self, job_id: str, attempt: int) -> None:
        shutil.rmtree(self._job(job_id) / f"a{attempt}", ignore_errors=True)

    def remove(self, job_id: str) -> None:
        """All of a job, after its record went. A download under way ends from its open file."""
        folder = self._job(job_id)
        doomed = folder.with_name(f".{folder.name}.gone")
        try:
            folder.rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def leftovers(self, older_than_s: float) -> list[str]:
        """Ids of folders that have not changed for a while; those without a record are nobody's."""
        ids = []
        for folder in self.jobs.iterdir():
            if folder.name.startswith("."):
                shutil.rmtree(folder, ignore_errors=True)
            elif is_id(folder.name) and _age(folder) > older_than_s:
                ids.append(folder.name)
        return ids

    def work_leftovers(self, older_than_s: float) -> list[tuple[str, int]]:
        """Attempts whose folder has not changed for a while."""
        found = []
        for folder in self.work.iterdir():
            job_id, _, attempt = folder.name.partition(".a")
            if is_id(job_id) and attempt.isdigit() and _age(folder) > older_than_s:
                found.append((job_id, int(attempt)))
        return found

    def free_mib(self) -> float:
        return shutil.disk_usage(self.root).free / 2**20

    def _job(self, job_id: str) -> Path:
        assert is_id(job_id), job_id
        return self.jobs / job_id

    def _work(self, job_id: str, attempt: int) -> Path:
        assert is_id(job_id), job_id
        return self.work / f"{job_id}.a{attempt}"


def _write(path: Path, data: bytes) -> None:
    beside = path.with_suffix(".part")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
