"""Resolvers: what they are asked with, how their failures count, and operations without one."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

from oncekey import Confirmed, Operation, Policy, StillUnknown
from oncekey.admin.dead_letters import dead_letters
from oncekey.core.health import NO_RESOLVER
from oncekey.core.states import Actor, Event, State
from oncekey.core.verdicts import Verdict
from oncekey.errors import ConfigurationError
from oncekey.upkeep import Inquiry, Reconciler
from tests.upkeep.key_store import OPERATION, RETENTION, KeyStore
from tests.upkeep.resolving import remembering, resolve

# -- resolvers ---------------------------------------------------------------------------------------------------------


def test_inquiry_has_steps_results_and_downstream_keys(rows: KeyStore) -> None:
    """Enough to ask a provider: the key, its steps with their results, and the downstream keys."""
    (record,) = rows.reserved()
    record = rows.step(record, "charge", "down-7", "ch_7")
    rows.moved([record], Event.DOUBT, last_error="TimeoutError")
    rows.age(60)
    seen: list[Inquiry] = []
    once = rows.once()
    resolve(once, remembering(seen))
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
    resolve(rows.once(), remembering(seen))
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
    assert resolve(once, resolver, timeout=0.05) == {"due": 2, "postponed": 1, "confirmed": 1}
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
    assert resolve(once, lambda inquiry: StillUnknown()) == {"due": 2, "postponed": 2}
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
    assert asked.exc_text is None
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
    assert resolve(once, plain) == {"due": 5, "confirmed": 5}
    responses = [rows.get(record).response for record in records]
    assert [response and response.status for response in responses] == [201, 201, 202, 202, 203]
    assert all(name.startswith("oncekey-task") for name in threads), "a plain function may block: not in the loop"


def test_a_plain_resolver_is_asked_again_after_a_close(rows: KeyStore) -> None:
    """An app may live more than once, and its reconciler with it: the threads of the first life are gone."""
    seen: list[Inquiry] = []
    once = rows.once()
    once.resolve_with(OPERATION, remembering(seen))
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
    assert resolve(once, lambda inquiry: Confirmed(200), batch=2) == {"due": 4, "postponed": 3, "confirmed": 1}
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
        assert resolve(knowing, lambda inquiry: StillUnknown(), backoff=1.0, max_backoff=1.0) == {
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
