"""A node of a cluster that failed: calls to it fail at once for a while, and then try it again."""

from __future__ import annotations

import time

import pytest

from oncekey.errors import StoreUnavailable
from oncekey.stores.redis import calls, urls
from oncekey.stores.redis.batches import Call
from oncekey.stores.redis.calls import PAUSE_SECONDS, Calls
from oncekey.stores.redis.connection import Lost
from oncekey.stores.redis.scripts import END

NODE = ("127.0.0.1", 1)
CALL = Call(0, END, (), (), ())


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_node_is_tried_again_after_its_pause_though_calls_never_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that fail in the pause do not prolong it: else a node that is back stays unavailable under load."""
    clock, tries = Clock(), []

    def refuse(*_: object) -> None:
        tries.append(clock.now)
        raise Lost("is unavailable (ConnectionRefusedError)")

    made = Calls(urls.read("redis+cluster://127.0.0.1:1"))
    monkeypatch.setattr(made.nodes, "of", lambda bucket, deadline: NODE)
    monkeypatch.setattr(calls, "connect", refuse)
    monkeypatch.setattr(calls, "time", clock)

    for _ in range(25):
        with pytest.raises(StoreUnavailable):
            made.run([CALL], time.monotonic() + 1.0, confirmed=False)
        clock.now += PAUSE_SECONDS / 10

    assert tries == pytest.approx([100.0, 100.0 + PAUSE_SECONDS, 100.0 + 2 * PAUSE_SECONDS], abs=PAUSE_SECONDS / 5)
