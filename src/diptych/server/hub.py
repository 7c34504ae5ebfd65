"""Who waits for which job: wakes watchers in this process at once, and by polling for what other processes change."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator

from diptych.server.store.jobs import JobStore

POLL_SECONDS = 0.25


class Hub:
    """Lives on the event loop; `notify` may be called from any thread."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self.closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watches: dict[str, set[asyncio.Event]] = defaultdict(set)

    @contextlib.contextmanager
    def watch(self, job_id: str) -> Iterator[asyncio.Event]:
        """An event that is set whenever the job may have changed; the watcher clears it."""
        event = asyncio.Event()
        self._watches[job_id].add(event)
        try:
            yield event
        finally:
            self._watches[job_id].discard(event)
            if not self._watches[job_id]:
                del self._watches[job_id]

    def notify(self, job_id: str) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody watches
                self._loop.call_soon_threadsafe(self._wake, job_id)

    async def run(self) -> None:
        """Compare the versions of all watched jobs with the store, a few times a second."""
        self._loop = asyncio.get_running_loop()
        seen: dict[str, int] = {}
        while not self.closing:
            await asyncio.sleep(POLL_SECONDS)
            watched = list(self._watches)
            now = await asyncio.to_thread(self.store.versions, watched) if watched else {}
            for job_id in watched:
                if seen.get(job_id, 0) != now.get(job_id, -1):
                    self._wake(job_id)
            seen = {job_id: now.get(job_id, -1) for job_id in watched}

    def close(self) -> None:
        """End all streams."""
        self.closing = True
        for job_id in list(self._watches):
            self._wake(job_id)

    def _wake(self, job_id: str) -> None:
        for event in self._watches.get(job_id, ()):
            event.set()
