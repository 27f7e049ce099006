"""What every statement really reads in a table of this size: EXPLAIN (ANALYZE, BUFFERS) of each, on the way.

``Looking`` is the store itself; each statement runs once under EXPLAIN in a transaction that is rolled back, then as it
is. Pages are counted, not guessed: a statement that reads the whole table shows as more pages at ten million keys than
at ten thousand, whatever its plan is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.growth_fill import Say
from benchmarks.growth_rounds import BATCH, spread
from benchmarks.store_alone import completion
from oncekey.core.health import COUNTED
from oncekey.core.record import Record
from oncekey.stores.api import Duty
from oncekey.stores.postgres.store import PostgresStore
from oncekey.upkeep import Reaper, Sweeper
from oncekey.upkeep.health import look

WRITTEN, LOOKED_UP, FOUND = 30, 10, 4
"""Pages that one row may take: written with its indexes, looked up by its key, found by a duty's index."""
SLACK = 300
"""Pages of any statement: a table of no more is read whole by right. One look of the lease watch is 200 rows."""


@dataclass(frozen=True, slots=True)
class Read:
    """One statement that ran."""

    verb: str
    pages: int
    most: int
    """Pages that it may take, by the rows of its batch."""
    scans: tuple[str, ...]
    """Relations and whole indexes that it went through from end to end."""
    indexes: tuple[str, ...]
    ms: float


class Looking(PostgresStore):
    def __init__(self, url: str) -> None:
        super().__init__(url, timeout=600.0)
        self.verb = ""
        self.most = 0
        self.reads: list[Read] = []

    def about(self, verb: str, most: int) -> None:
        self.verb, self.most = verb, most + SLACK

    def _execute(self, statement: Any, parameters: Any) -> Any:
        connection = self._connection()
        with connection.transaction(force_rollback=True):
            asked = b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement.encode()
            row = connection.execute(asked, parameters).fetchone()
        assert row is not None
        plan = row[0][0]["Plan"]
        nodes = _nodes(plan)
        scans = [
            node.get("Index Name", node.get("Relation Name", "?"))
            for node in nodes
            if node["Node Type"] == "Seq Scan"
            or (node.get("Index Name", "").endswith("_pkey") and "Index Cond" not in node)
        ]
        pages = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
        indexes = tuple(sorted({node["Index Name"] for node in nodes if "Index Name" in node}))
        took = row[0][0]["Execution Time"]
        self.reads.append(Read(self.verb, pages, self.most, tuple(scans), indexes, took))
        return super()._execute(statement, parameters)


def _nodes(plan: Any) -> list[dict[str, Any]]:
    return [plan, *(node for below in plan.get("Plans", []) for node in _nodes(below))]


def look_at(url: str, say: Say) -> list[Read]:
    """Let every verb of a request and every duty of upkeep run once, on a batch of 500."""
    store = Looking(url)
    store.migrate()
    asked = [spread() for _ in range(BATCH)]
    store.about("reserve", BATCH * WRITTEN)
    found = store.reserve(asked)
    store.about("complete", BATCH * WRITTEN)
    store.swap([completion(mine, each) for mine, each in zip(asked, found, strict=True)])
    store.about("replay", BATCH * LOOKED_UP)
    store.reserve(asked)
    store.about("read", BATCH * LOOKED_UP)
    store.read([(each.scope, each.key) for each in asked])
    for duty in Duty:
        store.about(f"due {duty}", BATCH * FOUND)
        _due: list[Record] = store.due(duty, BATCH)
    store.about("sweep", BATCH * WRITTEN)
    Sweeper(store, batch=BATCH).run()
    store.about("purge", BATCH * WRITTEN)
    store.purge(BATCH)
    store.about("purge, expired state only", BATCH * FOUND)
    store.purge(BATCH, expired_state_only=True)
    store.about("reap, nothing to delete", BATCH * FOUND)
    Reaper(_NothingFinal(store), batch=BATCH, share=1.0).run()
    store.about("health", COUNTED)
    look(store)
    store.close()
    say(f"{len(store.reads)} statements looked at")
    return store.reads


class _NothingFinal:
    """The store for a reaper without a backlog: one purge was looked at, and all of it would take long."""

    def __init__(self, store: Looking) -> None:
        self._store = store

    def purge(self, limit: int, *, expired_state_only: bool = False) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def report(found: dict[int, list[Read]]) -> bool:
    """One line per verb: pages at each size. Whether none grows with the table and none reads one whole."""
    ok = True
    print("\npages that one statement reads (hit or read), at each size; the time of the largest")
    smallest = min(found)
    verbs = list(dict.fromkeys(each.verb for each in found[smallest]))
    for verb in verbs:
        pages = {size: max(each.pages for each in reads if each.verb == verb) for size, reads in found.items()}
        last = [each for each in found[max(found)] if each.verb == verb]
        most = max(last, key=lambda each: each.pages)
        trouble = [f"reads all of {name}" for each in last for name in each.scans if each.pages > SLACK]
        if most.pages > most.most:
            trouble.append("too many pages for its batch")
        ok &= not trouble
        shown = "  ".join(f"{size:,}: {number:,}" for size, number in pages.items())
        names = ", ".join(
            name.removeprefix("idempotency_") for name in sorted({i for each in last for i in each.indexes})
        )
        print(f"  {verb:24} {shown}   {max(each.ms for each in last):.1f} ms   {names}   {'; '.join(trouble) or 'ok'}")
    return ok
