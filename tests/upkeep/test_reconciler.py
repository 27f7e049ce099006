"""The reconciler: resolvers are asked until one knows, and what they say is done once."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import Confirmed, OnceKey, Refuted, StillUnknown
from oncekey.core.record import Record
from oncekey.core.states import Actor, Event, State
from oncekey.core.verdicts import Verdict
from oncekey.errors import OutcomeUnknown
from oncekey.upkeep import Inquiry, Reconciler
from oncekey.web.asgi import IdempotencyMiddleware
from tests.upkeep.key_store import LEASE, OPERATION, KeyStore
from tests.upkeep.resolving import QUARANTINE, resolve

# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_confirmed_completes_the_key_with_its_response(rows: KeyStore) -> None:
    """The key is completed with that response, as with a handler's; the audit line has the actor and the reason."""
    (record,) = rows.unknown()
    answer = Confirmed(201, {"id": "pay_9"}, headers={"Location": "/payments/9"}, reason="found in their ledger")
    assert resolve(rows.once(), lambda inquiry: answer) == {"due": 1, "confirmed": 1}
    found = rows.get(record)
    assert (found.state, found.reconcile_at) == (State.COMPLETED, None)
    assert found.response is not None
    assert (found.response.status, found.response.body) == (201, b'{"id":"pay_9"}')
    assert dict(found.response.headers) == {"location": "/payments/9", "content-type": "application/json"}
    (line,) = rows.store.audit(record.scope, record.key, 10)
    assert (line.who, line.event, line.before, line.after) == ("reconciler", "confirm", "unknown", "completed")
    assert line.why == "found in their ledger"
    assert rows.names() == ["ReconcileResolved"]


def test_confirmed_failure_completes_the_key(rows: KeyStore) -> None:
    """Completed with its failure: it happened, and a retry must not make another."""
    (record,) = rows.unknown()
    resolve(rows.once(), lambda inquiry: Confirmed(402, {"error": "declined"}))
    found = rows.get(record)
    assert (found.state, found.response and found.response.status) == (State.COMPLETED, 402)


def test_refuted_after_the_quarantine_makes_the_key_retryable(rows: KeyStore) -> None:
    (record,) = rows.unknown()
    rows.age(QUARANTINE + 1)
    assert resolve(rows.once(), lambda inquiry: Refuted("no such charge")) == {"due": 1, "refuted": 1}
    found = rows.get(record)
    assert (found.state, found.last_error) == (State.FAILED_RETRYABLE, "no such charge")
    assert rows.audit(record) == [("reconciler", "unknown", "failed_retryable")]


