"""The part of the store suite about upkeep: unknown keys in turns by scope, and the purge of the audit."""

from __future__ import annotations

from oncekey.core.audit import Audit
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.stores.api import Duty, Store
from oncekey.stores.duties import VISITED
from oncekey.testing.conformance.base import RESPONSE, SuiteBase, one

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

    # the purge of the audit

    def test_old_lines_of_the_audit_are_purged_and_younger_ones_stay(self, store: Store) -> None:
        """The oldest lines are deleted first, up to the limit, whether or not their key exists."""
        for key in ("gone", "done"):
            row = self.drive(store, State.UNKNOWN, key)
            row = one(store.swap([swap(row, Event.CONFIRM, Actor.OPERATOR, response=RESPONSE, audit=_WHY)])[0])
            if key == "gone":
                assert store.swap([swap(row, Event.FORGET, Actor.OPERATOR, audit=_WHY)]) != [None]
        assert store.purge_audit(10, 3600.0) == 0
        assert store.purge_audit(1, 0.0) == 1
        assert [line.event for line in store.audit("tenant-1", "gone", 10)] == ["forget"]
        assert len(store.audit("tenant-1", "done", 10)) == 1
        assert store.purge_audit(10, 0.0) == 2
        assert store.audit("tenant-1", "gone", 10) == store.audit("tenant-1", "done", 10) == []

    def test_the_audit_of_a_key_that_is_not_over_is_not_purged(self, store: Store) -> None:
        """Its lines are kept, however old they are. Lines of the same key in another scope are deleted."""
        unknown = self.drive(store, State.UNKNOWN, "unknown")
        assert store.swap([swap(unknown, Event.POSTPONE, Actor.OPERATOR, reconcile_in=0, audit=_WHY)]) != [None]
        for key in ("running", "resumable"):
            row = self.drive(store, State.IN_PROGRESS, key, steps=key == "resumable")
            row = one(store.swap([swap(row, Event.RENEW, Actor.OWNER, lease_seconds=60.0, audit=_WHY)])[0])
            if key == "resumable":
                assert store.swap([swap(row, Event.RELEASE, Actor.OWNER)]) != [None]
        other = self.drive(store, State.COMPLETED, "unknown", scope="tenant-2")
        assert store.swap([swap(other, Event.FORGET, Actor.OPERATOR, audit=_WHY)]) != [None]
        assert store.purge_audit(10, 0.0) == 1
        for key in ("unknown", "running", "resumable"):
            assert len(store.audit("tenant-1", key, 10)) == 1, key
        assert store.audit("tenant-2", "unknown", 10) == []
