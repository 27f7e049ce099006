"""A packet whose transaction ends before the packet does writes nothing over what a rival has written meanwhile.

In a Galera cluster, a write of another node can end a transaction between two statements of a packet; the statements
that follow then run without one, with what the first statements had seen. Here a ROLLBACK and the rival's write stand
in the packet itself, before the first statement that writes. The store sends the packet again, as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from pymysql.err import OperationalError

from oncekey.core.audit import Audit
from oncekey.core.jobs import Conclusion, JobEnd, JobState
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import Actor, Event, State
from oncekey.core.steps import Step, StepKind, StepsOf, StepState
from oncekey.core.swaps import Swap, swap
from oncekey.stores.mysql import MysqlStore
from oncekey.stores.mysql.connection import DEADLOCK, Connection
from oncekey.stores.mysql.packets import PACKAGE, statement
from oncekey.stores.sql import queries
from tests.engine.doubles import RESPONSE
from tests.outbox.outbox_table import OutboxTable
from tests.stores.mysql import complete, older, put

_FIRST_WRITE = re.compile(r";\s*(?=(UPDATE|DELETE|INSERT)\b)")
HOUR = "utc_timestamp(6) + INTERVAL 1 HOUR"
TAKEN = f"owner = 'rival', attempt = attempt + 1, lease_until = {HOUR}"
TAKES_JOB = f"UPDATE idempotency_outbox SET state = 'running', {TAKEN}"
TAKES_KEY = f"UPDATE idempotency_keys SET state = 'in_progress', {TAKEN}"


@pytest.fixture
def outbox(ready_mysql: str) -> Iterator[OutboxTable]:
    table = OutboxTable(ready_mysql)
    yield table
    table.close()


@pytest.fixture
def store(outbox: OutboxTable) -> MysqlStore:
    assert isinstance(outbox.store, MysqlStore)
    return outbox.store


@contextmanager
def torn(rival: str) -> Iterator[list[str]]:
    """The next packet of a transaction loses it, and the rival's statement comes in between."""
    real = Connection.run
    packets: list[str] = []

    def run(self: Connection, text: str) -> list[object]:
        if "COMMIT" not in text or packets:
            return real(self, text)
        packets.append(text)
        return real(self, _FIRST_WRITE.sub(lambda mark: f"; ROLLBACK; {rival}; ", text, count=1))

    Connection.run = run  # type: ignore[method-assign]
    try:
        yield packets
    finally:
        Connection.run = real  # type: ignore[method-assign]
    assert packets, "no packet was torn"


def claimed(outbox: OutboxTable, of: Record | None = None) -> str:
    """A job that runs under the owner ``me``."""
    job_id = outbox.add("charge", of=of)
    assert [job.id for job in outbox.store.claim("me", ["charge"], 1, 60.0)] == [job_id]
    return job_id


def test_job_that_a_rival_claims_meanwhile_stays_the_rivals(outbox: OutboxTable, store: MysqlStore) -> None:
    job_id = outbox.add("charge")
    with torn(TAKES_JOB):
        assert store.claim("me", ["charge"], 10, 60.0) == []
    job = outbox.get(job_id)
    assert (job.state, job.owner, job.attempt) == (JobState.RUNNING, "rival", 1)


def test_job_that_a_rival_takes_over_is_not_concluded_and_its_key_not_settled(
    outbox: OutboxTable, store: MysqlStore
) -> None:
    (key,) = outbox.pending()
    job_id = claimed(outbox, key)
    with torn(TAKES_JOB):
        ended = Conclusion(job_id, "me", JobEnd.DONE, settle=State.COMPLETED, response=RESPONSE)
        assert store.conclude([ended]) == [False]
    job = outbox.get(job_id)
    assert (job.state, job.owner) == (JobState.RUNNING, "rival")
    assert outbox.key(key).state is State.PENDING


def test_job_that_a_rival_takes_over_is_not_renewed(outbox: OutboxTable, store: MysqlStore) -> None:
    """The UPDATE is the first statement, so the rival comes after it."""
    job_id = claimed(outbox)
    real = Connection.run
    texts: list[str] = []

    def run(self: Connection, text: str) -> list[object]:
        if "SELECT j.id" in text and not texts:
            texts.append(text)
            text = text.replace("SELECT j.id", f"ROLLBACK; {TAKES_JOB}; SELECT j.id")
        return real(self, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Connection, "run", run)
        assert store.renew_jobs("me", [job_id], 60.0) == []
    assert texts
    assert outbox.get(job_id).owner == "rival"


