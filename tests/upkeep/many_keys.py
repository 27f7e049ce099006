"""A table with very many keys, and the plan of every statement that upkeep runs on it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import psycopg

from oncekey import SINGLE_TENANT, Confirmed, OnceKey, Policy, Refuted, StillUnknown
from oncekey.core.verdicts import Verdict
from oncekey.engine.resumption import Answer, Resumption
from oncekey.stores.postgres.store import PostgresStore
from oncekey.upkeep import Inquiry, Reaper, Reconciler, Resumer, Sweeper, Upkeep
from oncekey.upkeep.health import look

FILL = """
INSERT INTO idempotency_keys (
    scope, key, operation, fingerprint, fingerprint_version, effects, state, attempt, owner, lease_until,
    response_status, response_headers, response_body, response_schema_version, recovery_point, reconcile_at,
    created_at, finished_at, retention_seconds, expires_at
)
SELECT
    'tenant-' || n % 100, md5(n::text), 'POST /payments', sha256(n::text::bytea), 1,
    CASE WHEN n % 2 = 0 THEN 'external' ELSE 'repeatable' END, {state}, 1, 'owner-' || n,
    now() - interval '1 hour', 201, '[]', '\\x7b7d', 1, {recovery_point}, {reconcile_at},
    now() - interval '2 hours', {finished_at}, 86400, now() + ({expires} || ' seconds')::interval
FROM generate_series({first}, {last}) AS n
"""
JOBS = """
INSERT INTO idempotency_outbox (
    id, scope, key, key_owner, operation, task, payload, downstream_key, settles, state, run_at, finished_at
)
SELECT
    'job-' || k.scope || k.key, k.scope, k.key, k.owner, k.operation, 'charge', '{}', 'down-' || k.key,
    k.state = 'pending', CASE WHEN k.state = 'pending' THEN 'ready' ELSE 'done' END, now(),
    CASE WHEN k.state <> 'pending' THEN now() - (abs(hashtext(k.key) % 9) || ' days')::interval END
FROM idempotency_keys AS k WHERE k.state IN ('pending', 'completed')
"""
DUE = 300
"""Of each kind; the batches below are smaller, so that several are needed."""


def fill(url: str, keys: int) -> None:
    """So many final keys, a twentieth of them past their expiry, and a few hundred of each kind that is due."""
    number = 0

    def rows(count: int, state: str, expires: str, **columns: str) -> bytes:
        nonlocal number
        first, number = number + 1, number + count
        names = {"recovery_point": "NULL", "reconcile_at": "NULL", "finished_at": "NULL"} | columns
        return FILL.format(state=state, expires=expires, first=first, last=number, **names).encode()

    with psycopg.connect(url, autocommit=True) as own:
        states = "CASE WHEN n % 3 = 0 THEN 'failed' ELSE 'completed' END"
        expires = "CASE WHEN n % 20 = 0 THEN -60 - n % 1000 ELSE 60 + n % 86400 END"
        own.execute(rows(keys, states, expires, finished_at="now() - interval '1 hour'"))
        own.execute(rows(DUE, "'in_progress'", "86400"))
        own.execute(rows(DUE, "'unknown'", "86400", reconcile_at="now() - interval '1 minute'"))
        own.execute(rows(DUE, "'pending'", "-60"))
        own.execute(rows(DUE, "'failed_retryable'", "-60", recovery_point="'ride'"))
        due = {"recovery_point": "'ride'", "reconcile_at": "now() - interval '1 minute'"}
        own.execute(rows(DUE, "'failed_retryable'", "86400", **due))
        own.execute(JOBS)
        own.execute("ANALYZE")


@dataclass
class Looked:
    """One statement that ran: its first line of SQL, its whole-table reads, its indexes, and how long it took."""

    words: str
    scans: list[str]
    indexes: set[str]
    seconds: float


class Explaining(PostgresStore):
    """Asks for the plan of every statement, with its own parameters, before it runs it."""

    def __init__(self, url: str) -> None:
        super().__init__(url, timeout=60.0)
        self.looked: list[Looked] = []

    def _execute(self, statement: Any, parameters: Any) -> Any:
        connection = self._connection()
        row = connection.execute(b"EXPLAIN (FORMAT JSON) " + statement.encode(), parameters).fetchone()
        assert row is not None
        nodes = list(_nodes(row[0][0]["Plan"]))
        scans = [node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"]
        # A whole index is as much as the whole table; in the order of the keys and up to a LIMIT it is not.
        scans += [
            node["Index Name"]
            for node in nodes
            if node.get("Index Name", "").endswith("_pkey") and "Index Cond" not in node
        ]
        indexes = {node["Index Name"] for node in nodes if "Index Name" in node}
        began = time.monotonic()
        answer = super()._execute(statement, parameters)
        words = " ".join(line for line in statement.splitlines() if not line.startswith("--"))[:60]
        self.looked.append(Looked(words, scans, indexes, time.monotonic() - began))
        return answer


def _nodes(plan: Any) -> list[dict[str, Any]]:
    return [plan, *(node for below in plan.get("Plans", []) for node in _nodes(below))]


def keep_up(url: str, *, reaped: int) -> list[Looked]:
    """Let every duty go through all that is due, and a health check; at most about ``reaped`` keys are deleted."""
    store = Explaining(url)
    once = OnceKey(store, scope=SINGLE_TENANT, policy=Policy(effects="phased"))
    verdicts: list[Verdict] = [Confirmed(201), Refuted("not there"), StillUnknown()]

    @once.resolver("POST /payments")
    async def ask(inquiry: Inquiry) -> Verdict:
        return verdicts[int(inquiry.key[:8], 16) % 3]

    @once.resume("POST /payments")
    async def go_on(op: Resumption) -> Answer:
        return 201, {"ride": op.result("ride")}

    class Enough(Reaper):
        deleted = 0

        def _purge(self) -> int:
            self.deleted += (done := super()._purge())
            return done if self.deleted < reaped else 0

    upkeep = Upkeep(
        once,
        sweeper=Sweeper(store, batch=200),
        reaper=Enough(store, batch=200, share=1.0),
        reconciler=Reconciler(once, batch=200),
        resumer=Resumer(once, batch=200),
    )
    turns: dict[str, Any] = {
        turn.duty: turn.result.as_json() if turn.result else turn.error for turn in upkeep.run_once()
    }
    soft = Upkeep(store, reaper=Reaper(store, soft=True, batch=200, share=1.0)) if reaped <= 10_000 else upkeep
    soft.run_once()
    look(store)
    once.ingest_blocking(Confirmed(201), provider_id="ch_1")
    once.close()
    assert turns["sweep"] == {"released": DUE // 2, "doubted": DUE // 2}, turns
    assert turns["reap"]["timed_out"] == turns["reap"]["doubted"] == DUE, turns
    assert turns["reconcile"]["due"] >= DUE, turns
    assert turns["resume"]["completed"] >= DUE, turns
    return store.looked
