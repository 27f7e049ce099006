"""The reconciler: resolvers are asked until one knows, and what they say is done once."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import Confirmed, OnceKey, Operation, Policy, Refuted, StillUnknown
from oncekey.admin.dead_letters import dead_letters
from oncekey.core.health import NO_RESOLVER
from oncekey.core.record import Record
from oncekey.core.states import Actor, Event, State
from oncekey.core.verdicts import Verdict
from oncekey.errors import ConfigurationError, OutcomeUnknown
from oncekey.upkeep import Inquiry, Reconciler
from oncekey.web.asgi import IdempotencyMiddleware
from tests.upkeep.key_store import LEASE, OPERATION, RETENTION, KeyStore

QUARANTINE = 300.0
"""The policy's default."""


def _resolve(once: OnceKey, resolver: Callable[[Inquiry], Verdict], **how: object) -> dict[str, int]:
    """One run with this resolver: what it did."""
    if OPERATION not in once.resolvers:
        once.resolve_with(OPERATION, resolver)
    reconciler = Reconciler(once, **how)  # type: ignore[arg-type]
    try:
        return {name: number for name, number in reconciler.run().as_json().items() if number}
    finally:
        reconciler.close()


def _remembering(seen: list[Inquiry]) -> Callable[[Inquiry], Verdict]:
    def resolver(inquiry: Inquiry) -> Verdict:
        seen.append(inquiry)
        return StillUnknown()

    return resolver


# -- verdicts ----------------------------------------------------------------------------------------------------------


def test_confirmed_completes_the_key_with_its_response(rows: KeyStore) -> None:
    """The key is completed with that response, as with a handler's; the audit line has the actor and the reason."""
    (record,) = rows.unknown()
    answer = Confirmed(201, {"id": "pay_9"}, headers={"Location": "/payments/9"}, reason="found in their ledger")
    assert _resolve(rows.once(), lambda inquiry: answer) == {"due": 1, "confirmed": 1}
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
    _resolve(rows.once(), lambda inquiry: Confirmed(402, {"error": "declined"}))
    found = rows.get(record)
    assert (found.state, found.response and found.response.status) == (State.COMPLETED, 402)


def test_refuted_after_the_quarantine_makes_the_key_retryable(rows: KeyStore) -> None:
    (record,) = rows.unknown()
    rows.age(QUARANTINE + 1)
    assert _resolve(rows.once(), lambda inquiry: Refuted("no such charge")) == {"due": 1, "refuted": 1}
    found = rows.get(record)
    assert (found.state, found.last_error) == (State.FAILED_RETRYABLE, "no such charge")
    assert rows.audit(record) == [("reconciler", "unknown", "failed_retryable")]


def test_refuted_before_the_quarantine_is_over(rows: KeyStore) -> None:
    """Refused, and asked again when it is over: also at the last try, which would otherwise end in the dead letters."""
    (record,) = rows.unknown()
    rows.age(QUARANTINE - 30)
    once = rows.once()
    assert _resolve(once, lambda inquiry: Refuted("no such charge"), max_tries=1) == {"due": 1, "postponed": 1}
    found = rows.get(record)
    assert (found.state, rows.audit(record)) == (State.UNKNOWN, [])
    assert found.reconcile_at is not None
    assert 20 < found.reconcile_at - found.now <= 30
    assert _resolve(once, lambda inquiry: Refuted("no such charge")) == {}
    rows.age(31)
    assert _resolve(once, lambda inquiry: Refuted("no such charge")) == {"due": 1, "refuted": 1}


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
    assert _resolve(once, slow) == {"due": 1, "postponed": 1}
    assert rows.get(record).state is State.UNKNOWN
    rows.age(60)
    assert _resolve(once, slow) == {"due": 1, "confirmed": 1}


def test_quarantine_of_the_row_is_the_reconcilers(rows: KeyStore) -> None:
    (record,) = rows.unknown(quarantine=10.0)
    rows.age(11)
    assert _resolve(rows.once(), lambda inquiry: Refuted("no")) == {"due": 1, "refuted": 1}
    assert rows.get(record).state is State.FAILED_RETRYABLE


def test_still_unknown_is_asked_again_later(rows: KeyStore) -> None:
    """In growing steps with jitter; the reason stands in the row, the tries are counted, nothing is in the audit."""
    (record,) = rows.unknown()
    once = rows.once()
    pauses = []
    for tries in (1, 2, 3, 4):
        assert _resolve(once, lambda inquiry: StillUnknown("they are down"), max_backoff=25.0) == {
            "due": 1,
            "postponed": 1,
        }
        found = rows.get(record)
        assert found.reconcile_at is not None
        words = "they are down; it became unknown because: the handler raised"
        assert (found.state, found.reconcile_tries, found.last_error) == (State.UNKNOWN, tries, words)
        pauses.append(found.reconcile_at - found.now)
        assert _resolve(once, lambda inquiry: Confirmed(200)) == {}, "not due yet"
        rows.age(pauses[-1] + 0.01)
    for pause, wanted in zip(pauses, (10, 20, 25, 25), strict=True):
        assert 0.74 * wanted <= pause <= 1.26 * wanted
    assert rows.store.audit(record.scope, record.key, 10) == []


