"""Adding a job: one INSERT for each dialect, to be run on the app's own connection inside its own transaction.

The engine's adapters run it (``engine/enlist``), and they turn ``:name`` into what their driver wants.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from oncekey.core.jobs import NewJob
from oncekey.stores import sqlfiles

_PACKAGES = {"postgresql": "oncekey.stores.postgres", "sqlite": "oncekey.stores.sqlite"}


@cache
def enqueue_statement(dialect: Literal["postgresql", "sqlite"]) -> str:
    """The INSERT, with ``:name`` placeholders for what :func:`job_parameters` gives, and without comments."""
    lines = sqlfiles.statement(_PACKAGES[dialect], "outbox_enqueue").splitlines()
    return "\n".join(line for line in lines if not line.startswith("--"))


def job_parameters(job: NewJob) -> dict[str, str | float | bool | None]:
    """Plain values by name, as any driver takes them."""
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
