"""Keys of which something is encrypted with a key that this process does not have: upkeep leaves them as they are."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from oncekey import Confirmed, Happened, OnceKey, StillUnknown
from oncekey.core.kept_request import KeptRequest, as_step
from oncekey.core.record import Record
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.steps import REQUEST, Step, StepKind, StepsOf, StepState
from oncekey.core.swaps import RESUME_SECONDS
from oncekey.core.verdicts import Verdict
from oncekey.encryption import Keyring
from oncekey.encryption.store import sealed
from oncekey.stores.api import Store
from oncekey.upkeep import Inquiry, Reaper, Sweeper, Upkeep
from oncekey.upkeep.resumer import NO_FUNCTION_SECONDS
from oncekey.upkeep.unreadable import LEFT_SECONDS
from tests.encryption.rings import ring
from tests.upkeep.half_done import CHARGED, finishes, half_done, resume
from tests.upkeep.key_store import LEASE, OPERATION, RETENTION, KeyStore
from tests.upkeep.resolving import resolve

ASKED = as_step(KeptRequest("POST", "/payments", "", {}, b'{"card":4242}'))
LEFT_TO_OTHERS = "leaves requests to other processes that it cannot read"
SENTENCE = "(encrypted with key 1, which this process does not have)"


@pytest.fixture(params=[None, 3], ids=["no_keyring", "another_keyring"])
def lacks(request: pytest.FixtureRequest) -> Keyring | None:
    """The keyring of a process that does not have key 1."""
    return None if request.param is None else ring(request.param)


def store_of(rows: KeyStore, keyring: Keyring | None) -> Store:
    return rows.store if keyring is None else sealed(rows.store, keyring)


@contextmanager
def written_by(rows: KeyStore, keyring: Keyring | None) -> Iterator[KeyStore]:
    """What the block makes, a process with this keyring writes."""
    plain = rows.store
    rows.store = store_of(rows, keyring)
    try:
        yield rows
    finally:
        rows.store = plain


def app(rows: KeyStore, keyring: Keyring | None, **policy: object) -> OnceKey:
    return rows.once(store_of(rows, keyring), **policy)


def read(rows: KeyStore, record: Record) -> tuple[Record, dict[str, Step]]:
    """The key as a process reads it that has every encryption key."""
    store = sealed(rows.store, ring(1, 3))
    (found,), (steps,) = store.read([(record.scope, record.key)]), store.steps([StepsOf(record.scope, record.key)])
    assert found is not None
    return found, {step.name: step for step in steps}


def unknown(rows: KeyStore, *steps: Step) -> Record:
    (record,) = rows.reserved(effects=Effects.PHASED, quarantine=0.0)
    for step in steps:
        (record,) = rows.moved([record], Event.ADVANCE, recovery_point="charge", step=step, lease_seconds=LEASE)
    return rows.moved([record], Event.DOUBT, last_error="TimeoutError")[0]


# -- the resumer -------------------------------------------------------------------------------------------------------


def test_request_that_does_not_open_is_not_claimed_and_the_others_are_resumed(
    rows: KeyStore, lacks: Keyring | None, caplog: pytest.LogCaptureFixture
) -> None:
    with written_by(rows, ring(1)):
        bad = [half_done(rows), half_done(rows)]
    with written_by(rows, lacks):
        good = [half_done(rows) for _ in range(3)]
    rows.age(RESUME_SECONDS + 1)
    once = app(rows, lacks, effects="phased")
    with caplog.at_level(logging.WARNING, "oncekey"):
        assert resume(once, finishes) == {"due": 5, "completed": 3, "left": 2}
    assert rows.states(good) == [State.COMPLETED] * 3
    assert caplog.text.count(LEFT_TO_OTHERS) == 1
    assert "encrypted with key 1" in caplog.text
    for record in bad:
        found, steps = read(rows, record)
        assert (found.state, found.attempt, found.reconcile_tries) == (State.FAILED_RETRYABLE, 1, 0)
        assert (found.owner, found.last_error) == (record.owner, "it fell")
        assert steps["charge"].result == CHARGED.result
    with_key = app(rows, ring(1), effects="phased")
    assert resume(with_key, finishes) == {"due": 2, "completed": 2}


def test_request_that_does_not_open_is_put_off_after_a_minute_and_no_try_is_counted(
    rows: KeyStore, lacks: Keyring | None
) -> None:
    with written_by(rows, ring(1)):
        record = half_done(rows)
    rows.age(RESUME_SECONDS + LEFT_SECONDS + 1)
    once = app(rows, lacks, effects="phased")
    assert resume(once, finishes) == {"due": 1, "left": 1}
    assert resume(once) == {}
    found, _ = read(rows, record)
    assert (found.state, found.attempt, found.reconcile_tries) == (State.FAILED_RETRYABLE, 1, 0)
    assert found.last_error == "it fell"
    rows.age(NO_FUNCTION_SECONDS + 1)
    assert resume(app(rows, ring(3, 1), effects="phased"), finishes) == {"due": 1, "completed": 1}


def test_request_of_which_only_the_error_does_not_open_is_not_claimed(rows: KeyStore, lacks: Keyring | None) -> None:
    """A process with the keyring has tried it meanwhile, in the deploy that switches encryption on."""
    record = half_done(rows, released=False)
    with written_by(rows, ring(1)):
        (record,) = rows.moved([record], Event.RELEASE, Actor.OWNER, last_error="it fell")
    rows.age(RESUME_SECONDS + 1)
    assert resume(app(rows, lacks, effects="phased"), finishes) == {"due": 1, "left": 1}
    found, _ = read(rows, record)
    assert (found.state, found.attempt, found.last_error) == (State.FAILED_RETRYABLE, 1, "it fell")


def test_request_that_was_tried_for_the_last_time_keeps_its_error_in_a_process_without_the_key(
    rows: KeyStore, lacks: Keyring | None
) -> None:
    with written_by(rows, ring(1)):
        record = half_done(rows)
    rows.age(RESUME_SECONDS + 1)

    def falls(op: object) -> tuple[int, None]:
        raise RuntimeError("again")

    assert resume(app(rows, ring(1), effects="phased"), falls, max_tries=2) == {"due": 1, "retryable": 1}
    before, _ = read(rows, record)
    rows.age(10 * RESUME_SECONDS)
    assert resume(app(rows, lacks, effects="phased"), finishes, max_tries=1) == {"due": 1, "left": 1}
    found, _ = read(rows, record)
    assert (found.state, found.last_error) == (State.FAILED_RETRYABLE, before.last_error)


def test_key_that_raises_after_its_claim_does_not_abandon_the_others(
    rows: KeyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Its kept request is damaged. The others are claimed in the same round, and their functions are running."""
    damaged = Step(REQUEST, StepKind.PHASE, StepState.INTENDED, True, b"{}")
    records = [half_done(rows, released=False) for _ in range(4)]
    (records[0],) = rows.moved(records[:1], Event.ADVANCE, step=damaged, lease_seconds=LEASE)
    rows.moved(records, Event.RELEASE, last_error="it fell")
    rows.age(RESUME_SECONDS + 1)

    async def function(op: object) -> tuple[int, None]:
        await asyncio.sleep(0.05)  # a cancelled task would end here
        return 201, None

    once = app(rows, None, effects="phased")
    with caplog.at_level(logging.ERROR, "oncekey"):
        assert resume(once, function) == {"due": 4, "completed": 3}
    assert rows.states(records[1:]) == [State.COMPLETED] * 3
    assert caplog.text.count("upkeep could not go on with one key") == 1
    rows.age(LEASE + 1)
    assert Sweeper(rows.store).run().released == 1


