"""The part of the store suite that is about effects in doubt: what settles one, and what that fences."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from oncekey.core import doubts
from oncekey.core.audit import Audit
from oncekey.core.record import Record
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.steps import Step, StepsOf, StepState
from oncekey.core.swaps import Swap, swap
from oncekey.stores.api import Steps, Store
from oncekey.testing.conformance.base import IN_DOUBT, LEASE, QUARANTINE, RESPONSE, SuiteBase, intend, one, stored

_OTHER = replace(IN_DOUBT, name="mail_sent", downstream_key="down-2")
_WHY = Audit("ann", "ch_7 is in their ledger")


class DoubtSuite(SuiteBase):
    needs: ClassVar[type] = Steps

    def _in_doubt(self, store: Store, *effects: Step) -> Record:
        """A phased request that is unknown, with these effects intended."""
        wanted = self.reservation(effects=Effects.PHASED, quarantine=QUARANTINE)
        record = one(store.reserve([wanted])[0].record)
        for step in effects:
            record = one(store.swap([intend(record, step)])[0])
        return one(store.swap([swap(record, Event.DOUBT, Actor.OWNER)])[0])

    def _steps(self, store: Store) -> list[Step]:
        return store.steps([StepsOf("tenant-1", "key-1")])[0]

    def _settle(self, store: Store, record: Record, step: Step, result: bytes | None) -> Swap:
        owner = f"settled-{next(self._numbers)}"
        return doubts.settled(
            *(record, self._steps(store), step, result, Actor.OPERATOR),
            provider_id="ch_7" if result else None,
            new_owner=owner,
            audit=_WHY,
        )

    def test_effect_that_happened_is_done_and_the_key_is_retryable_under_a_new_owner(self, store: Store) -> None:
        record = self._in_doubt(store, IN_DOUBT)
        change = self._settle(store, record, IN_DOUBT, b'{"id":"ch_7"}')
        moved = one(store.swap([change])[0])
        assert (moved.state, moved.effects, moved.attempt) == (State.FAILED_RETRYABLE, Effects.PHASED, 1)
        assert (moved.owner, moved.recovery_point) == (change.new_owner, IN_DOUBT.name)
        assert moved.owner != record.owner
        done = replace(IN_DOUBT, state=StepState.DONE, result=b'{"id":"ch_7"}', provider_id="ch_7")
        assert self._steps(store) == [done]
        assert stored(store) == replace(moved, now=0.0)
        (line,) = store.audit("tenant-1", "key-1", 10)
        assert (line.who, line.event, line.before, line.after) == ("ann", "happened", "unknown", "failed_retryable")
        assert store.find(provider_id="ch_7") == [("tenant-1", "key-1")]

    def test_corrected_result_replaces_the_old_one_under_a_new_owner(self, store: Store) -> None:
        """The key keeps its state. A caller that saw the old row cannot write."""
        record = self._in_doubt(store, IN_DOUBT)
        record = one(store.swap([self._settle(store, record, IN_DOUBT, b'"wrong"')])[0])
        (step,) = self._steps(store)
        right = replace(step, result=b'{"id":"ch_7"}')
        moved = one(store.swap([doubts.corrected(record, right, new_owner="corrected", audit=_WHY)])[0])
        assert (moved.state, moved.attempt, moved.owner) == (State.FAILED_RETRYABLE, 1, "corrected")
        assert (self._steps(store), stored(store)) == ([right], replace(moved, now=0.0))
        assert store.swap([doubts.corrected(record, step, new_owner="late", audit=_WHY)]) == [None]
        assert store.swap([swap(record, Event.RETRY, Actor.REQUEST, reservation=self.reservation())]) == [None]
        assert store.audit("tenant-1", "key-1", 1)[0].event == "correct"

    def test_effect_that_did_not_happen_is_cleared_after_the_quarantine_and_not_before(self, store: Store) -> None:
        record = self._in_doubt(store, IN_DOUBT)
        change = self._settle(store, record, IN_DOUBT, None)
        self.age(store, record.scope, record.key, QUARANTINE - 2)
        before = stored(store)
        assert store.swap([change]) == [None]
        assert (stored(store), self._steps(store), store.audit("tenant-1", "key-1", 10)) == (before, [IN_DOUBT], [])
        self.age(store, record.scope, record.key, 2)
        moved = one(store.swap([change])[0])
        assert (moved.state, moved.effects, moved.owner) == (State.FAILED_RETRYABLE, Effects.PHASED, change.new_owner)
        assert self._steps(store) == [replace(IN_DOUBT, repeatable=True)], "to be called, and in doubt no more"
        assert doubts.in_doubt(moved, self._steps(store)) == []

    @pytest.mark.parametrize("result", [b"7", None])
    def test_late_owner_writes_nothing_after_an_effect_was_settled(self, store: Store, result: bytes | None) -> None:
        """From ``unknown`` it could complete its key; the new owner token refuses it."""
        record = self._in_doubt(store, IN_DOUBT, _OTHER)
        self.age(store, record.scope, record.key, QUARANTINE + 1)
        moved = one(store.swap([self._settle(store, record, IN_DOUBT, result)])[0])
        after, steps = stored(store), self._steps(store)
        assert moved.state is State.UNKNOWN
        for event in (Event.COMPLETE, Event.FAIL):
            assert store.swap([swap(record, event, Actor.OWNER, response=RESPONSE)]) == [None]
        working = replace(record, state=State.IN_PROGRESS)
        for event in (Event.RENEW, Event.ADVANCE):
            late = swap(working, event, Actor.OWNER, lease_seconds=LEASE, step=None if event is Event.RENEW else _OTHER)
            assert store.swap([late]) == [None]
        assert (stored(store), self._steps(store)) == (after, steps)

    def test_second_verdict_about_one_effect_changes_nothing(self, store: Store) -> None:
        """Two resolvers at once: the first counts, with its result and its line in the audit."""
        record = self._in_doubt(store, IN_DOUBT)
        self.age(store, record.scope, record.key, QUARANTINE + 1)
        first, second = (self._settle(store, record, IN_DOUBT, result) for result in (b"1", b"2"))
        third = self._settle(store, record, IN_DOUBT, None)
        assert store.swap([first]) != [None]
        after, steps = stored(store), self._steps(store)
        assert store.swap([second]) == store.swap([third]) == [None]
        assert (stored(store), self._steps(store)) == (after, steps)
        assert len(store.audit("tenant-1", "key-1", 10)) == 1

    def test_key_with_two_effects_in_doubt_is_unknown_until_both_are_settled(self, store: Store) -> None:
        record = self._in_doubt(store, IN_DOUBT, _OTHER)
        assert doubts.in_doubt(record, self._steps(store)) == [IN_DOUBT, _OTHER]
        moved = one(store.swap([self._settle(store, record, _OTHER, b"null")])[0])
        assert (moved.state, moved.effects, moved.lease_until) == (State.UNKNOWN, Effects.EXTERNAL, record.lease_until)
        assert moved.reconcile_at is not None
        assert doubts.in_doubt(moved, self._steps(store)) == [IN_DOUBT]
        last = one(store.swap([self._settle(store, moved, IN_DOUBT, b"1")])[0])
        assert (last.state, last.effects) == (State.FAILED_RETRYABLE, Effects.PHASED)
        assert {step.state for step in self._steps(store)} == {StepState.DONE}
