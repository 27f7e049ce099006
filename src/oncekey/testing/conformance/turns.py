"""The part of the store suite about unknown keys: they are handed out in turns by scope, and asked about again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oncekey.core.audit import Audit
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.stores.api import Duty, Store
from oncekey.stores.duties import VISITED
from oncekey.testing.conformance.base import AGES, RESPONSE, SuiteBase, one, stored

_WHY = Audit("ana@example.com", "the provider's ledger has it")


class TurnSuite(SuiteBase):
    def _unknown(self, store: Store, scope: str, number: int, *, due_in: float = 0.0) -> list[tuple[str, str]]:
        """Make ``number`` unknown keys of a scope, one second apart. Return them with the oldest first."""
        wanted = [self.reservation(f"key-{at:04}", scope=scope) for at in range(number)]
        found = [one(each.record) for each in store.reserve(wanted)]
        doubts = [swap(row, Event.DOUBT, Actor.OWNER, reconcile_in=due_in - at) for at, row in enumerate(found)]
        assert None not in store.swap(doubts)
        return [(row.scope, row.key) for row in reversed(found)]

    def _handed_out(self, store: Store, limit: int, duty: Duty = Duty.UNKNOWNS) -> list[tuple[str, str]]:
        return [(row.scope, row.key) for row in store.due(duty, limit)]

    def test_half_done_keys_are_handed_out_in_turns_too(self, store: Store) -> None:
        """Neither of the two duties lists the keys of the other."""
        self._unknown(store, "tenant-2", 1)
        rows = [
            self.drive(store, State.FAILED_RETRYABLE, f"key-{at:04}", scope=scope, steps=True)
            for scope, number in (("tenant-1", 30), ("tenant-3", 1))
            for at in range(number)
        ]
        assert self._handed_out(store, 100, Duty.RESUMABLE) == [], "the client has the first try"
        late = [swap(row, Event.POSTPONE, Actor.RESUMER, reconcile_in=at - 100.0) for at, row in enumerate(rows)]
        assert None not in store.swap(late)
        *flood, single = [(row.scope, row.key) for row in rows]
        assert self._handed_out(store, 10, Duty.RESUMABLE) == [flood[0], single, *flood[1:9]]
        assert self._handed_out(store, 10) == [("tenant-2", "key-0000")]

    def test_unknown_keys_of_one_scope_do_not_keep_anothers_waiting(self, store: Store) -> None:
        """The oldest key is returned first. The only key of another scope, the newest of all, is returned second."""
        flood = self._unknown(store, "tenant-1", 250)
        assert self._handed_out(store, 100) == flood[:100]
        self._unknown(store, "tenant-2", 1)
        assert self._handed_out(store, 100) == [flood[0], ("tenant-2", "key-0000"), *flood[1:99]]
        assert self._handed_out(store, 1) == flood[:1], "a health check asks for the one that has waited longest"
        assert self._handed_out(store, 251) == [flood[0], ("tenant-2", "key-0000"), *flood[1:]]

    def test_scopes_share_the_keys_that_are_handed_out(self, store: Store) -> None:
        """All scopes get an equal part of one half. The other half goes to the keys that have waited longest."""
        flood = self._unknown(store, "tenant-1", 60)
        few = self._unknown(store, "tenant-2", 9)
        turns = [at for pair in zip(flood[:5], few[:5], strict=True) for at in pair]
        assert self._handed_out(store, 20) == turns + flood[5:15]

    def test_every_scope_has_its_turn_however_many_there_are(self, store: Store) -> None:
        """There are more scopes than one call returns. The next call goes on where the last one ended."""
        flood = self._unknown(store, "a-flood", 40)
        scopes = [f"tenant-{number:02}" for number in range(30)]
        for scope in scopes:
            self._unknown(store, scope, 1)
        batches = [self._handed_out(store, 20) for _ in range(4)]
        assert [len(set(batch)) for batch in batches] == [20] * 4
        assert {scope for batch in batches for scope, _ in batch} == {*scopes, "a-flood"}
        assert all(flood[0] in batch for batch in batches), "the oldest is never left out"

    def test_scopes_with_nothing_due_are_passed_over(self, store: Store) -> None:
        """There are more such scopes than one call reads. The next call goes on after them, then from the beginning."""
        flood = self._unknown(store, "a-flood", 40)
        for number in range(VISITED + 10):
            self._unknown(store, f"later-{number:03}", 1, due_in=1000.0)
        self._unknown(store, "tenant-2", 1)
        first, second, third = (self._handed_out(store, 20) for _ in range(3))
        assert first == third == flood[:20]
        assert second == [flood[0], ("tenant-2", "key-0000"), *flood[1:19]]

    # unknown outcomes

    def test_a_postponed_outcome_is_asked_again_later(self, store: Store) -> None:
        """Each try is counted, and its error is kept. The row is due again when its time has come, and not before."""
        record = self.drive(store, State.UNKNOWN)
        for tries in (1, 2):
            later = swap(record, Event.POSTPONE, Actor.RECONCILER, reconcile_in=90, last_error=f"no answer {tries}")
            record = one(store.swap([later])[0])
            assert (record.state, record.reconcile_tries) == (State.UNKNOWN, tries)
            assert record.last_error == f"no answer {tries}"
            assert record.reconcile_at == pytest.approx(record.now + 90, abs=1)
            assert stored(store) == replace(record, now=0.0)
            assert store.due(Duty.UNKNOWNS, 10) == []
            self.age(store, record.scope, record.key, 91)
            assert [row.reconcile_tries for row in store.due(Duty.UNKNOWNS, 10)] == [tries]

    def test_an_outcome_that_is_asked_no_more_is_a_dead_letter(self, store: Store) -> None:
        """It stays unknown. No duty lists it, however old it is. An operator can still settle it."""
        record = self.drive(store, State.UNKNOWN)
        record = one(store.swap([swap(record, Event.POSTPONE, Actor.RECONCILER, last_error="gave up")])[0])
        assert (record.reconcile_at, record.last_error) == (None, "gave up")
        self.age(store, record.scope, record.key, AGES)
        assert [store.due(duty, 10) for duty in Duty] == [[] for _ in Duty]
        assert store.counts().dead == 1
        refute = swap(record, Event.REFUTE, Actor.OPERATOR, audit=_WHY)
        assert one(store.swap([refute])[0]).state is State.FAILED_RETRYABLE
        assert store.counts().dead == 0

    def test_a_mover_that_looked_before_a_try_does_not_undo_its_count(self, store: Store) -> None:
        """A try changes neither state nor owner. A later move returns the count of the stored row, not the one read."""
        looked = [self.drive(store, State.UNKNOWN, key) for key in ("key-1", "key-2", "key-3")]
        assert None not in store.swap([swap(row, Event.POSTPONE, Actor.RECONCILER, reconcile_in=0) for row in looked])
        confirm, *others = (swap(row, Event.CONFIRM, Actor.OPERATOR, response=RESPONSE) for row in looked)
        settled = [one(row) for row in store.swap([confirm]) + store.swap(others)]
        assert [row.reconcile_tries for row in settled] == [1, 1, 1]
        assert [stored(store, key=row.key) for row in settled] == [replace(row, now=0.0) for row in settled]
