"""Run by Alembic: the connection comes from `diptych.server.store.database.migrate`."""

from __future__ import annotations

from alembic import context

from diptych.server.store.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
