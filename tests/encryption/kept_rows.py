"""Rows of every kind in a store, with a secret in each value that encryption covers; and what can be read of them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import orjson

from oncekey.core.audit import Audit
from oncekey.core.jobs import Conclusion, JobEnd, NewJob
from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import Actor, Effects, Event
from oncekey.core.steps import REQUEST, Step, StepKind, StepsOf, StepState
from oncekey.core.swaps import swap
from oncekey.encryption import Keyring
from oncekey.encryption.store import sealed
from oncekey.stores.api import KeptValues, Outbox, Store
from oncekey.stores.kept_api import Kept
from oncekey.stores.sql.enqueue import enqueue_statement, job_parameters
from tests import databases
from tests.outbox.outbox_table import MYSQL_ENQUEUE, POSTGRES_ENQUEUE
from tests.stores import mysql

SECRET = "planted-4242"
SCOPE = "tenant"


def reservation(key: str, *, version: int = 2) -> Reservation:
    return Reservation(
        *(SCOPE, key, "POST /payments", key.encode().ljust(32, b"."), version, Effects.EXTERNAL, f"owner-{key}"),
        *(60.0, 3600.0),
    )


def put(store: Store, prefix: str, *, version: int = 2) -> None:
    """A completed key, an unknown one with an audit, a half-done one with steps, and one in progress."""
    rows = {name: reserved(store, f"{prefix}-{name}", version) for name in ("done", "unknown", "half", "running")}
    response = StoredResponse(201, (("x-note", f"{prefix} {SECRET}"),), f"{prefix} {SECRET}".encode() * 3)
    move(store, rows["done"], Event.COMPLETE, response=response)
    unknown = move(store, rows["unknown"], Event.DOUBT, last_error=f"{prefix} error {SECRET}")
    move(
        *(store, unknown, Event.POSTPONE, Actor.OPERATOR),
        reconcile_in=60.0,
        last_error=f"{prefix} error {SECRET}",
        audit=Audit("ana", f"{prefix} reason {SECRET} é"),
    )
    half = rows["half"]
    for name, result in (("charge", f'{{"id":"{prefix} {SECRET}"}}'), (REQUEST, f'["{SECRET} é"]'), ("later", None)):
        step = Step(
            *(name, StepKind.EFFECT, StepState.DONE if result else StepState.INTENDED, True),
            result=result.encode() if result else None,
            provider_id=f"ch_{prefix}",
        )
        half = move(store, half, Event.ADVANCE, recovery_point="charge", lease_seconds=60.0, step=step)
    move(store, half, Event.RELEASE, last_error=f"{prefix} error {SECRET}")


def put_job(store: Store, url: str, prefix: str, keyring: Keyring | None) -> None:
    """A dead job with an error and a history."""
    job = NewJob(
        *(f"job-{prefix}", SCOPE, f"{prefix}-done", "owner", "POST /payments", f"task-{prefix}"),
        f'{{"to":"{SECRET}"}}'.encode(),
        *("down", None, False),
    )
    if keyring is not None:
        job = store.sealed_job(job)  # type: ignore[attr-defined]
    add_job(url, job)
    assert isinstance(store, Outbox)
    for end in (JobEnd.RETRY, JobEnd.DEAD):
        assert [each.id for each in store.claim("worker", [job.task], 10, 60.0)] == [job.id]
        assert store.conclude([Conclusion(job.id, "worker", end, error=f"{end} {SECRET}")]) == [True]


def add_job(url: str, job: NewJob) -> None:
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)) as own, own:
            own.execute(enqueue_statement("sqlite"), job_parameters(job))
    elif url.startswith("mysql"):
        mysql.run(url, MYSQL_ENQUEUE, **job_parameters(job))
    else:
        with databases.beside(url) as connection:
            connection.execute(POSTGRES_ENQUEUE.encode(), job_parameters(job))


def fill(raw: Store, url: str) -> list[str]:
    """Rows from before encryption, under key 1, and under key 2; returns the beginnings of their keys."""
    from tests.encryption.rings import ring

    for prefix, keyring in (("plain", None), ("one", ring(1)), ("two", ring(2, 1))):
        store = raw if keyring is None else sealed(raw, keyring)
        put(store, prefix, version=2 if keyring is None else keyring.current * 256 + 2)
        if isinstance(raw, Outbox):
            put_job(store, url, prefix, keyring)
    return ["plain", "one", "two"]


def readable(raw: Store, keyring: Keyring) -> dict[str, Any]:
    """All that the app and an operator see of the rows that ``fill`` made."""
    store = sealed(raw, keyring)
    seen: dict[str, Any] = {}
    for prefix in ("plain", "one", "two"):
        for name in ("done", "unknown", "half", "running"):
            key = f"{prefix}-{name}"
            (record,) = store.read([(SCOPE, key)])
            assert record is not None
            seen[key] = (replace(record, now=0.0), store.steps([StepsOf(SCOPE, key)]), store.audit(SCOPE, key, 10))
        if isinstance(store, Outbox):
            job = store.job(f"job-{prefix}")
            assert job is not None
            seen[f"job-{prefix}"] = (replace(job, now=0.0, history=b""), orjson.loads(job.history))
    return seen


def kept(raw: Store, page: int = 50) -> Iterator[Kept]:
    assert isinstance(raw, KeptValues)
    after = ""
    while True:
        found = raw.kept(after, page)
        yield from found.rows
        if not (after := found.next):
            return


def raw_text(raw: Store) -> str:
    """All kept values as text: what a thief of the database sees of them."""
    return repr(list(kept(raw)))


def reserved(store: Store, key: str, version: int) -> Record:
    record = store.reserve([reservation(key, version=version)])[0].record
    assert record is not None
    return record


def move(store: Store, record: Record, event: Event, by: Actor = Actor.OWNER, **what: Any) -> Record:
    (moved,) = store.swap([swap(record, event, by, **what)])
    assert moved is not None
    return moved
