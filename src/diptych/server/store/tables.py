"""The tables. The schema is made by the migrations beside; a test holds the two together."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, Integer, MetaData, String, Table, Text

metadata = MetaData()
_Long = BigInteger().with_variant(Integer, "sqlite")

jobs = Table(
    "jobs",
    metadata,
    Column("seq", _Long, primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("key", String(128), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("status", String(16), nullable=False),
    Column("cancel", String(8), nullable=False),
    Column("created_ms", _Long, nullable=False),
    Column("started_ms", _Long),
    Column("completed_ms", _Long),
    Column("expires_ms", _Long),
    Column("spec", Text, nullable=False),
    Column("outcome", Text),
    Column("error", Text),
    Column("remixed_from", String(64)),
    Column("runner", String(128)),
    Column("attempt", Integer, nullable=False),
    Column("beat", Integer, nullable=False),
    Column("turn", _Long, nullable=False),
    Column("version", Integer, nullable=False),
    Column("progress", Integer, nullable=False),
    Column("stage", String(16)),
    Column("step", Integer),
    Column("total_steps", Integer),
    Column("eta_ms", _Long),
    Column("preview", Integer, nullable=False),
    Column("bytes", _Long, nullable=False),
    Index("jobs_by_status", "status", "seq"),
    Index("jobs_by_key", "key", "status"),
)
"""seq orders the queue whatever the clock does; id orders lists. turn counts starts, for fair shares between keys.

beat rises while a runner works on the job; version rises with every change that a watcher should see.
"""

keys = Table(
    "idempotency_keys",
    metadata,
    Column("scope", String(200), primary_key=True),
    Column("key", String(255), primary_key=True),
    Column("job", String(64), nullable=False),
    Column("body", String(64), nullable=False),
    Column("created_ms", _Long, nullable=False),
)

runners = Table(
    "runners",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("host", String(128), nullable=False),
    Column("state", String(16), nullable=False),
    Column("beat", Integer, nullable=False),
    Column("about", Text, nullable=False),
)
"""One row for each engine of each host; about holds what it can do, for API hosts that have no engine."""