@pytest.mark.parametrize(("verdict", "lines"), [(Refuted("no such charge"), 1), (Confirmed(200), 0)])
def test_refuted_message_is_logged_with_what_to_do_at_the_broker(
    rows: KeyStore, verdict: Verdict, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    rows.unknown(operation="message payments/billing")
    rows.age(QUARANTINE + 1)
    once = rows.once()
    once.resolve_with("message payments/billing", lambda inquiry: verdict)
    resolve(once, lambda inquiry: verdict)
    found = [each.getMessage() for each in caplog.records if "move its copy back to payments/billing" in each.message]
    assert len(found) == lines
    assert all("oncekey keys show" in line for line in found)


def test_refuted_before_the_quarantine_is_over(rows: KeyStore) -> None:
    """Refused, and asked again when it is over: also at the last try, which would otherwise end in the dead letters."""
    (record,) = rows.unknown()
    rows.age(QUARANTINE - 30)
    once = rows.once()
    assert resolve(once, lambda inquiry: Refuted("no such charge"), max_tries=1) == {"due": 1, "postponed": 1}
    found = rows.get(record)
    assert (found.state, rows.audit(record)) == (State.UNKNOWN, [])
    assert found.reconcile_at is not None
    assert 20 < found.reconcile_at - found.now <= 30
    assert resolve(once, lambda inquiry: Refuted("no such charge")) == {}
    rows.age(31)
    assert resolve(once, lambda inquiry: Refuted("no such charge")) == {"due": 1, "refuted": 1}


def test_asked_before_the_quarantine_is_over_and_answered_after_it(rows: KeyStore) -> None:
    """An answer from before that does not cover what the paused owner did meanwhile, so the resolver is asked again."""
    (record,) = rows.unknown()
    rows.age(QUARANTINE - 30)
    happened: list[str] = []

    def slow(inquiry: Inquiry) -> Verdict:
        verdict = Confirmed(201, body="charged") if happened else Refuted("no such charge")
        if not happened:
            happened.append("the owner wakes up, and calls")
            rows.age(60)
        return verdict

    once = rows.once()
    assert resolve(once, slow) == {"due": 1, "postponed": 1}
    assert rows.get(record).state is State.UNKNOWN
    rows.age(60)
    assert resolve(once, slow) == {"due": 1, "confirmed": 1}


def test_quarantine_of_the_row_is_the_reconcilers(rows: KeyStore) -> None:
    (record,) = rows.unknown(quarantine=10.0)
    rows.age(11)
    assert resolve(rows.once(), lambda inquiry: Refuted("no")) == {"due": 1, "refuted": 1}
    assert rows.get(record).state is State.FAILED_RETRYABLE


def test_still_unknown_is_asked_again_later(rows: KeyStore) -> None:
    """In growing steps with jitter; the reason stands in the row, the tries are counted, nothing is in the audit."""
    (record,) = rows.unknown()
    once = rows.once()
    pauses = []
    for tries in (1, 2, 3, 4):
        assert resolve(once, lambda inquiry: StillUnknown("they are down"), max_backoff=25.0) == {
            "due": 1,
            "postponed": 1,
        }
        found = rows.get(record)
        assert found.reconcile_at is not None
        words = "they are down; it became unknown because: the handler raised"
        assert (found.state, found.reconcile_tries, found.last_error) == (State.UNKNOWN, tries, words)
        pauses.append(found.reconcile_at - found.now)
        assert resolve(once, lambda inquiry: Confirmed(200)) == {}, "not due yet"
        rows.age(pauses[-1] + 0.01)
    for pause, wanted in zip(pauses, (10, 20, 25, 25), strict=True):
        assert 0.74 * wanted <= pause <= 1.26 * wanted
    assert rows.store.audit(record.scope, record.key, 10) == []


def test_after_the_last_try_a_dead_letter(rows: KeyStore) -> None:
    """Unknown still, but no resolver is asked any more; that is a line in the audit and an error in the log."""
    (record,) = rows.unknown()
    once = rows.once()
    assert resolve(once, lambda inquiry: StillUnknown("no answer"), max_tries=2) == {"due": 1, "postponed": 1}
    rows.age(100)
    assert resolve(once, lambda inquiry: StillUnknown("no answer"), max_tries=2) == {"due": 1, "dead": 1}
    found = rows.get(record)
    assert (found.state, found.reconcile_at, found.reconcile_tries) == (State.UNKNOWN, None, 2)
    rows.age(1_000_000)
    assert resolve(once, lambda inquiry: Confirmed(200)) == {}
    (line,) = rows.store.audit(record.scope, record.key, 10)
    assert (line.who, line.before, line.after) == ("reconciler", "unknown", "unknown")
    assert line.why == "asked 2 times, and no more: no answer"
    assert rows.names()[-1] == "ReconcileGaveUp"
    assert rows.store.counts().dead == 1


# -- many at once ------------------------------------------------------------------------------------------------------


def test_reconciler_takes_all_keys_in_batches(rows: KeyStore) -> None:
    rows.unknown(7)
    assert resolve(rows.once(), lambda inquiry: Confirmed(200), batch=3) == {"due": 7, "confirmed": 7}


def test_another_tenants_key_does_not_wait_for_two_thousand_of_one(rows: KeyStore) -> None:
    """Resolvers are asked about a few keys at a time, so what counts is how many stand before it."""
    rows.unknown(2_000, scope="hostile")
    rows.age(1)
    rows.unknown(1, scope="patient")
    asked: list[str] = []

    def resolver(inquiry: Inquiry) -> Verdict:
        asked.append(inquiry.scope)
        return StillUnknown()

    class Enough(threading.Event):
        def is_set(self) -> bool:
            return bool(asked)  # one batch

    once = rows.once()
    once.resolve_with(OPERATION, resolver)
    reconciler = Reconciler(once)
    try:
        assert reconciler.run(Enough()).due == 100
    finally:
        reconciler.close()
    assert asked.index("patient") < 16, "two rounds of eight at once"


def test_dry_run_calls_no_resolver(rows: KeyStore) -> None:
    (record,) = rows.unknown()
    once = rows.once()

    @once.resolver(OPERATION)
    def never(inquiry: Inquiry) -> Verdict:
        raise AssertionError

    assert Reconciler(once).run(dry_run=True).as_json()["due"] == 1
    assert (rows.get(record).reconcile_tries, rows.told) == (0, [])


def test_two_reconcilers_settle_each_key_once(shop: KeyStore) -> None:
    """Each key is settled once, with one line in the audit, whichever asks; and hardly any is asked about twice."""
    records = shop.unknown(60)
    asked: list[str] = []

    def resolver(inquiry: Inquiry) -> Verdict:
        asked.append(inquiry.key)
        return Confirmed(201, {"by": threading.get_ident()})

    onces = [shop.once(shop.another()) for _ in range(2)]
    done: list[int] = []

    def work(once: OnceKey) -> None:
        once.resolve_with(OPERATION, resolver)
        reconciler = Reconciler(once, batch=60)
        both.wait()
        done.append(reconciler.run().confirmed)
        reconciler.close()
        once.store.disconnect()

    both = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(once,)) for once in onces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(done) == 60
    assert shop.states(records) == [State.COMPLETED] * 60
    assert all(len(shop.audit(record)) == 1 for record in records)


