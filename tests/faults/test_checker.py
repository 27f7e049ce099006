"""The checker sees what it claims to see: an honest run has no violation, and each one planted in it is told."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oncekey.core.jobs import JobState
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import State
from tests.faults.app import KINDS
from tests.faults.campaign import Run
from tests.faults.checker import PROMISES, check
from tests.faults.clients import Ask, History, Name, pay_all
from tests.faults.evidence import Evidence
from tests.faults.shop import Shop

Plant = Callable[["Site"], None]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    """One payment of each kind for each of two tenants, under the same keys, and nothing goes wrong."""
    run = Run("sqlite", 1, 1, tmp_path_factory.mktemp("shop"))
    history = History()
    with Shop(run, lease=10.0) as shop:
        shop.start()
        asks = [Ask(kind, f"key-{kind}", 100, scope) for kind in KINDS for scope in ("acme", "globex")]
        asyncio.run(pay_all(shop.port, history, asks, 1))
        while shop.ask("SELECT 1 FROM idempotency_outbox WHERE state <> 'done'"):
            time.sleep(0.02)
        return shop.evidence(history)


class Site:
    """A copy of the evidence, to be tampered with."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = copy.deepcopy(evidence)

    def name(self, kind: str) -> Name:
        return ("acme", f"key-{kind}")

    def record(self, kind: str, **changes: Any) -> None:
        records, name = self.evidence.tables.records, self.name(kind)
        records[name] = replace(records[name], **changes)

    def drop(self, listed: str, kind: str) -> None:
        getattr(self.evidence, f"{listed}_of").pop(self.name(kind))

    def repeat(self, listed: str, kind: str, **changes: Any) -> None:
        found = getattr(self.evidence, f"{listed}_of")[self.name(kind)]
        found.append(replace(found[0], **changes))

    def change(self, listed: str, kind: str, **changes: Any) -> None:
        found = getattr(self.evidence, f"{listed}_of")[self.name(kind)]
        found[:] = [replace(each, **changes) for each in found]

    def answer(self, kind: str, **changes: Any) -> None:
        """To the client's last attempt."""
        made = self.evidence.history.attempts[self.name(kind)]
        made[-1] = replace(made[-1], **changes)

    def refuse_first(self, kind: str) -> None:
        """Before its handler ran."""
        first = self.evidence.history.attempts[self.name(kind)][0]
        first.status, first.answered_at = 409, first.sent_at

    def forget(self, kind: str) -> Record:
        return self.evidence.tables.records.pop(self.name(kind))


def _told(**told: Any) -> bytes:
    return json.dumps(told).encode()


def _stored(body: bytes) -> StoredResponse:
    return StoredResponse(201, (), body)


