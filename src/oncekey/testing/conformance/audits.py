"""The part of the store suite about the audit: the lines that changes by hand leave, and how long they stay."""

from __future__ import annotations

from typing import ClassVar

import pytest

from oncekey.core.audit import Audit
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.stores.api import Inspect, Store
from oncekey.testing.conformance.base import AGES, RESPONSE, SuiteBase, one

_WHY = Audit("ana@example.com", "the provider's ledger has it")


class AuditSuite(SuiteBase):
    needs: ClassVar[type] = Inspect

    def test_change_by_hand_writes_an_audit_line_with_before_and_after(self, store: Store) -> None:
        """A line has who, when (the store's clock), event, before, after and why. The newest line is first."""
        record = self.drive(store, State.UNKNOWN)
        self.drive(store, State.UNKNOWN, scope="tenant-2")
        tries = swap(record, Event.POSTPONE, Actor.RECONCILER, audit=Audit("reconciler", "no answer '%s' é"))
        record = one(store.swap([tries])[0])
        record = one(store.swap([swap(record, Event.CONFIRM, Actor.OPERATOR, response=RESPONSE, audit=_WHY)])[0])
        lines = store.audit("tenant-1", "key-1", 10)
        assert [(line.who, line.event, line.before, line.after, line.why) for line in lines] == [
            (_WHY.who, "confirm", "unknown", "completed", _WHY.why),
            ("reconciler", "postpone", "unknown", "unknown", "no answer '%s' é"),
        ]
        assert {(line.scope, line.key, line.job_id) for line in lines} == {("tenant-1", "key-1", None)}
        assert [line.at for line in lines] == [pytest.approx(record.now, abs=5)] * 2
        assert store.audit("tenant-1", "key-1", 1) == lines[:1]
        assert store.audit("tenant-2", "key-1", 10) == store.audit("tenant-1", "key", 10) == []

    def test_the_audit_outlives_the_key(self, store: Store) -> None:
        """The line of a forgotten key has no state after it. The lines stay when the key starts over."""
        record = self.drive(store, State.COMPLETED)
        forget = swap(record, Event.FORGET, Actor.OPERATOR, audit=_WHY)
        assert one(store.swap([forget])[0]).response == RESPONSE
        (line,) = store.audit("tenant-1", "key-1", 10)
        assert (line.event, line.before, line.after, line.who) == ("forget", "completed", None, _WHY.who)
        assert store.swap([forget]) == [None]
        record = self.drive(store, State.COMPLETED)
        self.age(store, record.scope, record.key, AGES)
        again = swap(record, Event.RESERVE, Actor.REQUEST, reservation=self.reservation(), audit=_WHY)
        assert store.swap([again]) != [None]
        lines = store.audit("tenant-1", "key-1", 10)
        assert [(line.event, line.after) for line in lines] == [("reserve", "in_progress"), ("forget", None)]

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
