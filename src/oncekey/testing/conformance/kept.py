"""The part of the store suite about the values that encryption covers: each can be read, and written again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from oncekey.core.audit import Audit
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import Actor, Event, State
from oncekey.core.steps import Step, StepKind, StepsOf, StepState
from oncekey.core.swaps import swap
from oncekey.stores.api import KeptValues, Store
from oncekey.stores.kept_api import BEFORE, OPERATORS_LINE, Kept, KeptKey, KeptLine, KeptStep, Rewrite
from oncekey.testing.conformance.base import LEASE, RESPONSE, SuiteBase, one, stored

LARGE = bytes(range(256)) * 1200
"""A body that a store may have to keep in several pieces."""


class KeptSuite(SuiteBase):
    needs: ClassVar[type] = KeptValues

    def test_walk_hands_out_every_row_once_for_any_size_of_page(self, store: Store) -> None:
        """Keys, results of steps and lines of the audit, whether or not rows are written again between two pages."""
        keys = [(scope, key) for scope in ("a", "b", "é") for key in ("one", "two", "three")]
        expected: set[tuple[str, ...]] = {("key", *at) for at in keys}
        expected |= {("step", *at, name) for at in keys for name in ("first", "second")}
        rows = [self._with_steps(store, *at) for at in keys]
        # One batch, so that a store may give all lines the same time.
        audit = Audit("ana", "why")
        postponed = [swap(row, Event.RENEW, Actor.OWNER, lease_seconds=LEASE, audit=audit) for row in rows]
        assert None not in store.swap(postponed)
        expected |= {("line", row.scope, row.key) for row in rows}
        for limit in (1, 4, 1000):
            found = []
            for row in self._walk(store, limit):
                found.append(row.place[:3] if isinstance(row, KeptLine) else row.place)
                if limit == 4:
                    assert self._rewritten(store, row, _other(row, "another")) == [True]
            assert sorted(found) == sorted(expected), f"pages of {limit}"

    def test_rewrite_changes_the_values_and_nothing_else(self, store: Store) -> None:
        """State, owner, lease, expiry and all else of the row stay, and the owner's next move succeeds."""
        done = self.drive(store, State.COMPLETED, "done")
        failed = self.drive(store, State.FAILED_RETRYABLE, "retryable", steps=True)
        kept = {row.place[2]: row for row in self._walk(store) if isinstance(row, KeptKey)}
        old = kept["done"]
        response = (201, '[["content-type","application/json"]]', RESPONSE.body, 1)
        assert old == KeptKey("tenant-1", "done", *response, None, State.COMPLETED, 2, old.expires_at)
        assert old.expires_at == pytest.approx(done.expires_at)
        new = replace(old, headers="[]", body=b"\x00\xff'sealed\\", last_error=None)
        assert self._rewritten(store, old, new) == [True]
        assert stored(store, key="done") == replace(done, response=StoredResponse(201, (), new.body), now=0.0)
        assert self._rewritten(store, kept["retryable"], replace(kept["retryable"], last_error="other é")) == [True]
        assert stored(store, key="retryable") == replace(failed, last_error="other é", now=0.0)
        again = self.reservation("retryable")
        moved = one(store.swap([swap(failed, Event.RETRY, Actor.REQUEST, reservation=again)])[0])
        assert store.swap([swap(moved, Event.COMPLETE, Actor.OWNER, response=RESPONSE)]) != [None]
        assert one(stored(store, key="retryable")).response == RESPONSE

    @pytest.mark.parametrize("body", [None, b"", LARGE], ids=["none", "empty", "large"])
    def test_body_of_any_size_can_be_replaced(self, store: Store, body: bytes | None) -> None:
        """An empty body is not none, and a large one may be kept in pieces."""
        self._completed(store, body)
        for new in (LARGE[::-1], b"small", LARGE + b"!", body):
            (old,) = self._walk(store)
            assert isinstance(old, KeptKey)
            assert self._rewritten(store, old, replace(old, body=new)) == [True]
            assert self._rewritten(store, old, replace(old, body=b"late")) == [new == old.body]
            if new != old.body:
                assert _body(store) == new

    def test_value_that_is_not_as_it_was_is_not_replaced(self, store: Store) -> None:
        """Every value of the row is compared, and one that differs is enough."""
        record = self.drive(store, State.UNKNOWN)
        self._completed(store, b"body", key="done")
        for old in [row for row in self._walk(store) if isinstance(row, KeptKey)]:
            before = stored(store, key=old.key)
            for difference in _differences(old):
                wrong = replace(old, **difference)
                assert self._rewritten(store, wrong, replace(wrong, last_error="x", body=b"x")) == [False], difference
                assert stored(store, key=old.key) == before, difference
            gone = replace(old, key="gone")
            assert self._rewritten(store, gone, replace(gone, last_error="x")) == [False]
        assert stored(store, key="gone") is None
        assert record.last_error is not None

    def test_state_is_not_compared(self, store: Store) -> None:
        """A row may be read in one state and written again in another, if its values stayed."""
        record = self.drive(store, State.COMPLETED, retention=10.0)
        (old,) = self._walk(store)
        assert isinstance(old, KeptKey)
        self.age(store, record.scope, record.key, 100.0)
        stale = replace(old, state=State.UNKNOWN, fingerprint_version=77, expires_at=1.0)
        assert self._rewritten(store, stale, replace(stale, body=b"new")) == [True]
        row = one(stored(store))
        assert (row.state, row.fingerprint_version, _body(store)) == (State.COMPLETED, 2, b"new")

    def test_move_of_the_app_is_not_overwritten(self, store: Store) -> None:
        """The app completes a key after its values were read: the response stays."""
        record = self.drive(store, State.UNKNOWN)
        (old,) = self._walk(store)
        confirm = swap(record, Event.CONFIRM, Actor.OPERATOR, response=RESPONSE)
        assert store.swap([confirm]) != [None]
        assert isinstance(old, KeptKey)
        assert self._rewritten(store, old, replace(old, last_error="sealed")) == [False]
        row = one(stored(store))
        assert (row.state, row.response, row.last_error) == (State.COMPLETED, RESPONSE, None)

    def test_result_of_a_step_is_replaced_if_it_still_is_as_it_was(self, store: Store) -> None:
        """Its other fields stay, and it is still found by them. A step without a result is not handed out."""
        row = self._with_steps(store, "tenant-1", "key-1")
        asked = [StepsOf("tenant-1", "key-1")]
        (before,) = store.steps(asked)
        assert [step.result for step in before] == [b'{"n":"first"}', b'{"n":"second"}', None]
        steps = [each for each in self._walk(store) if isinstance(each, KeptStep)]
        assert [(each.name, each.result) for each in steps] == [
            ("first", b'{"n":"first"}'),
            ("second", b'{"n":"second"}'),
        ]
        large = b'"' + b"x" * 50_000 + b'"'
        for new in (b"oncekey-sealed:abc", large, b'"small"'):
            old = next(each for each in self._walk(store) if isinstance(each, KeptStep))
            assert self._rewritten(store, old, replace(old, result=new)) == [True]
            assert self._rewritten(store, old, replace(old, result=b'"late"')) == [False]
            assert store.steps(asked) == [[replace(before[0], result=new), *before[1:]]]
        assert store.find(provider_id="ch_first") == [("tenant-1", "key-1")]
        absent = replace(steps[0], name="absent")
        assert self._rewritten(store, absent, replace(absent, result=b"1")) == [False]
        assert store.swap([swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE)]) != [None]

    def test_reason_in_the_audit_is_replaced_if_it_still_is_as_it_was(self, store: Store) -> None:
        """The line keeps its time, its words and its place, also after its key is gone."""
        record = self.drive(store, State.COMPLETED)
        for number in range(3):
            change = swap(record, Event.FORGET, Actor.OPERATOR, audit=Audit("ana", f"reason {number} é"))
            assert store.swap([change]) != [None]
            record = self.drive(store, State.COMPLETED)
        before = store.audit("tenant-1", "key-1", 10)
        lines = [each for each in self._walk(store) if isinstance(each, KeptLine)]
        assert sorted((each.event, each.why) for each in lines) == [("forget", f"reason {n} é") for n in range(3)]
        old = next(each for each in lines if each.why == "reason 1 é")
        assert self._rewritten(store, replace(old, why="other"), replace(old, why="x")) == [False]
        assert self._rewritten(store, old, replace(old, why="oncekey-sealed:abc")) == [True]
        assert self._rewritten(store, old, replace(old, why="late")) == [False]
        after = store.audit("tenant-1", "key-1", 10)
        assert after == [before[0], replace(before[1], why="oncekey-sealed:abc"), before[2]]
        assert store.purge_audit(10, 0.0) == 3
        assert store.audit("tenant-1", "key-1", 10) == []
        assert self._rewritten(store, old, replace(old, why="late")) == [False]

    def test_answers_of_a_batch_are_in_its_order(self, store: Store) -> None:
        """Rows of every kind in one batch; those that do not fit are left alone, and the others are written."""
        for key in ("b", "a", "c"):
            row = self._with_steps(store, "tenant-1", key)
            assert store.swap([swap(row, Event.COMPLETE, Actor.OWNER, response=RESPONSE, audit=Audit("ana", key))])
        rows = list(self._walk(store))
        batch = [Rewrite(row, _other(row, "new")) for row in reversed(rows)]
        stale = {row.place for row in rows if row.place[2] == "b"}
        batch = [Rewrite(_other(work.old, "stale"), work.new) if work.old.place in stale else work for work in batch]
        assert isinstance(store, KeptValues)
        assert store.rewrite(batch) == [work.new.place not in stale for work in batch]
        after = {row.place: row for row in self._walk(store)}
        assert after == {row.place: row if row.place in stale else _other(row, "new") for row in rows}
        assert store.rewrite([]) == []

    def test_line_about_a_walk_is_in_the_audit(self, store: Store) -> None:
        """It belongs to no key, and is found under the scope and key that ``kept_api`` names."""
        assert isinstance(store, KeptValues)
        store.note_walk("re-encrypt", "key 2", Audit("ana", "key 1 was seen in a log"))
        store.note_walk("re-encrypt", "key 2", Audit("ben", "again"))
        newest, oldest = store.audit(*OPERATORS_LINE, 10)
        assert (newest.who, newest.before, newest.after, newest.why) == ("ben", BEFORE, "key 2", "again")
        assert (oldest.event, oldest.who, oldest.why) == ("re-encrypt", "ana", "key 1 was seen in a log")
        assert store.read([OPERATORS_LINE]) == [None]
        assert [row.place[:3] for row in self._walk(store)] == [("line", *OPERATORS_LINE)] * 2
        assert store.purge_audit(10, 0.0) == 2

    # ways

    def _walk(self, store: Store, limit: int = 5) -> Iterator[Kept]:
        assert isinstance(store, KeptValues)
        after = ""
        while True:
            page = store.kept(after, limit)
            yield from page.rows
            if not page.next:
                return
            assert page.next != after
            after = page.next

    def _rewritten(self, store: Store, old: Kept, new: Kept) -> list[bool]:
        assert isinstance(store, KeptValues)
        return store.rewrite([Rewrite(old, new)])

    def _completed(self, store: Store, body: bytes | None, key: str = "key-1") -> None:
        record = one(store.reserve([self.reservation(key)])[0].record)
        response = StoredResponse(200, (("x", "y"),), body)
        assert store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=response)]) != [None]

    def _with_steps(self, store: Store, scope: str, key: str) -> Record:
        """A key in progress with two steps that are done, and one that is intended."""
        record = one(store.reserve([self.reservation(key, scope=scope)])[0].record)
        for name in ("first", "second", "third"):
            done = name != "third"
            step = Step(
                *(name, StepKind.EFFECT, StepState.DONE if done else StepState.INTENDED, True),
                result=b'{"n":"%s"}' % name.encode() if done else None,
                provider_id=f"ch_{name}" if key == "key-1" else None,
            )
            change = swap(record, Event.ADVANCE, Actor.OWNER, lease_seconds=LEASE, recovery_point="first", step=step)
            record = one(store.swap([change])[0])
        return record


def _other(row: Kept, text: str) -> Kept:
    """The row with other values."""
    if isinstance(row, KeptKey):
        return replace(row, body=text.encode(), headers="[]") if row.status else row
    if isinstance(row, KeptStep):
        return replace(row, result=b'"%s"' % text.encode())
    assert isinstance(row, KeptLine)
    return replace(row, why=text)


def _body(store: Store) -> bytes | None:
    response = one(stored(store)).response
    assert response is not None
    return response.body


def _differences(old: KeptKey) -> list[dict[str, Any]]:
    if old.status is None:
        return [{"last_error": None}, {"last_error": "other"}]
    others: list[dict[str, Any]] = [{"status": 202}, {"headers": '[["x","z"]]'}, {"schema_version": 3}]
    return [*others, {"body": b"bod"}, {"body": None}, {"body": b""}, {"last_error": "an error"}]
