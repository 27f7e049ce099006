"""What there is to compare when a fault is over: the clients' history, the ledger, the app's rows, and our tables."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from oncekey.core.audit import AuditLine
from oncekey.core.jobs import Job, JobState
from oncekey.core.record import Record
from oncekey.core.steps import Step, StepsOf
from oncekey.stores.api import Outbox, Store
from tests.faults.clients import History, Name
from tests.faults.provider import Call

_PAGE = 1_000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Tables:
    """oncekey's own: keys with their responses, steps, outbox and audit."""

    records: dict[Name, Record]
    steps: dict[Name, list[Step]]
    jobs: list[Job]
    audit: dict[Name, list[AuditLine]]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the app's own table."""

    scope: str
    key: str
    what: str
    attempt: int


@dataclass(frozen=True, slots=True)
class HandlerRun:
    """A handler was called."""

    scope: str
    key: str
    attempt: int
    owner: str
    pid: int
    at: float


@dataclass(slots=True)
class Evidence:
    history: History
    calls: list[Call]
    rows: list[Row]
    runs: list[HandlerRun]
    tables: Tables
    has_rows: bool = True
    """Whether the app has a database to write rows to (with a memory store it has none)."""
    calls_of: dict[Name, list[Call]] = field(init=False)
    rows_of: dict[Name, list[Row]] = field(init=False)
    runs_of: dict[Name, list[HandlerRun]] = field(init=False)
    jobs_of: dict[Name, list[Job]] = field(init=False)

    def __post_init__(self) -> None:
        self.calls_of = _by_name(self.calls)
        self.rows_of = _by_name(self.rows)
        self.runs_of = _by_name(self.runs)
        self.jobs_of = _by_name(self.tables.jobs)

    def text(self, name: Name) -> str:
        """All that is known of one key, in the order in which it happened as far as that can be said."""
        timed = [(attempt.sent_at, attempt.text()) for attempt in self.history.attempts.get(name, [])]
        for run in self.runs_of.get(name, []):
            timed.append((run.at, f"handler {run.at:.3f}: attempt {run.attempt} by {run.owner} in process {run.pid}"))
        for call in self.calls_of.get(name, []):
            made = "charged" if call.new else "found"
            timed.append((call.at, f"ledger  {call.at:.3f}: {made} {call.id}, {call.what} by attempt {call.attempt}"))
        for line in self.tables.audit.get(name, []):
            timed.append(
                (line.at, f"audit   {line.at:.3f}: {line.who} {line.event}, {line.before} to {line.after}: {line.why}")
            )
        lines = [text for _, text in sorted(timed)]
        lines += [f"row     {row.what} by attempt {row.attempt}" for row in self.rows_of.get(name, [])]
        lines += [f"step    {step}" for step in self.tables.steps.get(name, [])]
        lines += [
            f"job     {job.task} {job.state}, attempt {job.attempt}, {job.provider_id}, {job.last_error}"
            for job in self.jobs_of.get(name, [])
        ]
        lines.append(f"record  {self.tables.records.get(name, 'there is none')}")
        return "\n".join(f"    {line}" for line in [f"{name[1]} of {name[0]}", *lines])


def _by_name(items: Iterable[_T]) -> dict[Name, list[_T]]:
    by_name: dict[Name, list[_T]] = defaultdict(list)
    for item in items:
        by_name[item.scope, item.key].append(item)  # type: ignore[attr-defined]  # all of them have a name
    return dict(by_name)


def look(store: Store) -> Tables:
    """Everything that the store has. Blocks."""
    names: list[Name] = []
    while page := store.listing(limit=_PAGE, after=names[-1] if names else None):
        names += [(record.scope, record.key) for record in page]
    records: dict[Name, Record] = {}
    steps: dict[Name, list[Step]] = {}
    for at in range(0, len(names), _PAGE):
        some = names[at : at + _PAGE]
        records |= {name: record for name, record in zip(some, store.read(some), strict=True) if record is not None}
        steps |= dict(zip(some, store.steps([StepsOf(*name) for name in some]), strict=True))
    jobs = [job for state in JobState if isinstance(store, Outbox) for job in store.jobs(state, 1_000_000)]
    audit = {name: store.audit(*name, 100) for name in names}
    return Tables(records, steps, jobs, audit)


def handler_runs(path: Path) -> list[HandlerRun]:
    if not path.exists():
        return []
    return [HandlerRun(*json.loads(line)) for line in path.read_bytes().split(b"\n")[:-1]]
