"""The part of the store suite for stores that begin and end requests in one commit."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest

from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.stores.api import SharedCommit, Store
from oncekey.testing.conformance.base import RESPONSE, SuiteBase, one, stored


class SharedCommitSuite(SuiteBase):
    needs: ClassVar[type] = SharedCommit

    def test_both_is_swap_and_then_reserve_in_one_commit(self, store: Store) -> None:
        """``both`` answers as ``swap`` and then ``reserve`` would. All of it is committed, or nothing."""
        assert isinstance(store, SharedCommit)
        first, other = (self.drive(store, State.IN_PROGRESS, key) for key in ("key-1", "key-2"))
        end = swap(first, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
        lost = replace(swap(other, Event.COMPLETE, Actor.OWNER, response=RESPONSE), owner="another-owner")
        new, again = self.reservation("key-3"), self.reservation("key-1")

        found, moved = store.both([new, again], [lost, end])

        assert moved[0] is None
        assert one(moved[1]).state is State.COMPLETED
        assert stored(store) == replace(one(moved[1]), now=0.0)
        assert one(found[0].record).owner == new.owner
        assert stored(store, key="key-3") == replace(one(found[0].record), now=0.0)
        assert one(found[1].record).response == RESPONSE, "it begins after the other has ended"

        unfit = replace(self.reservation("key-5"), scope=None)  # type: ignore[arg-type]  # no store can take it
        end = swap(other, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever the driver says
            store.both([self.reservation("key-4"), unfit], [end])
        assert stored(store, key="key-4") is None
        assert one(stored(store, key="key-2")).state is State.IN_PROGRESS
