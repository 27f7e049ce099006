"""Adding a job on connections of other drivers than the store's own: the same statement, the same row."""

from __future__ import annotations

import re
from typing import Any

import asyncpg
import pytest
import sqlalchemy

from oncekey.core.jobs import JobState
from oncekey.stores.sql.enqueue import enqueue_statement, job_parameters
from tests.outbox.outbox_table import OutboxTable


@pytest.mark.parametrize("run_at", [None, 1_700_000_000, 1_700_000_000.25])
def test_statement_of_enqueue_runs_in_sqlalchemy(outbox: OutboxTable, run_at: float | None) -> None:
    """``text()`` takes it as it is, on either dialect; without a time it is due at once."""
    key = outbox.pending()[0]
    job = outbox.job("task", {"note": "é :not_a_parameter"}, of=key, run_at=run_at)
    engine = sqlalchemy.create_engine(outbox.url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        dialect = "sqlite" if outbox.is_sqlite else "postgresql"
        connection.execute(sqlalchemy.text(enqueue_statement(dialect)), job_parameters(job))
    engine.dispose()
    found = outbox.get(job.id)
    assert (found.payload, found.settles, found.state) == (job.payload, True, JobState.READY)
    assert (found.key_owner, found.downstream_key) == (key.owner, job.downstream_key)
    assert found.run_at == (run_at if run_at is not None else pytest.approx(found.now, abs=60))
    assert [job.id for job in outbox.store.claim("w", ["task"], 1, 1.0)] == [job.id]


@pytest.mark.parametrize("run_at", [None, 1_700_000_000])
async def test_statement_of_enqueue_runs_in_asyncpg(postgres_url: str, run_at: float | None) -> None:
    """Its types are strict: every parameter says its own."""
    outbox = OutboxTable(postgres_url)
    job = outbox.job("task", run_at=run_at)
    parameters = job_parameters(job)
    names = list(parameters)
    numbered = re.sub(r":(\w+)", lambda name: f"${names.index(name[1]) + 1}", enqueue_statement("postgresql"))
    connection: Any = await asyncpg.connect(postgres_url)
    await connection.execute(numbered, *parameters.values())
    await connection.close()
    assert (outbox.get(job.id).payload, outbox.get(job.id).settles) == (b"{}", False)
    outbox.close()
