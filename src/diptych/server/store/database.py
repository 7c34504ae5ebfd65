"""One database, SQLite or PostgreSQL: connections, migrations, and write transactions that take turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import Connection

POOL = 16
_LOCK = 0x64697074  # "dipt": the advisory lock under which PostgreSQL writers decide on the queue


class Database:
    """A pool of connections. `write()` serialises what decides about the queue; `read()` never waits for a writer."""

    def __init__(self, url: str) -> None:
        self.sqlite = url.startswith("sqlite")
        if self.sqlite:
            self.engine = sa.create_engine(url, pool_size=POOL, connect_args={"timeout": 30})
            event.listen(self.engine, "connect", _on_sqlite_connect)
            event.listen(self.engine, "begin", _on_sqlite_begin)
        else:
            self.engine = sa.create_engine(url, pool_size=POOL, pool_pre_ping=True)
        self._turn = threading.Lock()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self, *, exclusive: bool = False, durable: bool = True) -> Iterator[Connection]:
        """One transaction, committed on leaving. `exclusive`: no other exclusive one, anywhere, runs meanwhile.

        Every commit survives a kill of the process. One that is not `durable` may be undone by a power failure, alone
        or with what followed it up to the next durable one; it saves waiting for the disk.
        """
        if self.sqlite:
            # SQLite has one writer; a lock of ours hands over at once, SQLite's own busy handler sleeps.
            sync = "FULL" if durable else "NORMAL"
            with self._turn, self.engine.connect().execution_options(sync=sync) as c, c.begin():
                yield c
            return
        with self.engine.begin() as c:
            if exclusive:
                c.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            yield c

    def migrate(self) -> None:
        """Bring the schema to the newest version; several processes may start at once."""
        from alembic import command
        from alembic.config import Config

        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        with self.write(exclusive=True) as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")

    def close(self) -> None:
        self.engine.dispose()


def _on_sqlite_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    for pragma in ("journal_mode=WAL", "foreign_keys=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _on_sqlite_begin(connection: Connection) -> None:
    sync = connection.get_execution_options().get("sync")
    if sync is None:
        connection.exec_driver_sql("BEGIN")
    else:
        connection.exec_driver_sql(f"PRAGMA synchronous={sync}")
        connection.exec_driver_sql("BEGIN IMMEDIATE")
