"""Judges what the probes of the SQL stores found: pure, and the same for all.

A probe asks its database. The limits and the texts are here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from math import ceil

from oncekey.core.diagnosis import Diagnosis, Level
from oncekey.stores.sql import queries

SAMPLE = 1_000
"""How many finished keys, the newest, show how long handlers take."""
ENOUGH = 20
"""An operation with fewer finished keys is not judged."""
CLOCK_SECONDS = 5.0
"""How far two clocks may be apart: more than NTP leaves, less than a usual time-out."""

_INDEX = re.compile(r"^CREATE INDEX (?:IF NOT EXISTS )?(\w+) [^;]+", re.MULTILINE)

USES: Mapping[str, frozenset[str]] = {
    name: frozenset(f"idempotency_{index}" for index in indexes)
    for name, indexes in {
        "due_leases": ["keys_leases"],
        "due_expired": ["keys_expired"],
        "due_abandoned": ["keys_abandoned"],
        "due_unknowns": ["keys_unknowns", "keys_turns"],
        "due_lapsed": ["keys_lapsed"],
        "due_resumable": ["keys_resumable", "keys_turns"],
        "fair_scopes": ["keys_turns"],
    }.items()
}
"""The statements that upkeep repeats where there are partial indexes, each with the indexes that serve it: the planner
takes one of them, by what it knows of the rows. Without any of them the statement reads all keys."""


def wanted_indexes(package: str) -> dict[str, str]:
    """The indexes that the migrations make, each with its statement. No migration has dropped one."""
    script = "\n".join(migration.sql for migration in queries.migrations(package))
    return {match[1]: " ".join(match[0].split()) for match in _INDEX.finditer(script)}


def schema(package: str, trouble: str | None) -> Diagnosis:
    newest = queries.migrations(package)[-1]
    if trouble is not None:
        found, _, advice = trouble.rpartition(": ")
        return Diagnosis("schema", Level.FAIL, found, advice)
    return Diagnosis("schema", Level.OK, f"{newest.number:04d}_{newest.name}, as this version wants it")


def indexes(package: str, there: Collection[str], broken: Collection[str] = ()) -> Diagnosis:
    """Whether all indexes exist; ``broken`` are those that the database does not keep up to date."""
    wanted = wanted_indexes(package)
    missing = [name for name in wanted if name not in there or name in broken]
    if not missing:
        return Diagnosis("indexes", Level.OK, f"all {len(wanted)} are there")
    steps = [f"DROP INDEX {name};" for name in missing if name in broken]
    steps += [f"{wanted[name]};" for name in missing]
    return Diagnosis(
        "indexes",
        Level.FAIL,
        f"missing or not valid: {', '.join(missing)}; upkeep and webhooks read whole tables without them",
        f"run {' '.join(steps)}",
    )


def plans(used: Mapping[str, Collection[str]], uses: Mapping[str, frozenset[str]] = USES) -> Diagnosis:
    """Whether upkeep's statements use their indexes; ``used`` names the indexes in each statement's plan."""
    lost = [name for name, serving in uses.items() if serving.isdisjoint(used[name])]
    if not lost:
        return Diagnosis("plans", Level.OK, f"all {len(uses)} statements of upkeep use their index")
    return Diagnosis(
        "plans",
        Level.FAIL,
        f"without an index: {', '.join(lost)}; each round of upkeep reads all keys",
        "see the line on indexes; if all are there, report it with the plan of the statement",
    )


def leases(sample: Iterable[tuple[str, float, float]]) -> Diagnosis:
    """Whether leases are long enough; ``sample``: operation, seconds until it was done, seconds it was leased for.

    A lease that was never renewed is as long as the policy says, so the shortest of an operation is its lease.
    """
    times: dict[str, list[tuple[float, float]]] = {}
    for operation, took, leased in sample:
        times.setdefault(operation, []).append((took, leased))
    seen = [
        (sorted(took for took, _ in rows)[ceil(0.99 * len(rows)) - 1], min(leased for _, leased in rows), name)
        for name, rows in times.items()
        if len(rows) >= ENOUGH
    ]
    if not seen:
        return Diagnosis("lease", Level.OK, f"no operation with {ENOUGH} finished keys yet to measure it by")
    took, lease, name = max(seen, key=lambda each: each[0] / max(each[1], 0.001))
    found = f"{name}: 99 % are done within {took:.3g} s, and the lease is {lease:.3g} s"
    if took <= lease:
        return Diagnosis("lease", Level.OK, found)
    return Diagnosis(
        "lease",
        Level.WARN,
        f"{found}: a process that pauses for long loses its key in the middle of the work",
        f"give the route Policy(lease=timedelta(seconds={ceil(took * 3)})) or more, or make it faster",
    )


def clock(difference: float, uncertain: float) -> Diagnosis:
    """Judges the difference: the database's clock minus this host's.

    Leases are on the database's clock, so they stay correct. Times in logs mislead the operator.
    """
    apart = max(0.0, abs(difference) - uncertain)
    if apart <= CLOCK_SECONDS:
        return Diagnosis("clock", Level.OK, "the database's and this host's agree")
    side = "ahead of" if difference > 0 else "behind"
    return Diagnosis(
        "clock",
        Level.WARN,
        f"the database's is {apart:,.0f} s {side} this host's; leases are safe (they are the database's), "
        "run_at of jobs and the times in logs are not",
        "synchronise both hosts' clocks (NTP)",
    )
