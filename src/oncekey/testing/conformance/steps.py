"""The part of the store suite about steps.

Steps and the lines of the audit are written if and only if the row is moved, in the same commit. Steps are deleted with
their key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest

from oncekey.core.audit import Audit
from oncekey.core.record import Record
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.steps import Step, StepKind, StepsOf, StepState
from oncekey.core.swaps import Swap, swap
from oncekey.stores.api import Steps, Store
from oncekey.testing.company import in_threads
from oncekey.testing.conformance.base import AGES, LEASE, RESPONSE, RETENTION, SuiteBase, one, stored

_INTENT = Step("charge", StepKind.EFFECT, StepState.INTENDED, repeatable=True, downstream_key="dk_1")
_DONE = replace(_INTENT, state=StepState.DONE, result=b'{"id":"ch_1"}', provider_id="ch_1")
_PHASE = Step("ride_created", StepKind.PHASE, StepState.DONE, repeatable=False, result=b"null")
_WHY = Audit("ana@example.com", "the provider's ledger has it")

_RESULTS = [b"null", b'"\xc3\xa9 \xe6\x97\xa5\xe6\x9c\xac \xf0\x9f\x94\x91"', b'"\\u0000"', b'{"%s": "?1 \'\\""}']


def _goes(event: Event, by: Actor, target: State | None) -> Callable[[SuiteBase, Store, Record], None]:
    """A move that deletes the steps of the key."""

    def go(suite: SuiteBase, store: Store, record: Record) -> None:
        new = suite.reservation(record.key) if event is Event.RESERVE else None
        change = swap(record, event, by, to_state=target, reservation=new)
        assert store.swap([change]) != [None]

    return go


_ENDINGS: dict[str, Callable[[SuiteBase, Store, Record], None]] = {
    "forgotten by an operator": _goes(Event.FORGET, Actor.OPERATOR, None),
    "expired and deleted": _goes(Event.EXPIRE, Actor.REAPER, None),
    "expired and kept": _goes(Event.EXPIRE, Actor.REAPER, State.EXPIRED),
    "started over": _goes(Event.RESERVE, Actor.REQUEST, State.IN_PROGRESS),
    "purged": lambda suite, store, record: _purged(store, 1),
}


def _purged(store: Store, number: int) -> None:
    assert store.purge(100) == number


def _advance(record: Record, step: Step, recovery_point: str | None = "started") -> Swap:
    return swap(record, Event.ADVANCE, Actor.OWNER, lease_seconds=LEASE, recovery_point=recovery_point, step=step)


class StepSuite(SuiteBase):
    needs: ClassVar[type] = Steps

    def _stepped(self, store: Store, *steps: Step, key: str = "key-1", scope: str = "tenant-1") -> Record:
        """A row in progress with these steps."""
        record = self.drive(store, State.IN_PROGRESS, key, scope=scope)
        for step in steps:
            record = one(store.swap([_advance(record, step)])[0])
        return record

    def _steps(self, store: Store, key: str = "key-1", scope: str = "tenant-1") -> list[Step]:
        return store.steps([StepsOf(scope, key)])[0]

    # steps

    @pytest.mark.parametrize("result", _RESULTS)
    def test_a_step_comes_back_as_it_was_written(self, store: Store, result: bytes) -> None:
        """Name, kind, state and result are kept byte for byte, and the step does not change the move itself."""
        step = replace(_DONE, name="Ünïcödé '%s", result=result)
        record = self.drive(store, State.IN_PROGRESS)
        moved = one(store.swap([_advance(record, step, "charge_created")])[0])
        assert self._steps(store) == [step]
        assert moved.recovery_point == "charge_created"
        assert stored(store) == replace(moved, now=0.0)

    @pytest.mark.parametrize("beside", [False, True])
    def test_actor_that_read_before_an_external_effect_moves_nothing(self, store: Store, beside: bool) -> None:
        """An owner that begins an effect that may not be repeated writes that into the row, with the same owner token.
        A request or a sweeper that read the row before, and was paused past the lease, cannot move it."""
        read = one(store.reserve([self.reservation(effects=Effects.PHASED)])[0].record)
        doubt = swap(
            read, Event.ADVANCE, Actor.OWNER, lease_seconds=LEASE, recovery_point="started", effects=Effects.EXTERNAL,
            step=_INTENT,
        )  # fmt: skip
        assert store.swap([doubt]) != [None]
        self.age(store, read.scope, read.key, LEASE + 1)
        audit = Audit("sweeper", "its lease is over") if beside else None
        release = swap(read, Event.RELEASE, Actor.SWEEPER, audit=audit)
        take_over = swap(read, Event.TAKE_OVER, Actor.REQUEST, reservation=self.reservation(), audit=audit)
        assert store.swap([take_over]) == [None]
        assert store.swap([release]) == [None]
        now = one(store.read([(read.scope, read.key)])[0])
        assert (now.state, now.owner, now.effects) == (State.IN_PROGRESS, read.owner, Effects.EXTERNAL)
        assert store.swap([swap(now, Event.DOUBT, Actor.SWEEPER)]) != [None]

    def test_step_written_again_keeps_its_kind_and_provider_id(self, store: Store) -> None:
        """Intended, then done, is one step. Its kind stays. A write without a provider's id does not delete that id."""
        record = self._stepped(store, _INTENT)
        record = one(store.swap([_advance(record, _DONE)])[0])
        assert self._steps(store) == [_DONE]
        again = Step("charge", StepKind.PHASE, StepState.INTENDED, repeatable=False)
        record = one(store.swap([_advance(record, again)])[0])
        assert self._steps(store) == [replace(again, kind=StepKind.EFFECT, provider_id="ch_1")]
        store.swap([_advance(record, replace(_DONE, provider_id="ch_2"))])
        assert self._steps(store) == [replace(_DONE, provider_id="ch_2")]

    def test_steps_stand_in_the_order_in_which_they_were_first_written(self, store: Store) -> None:
        """They are not sorted by name, and a later write of a step does not change its place."""
        names = ["b", "a", "C", "d", "0"]
        record = self._stepped(store, *(replace(_INTENT, name=name) for name in names))
        store.swap([_advance(record, replace(_DONE, name="b"))])
        assert [(step.name, step.state) for step in self._steps(store)] == [
            ("b", StepState.DONE),
            *((name, StepState.INTENDED) for name in names[1:]),
        ]

    def test_steps_belong_to_one_key_of_one_scope(self, store: Store) -> None:
        """The answers for several keys are in the order of the batch. A key that does not exist has no steps (I6)."""
        self._stepped(store, _DONE)
        self._stepped(store, _PHASE, _INTENT, key="key-2")
        self._stepped(store, _PHASE, scope="Tenant-1")
        asked = [
            StepsOf("tenant-1", "key-2"),
            StepsOf("tenant-1", "absent"),
            StepsOf("Tenant-1", "key-1"),
            StepsOf("tenant-1", "key-1"),
        ]
        assert store.steps(asked) == [[_PHASE, _INTENT], [], [_PHASE], [_DONE]]
        assert store.steps([]) == []

    def test_a_refused_move_writes_nothing_beside_the_row(self, store: Store) -> None:
        """An owner that lost its lease can write neither a step nor a line of the audit (I3)."""
        record = self._stepped(store, _INTENT)
        late = replace(_advance(record, _DONE), owner="another-owner", audit=_WHY)
        wrong = replace(swap(record, Event.COMPLETE, Actor.OWNER, step=_DONE), from_state=State.UNKNOWN, audit=_WHY)
        early = swap(record, Event.DOUBT, Actor.SWEEPER, step=_DONE, audit=_WHY)
        forget = replace(late, event=Event.FORGET, to_state=None, step=None)
        again = replace(late, restart=self.reservation(), step=None)
        for change in (late, wrong, early, forget, again):
            assert store.swap([change]) == [None]
        assert self._steps(store) == [_INTENT]
        assert store.audit("tenant-1", "key-1", 10) == []

    def test_steps_survive_whatever_may_be_resumed_or_looked_into(self, store: Store) -> None:
        """The steps of a key that is released, retried, taken over, unknown or confirmed are kept."""
        record = self._stepped(store, _PHASE, _INTENT)
        record = one(store.swap([swap(record, Event.RELEASE, Actor.OWNER)])[0])
        retry = swap(record, Event.RETRY, Actor.REQUEST, reservation=self.reservation())
        record = one(store.swap([retry])[0])
        self.age(store, record.scope, record.key, LEASE + 1)
        taken = swap(
            replace(record, effects=self.reservation().effects),
            Event.TAKE_OVER,
            Actor.REQUEST,
            reservation=self.reservation(),
        )
        record = one(store.swap([taken])[0])
        assert self._steps(store) == [_PHASE, _INTENT]
        record = one(store.swap([swap(record, Event.DOUBT, Actor.OWNER)])[0])
        assert self._steps(store) == [_PHASE, _INTENT]
        store.swap([swap(record, Event.CONFIRM, Actor.RECONCILER, response=RESPONSE, step=_DONE)])
        assert self._steps(store) == [_PHASE, _DONE]

    @pytest.mark.parametrize("ending", list(_ENDINGS))
    def test_steps_are_deleted_with_their_key(self, store: Store, ending: str) -> None:
        """A key that is deleted, expired or started over has no steps. The steps of other keys stay."""
        record = self._stepped(store, _PHASE, _DONE)
        self._stepped(store, _DONE, key="key-2")
        self._stepped(store, _DONE, scope="tenant-2")
        record = one(store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)])[0])
        self.age(store, record.scope, record.key, RETENTION + 1)
        _ENDINGS[ending](self, store, record)
        assert self._steps(store) == []
        assert self._steps(store, "key-2") == self._steps(store, scope="tenant-2") == [_DONE]

    def test_purged_expired_key_and_a_reserved_one_leave_no_steps(self, store: Store) -> None:
        """A key that is used again does not get its old steps back."""
        record = self._stepped(store, _DONE)
        record = one(store.swap([swap(record, Event.COMPLETE, Actor.OWNER)])[0])
        self.age(store, record.scope, record.key, AGES)
        _purged(store, 1)
        store.reserve([self.reservation()])
        assert self._steps(store) == []

    def test_a_batch_may_hold_moves_with_and_without_something_beside(self, store: Store) -> None:
        """Each row gets only its own step and line: plain, with a step, with a line, with both, deleted, refused."""
        keys = ["plain", "step", "line", "both", "gone", "refused"]
        records = {key: self.drive(store, State.IN_PROGRESS, key) for key in keys}
        refused = replace(_advance(records["refused"], _DONE), owner="another-owner", audit=_WHY)
        batch = [
            refused,
            swap(records["gone"], Event.DISCARD, Actor.OWNER, audit=_WHY),
            replace(_advance(records["both"], _PHASE), audit=_WHY),
            swap(records["line"], Event.COMPLETE, Actor.OWNER, response=RESPONSE, audit=_WHY),
            _advance(records["step"], _DONE),
            swap(records["plain"], Event.COMPLETE, Actor.OWNER, response=RESPONSE),
        ]
        moved = store.swap(batch)
        assert [row and row.key for row in moved] == [None, "gone", "both", "line", "step", "plain"]
        assert [row and row.response for row in moved] == [None, None, None, RESPONSE, None, RESPONSE]
        steps = store.steps([StepsOf("tenant-1", key) for key in keys])
        assert steps == [[], [_DONE], [], [_PHASE], [], []]
        lines = {key: [line.after for line in store.audit("tenant-1", key, 10)] for key in keys}
        assert lines == {
            "plain": [],
            "step": [],
            "line": ["completed"],
            "both": ["in_progress"],
            "gone": [None],
            "refused": [],
        }
        assert stored(store, key="line") == replace(one(moved[3]), now=0.0)

    def test_of_many_threads_that_settle_one_key_one_leaves_a_line(self, store: Store) -> None:
        """A webhook, the poll and an operator act at once: one moves the key, and writes its line and its step."""
        record = self.drive(store, State.UNKNOWN)

        def settle(number: int) -> bool:
            step = replace(_DONE, name=f"step-{number}")
            audit = Audit(f"thread-{number}", "told so")
            change = swap(record, Event.CONFIRM, Actor.RECONCILER, response=RESPONSE, step=step, audit=audit)
            return store.swap([change]) != [None]

        won = in_threads(store, settle, 8)
        assert won.count(True) == 1
        winner = won.index(True)
        assert [line.who for line in store.audit("tenant-1", "key-1", 10)] == [f"thread-{winner}"]
        assert [step.name for step in self._steps(store)] == [f"step-{winner}"]
