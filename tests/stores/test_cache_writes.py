"""The thread that writes rows to the cache."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.stores.cache.client import InLoopCache
from oncekey.stores.cache.entries import Entries, secret_of
from oncekey.stores.cache.front import Cache, clocks
from tests.engine.doubles import RESPONSE, reservation


class Database:
    def identity(self) -> str:
        return "one"


class SlowClient:
    """A cache that writes when the test lets it."""

    def __init__(self) -> None:
        self.asked, self.let_go = threading.Event(), threading.Event()
        self.written: set[bytes] = set()

    def get(self, names: Sequence[bytes]) -> Sequence[bytes | None]:
        return [None] * len(names)

    def add(self, entries: Mapping[bytes, bytes], seconds: Mapping[bytes, float]) -> None:
        self.asked.set()
        assert self.let_go.wait(30)
        self.written |= set(entries)

    def replace(self, name: bytes, mark: bytes, seconds: float) -> None: ...

    def in_loop(self) -> InLoopCache:
        raise NotImplementedError

    def close(self) -> None: ...


def completed(key: str) -> Record:
    return replace(reservation(key).record(1000.0), state=State.COMPLETED, response=RESPONSE, finished_at=1000.0)


def test_flush_waits_for_a_row_that_the_writer_has_taken_and_not_written() -> None:
    client = SlowClient()
    cache = Cache(client, Entries(secret_of("0123456789abcdef"), 60.0), Database())
    cache.look_up([reservation("k")])  # it learns the identity of the database
    cache.keep([completed("k")], clocks())
    assert client.asked.wait(30), "the writer has the row"
    flushing = threading.Thread(target=cache.flush, args=(30.0,))
    flushing.start()
    flushing.join(0.2)
    assert flushing.is_alive()
    client.let_go.set()
    flushing.join(30)
    assert len(client.written) == 1
    cache.close()
