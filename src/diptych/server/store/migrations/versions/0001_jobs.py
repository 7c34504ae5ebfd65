"""Jobs, idempotency keys and runners."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_Long = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("seq", _Long, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(64), nullable=False, unique=True),
        sa.Column("key", sa.String(128), nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("cancel", sa.String(8), nullable=False),
        sa.Column("created_ms", _Long, nullable=False),
        sa.Column("started_ms", _Long),
        sa.Column("completed_ms", _Long),
        sa.Column("expires_ms", _Long),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("outcome", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("remixed_from", sa.String(64)),
        sa.Column("runner", sa.String(128)),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("beat", sa.Integer, nullable=False),
        sa.Column("turn", _Long, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("progress", sa.Integer, nullable=False),
        sa.Column("stage", sa.String(16)),
        sa.Column("step", sa.Integer),
        sa.Column("total_steps", sa.Integer),
        sa.Column("eta_ms", _Long),
        sa.Column("preview", sa.Integer, nullable=False),
        sa.Column("bytes", _Long, nullable=False),
    )
    op.create_index("jobs_by_status", "jobs", ["status", "seq"])
    op.create_index("jobs_by_key", "jobs", ["key", "status"])
    op.create_table(
        "idempotency_keys",
        sa.Column("scope", sa.String(200), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("job", sa.String(64), nullable=False),
        sa.Column("body", sa.String(64), nullable=False),
        sa.Column("created_ms", _Long, nullable=False),
    )
    op.create_table(
        "runners",
        sa.Column("id", sa.String(128), primary_key=True),
        sa.Column("host", sa.String(128), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("beat", sa.Integer, nullable=False),
        sa.Column("about", sa.Text, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("runners")
    op.drop_table("idempotency_keys")
    op.drop_table("jobs")