def test_after_the_last_try_a_dead_letter(rows: KeyStore) -> None:
    """Unknown still, but no resolver is asked any more; that is a line in the audit and an error in the log."""
    (record,) = rows.unknown()
    once = rows.once()
    assert _resolve(once, lambda inquiry: StillUnknown("no answer"), max_tries=2) == {"due": 1, "postponed": 1}
    rows.age(100)
    assert _resolve(once, lambda inquiry: StillUnknown("no answer"), max_tries=2) == {"due": 1, "dead": 1}
    found = rows.get(record)
    assert (found.state, found.reconcile_at, found.reconcile_tries) == (State.UNKNOWN, None, 2)
    rows.age(1_000_000)
    assert _resolve(once, lambda inquiry: Confirmed(200)) == {}
    (line,) = rows.store.audit(record.scope, record.key, 10)
    assert (line.who, line.before, line.after) == ("reconciler", "unknown", "unknown")
    assert line.why == "asked 2 times, and no more: no answer"
    assert rows.names()[-1] == "ReconcileGaveUp"
    assert rows.store.counts().dead == 1


# -- resolvers ---------------------------------------------------------------------------------------------------------


def test_inquiry_has_steps_results_and_downstream_keys(rows: KeyStore) -> None:
    """Enough to ask a provider: the key, its steps with their results, and the downstream keys."""
    (record,) = rows.reserved()
    record = rows.step(record, "charge", "down-7", "ch_7")
    rows.moved([record], Event.DOUBT, last_error="TimeoutError")
    rows.age(60)
    seen: list[Inquiry] = []
    once = rows.once()
    _resolve(once, _remembering(seen))
    (inquiry,) = seen
    assert (inquiry.scope, inquiry.key, inquiry.operation) == (record.scope, record.key, OPERATION)
    assert (inquiry.attempt, inquiry.tries, inquiry.last_error) == (1, 0, "TimeoutError")
    assert (inquiry.recovery_point, inquiry.provider_id, inquiry.result("charge")) == ("started", "ch_7", None)
    assert [step.name for step in inquiry.steps] == ["charge"]
    assert inquiry.downstream_key("charge").startswith("oncekey-")
    assert 59 < inquiry.age < 90


def test_the_downstream_key_of_the_handler(rows: KeyStore) -> None:
    """What the handler gave to the provider is what the resolver asks for, and results of steps can be read."""
    (record,) = rows.half_done()
    rows.age(RETENTION + 1)
    (unknown,) = rows.moved([record], Event.DOUBT, Actor.REAPER)
    seen: list[Inquiry] = []
    _resolve(rows.once(), _remembering(seen))
    (inquiry,) = seen
    assert inquiry.downstream_key("charge") == Operation(unknown, Policy(), "t").downstream_key("charge")
    assert (inquiry.result("ride"), inquiry.result("charge"), inquiry.result("other")) == ({"id": 7}, None, None)


async def _raises(inquiry: Inquiry) -> Verdict:
    raise ConnectionError("cannot reach https://u:secret@provider/charges")


def _returns_nonsense(inquiry: Inquiry) -> Verdict:
    return None  # type: ignore[return-value]


async def _never_ends(inquiry: Inquiry) -> Verdict:
    await asyncio.Event().wait()
    raise AssertionError


def _quotes_rubbish(inquiry: Inquiry) -> Verdict:
    return StillUnknown("they said \0 and \ud800" + "x" * 2000)


@pytest.mark.parametrize(
    ("resolver", "words"),
    [
        (_raises, "the resolver raised ConnectionError: cannot reach …"),
        (_returns_nonsense, "the resolver returned NoneType"),
        (_never_ends, "the resolver took longer than 0.05 s"),
        (_quotes_rubbish, "they said  and ?"),
    ],
)
def test_a_resolver_that_fails_does_not_know(
    rows: KeyStore, resolver: Callable[[Inquiry], Verdict], words: str
) -> None:
    """Whatever it does: the others are asked all the same, and its words can be kept."""
    first, second = *rows.unknown(), *rows.unknown(operation="POST /refunds")
    once = rows.once()
    once.resolve_with("POST /refunds", lambda inquiry: Confirmed(200))
    assert _resolve(once, resolver, timeout=0.05) == {"due": 2, "postponed": 1, "confirmed": 1}
    found = rows.get(first)
    assert (found.state, found.reconcile_tries) == (State.UNKNOWN, 1)
    assert (found.last_error or "").startswith(words)
    said, _, cause = (found.last_error or "").partition("; it became unknown because: ")
    assert (len(said) <= 500, cause) == (True, "the handler raised")
    assert rows.get(second).state is State.COMPLETED


