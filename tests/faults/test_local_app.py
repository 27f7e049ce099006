"""The check of the faults that happen in the campaign's own process: each violation that is planted is found."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from oncekey import Policy
from oncekey.core.decision import Decision, Execute
from oncekey.core.record import Found, Reservation
from oncekey.core.states import Effects
from oncekey.engine.engine import Engine
from oncekey.engine.flows import Flow
from oncekey.errors import StoreUnavailable
from oncekey.stores.memory import MemoryStore
from oncekey.testing.clock import NoCompiler, TurnedClock
from tests.faults import clocks, outages
from tests.faults.campaign import Run
from tests.faults.local_app import LocalApp
from tests.faults.local_app_check import Rows, check, checked


def paid(run: Run, spoil: Callable[[LocalApp], Any]) -> list[str]:
    """One key of each kind, and then something is spoiled. The promises that the check finds broken."""

    async def pay() -> None:
        local = LocalApp(MemoryStore())
        async with local.open():
            for _ in range(3):
                await local.pay(local.story())
            spoil(local)
            await checked(run, local, None)

    asyncio.run(pay())
    return [violation[:2] for violation in run.violations]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run("memory", 40, 1, tmp_path)


def test_nothing_is_found_where_nothing_is(run: Run) -> None:
    assert paid(run, lambda local: None) == []


def key(local: LocalApp) -> str:
    return local.stories[0].key


@pytest.mark.parametrize(
    ("promise", "spoil"),
    [
        ("I1", lambda local: local.charges.update([key(local)])),
        ("I1", lambda local: local.charges.clear()),
        ("I2", lambda local: local.stories[0].answers.__setitem__(1, (201, b"another"))),
        ("I2", lambda local: local.once.store._rows.clear()),
        ("I4", lambda local: setattr(local.stories[0], "end", "")),
        ("I7", lambda local: setattr(local.stories[0], "end", "was answered with 404")),
        ("I7", lambda local: local.stories[0].refused.append(f"{key(local)}.1")),
        ("I7", lambda local: local.failed_open.append(f"{key(local)}.1")),
    ],
)
def test_planted_violation_is_found(run: Run, promise: str, spoil: Callable[[LocalApp], Any]) -> None:
    assert promise in paid(run, spoil)
    assert key_of(run.violations[0]), "with the history of the key"


def key_of(violation: str) -> bool:
    return "key-00000" in violation and "POST 201" in violation


def test_business_rows_are_compared(run: Run) -> None:
    async def pay(rows: Rows) -> None:
        local = LocalApp(MemoryStore())
        async with local.open():
            await local.pay(local.story())
            check(run, local, local.once.store, rows)

    asyncio.run(pay({}))
    assert not run.violations
    asyncio.run(pay({"key-000001": {"paid": 2}}))
    assert run.violations[0].startswith("I1")


# -- a guard is removed, and the fault finds it ------------------------------------------------------------------------


def test_an_engine_that_fails_open_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard 12: what cannot be reserved is run all the same."""
    begin = Engine.begin

    def open_door(
        self: Engine, wanted: Reservation, policy: Policy, first: Found | None = None, admission: Any = None
    ) -> Flow[Decision]:
        try:
            return (yield from begin(self, wanted, policy, first, admission))
        except StoreUnavailable:
            return Execute(wanted.record(time.time()))

    monkeypatch.setattr(Engine, "begin", open_door)
    monkeypatch.setattr(outages, "OPERATIONS", [each for each in outages.OPERATIONS if each.name == "reserve"])
    monkeypatch.setattr(outages, "KINDS", ("refused",))
    run.count = 20
    outages.every_operation(run)
    assert "I1" in {violation[:2] for violation in run.violations}


def test_take_over_of_external_effects_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hazard 2: with a clock that jumps, a lease that is over re-executes a payment."""
    monkeypatch.setattr("oncekey.core.decision.MAY_RERUN", frozenset(Effects))
    monkeypatch.setattr("oncekey.core.swaps.MAY_RERUN", frozenset(Effects))
    clocks.of_the_app(run)
    assert "I1" in {violation[:2] for violation in run.violations}


# -- the clock ---------------------------------------------------------------------------------------------------------


def test_a_clock_is_turned_while_its_process_runs(tmp_path: Path) -> None:
    try:
        clock = TurnedClock(tmp_path)
    except NoCompiler as missing:
        pytest.skip(str(missing))
    code = "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | clock.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for hours in (0, 1, -1, 0):
            clock.turn(timedelta(hours=hours))
            child.stdin.write("what time is it?\n")
            child.stdin.flush()
            wall, steady = (float(text) for text in child.stdout.readline().split())
            assert abs(wall - time.time() - 3600 * hours) < 60
            assert abs(steady - time.monotonic()) < 60
        child.stdin.close()
    clock.close()
