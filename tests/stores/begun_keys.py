"""What tests of the hot verbs share: a key that its owner has begun, and the move that ends it."""

from __future__ import annotations

from oncekey.core.record import Record
from oncekey.core.states import Actor, Event
from oncekey.core.swaps import Swap, swap
from oncekey.stores.api import Store
from tests.engine.doubles import RESPONSE, reservation


def reserved(store: Store, key: str) -> Record:
    (found,) = store.reserve([reservation(key)])
    assert found.record is not None
    return found.record


def completion(record: Record) -> Swap:
    return swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)
