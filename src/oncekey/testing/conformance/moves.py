"""The part of the store suite about moves: one pair of tests per row of ``core.states.TABLE`` and actor.

A row that is added to the table gets its tests without more code. No test waits: it moves the time (``SuiteBase.age``).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from oncekey.core.record import DEFAULT_QUARANTINE_SECONDS, Record
from oncekey.core.states import FENCES, FINAL, STARTS, TABLE, Actor, Condition, Effects, Event, State
from oncekey.core.swaps import swap, undo
from oncekey.stores.api import Store
from oncekey.testing.conformance.base import (
    LEASE,
    QUARANTINE,
    RESPONSE,
    RETENTION,
    Move,
    SuiteBase,
    one,
    stored,
    waiting_time,
)

_MOVES = [
    pytest.param((row, actor), id=f"{row.source}-{row.event}-{row.target or 'gone'}-{actor}")
    for row in TABLE
    if row.source is not None
    for actor in sorted(row.by)
]

_TIMED = {Condition.LEASE_OVER, Condition.QUARANTINE_OVER, Condition.PAST_EXPIRY}
_WITH_STEPS = {Condition.HAS_STEPS, Condition.MAY_HAVE_BEGUN}
_NEARLY = 2.0
"""This many seconds before a move becomes possible, the store must still refuse it."""


class MoveSuite(SuiteBase):
    def _before(self, store: Store, move: Move) -> Record:
        """A row from which the move can be made, when enough time has passed."""
        row, _ = move
        assert row.source is not None
        doubted = row.event in FENCES and Condition.NONE_IN_DOUBT not in row.when
        return self.drive(store, row.source, steps=bool(_WITH_STEPS & row.when), doubted=doubted)

    @pytest.mark.parametrize("move", _MOVES)
    def test_a_move_of_the_table_is_made(self, store: Store, move: Move) -> None:
        """A row that meets the table's conditions moves to the table's target. The answer equals the stored row."""
        before = self._before(store, move)
        self.ripen(store, before, move)
        before = one(store.read([(before.scope, before.key)])[0])
        row, actor = move
        change = self.change(before, move)

        moved = one(store.swap([change])[0])

        after = stored(store)
        if row.target is None:
            assert replace(moved, now=0.0) == replace(before, now=0.0)
            assert after is None
            return
        assert after == replace(moved, now=0.0)
        assert moved.state is row.target
        assert moved.response == (RESPONSE if row.target in FINAL else None)
        assert moved.last_error == change.last_error
        assert (moved.finished_at is not None) == (row.target in FINAL)
        # A row that is postponed without a time is not asked about again. A row that becomes ``unknown`` always is.
        # A half-done request that a verdict frees is on the resumer's list.
        listed = row.target is State.UNKNOWN or (row.event in FENCES and row.target is State.FAILED_RETRYABLE)
        assert (moved.reconcile_at is not None) == (listed and row.event is not Event.POSTPONE)
        asked = row.event is Event.POSTPONE and row.source is State.UNKNOWN
        resumed = row.event is Event.RETRY and actor is Actor.RESUMER
        tries = 0 if row.event is Event.RESERVE else before.reconcile_tries + (asked or resumed)
        assert moved.reconcile_tries == tries
        starts_over = row.event is Event.RESERVE
        assert (moved.fingerprint == before.fingerprint) != starts_over
        assert moved.fingerprint_recipe == (None if starts_over else before.fingerprint_recipe)
        assert moved.quarantine_seconds == (None if starts_over else before.quarantine_seconds)
        if row.event in STARTS:
            assert moved.owner == change.new_owner
            assert moved.attempt == (1 if starts_over else before.attempt + 1)
            assert moved.effects is Effects.TRANSACTIONAL is not before.effects
        elif row.event in FENCES:
            assert (moved.owner, moved.attempt) == (change.new_owner, before.attempt)
            assert moved.effects is (Effects.PHASED if row.target is State.FAILED_RETRYABLE else Effects.EXTERNAL)
        else:
            kept = (before.owner, before.attempt, before.effects)
            assert (moved.owner, moved.attempt, moved.effects) == kept
        if row.event in STARTS or row.event in (Event.RENEW, Event.ADVANCE):
            assert moved.lease_until == pytest.approx(moved.now + LEASE, abs=1)
        elif row.target is State.UNKNOWN is not row.source:
            assert moved.lease_until == pytest.approx(moved.now, abs=1), "the quarantine counts from the doubt"
        else:
            assert moved.lease_until == before.lease_until
        settles = row.source is State.UNKNOWN and row.target is State.FAILED_RETRYABLE
        if starts_over or settles or row.target in FINAL:
            assert moved.expires_at == pytest.approx(moved.now + RETENTION, abs=1)
        else:
            assert moved.expires_at == before.expires_at
        if starts_over:
            assert moved.recovery_point is None
        else:
            assert moved.recovery_point == (change.recovery_point or before.recovery_point)

    @pytest.mark.parametrize("move", _MOVES)
    def test_move_is_refused_if_the_row_changed_since_it_was_read(self, store: Store, move: Move) -> None:
        """With another owner or state, or a lease or retention that still runs: None, and nothing is written."""
        before = self._before(store, move)
        change = self.change(before, move)
        if move[0].when & _TIMED:
            as_it_was = stored(store)
            assert store.swap([change]) == [None]
            assert stored(store) == as_it_was
            self.age(store, before.scope, before.key, waiting_time(before, move) - _NEARLY)
            as_it_was = stored(store)
            assert store.swap([change]) == [None]
            assert stored(store) == as_it_was
            self.age(store, before.scope, before.key, _NEARLY)

        as_it_was = stored(store)
        wrong = [replace(change, owner="another-owner"), replace(change, owner=change.owner.upper())]
        wrong += [replace(change, from_state=state) for state in State if state is not change.from_state]
        wrong += [replace(change, key="no-such-key"), replace(change, scope="no-such-tenant")]
        for bad in wrong:
            assert store.swap([bad]) == [None]
        assert stored(store) == as_it_was
        assert stored(store, key="no-such-key") is None
        assert store.swap([change]) != [None]  # so only the difference was refused

    def test_a_move_that_was_made_is_not_made_again(self, store: Store) -> None:
        """The same swap, sent a second time, finds another state or owner, and is refused."""
        record = self.drive(store, State.FAILED_RETRYABLE)
        change = swap(record, Event.RETRY, Actor.REQUEST, reservation=self.reservation())
        assert store.swap([change]) != [None]
        after = stored(store)
        assert store.swap([change]) == [None]
        assert stored(store) == after

    def test_a_late_owner_writes_nothing(self, store: Store) -> None:
        """An owner that was paused past its lease and replaced cannot renew, complete or release (hazard 1)."""
        paused = self.drive(store, State.IN_PROGRESS)
        self.age(store, paused.scope, paused.key, LEASE + 1)
        taken = swap(paused, Event.TAKE_OVER, Actor.REQUEST, reservation=self.reservation())
        assert one(store.swap([taken])[0]).attempt == 2
        after = stored(store)
        for event in (Event.RENEW, Event.ADVANCE, Event.COMPLETE, Event.FAIL, Event.RELEASE, Event.DOUBT):
            late = swap(paused, event, Actor.OWNER, lease_seconds=LEASE, response=RESPONSE)
            assert store.swap([late]) == [None]
        assert stored(store) == after

    @pytest.mark.parametrize("later", ["attempt", "step"])
    def test_reservation_with_later_work_is_not_discarded(self, store: Store, later: str) -> None:
        """A lane that undoes a reservation has not seen the row. A later attempt or a step shows that work was done. If
        the row were deleted, a retry would do that work again (I1)."""
        wanted = self.reservation()
        if later == "attempt":
            row = self.drive(store, State.FAILED_RETRYABLE)
            one(store.swap([swap(row, Event.RETRY, Actor.REQUEST, reservation=wanted)])[0])
        else:
            row = one(store.reserve([wanted])[0].record)
            one(store.swap([swap(row, Event.ADVANCE, Actor.OWNER, recovery_point="charged")])[0])
        before = stored(store)
        assert before is not None

        back = undo(wanted)
        assert back is not None
        assert store.swap([back]) == [None]

        assert stored(store) == before

    def test_completing_extends_the_expiry(self, store: Store) -> None:
        """The retention counts from the end of the work, not from its beginning."""
        record = self.drive(store, State.IN_PROGRESS)
        self.age(store, record.scope, record.key, RETENTION - 10)
        done = one(store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)])[0])
        assert done.expires_at == pytest.approx(done.now + RETENTION, abs=1)

    def test_completing_never_shortens_the_expiry(self, store: Store) -> None:
        """An expiry later than now + retention stays."""
        record = self.drive(store, State.IN_PROGRESS)
        self.age(store, record.scope, record.key, -500)
        before = one(stored(store))
        done = one(store.swap([swap(before, Event.COMPLETE, Actor.OWNER, response=RESPONSE)])[0])
        assert done.expires_at == one(stored(store)).expires_at == before.expires_at
        assert done.expires_at == pytest.approx(done.now + RETENTION + 500, abs=1)

    def test_the_recovery_point_survives_until_the_key_starts_over(self, store: Store) -> None:
        """A key that is released and retried still has the name of the last step that is done."""
        record = self.drive(store, State.IN_PROGRESS)
        for event, extra in ((Event.ADVANCE, "charge_created"), (Event.RENEW, None), (Event.RELEASE, None)):
            change = swap(record, event, Actor.OWNER, recovery_point=extra, lease_seconds=LEASE)
            record = one(store.swap([change])[0])
        retry = swap(record, Event.RETRY, Actor.REQUEST, reservation=self.reservation())
        record = one(store.swap([retry])[0])
        assert (record.recovery_point, record.attempt) == ("charge_created", 2)

    @pytest.mark.parametrize("lease", [None, 7.0])
    def test_quarantine_counts_from_becoming_unknown_or_from_the_end_of_the_kept_lease(
        self, store: Store, lease: float | None
    ) -> None:
        """If the handler has ended, the doubt ends the lease. If it may still run, the doubt keeps a lease."""
        record = self.drive(store, State.IN_PROGRESS)
        doubted = one(store.swap([swap(record, Event.DOUBT, Actor.OWNER, lease_seconds=lease)])[0])
        assert doubted.lease_until == pytest.approx(doubted.now + (lease or 0.0), abs=1)
        refute = swap(doubted, Event.REFUTE, Actor.RECONCILER)
        self.age(store, record.scope, record.key, QUARANTINE + (lease or 0.0) - _NEARLY)
        assert store.swap([refute]) == [None]
        postponed = one(store.swap([swap(doubted, Event.POSTPONE, Actor.RECONCILER, reconcile_in=0.0)])[0])
        assert postponed.now - postponed.lease_until == pytest.approx(QUARANTINE - _NEARLY, abs=1), "asked, not doubted"
        self.age(store, record.scope, record.key, _NEARLY)
        assert one(store.swap([refute])[0]).state is State.FAILED_RETRYABLE

    def test_quarantine_of_a_row_that_names_none_is_the_default(self, store: Store) -> None:
        record = one(store.reserve([self.reservation(quarantine=None)])[0].record)
        assert (record.quarantine_seconds, record.quarantine) == (None, DEFAULT_QUARANTINE_SECONDS)
        other = one(store.reserve([self.reservation("key-2", quarantine=0.5)])[0].record)
        assert (other.quarantine_seconds, stored(store, key="key-2")) == (0.5, replace(other, now=0.0))
        doubted = one(store.swap([swap(record, Event.DOUBT, Actor.OWNER)])[0])
        self.age(store, record.scope, record.key, DEFAULT_QUARANTINE_SECONDS - _NEARLY)
        refute = swap(doubted, Event.REFUTE, Actor.RECONCILER)
        assert store.swap([refute]) == [None]
        self.age(store, record.scope, record.key, _NEARLY)
        assert store.swap([refute]) != [None]

    @pytest.mark.parametrize("recipe", [None, '{"headers":["accept"]}'])
    def test_a_key_that_starts_over_has_no_past(self, store: Store, recipe: str | None) -> None:
        """After expiry a new request gets a row as if it were the first: new fingerprint, attempt 1, no response."""
        record = self.drive(store, State.FAILED_RETRYABLE)
        retry = swap(record, Event.RETRY, Actor.REQUEST, reservation=self.reservation())
        record = one(store.swap([retry])[0])
        record = one(store.swap([swap(record, Event.FAIL, Actor.OWNER, response=RESPONSE, last_error="no")])[0])
        self.age(store, record.scope, record.key, RETENTION + 1)
        new = replace(
            self.reservation(lease=7, retention=70, effects=Effects.PHASED, recipe=recipe, quarantine=9.5),
            operation="PUT /",
            fingerprint=bytes(range(36)),
            fingerprint_version=120 * 256 + 2,  # the highest one, of a keyed fingerprint
        )
        again = one(store.swap([swap(record, Event.RESERVE, Actor.REQUEST, reservation=new)])[0])
        assert stored(store) == replace(again, now=0.0)
        other = one(store.reserve([replace(new, key="key-2")])[0].record)
        start = again.created_at
        assert start == pytest.approx(again.now, abs=1)
        assert again == replace(
            other,
            key=again.key,
            lease_until=start + 7,
            created_at=start,
            expires_at=start + 70,
            now=again.now,
        )

    def test_an_error_and_a_time_to_reconcile_are_kept_until_the_next_move(self, store: Store) -> None:
        """An unknown row has a reason and a time to ask again. A settled row has neither."""
        record = self.drive(store, State.IN_PROGRESS)
        doubt = swap(record, Event.DOUBT, Actor.OWNER, last_error="timeout ✂", reconcile_in=90)
        record = one(store.swap([doubt])[0])
        assert record.last_error == "timeout ✂"
        assert record.reconcile_at == pytest.approx(record.now + 90, abs=1)
        record = one(
            store.swap([swap(record, Event.CONFIRM, Actor.RECONCILER, response=RESPONSE)])[0],
        )
        assert (record.last_error, record.reconcile_at) == (None, None)
        assert stored(store) == replace(record, now=0.0)