def test_second_verdict_after_a_faster_one_changes_nothing(rows: KeyStore) -> None:
    """The key is settled while the resolver is being asked: the second verdict changes nothing."""
    (record,) = rows.unknown()
    once = rows.once()

    def slow(inquiry: Inquiry) -> Verdict:
        once.ingest_blocking(Confirmed(201, {"first": True}), key=record.key)
        return Confirmed(500, {"second": True})

    assert resolve(once, slow) == {"due": 1}
    found = rows.get(record)
    assert found.response is not None
    assert (found.response.status, len(rows.audit(record))) == (201, 1)


def test_settled_before_it_was_asked_about(rows: KeyStore) -> None:
    """It looks again right before it asks: of two that were due, a webhook has settled the second meanwhile."""
    records = rows.unknown(2)
    once = rows.once()
    asked = []

    def resolver(inquiry: Inquiry) -> Verdict:
        asked.append(inquiry.key)
        for record in records:
            if record.key != inquiry.key:
                once.ingest_blocking(Confirmed(201), key=record.key)
        return Confirmed(201)

    assert resolve(once, resolver, concurrency=1) == {"due": 2, "confirmed": 1}
    assert len(asked) == 1


@pytest.mark.parametrize("verdict", [Refuted("not there"), Confirmed(201)], ids=["refuted", "confirmed"])
def test_a_verdict_about_another_attempt(rows: KeyStore, verdict: Verdict) -> None:
    """Refuted and retried while the resolver was being asked: what it found out is about the attempt before."""
    (record,) = rows.unknown()
    rows.age(LEASE + QUARANTINE + 1)
    once = rows.once()
    again: list[Record] = []

    def slow(inquiry: Inquiry) -> Verdict:
        once.ingest_blocking(Refuted("not there"), key=record.key)
        (retryable,) = [rows.get(record)]
        (wanted,) = rows.reservations(1)
        taken = rows.moved([retryable], Event.RETRY, Actor.REQUEST, reservation=wanted)
        again.extend(rows.moved(taken, Event.DOUBT))
        rows.store.disconnect()  # of this thread
        return verdict

    assert resolve(once, slow) == {"due": 1}
    found = rows.get(record)
    assert (found.state, found.owner, found.attempt) == (State.UNKNOWN, again[0].owner, 2)


# -- for the client ----------------------------------------------------------------------------------------------------


async def test_confirmed_after_its_expiry_is_replayed(rows: KeyStore) -> None:
    """An unknown never expires. Confirmed after its time, it is replayed for a whole retention, and not run again."""
    calls = 0

    async def pay(request: Request) -> JSONResponse:
        nonlocal calls
        calls += 1
        raise OutcomeUnknown

    once = rows.once()
    routes = [Route("/payments", pay, methods=["POST"])]
    app = Starlette(routes=routes, middleware=[Middleware(IdempotencyMiddleware, once=once)])
    once.resolve_with(OPERATION, lambda inquiry: Confirmed(201, {"id": 9}, headers={"Location": "/payments/9"}))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:

        async def send() -> httpx.Response:
            return await client.post(
                "/payments", json={"cents": 5}, headers={"Idempotency-Key": "the-key-of-the-client"}
            )

        assert (await send()).status_code == 409
        rows.age(3 * 86_400)
        assert (await send()).status_code == 409
        reconciler = Reconciler(once)
        loop = asyncio.get_running_loop()

        def reconcile() -> int:
            confirmed = reconciler.run(loop=loop).confirmed
            rows.store.disconnect()
            return confirmed

        assert await asyncio.to_thread(reconcile) == 1
        rows.age(86_000)
        replayed = await send()
        assert (replayed.status_code, replayed.json()) == (201, {"id": 9})
        assert replayed.headers["idempotency-replayed"] == "true"
        assert replayed.headers["location"] == "/payments/9"
    assert calls == 1
    await once.aclose()
