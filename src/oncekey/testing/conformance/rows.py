"""The part of the store suite about rows: reservations, keys as bytes, responses, batches, duties."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.swaps import swap
from oncekey.stores.api import Duty, Store
from oncekey.testing.conformance.base import (
    AGES,
    LEASE,
    RESPONSE,
    RETENTION,
    SuiteBase,
    one,
    stored,
)

_ALIKE = [
    *("key", "Key", "KEY", "key ", " key", "key\t", "'key'", '"key"', "key'; --", "k_y", "k%y", "%", "_", "*"),
    *("key\\", "key\\\\", "k?y", "k$1y", "{key}", "%s", ":key", "0", "00", "0.0", "1e3", "1000", "null", "NULL"),
    *("k" * 254, "k" * 255, "k" * 254 + "K"),
]
_ALIKE_SCOPES = [
    *("müller", "mu\u0308ller", "muller", "Müller", "MÜLLER", "mueller", "straße", "strasse", "STRASSE"),
    *("tenant", "tenant ", "tenant\u00a0", "Tenant", "\u0131", "i", "İ", "日本", "\U0001f511", "a/b"),
]

_RESPONSES = {
    "empty body": StoredResponse(204, (), b""),
    "tombstone": StoredResponse(200, (("content-type", "text/html"),), None),
    "every byte": StoredResponse(200, (), bytes(range(256)) * 4),
    "NULs": StoredResponse(200, (), b"\x00\x00a\x00"),
    "1 MiB": StoredResponse(200, (), b"\x00\xff\xfe'%" * 209_715 + b"."),
    "looks like text": StoredResponse(200, (), b'{"a": "\\u0000"}'),
    "header values": StoredResponse(
        418, (("x-note", "é ü 日本 \U0001f511"), ("x-quotes", "\"'\\%"), ("x-empty", ""), ("x-note", "again")), b"x"
    ),
}

_DUE_STATES = {
    Duty.LEASES: {State.IN_PROGRESS},
    Duty.EXPIRED: {State.COMPLETED, State.FAILED, State.FAILED_RETRYABLE},
    Duty.ABANDONED: {State.PENDING},
    Duty.UNKNOWNS: {State.UNKNOWN},
    Duty.LAPSED: {State.FAILED_RETRYABLE},
    Duty.RESUMABLE: {State.FAILED_RETRYABLE},
}


class RowSuite(SuiteBase):
    # reservations

    @pytest.mark.parametrize("recipe", [None, '{"fields":["a.b","é \\""],"headers":[]}'])
    def test_a_reservation_of_an_absent_key_is_the_row(self, store: Store, recipe: str | None) -> None:
        """The row has all fields of the reservation and a lease from now, and a reader sees it."""
        wanted = self.reservation(effects=Effects.EXTERNAL, recipe=recipe)
        record = one(store.reserve([wanted])[0].record)
        assert stored(store) == replace(record, now=0.0)
        assert record == Record(
            scope=wanted.scope,
            key=wanted.key,
            operation=wanted.operation,
            fingerprint=wanted.fingerprint,
            fingerprint_version=wanted.fingerprint_version,
            effects=Effects.EXTERNAL,
            state=State.IN_PROGRESS,
            attempt=1,
            owner=wanted.owner,
            lease_until=record.created_at + LEASE,
            recovery_point=None,
            response=None,
            last_error=None,
            reconcile_at=None,
            reconcile_tries=0,
            created_at=record.now,
            finished_at=None,
            retention_seconds=RETENTION,
            expires_at=record.created_at + RETENTION,
            now=record.now,
            fingerprint_recipe=recipe,
        )

    def test_each_reservation_of_a_batch_keeps_its_own_recipe(self, store: Store) -> None:
        """NULL does not become the recipe of another row or an empty text. A later reservation finds each recipe."""
        recipes = {"key-1": None, "key-2": '{"headers":[]}', "key-3": "", "key-4": None}
        batch = [self.reservation(key, recipe=recipe) for key, recipe in recipes.items()]
        for _ in range(2):
            found = [one(each.record) for each in store.reserve(batch)]
            assert {record.key: record.fingerprint_recipe for record in found} == recipes
            batch = [self.reservation(key, recipe="another") for key in recipes]

    def test_each_reservation_of_a_batch_keeps_its_own_fingerprint(self, store: Store) -> None:
        """Plain ones have 32 bytes and version 1 or 2, keyed ones 36 bytes and a version up to 120 * 256 + 2."""
        sizes = {1: 32, 2: 32, 258: 36, 30722: 36}
        prints = {f"key-{version}": (b"\xff" * size, version) for version, size in sizes.items()}
        batch = [replace(self.reservation(key), fingerprint=a, fingerprint_version=b) for key, (a, b) in prints.items()]
        for wanted in (batch, batch[2:], batch[3:]):
            found = [one(each.record) for each in store.reserve(wanted)]
            read = [one(record) for record in store.read([(each.scope, each.key) for each in wanted])]
            for record in (*found, *read):
                assert (record.fingerprint, record.fingerprint_version) == prints[record.key]

    @pytest.mark.parametrize("state", list(State))
    def test_reservation_of_an_existing_key_reads_it(self, store: Store, state: State) -> None:
        """In every state, expired or not, a reservation changes nothing and returns the row."""
        self.drive(store, state)
        for _ in range(2):
            before = stored(store)
            found = one(store.reserve([self.reservation()])[0].record)
            assert replace(found, now=0.0) == before == stored(store)
            self.age(store, found.scope, found.key, AGES)

    def test_a_reservation_that_is_repeated_finds_itself(self, store: Store) -> None:
        """A driver that asks again after a lost answer finds its own owner token, not a conflict (hazard 8)."""
        wanted = self.reservation()
        first, again = (one(store.reserve([wanted])[0].record) for _ in range(2))
        assert first.owner == again.owner == wanted.owner
        assert again.state is State.IN_PROGRESS

    def test_reading_says_none_where_there_is_no_row(self, store: Store) -> None:
        """An absent key reads as None, at its place in the batch, and reading makes no row."""
        self.drive(store, State.IN_PROGRESS, "there")
        keys = [("tenant-1", "absent"), ("tenant-1", "there"), ("tenant-2", "there"), ("tenant-1", "there")]
        assert [record and record.key for record in store.read(keys)] == [None, "there", None, "there"]
        assert stored(store, key="absent") is None

    def test_the_clock_of_the_store_comes_with_every_record(self, store: Store) -> None:
        """``now`` is the time of the call on the store's own clock, so a caller never needs its own clock."""
        record = self.drive(store, State.IN_PROGRESS)
        assert not record.lease_over
        self.age(store, record.scope, record.key, LEASE + 1)
        assert one(store.read([(record.scope, record.key)])[0]).lease_over
        assert one(store.reserve([self.reservation()])[0].record).lease_over
        assert [late.lease_over for late in store.due(Duty.LEASES, 1)] == [True]

    # keys as bytes

    def test_keys_that_look_alike_are_different_keys(self, store: Store) -> None:
        """Case, blanks, quotes, wildcards, numbers, length: only the same bytes are the same key (hazard 17)."""
        wanted = [self.reservation(key) for key in _ALIKE]
        assert [one(found.record).owner for found in store.reserve(wanted)] == [w.owner for w in wanted]
        found = store.read([("tenant-1", key) for key in _ALIKE])
        assert [(one(row).key, one(row).owner) for row in found] == [(w.key, w.owner) for w in wanted]

    def test_scopes_that_look_alike_are_different_scopes(self, store: Store) -> None:
        """Case, accents, composed or not, blanks: only the same bytes are the same tenant (hazard 17, I6)."""
        wanted = [self.reservation(scope=scope) for scope in _ALIKE_SCOPES]
        assert [one(found.record).owner for found in store.reserve(wanted)] == [w.owner for w in wanted]
        found = store.read([(scope, "key-1") for scope in _ALIKE_SCOPES])
        assert [(one(row).scope, one(row).owner) for row in found] == [(w.scope, w.owner) for w in wanted]

    def test_one_key_in_two_scopes_is_two_rows(self, store: Store) -> None:
        """A tenant that completes a key does not change the same key of another tenant (I6)."""
        mine = self.drive(store, State.IN_PROGRESS, scope="tenant-1")
        self.drive(store, State.IN_PROGRESS, scope="tenant-2")
        theirs = stored(store, "tenant-2")
        assert store.swap([swap(mine, Event.COMPLETE, Actor.OWNER, response=RESPONSE)]) != [None]
        assert stored(store, "tenant-2") == theirs

    def test_scope_and_key_are_not_joined(self, store: Store) -> None:
        """('a', 'b:c') and ('a:b', 'c') are two rows, with every delimiter."""
        pairs = [("a", f"b{mark}c") for mark in ":/|\x1f "] + [(f"a{mark}b", "c") for mark in ":/|\x1f "]
        wanted = [self.reservation(key, scope=scope) for scope, key in pairs]
        assert [one(found.record).owner for found in store.reserve(wanted)] == [w.owner for w in wanted]

    # responses

    @pytest.mark.parametrize("name", list(_RESPONSES))
    def test_a_response_comes_back_byte_for_byte(self, store: Store, name: str) -> None:
        """Status, headers in their order, and body are as stored. No body differs from an empty body (I2)."""
        record = self.drive(store, State.IN_PROGRESS)
        response = _RESPONSES[name]
        moved = one(store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=response)])[0])
        found = one(store.reserve([self.reservation()])[0].record)
        assert moved.response == found.response == response
        assert type(found.response.body) is type(response.body)
        assert found.response.replayable == (response.body is not None)

    def test_a_response_of_another_schema_version_is_a_tombstone(self, store: Store) -> None:
        """A response that a newer oncekey stored is read without an error, and not replayed."""
        record = self.drive(store, State.IN_PROGRESS)
        newer = replace(RESPONSE, schema_version=99)
        store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=newer)])
        response = one(stored(store)).response
        assert response is not None
        assert (response.status, response.schema_version, response.replayable) == (RESPONSE.status, 99, False)

    # batches

    def test_a_large_unsorted_batch_is_answered_in_its_own_order(self, store: Store) -> None:
        """Of 500 unsorted reservations, half are of taken keys. The answers are in the order of the batch."""
        numbers = [number * 7919 % 500 for number in range(500)]
        taken = {n: self.reservation(f"key-{n}", scope=f"tenant-{n % 3}") for n in numbers if n % 2}
        store.reserve(list(taken.values()))
        wanted = [self.reservation(f"key-{n}", scope=f"tenant-{n % 3}") for n in numbers]

        found = [one(answer.record) for answer in store.reserve(wanted)]

        assert [(row.scope, row.key) for row in found] == [(w.scope, w.key) for w in wanted]
        owners = [taken[n].owner if n in taken else w.owner for n, w in zip(numbers, wanted, strict=True)]
        assert [row.owner for row in found] == owners
        changes = [swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE) for row in found]
        changes = [c if n % 5 else replace(c, owner="another-owner") for n, c in zip(numbers, changes, strict=True)]
        moved = store.swap(changes)
        assert [row and row.key for row in moved] == [f"key-{n}" if n % 5 else None for n in numbers]
        read = store.read([(w.scope, w.key) for w in wanted])
        assert [one(row).state is State.COMPLETED for row in read] == [n % 5 != 0 for n in numbers]

    def test_a_batch_may_hold_different_moves(self, store: Store) -> None:
        """One batch completes, renews, deletes and starts over, and one move is refused. Each acts as if alone."""
        records = [self.drive(store, State.IN_PROGRESS, key) for key in "edcba"]
        ended = self.drive(store, State.COMPLETED, "f", retention=1.0)
        self.age(store, ended.scope, ended.key, 2)
        owner, request = Actor.OWNER, Actor.REQUEST
        again = self.reservation("f")
        batch = [
            swap(records[0], Event.COMPLETE, owner, response=RESPONSE),
            swap(ended, Event.RESERVE, request, reservation=again),
            swap(records[1], Event.RENEW, owner, lease_seconds=LEASE),
            swap(records[2], Event.DISCARD, owner),
            replace(swap(records[3], Event.FAIL, owner), owner="another-owner"),
            swap(records[4], Event.DEFER, owner),
        ]
        moved = store.swap(batch)
        assert [row and row.key for row in moved] == ["e", "f", "d", "c", None, "a"]
        states = [row and row.state for row in store.read([("tenant-1", key) for key in "abcdef"])]
        running = State.IN_PROGRESS
        assert states == [State.PENDING, running, None, running, State.COMPLETED, running]
        assert one(moved[1]).fingerprint == again.fingerprint

    def test_an_empty_batch_is_nothing(self, store: Store) -> None:
        """The answer is an empty list, and no error."""
        assert (store.reserve([]), store.swap([]), store.read([])) == ([], [], [])

    # duties

    @pytest.mark.parametrize("duty", list(Duty))
    def test_a_duty_lists_its_own_rows_and_no_others(self, store: Store, duty: Duty) -> None:
        """There is one old row in each state. A duty lists only the rows of its own states."""
        self._one_of_each(store)
        assert {row.state for row in store.due(duty, 100)} == _DUE_STATES[duty]
        assert ("stepped" in {row.key for row in store.due(duty, 100)}) == (duty in (Duty.LAPSED, Duty.RESUMABLE))

    @pytest.mark.parametrize("duty", list(Duty))
    def test_a_duty_lists_the_oldest_first_up_to_its_limit(self, store: Store, duty: Duty) -> None:
        """Three rows are due, one is not. The row that is due longest is first; no row has a response."""
        records = [self._due_in(store, duty, key, seconds) for key, seconds in _DUE_TIMES.items()]
        assert store.due(duty, 10) == []
        for record in records:
            self.age(store, record.scope, record.key, 100)
        listed = store.due(duty, 10)
        assert [row.key for row in listed] == ["b-oldest", "a-later", "c-last"]
        assert [row.key for row in store.due(duty, 2)] == ["b-oldest", "a-later"]
        rows = [replace(one(stored(store, key=row.key)), response=None) for row in listed]
        assert [replace(row, now=0.0) for row in listed] == rows

    def _due_in(self, store: Store, duty: Duty, key: str, seconds: float) -> Record:
        lease = seconds if duty is Duty.LEASES else LEASE
        retention = seconds if duty in (Duty.EXPIRED, Duty.ABANDONED, Duty.LAPSED) else RETENTION
        record = one(store.reserve([self.reservation(key, lease=lease, retention=retention)])[0].record)
        match duty:
            case Duty.EXPIRED:
                change = swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
            case Duty.ABANDONED:
                change = swap(record, Event.DEFER, Actor.OWNER)
            case Duty.UNKNOWNS:
                change = swap(record, Event.DOUBT, Actor.OWNER, reconcile_in=seconds)
            case Duty.LAPSED:
                advance = swap(record, Event.ADVANCE, Actor.OWNER, recovery_point="charge_created")
                change = swap(one(store.swap([advance])[0]), Event.RELEASE, Actor.OWNER)
            case Duty.RESUMABLE:
                advance = swap(record, Event.ADVANCE, Actor.OWNER, recovery_point="charge_created")
                released = swap(one(store.swap([advance])[0]), Event.RELEASE, Actor.OWNER)
                change = swap(one(store.swap([released])[0]), Event.POSTPONE, Actor.RESUMER, reconcile_in=seconds)
            case _:
                return record
        return one(store.swap([change])[0])

    def _one_of_each(self, store: Store) -> None:
        """Make one row per state, and a retryable row with a step that is done. All of them are old."""
        for state in State:
            self.drive(store, state, str(state))
        self.drive(store, State.FAILED_RETRYABLE, "stepped", steps=True)
        for key in [*map(str, State), "stepped"]:
            self.age(store, "tenant-1", key, AGES)

    # purging

    def test_purge_deletes_only_final_expired_keys(self, store: Store) -> None:
        """The purge never deletes keys in flight, pending, unknown or resumable, however old they are (hazard 11)."""
        self._one_of_each(store)
        self.drive(store, State.COMPLETED, "fresh", retention=1000 * AGES)
        assert store.purge(100) == 4
        keys = [*map(str, State), "stepped", "fresh"]
        left = {key for key in keys if stored(store, key=key)}
        assert left == {"in_progress", "pending", "unknown", "stepped", "fresh"}
        assert store.purge(100) == 0

    def test_expired_key_is_kept_for_as_long_again(self, store: Store) -> None:
        """An expired key is kept for the audit. It is deleted when its retention has passed a second time."""
        expired = self.drive(store, State.EXPIRED, retention=100)
        self.age(store, expired.scope, expired.key, expired.expires_at - expired.now + 100 - 2)
        assert store.purge(10) == store.purge(10, expired_state_only=True) == 0
        self.age(store, expired.scope, expired.key, 2 + 1)
        assert store.purge(10, expired_state_only=True) == 1
        assert stored(store) is None

    def test_purge_of_expired_keys_only_keeps_final_ones(self, store: Store) -> None:
        """A reaper with ``soft`` must not delete a key that became due after the reaper's read."""
        expired = self.drive(store, State.EXPIRED, "expired")
        done = self.drive(store, State.COMPLETED, "done")
        for record in (expired, done):
            self.age(store, record.scope, record.key, AGES)
        assert store.purge(10, expired_state_only=True) == 1
        assert stored(store, key="expired") is None
        assert stored(store, key="done") is not None

    def test_purge_keeps_to_its_limit_with_final_and_expired_keys_together(self, store: Store) -> None:
        """One limit applies to both: final keys are deleted first, then keys in the state ``expired``."""
        for key in ("a", "b"):
            self.drive(store, State.EXPIRED, f"expired-{key}")
            self.drive(store, State.COMPLETED, f"done-{key}")
        for key in ("expired-a", "expired-b", "done-a", "done-b"):
            self.age(store, "tenant-1", key, AGES)
        assert store.purge(3) == 3
        left = [key for key in ("expired-a", "expired-b", "done-a", "done-b") if stored(store, key=key)]
        assert len(left) == 1
        assert left[0].startswith("expired")
        assert store.purge(3) == 1

    def test_purging_keeps_to_its_limit_and_begins_with_the_oldest(self, store: Store) -> None:
        """A purge of two deletes the two that expired first."""
        for key, seconds in _DUE_TIMES.items():
            self._due_in(store, Duty.EXPIRED, key, seconds)
        for key in _DUE_TIMES:
            self.age(store, "tenant-1", key, 100)
        assert store.purge(2) == 2
        assert [key for key in _DUE_TIMES if stored(store, key=key)] == ["c-last", "not yet"]
        assert store.purge(2) == 1


# The order in which they are due differs from the order of the names and from the order of the insertions.
_DUE_TIMES = {"c-last": 30.0, "b-oldest": 10.0, "not yet": 100 * AGES, "a-later": 20.0}
