"""The engines of all hosts, so that a host without one knows what the others can do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from diptych.server.store.database import Database
from diptych.server.store.job import host_name
from diptych.server.store.tables import runners


@dataclass(frozen=True)
class RunnerRow:
    id: str
    state: str
    beat: int
    about: dict[str, Any]


class RunnerTable:
    def __init__(self, database: Database) -> None:
        self.db = database

    def put(self, runner: str, state: str, about: dict[str, Any]) -> None:
        values = {"state": state, "about": json.dumps(about)}
        with self.db.write(durable=False) as c:
            changed = c.execute(
                sa.update(runners).where(runners.c.id == runner).values(beat=runners.c.beat + 1, **values)
            )
            if not changed.rowcount:
                c.execute(sa.insert(runners).values(id=runner, host=host_name(), beat=1, **values))

    def beat(self, runner: str) -> None:
        with self.db.write(durable=False) as c:
            c.execute(sa.update(runners).where(runners.c.id == runner).values(beat=runners.c.beat + 1))

    def remove(self, runner: str) -> None:
        with self.db.write(durable=False) as c:
            c.execute(sa.delete(runners).where(runners.c.id == runner))

    def rows(self) -> list[RunnerRow]:
        with self.db.read() as c:
            return [RunnerRow(r.id, r.state, r.beat, json.loads(r.about)) for r in c.execute(sa.select(runners))]