PLANTED: list[tuple[str, str, Plant]] = [
    ("I1", "'charge' happened 2 times", lambda site: site.repeat("calls", "external")),
    ("I1", "'charge' happened 2 times", lambda site: site.repeat("calls", "deferred", downstream_key="another")),
    ("I1", "'written' happened 2 times", lambda site: site.repeat("rows", "transactional")),
    ("I1", "'opened' happened 2 times", lambda site: site.repeat("rows", "once")),
    ("I1", "never charged", lambda site: site.drop("calls", "repeatable")),
    ("I1", "row 'opened' is missing", lambda site: site.drop("rows", "phased")),
    ("I1", "rolled back", lambda site: site.record("transactional", state=State.FAILED_RETRYABLE)),
    ("I1", "no record of it", lambda site: (site.forget("external"), None)[1]),
    ("I1", "no client asked for it", lambda site: (site.evidence.history.attempts.pop(site.name("once")), None)[1]),
    ("I2", "2 different answers", lambda site: site.answer("external", body=_told(attempt=1))),
    ("I2", "2 different answers", lambda site: site.answer("external", status=200)),
    ("I2", "not what was answered", lambda site: site.record("external", response=_stored(_told(attempt=1)))),
    ("I2", "the key is unknown", lambda site: site.record("external", state=State.UNKNOWN)),
    ("I2", "the key is gone", lambda site: (site.forget("external"), None)[1]),
    ("I2", "and then 409", lambda site: site.answer("external", status=409, headers={"retry-after": "1"})),
    ("I3", "attempt 1 wrote the response", lambda site: site.record("external", attempt=2)),
    ("I3", "attempt 1 wrote row 'written'", lambda site: site.record("deferred", attempt=2)),
    ("I3", "attempt 3 wrote row 'written'", lambda site: site.change("rows", "transactional", attempt=3)),
    ("I4", "no process works on it", lambda site: site.record("phased", state=State.IN_PROGRESS)),
    ("I4", "not on the reconciler's list", lambda site: site.record("once", state=State.UNKNOWN)),
    ("I4", "no job will settle it", lambda site: site.record("deferred", state=State.PENDING)),
    ("I4", "gave up", lambda site: site.evidence.history.outcomes.update({site.name("once"): "stuck"})),
    ("I5", "told of key key-9", lambda site: site.answer("external", body=_told(key="key-9"))),
    ("I5", "asked for 100 and was told 7", lambda site: site.answer("external", body=_told(cents=7))),
    ("I5", "is another request", lambda site: site.answer("external", ask=Ask("external", "key-external", 7))),
    ("I6", "no client of acme had used the key before", lambda site: site.refuse_first("external")),
    ("I6", "was told of globex", lambda site: site.answer("external", body=_told(scope="globex"))),
    ("I7", "ran 2 times for attempt 1", lambda site: site.repeat("runs", "external")),
    ("I7", "the store has no record", lambda site: (site.forget("external"), None)[1]),
    ("I7", "ran for attempts [2]", lambda site: site.change("runs", "external", attempt=2)),
    ("I8", "not in the outbox", lambda site: site.drop("jobs", "transactional")),
    ("I8", "never heard of it", lambda site: site.drop("calls", "transactional")),
    ("I8", "without a reason", lambda site: site.change("jobs", "transactional", state=JobState.DEAD)),
    ("I8", "was cancelled", lambda site: site.change("jobs", "transactional", state=JobState.CANCELLED)),
    ("I8", "is still ready", lambda site: site.evidence.tables.jobs.append(
        replace(site.evidence.tables.jobs[0], state=JobState.READY))),
]  # fmt: skip


def checked(evidence: Evidence, **how: Any) -> Run:
    run = Run("sqlite", 1, 1, Path())
    check(run, evidence, drained=True, **how)
    return run


def test_honest_run_has_no_violation(honest: Evidence) -> None:
    assert checked(honest).violations == []
    assert {call.what for call in honest.calls} == {"charge", "receipt"}
    assert len(honest.tables.records) == 2 * len(KINDS)


def test_every_promise_has_its_plant() -> None:
    assert {promise for promise, _, _ in PLANTED} == set(PROMISES)


@pytest.mark.parametrize(("promise", "says", "plant"), PLANTED, ids=[f"{each[0]} {each[1]}" for each in PLANTED])
def test_planted_violation_is_found(honest: Evidence, promise: str, says: str, plant: Plant) -> None:
    site = Site(honest)
    plant(site)
    found = [each for each in checked(site.evidence).violations if each.startswith(f"{promise}: ") and says in each]
    assert len(found) == 1
    assert "record  " in found[0]  # with its history
    assert "key-" in found[0]


def test_text_of_a_key_has_all_its_evidence(honest: Evidence) -> None:
    """It lists the requests, runs and charges, the rows, steps and jobs, and the record."""
    told = "".join(honest.text(("acme", f"key-{kind}")) for kind in ("phased", "transactional"))
    for part in (
        "client  ",
        "handler ",
        "ledger  ",
        "row     opened",
        "step    ",
        "job     receipt",
        "record  Record(",
    ):
        assert part in told, part


def test_the_residue_is_not_a_violation(honest: Evidence) -> None:
    site = Site(honest)
    site.repeat("calls", "external")
    assert checked(site.evidence, residue={site.name("external")}).violations == []
