"""The tables of the app, and the check: what clients saw, what was charged, what the tables say, against the promises.

``test_local_app.py`` plants a violation of each.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import psycopg

from oncekey.core.record import Record
from oncekey.core.states import FINAL, State
from oncekey.engine.once import SINGLE_SCOPE
from oncekey.stores.api import Store
from oncekey.stores.registry import open_store
from tests.faults.campaign import Run
from tests.faults.local_app import LocalApp, Story
from tests.stores import mysql

Rows = Mapping[str, Mapping[str, int]]
"""Key -> what -> how many rows of the business table."""
WANTED: Rows = {
    "transactional": {"paid": 1},
    "deferred": {"taken": 1},
    "phased": {"opened": 1, "closed": 1},
}


def prepare(url: str) -> None:
    """The tables of oncekey and of the business."""
    store = open_store(url)
    store.migrate()
    store.close()
    ask(url, "CREATE TABLE app_rows (of_key text NOT NULL, what text NOT NULL)")


def ask(url: str, sql: str) -> list[Any]:
    """One statement on a connection of its own."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30)) as own, own:
            return own.execute(sql).fetchall()
    if url.startswith("mysql"):
        return mysql.run(url, sql)
    with psycopg.connect(url) as server:
        cursor = server.execute(sql.encode())
        return cursor.fetchall() if cursor.description else []


async def checked(run: Run, local: LocalApp, url: str | None) -> None:
    """The check, with what is in the tables at ``url``: not the way by which the app goes. None: the app has no tables
    beside the keys, and the keys are read by its own store."""
    if url is None:
        check(run, local, local.once.store, {})
        local.once.store.disconnect()
        return
    rows: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for key, what in ask(url, "SELECT of_key, what FROM app_rows"):
        rows[key][what] += 1
    store = open_store(url)
    try:
        check(run, local, store, rows)
    finally:
        store.close()


def check(run: Run, local: LocalApp, store: Store, rows: Rows) -> None:
    """Compare all that is over."""
    keys = [(SINGLE_SCOPE, story.key) for story in local.stories]
    records = [row for at in range(0, len(keys), 100) for row in store.read(keys[at : at + 100])]
    for story, record in zip(local.stories, records, strict=True):
        for promise, what in _broken(local, story, record, rows.get(story.key, {})):
            run.violated(promise, f"{what}\n  {story.told()}\n    charges {local.charges[story.key]}, {record}")
    run.asked(max(0, sum(local.statuses.values()) - run.requests))
    run.notes += [f"{sum(story.end == 'unknown' for story in local.stories)} unknown"]


def _broken(local: LocalApp, story: Story, record: Record | None, rows: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    state, response = (record.state, record.response) if record else (None, None)
    charged = local.charges[story.key]
    if charged > 1 or max(rows.values(), default=0) > 1:
        yield "I1", f"{charged} charges, rows {dict(rows)}"
    if len({*story.answers}) > 1:
        yield "I2", "two answers"
    if early := [name for name in story.refused if name in local.runs]:
        yield "I7", f"refused for want of the store, and the handler was called: {early}"
    if open_door := [name for name in local.failed_open if local.runs[name] == story.key]:
        yield "I7", f"the store was not there, and the handler was called: {open_door}"
    if story.end not in ("answered", "unknown"):
        yield ("I4", "it is stuck") if not story.end else ("I7", f"it {story.end}")
    if story.end == "answered":
        if state not in FINAL or response is None or response.body != story.answers[0][1]:
            yield "I2", f"answered, and the store says {state}"
        wanted = WANTED.get(story.kind, {}) if local.url else {}
        if story.answers[0][0] == 201 and (rows != wanted or charged != (story.kind != "transactional")):
            yield "I1", f"answered, and {charged} charges, rows {dict(rows)}"
    if story.end == "unknown" and state not in (State.UNKNOWN, State.COMPLETED):
        yield "I4", f"told unknown, and the store says {state}"
