"""Verdicts about effects: which effect they are about, what is refused, several in doubt, and two verdicts at once."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from oncekey import Confirmed, Happened, NotHappened, OnceKey, Refuted, StillUnknown
from oncekey.core.jobs import Conclusion, JobEnd
from oncekey.core.record import Record
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.steps import MAX_RESULT_BYTES, Step, StepKind, StepsOf, StepState
from oncekey.core.swaps import Swap, swap
from oncekey.core.verdicts import Verdict
from oncekey.errors import ConfigurationError
from oncekey.upkeep import Inquiry, Outcome, Reconciler
from oncekey.upkeep.reaper import Reaper
from tests.upkeep.key_store import LEASE, OPERATION, RESPONSE, RETENTION, KeyStore

QUARANTINE = 10.0
CHARGE = Step("charge", StepKind.EFFECT, StepState.INTENDED, False, None, "down-charge")
MAIL = replace(CHARGE, name="mail", downstream_key="down-mail")
RIDE = replace(CHARGE, name="ride", state=StepState.DONE, result=b"1", downstream_key="down-ride")


def unknown(rows: KeyStore, *steps: Step, effects: Effects = Effects.EXTERNAL) -> Record:
    """A phased request that became unknown, with these steps."""
    (record,) = rows.reserved(effects=Effects.PHASED, quarantine=QUARANTINE)
    for step in steps:
        (record,) = rows.moved(
            [record], Event.ADVANCE, recovery_point="ride", step=step, effects=effects, lease_seconds=LEASE
        )
    (record,) = rows.moved([record], Event.DOUBT, last_error="TimeoutError")
    return record


def steps_of(rows: KeyStore, record: Record) -> dict[str, Step]:
    (steps,) = rows.store.steps([StepsOf(record.scope, record.key)])
    return {step.name: step for step in steps}


@pytest.mark.parametrize(
    ("steps", "verdict", "says"),
    [
        ([RIDE, CHARGE], Happened(1, "mail"), "this key has no effect 'mail'; effect 'charge' is in doubt"),
        ([RIDE, replace(MAIL, repeatable=True), CHARGE], Happened(1, "mail"), "effect 'mail' is not in doubt"),
        ([CHARGE, MAIL], Happened(1), "effects 'charge', 'mail' are in doubt: name one"),
        ([CHARGE, MAIL], Confirmed(201), "effects 'charge', 'mail' are in doubt, and Confirmed(…) skips every phase"),
        ([RIDE], Happened(1), "no effect of this key is in doubt"),
        ([], Happened(1, "charge"), "this key has no effect 'charge'; no effect of this key is in doubt"),
        ([], NotHappened("no"), "no effect of this key is in doubt"),
    ],
)
def test_verdict_about_an_effect_that_is_not_in_doubt_is_refused(
    rows: KeyStore, steps: list[Step], verdict: Verdict, says: str
) -> None:
    record = unknown(rows, *steps)
    rows.age(QUARANTINE + 1)
    before, kept = rows.get(record), steps_of(rows, record)
    settled = rows.once().ingest_blocking(verdict, key=record.key)
    assert (settled.outcome, settled.over) == (Outcome.REFUSED, False)
    assert says in (settled.reason or "")
    assert rows.names() == ["ReconcileFailed"], "a webhook that gets 503 for ever has its reason in the log"
    after = rows.get(record)
    assert (replace(after, now=0), steps_of(rows, record)) == (replace(before, now=0), kept)
    assert rows.audit(record) == []


def test_confirmed_needs_final_if_the_key_has_steps(rows: KeyStore) -> None:
    """Also if no effect is in doubt: the phases after the last step that is done would be skipped."""
    record = unknown(rows, RIDE, effects=Effects.PHASED)
    settled = rows.once().ingest_blocking(Confirmed(201), key=record.key)
    assert (settled.outcome, rows.get(record).state) == (Outcome.REFUSED, State.UNKNOWN)
    assert "skips every phase after it. Use Happened(result, effect='ride')" in (settled.reason or "")
    assert rows.once().ingest_blocking(Confirmed(402, final=True), key=record.key).outcome is Outcome.SETTLED


def test_confirmed_needs_no_final_for_a_deferred_request(shop: KeyStore) -> None:
    """All its phases are done, and only its job was not."""
    (record,) = shop.reserved(effects=Effects.PHASED)
    (record,) = shop.moved([record], Event.ADVANCE, recovery_point="ride", step=RIDE)
    shop.moved([record], Event.DEFER)
    shop.job(record)
    (job,) = shop.outbox.claim("worker", ["charge"], 1, 60.0)
    shop.outbox.conclude([Conclusion(job.id, "worker", JobEnd.DEAD, error="no", settle=State.UNKNOWN)])
    assert shop.once().ingest_blocking(Confirmed(201), key=record.key).outcome is Outcome.SETTLED


@pytest.mark.parametrize("by", ["webhook", "resolver"])
def test_happened_about_a_done_effect_lets_an_expired_half_done_request_go_on(rows: KeyStore, by: str) -> None:
    """No effect is in doubt. The effect keeps its result, and the late owner is fenced."""
    (record,) = rows.reserved(effects=Effects.PHASED)
    (record,) = rows.moved([record], Event.ADVANCE, recovery_point="charge", step=replace(RIDE, name="charge"))
    (record,) = rows.moved([record], Event.RELEASE)
    rows.age(RETENTION + 1)
    assert Reaper(rows.store).run().doubted == 1
    verdict = Happened("another result", "charge")
    if by == "webhook":
        assert rows.once().ingest_blocking(verdict, key=record.key).outcome is Outcome.SETTLED
    else:
        assert _reconcile(rows.once(), verdict) == {"due": 1, "happened": 1}
    found = rows.get(record)
    assert (found.state, found.recovery_point) == (State.FAILED_RETRYABLE, "charge")
    assert (found.owner != record.owner, found.past_expiry, found.reconcile_at) == (True, False, found.reconcile_at)
    assert found.reconcile_at is not None
    assert steps_of(rows, record)["charge"].result == b"1"
    assert [line.event for line in rows.store.audit(record.scope, record.key, 10)] == ["go_on"]


def test_happened_about_a_done_effect_does_not_settle_a_route_that_is_not_phased(rows: KeyStore) -> None:
    """What it may have done is not all in its steps."""
    record = unknown(rows, RIDE)
    settled = rows.once().ingest_blocking(Happened(1, "ride"), key=record.key)
    assert (settled.outcome, rows.get(record).state) == (Outcome.ALREADY, State.UNKNOWN)


def test_row_keeps_why_the_key_became_unknown_beside_the_last_try(rows: KeyStore) -> None:
    record = unknown(rows, CHARGE)
    for said in ("not there yet", "still not there"):
        assert _reconcile(rows.once(), StillUnknown(said))["postponed"] == 1
        assert rows.get(record).last_error == f"{said}; it became unknown because: TimeoutError"
        rows.age(3600)


def test_effect_that_is_done_is_not_done_again(rows: KeyStore) -> None:
    """A webhook that is delivered twice, while another effect of the same key is in doubt."""
    record = unknown(rows, RIDE, CHARGE)
    settled = rows.once().ingest_blocking(Happened(2), downstream_key="down-ride")
    assert (settled.outcome, settled.over) == (Outcome.ALREADY, True)
    assert steps_of(rows, record)["ride"].result == b"1"


@pytest.mark.parametrize(
    ("verdict", "says"),
    [
        (Happened(1, "mail"), "the id belongs to effect 'charge', and the verdict is about 'mail'"),
        (NotHappened("no", "mail"), "the id belongs to effect 'charge', and the verdict is about 'mail'"),
    ],
)
def test_webhook_about_one_effect_does_not_settle_another(rows: KeyStore, verdict: Verdict, says: str) -> None:
    record = unknown(rows, CHARGE, MAIL)
    rows.age(QUARANTINE + 1)
    settled = rows.once().ingest_blocking(verdict, downstream_key="down-charge")
    assert (settled.outcome, says in (settled.reason or "")) == (Outcome.REFUSED, True)
    assert steps_of(rows, record) == {"charge": CHARGE, "mail": MAIL}


def test_webhook_about_a_job_does_not_settle_an_effect(shop: KeyStore) -> None:
    record = unknown(shop, CHARGE)
    shop.job(record, settles=False, downstream_key="down-of-a-job")
    settled = shop.once().ingest_blocking(Happened(1), downstream_key="down-of-a-job")
    assert settled.outcome is Outcome.REFUSED
    assert "belongs to a job of this key" in (settled.reason or "")
    assert steps_of(shop, record) == {"charge": CHARGE}


def test_not_happened_waits_for_the_quarantine(rows: KeyStore) -> None:
    record = unknown(rows, CHARGE)
    once = rows.once()
    rows.age(QUARANTINE - 2)
    early = once.ingest_blocking(NotHappened("no such charge"), key=record.key)
    assert early.outcome is Outcome.TOO_EARLY
    assert early.retry_in == pytest.approx(2, abs=2)
    assert (rows.get(record).state, steps_of(rows, record)) == (State.UNKNOWN, {"charge": CHARGE})
    rows.age(3)
    assert once.ingest_blocking(NotHappened("no such charge"), key=record.key).outcome is Outcome.SETTLED
    assert rows.get(record).state is State.FAILED_RETRYABLE
    assert steps_of(rows, record) == {"charge": replace(CHARGE, repeatable=True)}


def test_key_stays_unknown_until_every_effect_in_doubt_is_settled(rows: KeyStore) -> None:
    record = unknown(rows, CHARGE, MAIL)
    once = rows.once()
    partly = once.ingest_blocking(Happened({"id": 7}, "mail"), key=record.key)
    assert (partly.outcome, partly.over, partly.reason) == (Outcome.PARTLY, True, "effect 'charge' is in doubt")
    found = rows.get(record)
    assert (found.state, found.effects, found.owner != record.owner) == (State.UNKNOWN, Effects.EXTERNAL, True)
    assert found.reconcile_at is not None
    late = [rows.store.swap([change]) for change in _endings(record)]
    assert late == [[None], [None]], "the first owner is fenced already"
    assert once.ingest_blocking(Happened(1), key=record.key).outcome is Outcome.SETTLED, "one is left, so it is that"
    found = rows.get(record)
    assert (found.state, found.effects) == (State.FAILED_RETRYABLE, Effects.PHASED)
    assert [step.result for step in steps_of(rows, record).values()] == [b"1", b'{"id":7}']


def _endings(record: Record) -> list[Swap]:

    return [swap(record, event, Actor.OWNER, response=RESPONSE) for event in (Event.COMPLETE, Event.FAIL)]


def test_refuted_clears_every_effect_in_doubt(rows: KeyStore) -> None:
    record = unknown(rows, RIDE, CHARGE, MAIL)
    rows.age(QUARANTINE + 1)
    assert rows.once().ingest_blocking(Refuted("nothing was sent"), key=record.key).outcome is Outcome.SETTLED
    assert (rows.get(record).state, rows.get(record).effects) == (State.FAILED_RETRYABLE, Effects.PHASED)
    steps = steps_of(rows, record)
    assert {name: (step.state, step.repeatable) for name, step in steps.items()} == {
        "ride": (StepState.DONE, False),
        "charge": (StepState.INTENDED, True),
        "mail": (StepState.INTENDED, True),
    }


def test_two_verdicts_at_once_settle_the_effect_once(shop: KeyStore) -> None:
    record = unknown(shop, CHARGE)
    outcomes: list[Outcome] = []
    together = threading.Barrier(4)

    def bring(once: OnceKey, number: int) -> None:
        together.wait()
        outcomes.append(once.ingest_blocking(Happened(number, "charge"), key=record.key).outcome)

    onces = [shop.once(), shop.once(shop.another())] * 2
    threads = [threading.Thread(target=bring, args=pair) for pair in zip(onces, range(4), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [Outcome.ALREADY] * 3 + [Outcome.SETTLED]
    assert shop.audit(record) == [("webhook", "unknown", "failed_retryable")]


@pytest.mark.parametrize("state", [State.UNKNOWN, State.FAILED_RETRYABLE, State.IN_PROGRESS])
def test_not_happened_about_a_done_effect_is_contradicted_and_acknowledged(rows: KeyStore, state: State) -> None:
    """The webhook is not delivered for ever, and the log names both."""
    record = unknown(rows, RIDE, CHARGE)
    rows.age(QUARANTINE + 1)
    once = rows.once()
    if state is not State.UNKNOWN:
        once.ingest_blocking(Happened(1, "charge"), key=record.key)
    if state is State.IN_PROGRESS:
        (wanted,) = rows.reservations(1)
        rows.moved([rows.get(record)], Event.RETRY, Actor.REQUEST, reservation=wanted)
    rows.told.clear()
    before = rows.get(record)
    settled = once.ingest_blocking(NotHappened("no such charge", "ride"), key=record.key)
    assert (settled.outcome, settled.over, before.state) == (Outcome.CONTRADICTED, True, state)
    assert "effect 'ride' is done" in (settled.reason or "")
    assert replace(rows.get(record), now=0) == replace(before, now=0)
    assert rows.names() == ["ReconcileFailed"]
    assert "webhook said NotHappened, and nothing was changed: effect 'ride' is done" in str(rows.told[0])


def test_not_happened_that_comes_twice_is_acknowledged(rows: KeyStore) -> None:
    record = unknown(rows, CHARGE)
    rows.age(QUARANTINE + 1)
    outcomes = [rows.once().ingest_blocking(NotHappened("no"), key=record.key) for _ in range(2)]
    assert [(each.outcome, each.over) for each in outcomes] == [(Outcome.SETTLED, True), (Outcome.ALREADY, True)]


def test_happened_after_not_happened_is_reported(rows: KeyStore) -> None:
    record = unknown(rows, CHARGE)
    rows.age(QUARANTINE + 1)
    once = rows.once()
    once.ingest_blocking(NotHappened("no such charge"), key=record.key)
    rows.told.clear()
    for verdict in (Happened(1, "charge"), Happened(1)):
        settled = once.ingest_blocking(verdict, key=record.key)
        assert (settled.outcome, settled.over) == (Outcome.CONTRADICTED, True)
    rows.told.pop()
    assert rows.names() == ["ReconcileFailed"]


# -- the reconciler ------------------------------------------------------------------------------------------------


def _reconcile(once: OnceKey, verdict: Verdict) -> dict[str, int]:
    once.resolve_with(OPERATION, lambda inquiry: verdict)
    reconciler = Reconciler(once)
    done = reconciler.run()
    reconciler.close()
    return {name: number for name, number in done.as_json().items() if number}


def test_reconciler_counts_happened_and_not_happened(rows: KeyStore) -> None:
    unknown(rows, CHARGE)
    assert _reconcile(rows.once(), Happened(1)) == {"due": 1, "happened": 1}
    unknown(rows, CHARGE)
    rows.age(QUARANTINE + 1)
    assert _reconcile(rows.once(), NotHappened("no")) == {"due": 1, "not_happened": 1}


@pytest.mark.parametrize("verdict", [Confirmed(201), Happened(1, "mail"), Happened(1, "ride")])
def test_reconciler_postpones_a_verdict_that_was_refused_and_says_why(rows: KeyStore, verdict: Verdict) -> None:
    record = unknown(rows, RIDE, CHARGE)
    assert _reconcile(rows.once(), verdict) == {"due": 1, "postponed": 1}
    found = rows.get(record)
    assert (found.state, found.reconcile_tries) == (State.UNKNOWN, 1)
    assert (found.last_error or "").startswith("the verdict was refused: ")
    assert "'charge' is in doubt" in (found.last_error or "")
    assert "ReconcileFailed" in rows.names()


def test_inquiry_names_the_effects_in_doubt(rows: KeyStore) -> None:
    record = unknown(rows, RIDE, CHARGE, replace(MAIL, repeatable=True))
    assert Inquiry(record, tuple(steps_of(rows, record).values())).in_doubt == ("charge",)


# -- what a verdict may carry --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"result": object()}, "is not JSON"),
        ({"result": "x" * MAX_RESULT_BYTES}, "more than the 65536 that are remembered"),
        ({"result": 1, "provider_id": "a\nb"}, "must be printable text"),
        ({"result": 1, "provider_id": ""}, "must be printable text"),
    ],
)
def test_result_that_op_effect_could_not_remember_is_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Happened(**arguments)  # type: ignore[arg-type]