def test_key_whose_job_a_rival_claims_is_not_timed_out(outbox: OutboxTable, store: MysqlStore) -> None:
    (key,) = outbox.pending()
    job_id = outbox.add("charge", of=key)
    older(store.url, 100_000.0)
    with torn(TAKES_JOB):
        assert store.time_out(10, StoredResponse(408, (), b"")) == []
    assert outbox.key(key).state is State.PENDING
    assert outbox.get(job_id).state is JobState.RUNNING


def test_dead_letter_that_a_rival_discards_is_not_retried(outbox: OutboxTable, store: MysqlStore) -> None:
    job_id = claimed(outbox)
    assert store.conclude([Conclusion(job_id, "me", JobEnd.DEAD, error="no")]) == [True]
    with torn("UPDATE idempotency_outbox SET state = 'cancelled', finished_at = utc_timestamp(6)"):
        assert store.redirect(job_id, JobState.READY, Audit("ana", "again")) is None
    job = outbox.get(job_id)
    assert job.state is JobState.CANCELLED
    assert store.audit(job.scope, job.key, 10) == []


def test_key_that_a_rival_starts_over_is_not_purged(store: MysqlStore) -> None:
    (record,) = put(store, "key-1")
    (moved,) = store.swap([advance(record)])
    assert moved is not None
    assert store.swap([complete(moved)]) != [None]
    older(store.url, 1_000_000.0)
    with torn(f"{TAKES_KEY}, expires_at = {HOUR}"):
        assert store.purge(10) == 0
    (row,) = store.read([("tenant-1", "key-1")])
    assert row is not None
    assert row.owner == "rival"
    assert [step.name for step in store.steps([StepsOf("tenant-1", "key-1")])[0]] == ["charge"]


def advance(record: Record) -> Swap:
    step = Step("charge", StepKind.EFFECT, StepState.DONE, True, b'"me"')
    return swap(record, Event.ADVANCE, Actor.OWNER, step=step, lease_seconds=60.0)


MOVES: dict[str, Callable[[Record], Swap]] = {
    "complete": complete,
    "release": lambda record: swap(record, Event.RELEASE, Actor.OWNER, audit=Audit("ana", "why")),
    "advance": advance,
    "discard": lambda record: swap(record, Event.DISCARD, Actor.OWNER),
}


@pytest.mark.parametrize("move", MOVES)
def test_key_that_a_rival_takes_over_is_not_moved(store: MysqlStore, move: str) -> None:
    (record,) = put(store, "key-1")
    with torn(TAKES_KEY):
        assert store.swap([MOVES[move](record)]) == [None]
    (row,) = store.read([("tenant-1", "key-1")])
    assert row is not None
    assert (row.state, row.owner, row.attempt, row.response) == (State.IN_PROGRESS, "rival", 2, None)
    assert store.steps([StepsOf("tenant-1", "key-1")]) == [[]]
    assert store.audit("tenant-1", "key-1", 10) == []


@pytest.mark.parametrize("move", MOVES)
def test_commit_in_a_galera_cluster_tells_of_a_lost_transaction(
    store: MysqlStore, move: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two statements of one packet, the server would say nothing, and COMMIT would succeed."""
    (record,) = put(store, "key-1")
    real = Connection._run
    packets: list[str] = []

    def run(self: Connection, text: str) -> list[object]:
        packets.append(text)
        if text == "COMMIT" and packets.count(text) == 1:
            real(self, f"ROLLBACK; {TAKES_KEY}")
            raise OperationalError(DEADLOCK, "a write of another node came first")
        return real(self, text)

    monkeypatch.setattr(Connection, "galera", True)
    monkeypatch.setattr(Connection, "_run", run)
    assert store.swap([MOVES[move](record)]) == [None]
    assert packets.count("COMMIT") == 2
    (row,) = store.read([("tenant-1", "key-1")])
    assert row is not None
    assert row.owner == "rival"


def test_every_transaction_ends_with_its_packet() -> None:
    """Then COMMIT can be a packet of its own."""
    texts = [statement(name) for name in queries.names(PACKAGE)]
    committing = [text for text in texts if re.search(r"\bCOMMIT\b", text)]
    assert len(committing) > 10
    assert [text for text in committing if not text.endswith(";\nCOMMIT") or text.count("COMMIT") > 1] == []
