"""The part of the store suite about lists and numbers, for operators and health checks."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from oncekey.core.health import NO_RESOLVER, WAITING_SECONDS, UnknownsOf
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.swaps import swap
from oncekey.stores.api import Inspect, Store
from oncekey.testing.conformance.base import AGES, LEASE, SuiteBase, one, stored


class LookupSuite(SuiteBase):
    needs: ClassVar[type] = Inspect

    # listing

    def test_a_listing_shows_every_row_by_its_key_without_its_response(self, store: Store) -> None:
        """There is one row of each state. They are listed in the order of (scope, key), without their responses."""
        for number, state in enumerate(State):
            self.drive(store, state, f"{state}-key", scope=f"tenant-{number % 3}")
        listed = store.listing()
        keys = sorted((f"tenant-{number % 3}", f"{state}-key") for number, state in enumerate(State))
        assert [(row.scope, row.key) for row in listed] == keys
        rows = [replace(one(stored(store, row.scope, row.key)), response=None) for row in listed]
        assert [replace(row, now=0.0) for row in listed] == rows

    @pytest.mark.parametrize("state", list(State))
    def test_a_listing_of_one_state_shows_it_alone(self, store: Store, state: State) -> None:
        """Each state may use another index. Retryable rows with and without steps and dead letters are listed too."""
        for other in State:
            for key in ("b", "a"):
                self.drive(store, other, f"{other}-{key}")
        dead = self.drive(store, State.UNKNOWN, "unknown-c")
        assert store.swap([swap(dead, Event.POSTPONE, Actor.RECONCILER)]) != [None]
        self.drive(store, State.FAILED_RETRYABLE, "failed_retryable-c", steps=True)
        more = ["c"] if state in (State.UNKNOWN, State.FAILED_RETRYABLE) else []
        assert [row.key for row in store.listing(state)] == [f"{state}-{key}" for key in ("a", "b", *more)]
        assert [row.key for row in store.listing(state, limit=1)] == [f"{state}-a"]
        read_on = store.listing(state, "tenant-1", after=("tenant-1", f"{state}-a"))
        assert [row.key for row in read_on] == [f"{state}-{key}" for key in ("b", *more)]
        assert store.listing(state, "tenant-2") == []

    def test_a_listing_is_narrowed_by_scope_operation_and_age(self, store: Store) -> None:
        """All filters apply together. A scope and an operation are compared as bytes."""
        refund = replace(self.reservation("old", scope="b"), operation="POST /refunds")
        store.reserve([refund])
        self.drive(store, State.IN_PROGRESS, "old", scope="a")
        for scope in ("a", "b"):
            self.age(store, scope, "old", 1000)
        now = [self.reservation("new", scope=scope) for scope in ("a", "b", "B")]
        store.reserve(now)
        assert [row.scope for row in store.listing(scope="b")] == ["b", "b"]
        assert [row.key for row in store.listing(operation="POST /refunds")] == ["old"]
        assert store.listing(operation="post /refunds") == []
        assert [(row.scope, row.key) for row in store.listing(older_than=900)] == [("a", "old"), ("b", "old")]
        assert [row.scope for row in store.listing(operation="POST /payments", older_than=900)] == ["a"]
        assert store.listing(State.COMPLETED, "b", "POST /refunds", 900) == []
        both = store.listing(State.IN_PROGRESS, "b", "POST /refunds", 900, 10)
        assert [(row.scope, row.key) for row in both] == [("b", "old")]

    def test_a_long_listing_is_read_on_from_where_it_ended(self, store: Store) -> None:
        """``after`` is the last row of the page before: no row is left out, and none is shown twice."""
        wanted = [self.reservation(f"key-{number:02}", scope=scope) for scope in ("a", "b", "B") for number in range(5)]
        store.reserve(wanted)
        pages: list[tuple[str, str]] = []
        after = None
        while page := store.listing(limit=4, after=after):
            pages += [(row.scope, row.key) for row in page]
            after = pages[-1]
            assert len(page) <= 4
        assert pages == sorted((w.scope, w.key) for w in wanted)
        assert [row.key for row in store.listing(scope="b", after=("b", "key-02"))] == ["key-03", "key-04"]
        assert store.listing(scope="a", after=("b", "")) == []

    # health

    def test_counts_are_rows_by_state(self, store: Store) -> None:
        """They count rows by state. In an empty store all numbers are 0."""
        empty = store.counts()
        assert empty.counts == dict.fromkeys(State, 0)
        assert (empty.dead, empty.oldest_unknown_seconds, empty.lease_over_seconds) == (0, 0.0, 0.0)
        for number, state in enumerate(State, start=1):
            for row in range(number):
                self.drive(store, state, f"{state}-{row}", steps=state is State.FAILED_RETRYABLE and row == 0)
        assert store.counts().counts == {state: number for number, state in enumerate(State, start=1)}

    def test_the_counts_name_the_operations_of_unknown_keys(self, store: Store) -> None:
        """The operation with the most unknown keys is first. Keys without a resolver are counted, also dead letters."""
        assert store.counts().unknowns == ()
        for operation, keys in (("POST /b", "12"), ("POST /c", "345"), ("POST /a", "67")):
            found = store.reserve([replace(self.reservation(key), operation=operation) for key in keys])
            store.swap([swap(one(each.record), Event.DOUBT, Actor.OWNER, last_error="timeout") for each in found])
        for key, reconcile_in in (("3", 90.0), ("4", None), ("6", 90.0)):
            row = one(store.read([("tenant-1", key)])[0])
            reason = NO_RESOLVER if key != "6" else "the provider has not decided"
            later = swap(row, Event.POSTPONE, Actor.RECONCILER, reconcile_in=reconcile_in, last_error=reason)
            assert store.swap([later]) != [None]
        self.drive(store, State.COMPLETED, "8")
        expected = (UnknownsOf("POST /c", 3, 2), UnknownsOf("POST /a", 2, 0), UnknownsOf("POST /b", 2, 0))
        assert store.counts().unknowns == expected

    def test_counts_name_the_operations_of_half_done_keys_that_wait(self, store: Store) -> None:
        """Keys that had no attempt for a while. Keys that upkeep has tried, and keys without steps, do not wait."""
        assert store.counts().half_done == ()
        for operation, keys in (("POST /b", "1"), ("POST /c", "23")):
            for key in keys:
                wanted = replace(self.reservation(key), operation=operation, effects=Effects.PHASED)
                record = one(store.reserve([wanted])[0].record)
                record = one(store.swap([swap(record, Event.ADVANCE, Actor.OWNER, recovery_point="ride")])[0])
                assert store.swap([swap(record, Event.RELEASE, Actor.OWNER)]) != [None]
        self.drive(store, State.FAILED_RETRYABLE, "4")
        assert store.counts().half_done == ()
        for key in "1234":
            self.age(store, "tenant-1", key, LEASE + WAITING_SECONDS + 50)
        first, second = store.counts().half_done
        assert (first.operation, first.keys, second.operation, second.keys) == ("POST /c", 2, "POST /b", 1)
        assert first.oldest_seconds >= WAITING_SECONDS + 40
        row = one(store.read([("tenant-1", "1")])[0])
        resumed = one(store.swap([swap(row, Event.RETRY, Actor.RESUMER, reservation=self.reservation("1"))])[0])
        assert store.swap([swap(resumed, Event.RELEASE, Actor.OWNER)]) != [None]
        self.age(store, "tenant-1", "1", LEASE + WAITING_SECONDS + 50)
        assert [each.operation for each in store.counts().half_done] == ["POST /c"]

    def test_counts_show_the_oldest_lapsed_lease_and_the_oldest_unknown(self, store: Store) -> None:
        """They show the oldest lease that is over and the oldest unknown outcome. A running lease counts as 0."""
        self.drive(store, State.IN_PROGRESS, "running")
        assert store.counts().lease_over_seconds == 0.0
        self.age(store, "tenant-1", "running", LEASE + 50)
        self.drive(store, State.IN_PROGRESS, "fresh")
        assert store.counts().lease_over_seconds == pytest.approx(50, abs=5)
        self.drive(store, State.UNKNOWN, "unknown")
        before = store.counts().oldest_unknown_seconds
        self.age(store, "tenant-1", "unknown", AGES)
        assert store.counts().oldest_unknown_seconds == pytest.approx(before + AGES, abs=5)
