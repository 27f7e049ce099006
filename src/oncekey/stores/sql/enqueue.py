"""Adds a job: one INSERT for each dialect, which runs on the app's own connection, inside the app's transaction.

The engine's adapters (``engine/transactions/adapters``) run it. They turn ``:name`` into the placeholders of their
driver.
"""

from __future__ import annotations

from functools import cache

from oncekey.core.jobs import NewJob
from oncekey.stores.registry import package_of
from oncekey.stores.sql import queries


@cache
def enqueue_statement(dialect: str) -> str:
    """The INSERT, with ``:name`` placeholders for what :func:`job_parameters` gives, and without comments."""
    (text,) = queries.bare(package_of(dialect), "outbox_enqueue")
    return text


def job_parameters(job: NewJob) -> dict[str, str | float | bool | None]:
    """The values by name, of types that every driver takes."""
    return {
        "id": job.id,
        "scope": job.scope,
        "key": job.key,
        "key_owner": job.key_owner,
        "operation": job.operation,
        "task": job.task,
        "payload": job.payload.decode(),
        "downstream_key": job.downstream_key,
        "settles": job.settles,
        "run_at": None if job.run_at is None else float(job.run_at),
    }
