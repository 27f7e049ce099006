"""How an error of one key, or of the store, meets the other keys of the same round."""

from __future__ import annotations

import asyncio
import logging

import pytest

from oncekey.errors import SchemaError, StoreError, StoreOverloaded, StoreUnavailable
from oncekey.upkeep.callers import Callers


class Round:
    """Two at once: ``a`` raises, ``b`` is running then and goes on, ``c`` has not begun."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.begun: list[str] = []
        self.ended: list[str] = []

    async def one(self, item: str) -> None:
        self.begun.append(item)
        if item == "a":
            await asyncio.sleep(0)
            raise self.error
        for _ in range(5):
            await asyncio.sleep(0)
        self.ended.append(item)

    def run(self) -> None:
        callers = Callers(2)
        try:
            callers.run("abc", self.one, None)
        finally:
            callers.close()


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), StoreOverloaded("full"), SchemaError("too old")])
def test_store_in_trouble_ends_the_round_and_running_keys_end_as_they_can(error: Exception) -> None:
    turn = Round(error)
    with pytest.raises(type(error)):
        turn.run()
    assert (turn.begun, turn.ended) == (["a", "b"], ["b"])


@pytest.mark.parametrize("error", [StoreError("a damaged row"), KeyError("text")])
def test_error_of_one_key_is_logged_and_all_others_end(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    turn = Round(error)
    with caplog.at_level(logging.ERROR, "oncekey"):
        turn.run()
    assert (turn.begun, turn.ended) == (["a", "b", "c"], ["b", "c"])
    assert caplog.text.count("upkeep could not go on with one key") == 1
