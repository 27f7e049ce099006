"""The values that encryption covers, in the dictionaries of the store in memory: what the verbs mean."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

from oncekey.core.audit import Audit, AuditLine
from oncekey.core.record import Record, StoredResponse
from oncekey.core.steps import Step
from oncekey.stores.kept_api import BEFORE, OPERATORS_LINE, Kept, KeptKey, KeptLine, KeptPage, KeptStep, Rewrite

At = tuple[str, str]


class MemoryKept:
    """A part of :class:`oncekey.stores.memory.store.MemoryStore`, which has the rows."""

    _clock: Callable[[], float]
    _rows: dict[At, Record]
    _steps: dict[At, dict[str, Step]]
    _audit: dict[int, AuditLine]
    _lock: threading.Lock

    if TYPE_CHECKING:

        def _note(self, line: AuditLine) -> None: ...

    def kept(self, after: str, limit: int) -> KeptPage:
        place = tuple(orjson.loads(after)) if after else ()
        with self._lock:
            found = heapq.nsmallest(limit, (row for row in self._all_kept() if row.place > place), key=_place)
        return KeptPage(found, orjson.dumps(found[-1].place).decode() if len(found) == limit else "")

    def _all_kept(self) -> Iterator[Kept]:
        for record in self._rows.values():
            yield kept_key(record)
        for (scope, key), steps in self._steps.items():
            for step in steps.values():
                if step.result is not None:
                    yield KeptStep(scope, key, step.name, step.result)
        for number, line in self._audit.items():
            yield KeptLine(line.scope, line.key, str(number), line.event, line.why)

    def rewrite(self, batch: Sequence[Rewrite]) -> list[bool]:
        with self._lock:
            return [self._rewrite(work) for work in batch]

    def _rewrite(self, work: Rewrite) -> bool:
        match work.old, work.new:
            case KeptKey() as old, KeptKey() as new:
                row = self._rows.get((old.scope, old.key))
                if row is None or _values(kept_key(row)) != _values(old):
                    return False
                self._rows[row.scope, row.key] = replace(row, response=_response(new), last_error=new.last_error)
                return True
            case KeptStep() as old, KeptStep() as new:
                steps = self._steps.get((old.scope, old.key), {})
                if old.name not in steps or steps[old.name].result != old.result:
                    return False
                steps[old.name] = replace(steps[old.name], result=new.result)
                return True
            case KeptLine() as old, KeptLine() as new:
                line = self._audit.get(int(old.number))
                if line is None or line.why != old.why:
                    return False
                self._audit[int(old.number)] = replace(line, why=new.why)
                return True
        return False

    def note_walk(self, event: str, after: str, audit: Audit) -> None:
        with self._lock:
            self._note(AuditLine(self._clock(), audit.who, event, *OPERATORS_LINE, None, BEFORE, after, audit.why))


def _place(row: Kept) -> tuple[str, ...]:
    return row.place


def kept_key(row: Record) -> KeptKey:
    """The kept values of a record."""
    answer = row.response
    return KeptKey(
        row.scope,
        row.key,
        None if answer is None else answer.status,
        None if answer is None else orjson.dumps(answer.headers).decode(),
        None if answer is None else answer.body,
        None if answer is None else answer.schema_version,
        row.last_error,
        row.state,
        row.fingerprint_version,
        row.expires_at,
    )


def _values(kept: KeptKey) -> tuple[object, ...]:
    return (kept.status, kept.headers, kept.body, kept.schema_version, kept.last_error)


def _response(kept: KeptKey) -> StoredResponse | None:
    if kept.status is None or kept.headers is None or kept.schema_version is None:
        return None
    headers = tuple((name, content) for name, content in orjson.loads(kept.headers))
    return StoredResponse(kept.status, headers, kept.body, kept.schema_version)