def test_failing_resolver_logs_its_traceback_its_try_and_the_next_time(
    rows: KeyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A resolver that does not know is in the log as well, without a traceback. Keys are masked."""
    first, second = *rows.unknown(), *rows.unknown(operation="POST /refunds")
    once = rows.once()
    once.resolve_with("POST /refunds", lambda inquiry: StillUnknown("the provider has not decided"))
    once.resolve_with(OPERATION, _raises)
    assert _resolve(once, lambda inquiry: StillUnknown()) == {"due": 2, "postponed": 2}
    told = [entry for entry in caplog.records if entry.getMessage().startswith("ReconcileFailed ")]
    lines = {entry.__dict__["event"].operation: entry for entry in told}
    failed, asked = lines[OPERATION], lines["POST /refunds"]
    assert failed.levelno == asked.levelno == logging.WARNING
    assert "in _raises" in (text := logging.Formatter().format(failed))
    for part in (
        "ReconcileFailed",
        "'POST /payments'",
        "tries=1",
        "the resolver raised ConnectionError",
        "in_seconds=",
    ):
        assert part in text
    assert "the provider has not decided" in asked.getMessage()
    assert asked.exc_info is None
    assert first.key not in caplog.text
    assert second.key not in caplog.text


def test_async_and_plain_functions_and_objects(rows: KeyStore) -> None:
    class Asks:
        async def __call__(self, inquiry: Inquiry) -> Verdict:
            await asyncio.sleep(0)
            return Confirmed(203)

    once = rows.once()
    threads: list[str] = []

    @once.resolver("POST /a", "POST /b")
    def plain(inquiry: Inquiry) -> Verdict:
        threads.append(threading.current_thread().name)
        return Confirmed(201)

    @once.resolver("POST /c/{id}")
    async def waits(inquiry: Inquiry) -> Verdict:
        await asyncio.sleep(0)
        return Confirmed(202)

    once.resolve_with("POST /d", Asks())
    paths = ("/a", "/b", "/c/77", "/c/{id}", "/d")
    records = [record for path in paths for record in rows.unknown(operation=f"POST {path}")]
    assert _resolve(once, plain) == {"due": 5, "confirmed": 5}
    responses = [rows.get(record).response for record in records]
    assert [response and response.status for response in responses] == [201, 201, 202, 202, 203]
    assert all(name.startswith("oncekey-task") for name in threads), "a plain function may block: not in the loop"


def test_a_plain_resolver_is_asked_again_after_a_close(rows: KeyStore) -> None:
    """An app may live more than once, and its reconciler with it: the threads of the first life are gone."""
    seen: list[Inquiry] = []
    once = rows.once()
    once.resolve_with(OPERATION, _remembering(seen))
    reconciler = Reconciler(once)
    for life in (1, 2, 3):
        rows.unknown()
        reconciler.run()
        reconciler.close()
        assert len({inquiry.key for inquiry in seen}) == life


def test_an_operation_without_a_resolver(rows: KeyStore) -> None:
    """It counts as not known, so that it neither blocks the others nor is forgotten."""
    lonely = rows.unknown(3, operation="POST /unresolved")
    rows.age(1)
    (other,) = rows.unknown()
    once = rows.once()
    once.resolve_with(OPERATION, lambda inquiry: Confirmed(200))
    assert _resolve(once, lambda inquiry: Confirmed(200), batch=2) == {"due": 4, "postponed": 3, "confirmed": 1}
    assert rows.get(other).state is State.COMPLETED
    assert {rows.get(record).last_error for record in lonely} == {
        "no resolver is registered for this operation; it became unknown because: the handler raised"
    }


def test_key_of_an_app_without_any_resolver_ends_as_a_dead_letter(rows: KeyStore) -> None:
    """Tries count, in the same steps as with a resolver; the last one makes it a dead letter, in the audit."""
    (record,) = rows.unknown()
    reconciler = Reconciler(rows.once(), max_tries=3)
    for tries in (1, 2, 3):
        assert reconciler.run().as_json()["dead"] == (tries == 3)
        assert rows.get(record).reconcile_tries == tries
        assert reconciler.run().due == 0, "not due yet"
        rows.age(100)
    reconciler.close()
    assert [found.key for found in dead_letters(rows.store, 10).keys] == [record.key]
    assert rows.store.audit(record.scope, record.key, 1)[0].why == f"asked 3 times, and no more: {NO_RESOLVER}"
    assert rows.names() == ["ReconcileUnasked", "ReconcileScheduled"] * 2 + ["ReconcileUnasked", "ReconcileGaveUp"]


def test_process_without_the_resolver_leaves_a_key_to_the_one_that_has_it(
    rows: KeyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """For a minute after it is due, from its second try on: a process that has the resolver asks every few seconds."""
    (record,) = rows.unknown()
    without, knowing = Reconciler(rows.once()), rows.once()
    assert without.run().as_json()["postponed"] == 1, "the first try, for the doctor to see it"
    rows.age(13)
    for tries in (2, 3, 4):
        rows.age(46)
        assert (without.run().due, rows.get(record).reconcile_tries) == (1, tries - 1)
        assert _resolve(knowing, lambda inquiry: StillUnknown(), backoff=1.0, max_backoff=1.0) == {
            "due": 1,
            "postponed": 1,
        }
        assert rows.get(record).reconcile_tries == tries
        rows.age(2)
    assert caplog.text.count("1 key is unknown and no resolver is registered for POST /payments") == 1
    rows.age(60)
    assert without.run().as_json()["postponed"] == 1, "there is no other process any more"
    without.close()


def test_log_names_an_operation_without_a_resolver_once_an_hour(
    rows: KeyStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each key, and not at each turn; again when there are five times as many."""
    rows.unknown(3, operation="POST /refunds")
    rows.unknown(1, operation="POST /odd\npath")
    rows.unknown()
    once = rows.once()
    once.resolve_with(OPERATION, lambda inquiry: StillUnknown())
    reconciler = Reconciler(once)
    now = 0.0
    monkeypatch.setattr(reconciler._watch._news, "_clock", lambda: now)

    def said() -> list[str]:
        caplog.clear()
        rows.age(10_000)
        assert reconciler.run().due >= 5
        lines = [entry for entry in caplog.records if "no resolver" in entry.getMessage()]
        assert all(entry.levelno == logging.WARNING for entry in lines)
        return [entry.getMessage() for entry in lines]

    first, second = said()
    assert first.startswith("3 keys are unknown and no resolver is registered for POST /refunds: register one with ")
    assert "@once.resolver('POST /refunds')" in first
    assert "oncekey keys resolve" in first
    assert second.startswith("1 key is unknown and no resolver is registered for 'POST /odd\\npath': ")
    assert said() == []
    rows.unknown(12, operation="POST /refunds")
    (grown,) = said()
    assert grown.startswith("15 keys are unknown and no resolver is registered for POST /refunds: ")
    now = 3_601.0
    assert len(said()) == 2
    reconciler.close()


def test_invalid_resolver_is_refused(rows: KeyStore) -> None:
    once = rows.once()
    with pytest.raises(ConfigurationError, match="name the operations"):
        once.resolver()
    with pytest.raises(ConfigurationError, match="name the operations"):
        once.resolver(lambda inquiry: Confirmed(200))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="'POST /path'"):
        once.resolve_with("/payments", lambda inquiry: Confirmed(200))
    once.resolve_with(OPERATION, lambda inquiry: Confirmed(200))
    with pytest.raises(ConfigurationError, match="has a resolver already"):
        once.resolve_with("post /payments", lambda inquiry: Confirmed(200))
    for wrong in ({"concurrency": 0}, {"timeout": 0.0}, {"max_tries": 0}):
        with pytest.raises(ConfigurationError, match="more than 0"):
            Reconciler(once, **wrong)


def test_a_response_that_must_not_be_kept() -> None:
    for wrong in ({"headers": {"Set-Cookie": "a=b"}}, {"headers": {"Location": "/a\r\nb"}}, {"body": b"x"}):
        with pytest.raises(ConfigurationError, match="Confirmed"):
            Confirmed(201, {}, **wrong)
    with pytest.raises(ConfigurationError, match="200 to 599"):
        Confirmed(100)


# -- many at once ------------------------------------------------------------------------------------------------------


def test_reconciler_takes_all_keys_in_batches(rows: KeyStore) -> None:
    rows.unknown(7)
    assert _resolve(rows.once(), lambda inquiry: Confirmed(200), batch=3) == {"due": 7, "confirmed": 7}


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

    assert _resolve(once, slow) == {"due": 1}
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

    assert _resolve(once, resolver, concurrency=1) == {"due": 2, "confirmed": 1}
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

    assert _resolve(once, slow) == {"due": 1}
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
