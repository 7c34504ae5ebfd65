"""Group commit: transactions that are wanted while one is under way share the next one, and its wait for the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from diptych.server.store.database import Database

T = TypeVar("T")


class Refusal(Exception):  # noqa: N818 - an answer, not an error
    """Raised by work that has written nothing: what shares its transaction is kept."""


@dataclass
class _Call:
    work: Callable[[Connection], Any]
    told: threading.Event = field(default_factory=threading.Event)
    leads: bool = False
    outcome: Any = None
    error: BaseException | None = None


class Together:
    """Runs work in exclusive, durable transactions, one after another and in the order it came.

    The thread that comes first leads: it runs its own work and all that waits by then, and commits once. Whoever came
    meanwhile waits, and the first of them leads next.
    """

    def __init__(self, database: Database) -> None:
        self.db = database
        self._lock = threading.Lock()
        self._waiting: list[_Call] = []
        self._led = False

    def run(self, work: Callable[[Connection], T]) -> T:
        """What `work` returns, after the commit. Raises what `work` raises, and what the commit raises.

        `work` may be run again after another one that shared its transaction was at fault.
        """
        mine = _Call(work)
        with self._lock:
            self._waiting.append(mine)
            mine.leads = not self._led
            self._led = True
        if not mine.leads:
            mine.told.wait()
        if mine.leads:
            self._lead()
        if mine.error is not None:
            raise mine.error
        outcome: T = mine.outcome
        return outcome

    def _lead(self) -> None:
        with self._lock:
            batch, self._waiting = self._waiting, []
        try:
            self._commit(batch)
        finally:
            with self._lock:
                self._led = bool(self._waiting)
                if self._waiting:
                    self._waiting[0].leads = True
                    self._waiting[0].told.set()
            for call in batch:
                call.told.set()

    def _commit(self, batch: list[_Call]) -> None:
        try:
            with self.db.write(exclusive=True) as c:
                for call in batch:
                    call.outcome = call.error = None
                    try:
                        call.outcome = call.work(c)
                    except Refusal as refusal:
                        call.error = refusal
        except IntegrityError as error:  # one of them was at fault, and all were rolled back: each for itself
            if len(batch) > 1:
                for call in batch:
                    self._commit([call])
            else:
                batch[0].error = error
        except BaseException as error:
            for call in batch:
                call.error = error