def test_key_that_raises_before_its_claim_is_put_off_and_the_others_are_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer version of oncekey has written its step."""
    rows = KeyStore(f"sqlite:///{tmp_path / 'keys.db'}")
    records = [half_done(rows) for _ in range(4)]
    with closing(sqlite3.connect(tmp_path / "keys.db")) as own, own:
        own.execute("PRAGMA ignore_check_constraints = on")
        own.execute("UPDATE idempotency_steps SET kind = 'dream' WHERE key = ?", (records[0].key,))
    rows.age(RESUME_SECONDS + 1)
    once = app(rows, None, effects="phased")
    with caplog.at_level(logging.ERROR, "oncekey"):
        assert resume(once, finishes) == {"due": 4, "completed": 3}
        assert resume(once) == {}
    assert caplog.text.count("upkeep could not go on with one key") == 1
    found = rows.get(records[0])
    assert (found.state, found.attempt, found.last_error) == (State.FAILED_RETRYABLE, 1, "it fell")
    rows.close()


# -- the reconciler ----------------------------------------------------------------------------------------------------


def confirms(inquiry: Inquiry) -> Verdict:
    return Confirmed(201, {"id": "pay_1"}, final=True, reason="found")


def test_kept_request_that_does_not_open_fails_for_its_key_alone_and_ends_as_a_dead_letter(
    rows: KeyStore, lacks: Keyring | None, caplog: pytest.LogCaptureFixture
) -> None:
    with written_by(rows, ring(1)):
        bad = unknown(rows, ASKED, CHARGED)
    with written_by(rows, lacks):
        good = unknown(rows, ASKED, CHARGED)
    once = app(rows, lacks)
    rows.age(1)
    with caplog.at_level(logging.WARNING, "oncekey"):
        assert resolve(once, confirms) == {"due": 2, "confirmed": 1}
        assert rows.get(good).state is State.COMPLETED
        assert rows.get(bad).reconcile_tries == 0
        rows.age(LEFT_SECONDS)
        assert resolve(once, confirms, max_tries=2, max_backoff=10.0) == {"due": 1, "postponed": 1}
        rows.age(LEFT_SECONDS + 20)
        assert resolve(once, confirms, max_tries=2) == {"due": 1, "dead": 1}
    assert f"the kept request cannot be read {SENTENCE}" in caplog.text
    found, steps = read(rows, bad)
    assert (found.state, found.reconcile_at, found.last_error) == (State.UNKNOWN, None, "TimeoutError")
    assert steps[REQUEST].result == ASKED.result
    (line,) = sealed(rows.store, ring(1, 3)).audit(bad.scope, bad.key, 10)
    assert f"asked 2 times, and no more: StoreError: the kept request cannot be read {SENTENCE}" in line.why


def test_key_of_which_only_the_error_does_not_open_is_asked_about_after_a_minute(
    rows: KeyStore, lacks: Keyring | None
) -> None:
    """The encryption key may be lost, and the provider knows what happened all the same."""
    with written_by(rows, ring(1)):
        (record,) = rows.unknown()
    seen: list[str | None] = []

    def resolver(inquiry: Inquiry) -> Verdict:
        seen.append(inquiry.last_error)
        return confirms(inquiry)

    once = app(rows, lacks)
    rows.age(1)
    assert resolve(once, resolver) == {"due": 1}
    rows.age(LEFT_SECONDS)
    assert resolve(once, resolver) == {"due": 1, "confirmed": 1}
    assert seen == [SENTENCE]
    assert read(rows, record)[0].state is State.COMPLETED


def test_result_that_does_not_open_is_the_same_after_a_verdict(rows: KeyStore, lacks: Keyring | None) -> None:
    with written_by(rows, ring(1)):
        record = unknown(rows, CHARGED)
    rows.age(LEFT_SECONDS + 1)
    assert resolve(app(rows, lacks), lambda inquiry: Happened({"id": "other"}, "charge")) == {"due": 1, "happened": 1}
    found, steps = read(rows, record)
    assert (found.state, steps["charge"].result) == (State.FAILED_RETRYABLE, CHARGED.result)


def test_cause_that_does_not_open_is_kept_by_a_verdict_that_settles_one_of_two_effects(
    rows: KeyStore, lacks: Keyring | None
) -> None:
    doubted = replace(CHARGED, state=StepState.INTENDED, result=None)
    with written_by(rows, ring(1)):
        (record,) = rows.reserved(effects=Effects.PHASED, quarantine=0.0)
        for step in (doubted, replace(doubted, name="mail")):
            (record,) = rows.moved(
                [record], Event.ADVANCE, recovery_point="ride", step=step, effects=Effects.EXTERNAL, lease_seconds=LEASE
            )
        rows.moved([record], Event.DOUBT, last_error="TimeoutError")
    rows.age(LEFT_SECONDS + 1)
    resolve(app(rows, lacks), lambda inquiry: Happened({"id": "ch_2"}, "charge"))
    found, steps = read(rows, record)
    assert (found.state, found.last_error) == (State.UNKNOWN, "TimeoutError")
    assert steps["charge"].result == b'{"id":"ch_2"}'


# -- all duties --------------------------------------------------------------------------------------------------------


def test_no_duty_of_a_process_without_the_key_writes_over_what_does_not_open(
    rows: KeyStore, lacks: Keyring | None
) -> None:
    with written_by(rows, ring(1)):
        (done,) = rows.finished(retention=100 * RETENTION)
        waits = half_done(rows, retention=100 * RETENTION)
        lapses = half_done(rows)
        (asked,) = rows.unknown()
        kept = unknown(rows, ASKED, CHARGED)
        dies = half_done(rows, released=False, retention=100 * RETENTION)
    once = app(rows, lacks, effects="phased")
    once.resume(OPERATION, finishes)
    once.resolve_with(OPERATION, lambda inquiry: StillUnknown("the provider does not know"))
    for seconds in (LEASE + 1, LEFT_SECONDS, NO_FUNCTION_SECONDS, RETENTION, 2 * LEFT_SECONDS):
        rows.age(seconds)
        for turn in Upkeep(once).run_once():
            assert turn.error is None, turn
    rows.age(1)
    Reaper(once.store).run()
    states = [State.COMPLETED, State.FAILED_RETRYABLE, State.UNKNOWN, State.UNKNOWN, State.UNKNOWN]
    assert rows.states([done, waits, lapses, asked, kept]) == states
    expected = ((waits, "it fell"), (lapses, "it fell"), (asked, "the handler raised"), (kept, "TimeoutError"))
    for record, error in expected:
        found, steps = read(rows, record)
        assert found.last_error == error
        assert not steps or steps["charge"].result == CHARGED.result
    found, steps = read(rows, dies)
    assert (found.state, found.attempt, steps["charge"].result) == (State.FAILED_RETRYABLE, 1, CHARGED.result)
    answer = read(rows, done)[0].response
    assert answer is not None
    assert answer.body == b'{"id":"pay_1"}'
