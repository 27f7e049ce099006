"""The points themselves: they are where the table says, and fire when, where and as often as they should."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest

from oncekey.engine.transactions.adapters import ADAPTERS
from oncekey.stores.api import EventLoops
from oncekey.stores.registry import STORES, open_store
from oncekey.testing import faults
from oncekey.testing.company import Child


@pytest.mark.parametrize("point", faults.POINTS)
def test_every_point_is_a_function_of_oncekey(point: str) -> None:
    """A function that was renamed or moved is missed here, and not in a campaign that no longer kills."""
    places = faults.places_of(point)
    assert len(places) >= len(faults.POINTS[point])
    for owner, name in places:
        assert callable(vars(owner)[name])


@pytest.mark.parametrize(("point", "names"), [("store.reserve", {"reserve", "both"}), ("store.swap", {"swap", "both"})])
def test_points_of_the_store_are_in_every_store_and_its_part_for_event_loops(point: str, names: set[str]) -> None:
    expected = set()
    for entry in STORES:
        store = open_store(entry.example)
        expected |= {(entry.package, name) for name in names if hasattr(store, name)}
        expected |= {(f"{entry.package}.in_loop", name) for name in names if isinstance(store, EventLoops)}
        store.close()
    found = {(owner.__module__, name) for owner, name in faults.places_of(point)}
    assert expected <= {(module.removesuffix(".store"), name) for module, name in found}


def test_points_of_a_transaction_are_in_every_drivers_link() -> None:
    """Where a class is the link. Django's link is made by a function; tests/enlist/killed_apps.py has its points."""
    files = {file for file, _, name in (where.partition(":") for where in ADAPTERS.values()) if name[0].isupper()}
    assert {owner.__module__.rpartition(".")[2] for owner, _ in faults.places_of("enlist.commit")} == files


def test_every_named_point_exists() -> None:
    assert len(faults.POINTS) >= 20


def shapes(seen: list[str]) -> dict[str, Callable[[], Any]]:
    """The same work as a plain function, a coroutine, a flow, and a function that hands on a flow."""

    def plain() -> int:
        seen.append("work")
        return 1

    async def coroutine() -> int:
        await asyncio.sleep(0)
        seen.append("work")
        return 1

    def flow() -> Generator[str, int, int]:
        got = yield "wanted"
        seen.append("work")
        return got

    def hands_on() -> Generator[str, int, int]:
        return flow()

    return {"plain": plain, "coroutine": coroutine, "flow": flow, "hands_on": hands_on}


def run(started: Any) -> int:
    if inspect.iscoroutine(started):
        result: int = asyncio.run(started)
        return result
    if isinstance(started, int):
        return started
    assert next(started) == "wanted"
    with pytest.raises(StopIteration) as end:
        started.send(1)
    value: int = end.value.value
    return value


@pytest.mark.parametrize("shape", ["plain", "coroutine", "flow", "hands_on"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_fault_strikes_before_or_after_its_point(shape: str, when: faults.When) -> None:
    """Whatever its shape, and its result is handed on."""
    seen: list[str] = []
    place = SimpleNamespace(work=shapes(seen)[shape])
    fault = faults.Fault("a point", when, lambda: seen.append("fault"), 1)
    fault.put(place, "work")
    assert run(place.work()) == 1
    assert seen == (["fault", "work"] if when == "before" else ["work", "fault"])
    assert fault.fired


def test_the_nth_time_and_only_then() -> None:
    seen: list[str] = []
    place = SimpleNamespace(work=shapes(seen)["plain"])
    fault = faults.Fault("a point", "before", lambda: seen.append("fault"), 2)
    fault.put(place, "work")
    for _ in range(3):
        place.work()
    assert seen == ["work", "fault", "work", "work"]
    assert (fault.passed, fault.fired) == (3, True)


def test_work_that_raises_has_no_after() -> None:
    def fails() -> None:
        raise KeyError("work")

    place = SimpleNamespace(work=fails)
    fault = faults.Fault("a point", "after", lambda: None, 1)
    fault.put(place, "work")
    with pytest.raises(KeyError):
        place.work()
    assert not fault.fired


def test_an_action_may_raise() -> None:
    place = SimpleNamespace(work=shapes([])["plain"])
    faults.Fault("a point", "before", faults.raising(ConnectionError("cut")), 1).put(place, "work")
    with pytest.raises(ConnectionError, match="cut"):
        place.work()


def test_removed_fault_leaves_the_code_as_it_was() -> None:
    before = {point: [vars(owner)[name] for owner, name in faults.places_of(point)] for point in faults.POINTS}
    for point in faults.POINTS:
        with faults.install(point, "before", faults.kill):
            assert [vars(owner)[name] for owner, name in faults.places_of(point)] != before[point]
    assert {p: [vars(owner)[name] for owner, name in faults.places_of(p)] for p in faults.POINTS} == before


def test_fault_of_the_environment_is_installed() -> None:
    assert faults.install_from_environment({}) is None
    fault = faults.install_from_environment({"ONCEKEY_FAULT": "effect.call:after:raise:3"})
    assert fault is not None
    with fault:
        assert (fault.point, fault.when, fault._nth) == ("effect.call", "after", 3)


def test_killed_in_a_process_of_its_own() -> None:
    def work() -> str:
        place = SimpleNamespace(work=shapes([])["plain"])
        faults.Fault("a point", "after", faults.kill, 1).put(place, "work")
        place.work()
        return "survived"

    assert Child(work).killed()


@pytest.mark.parametrize(("text", "says"), [("nowhere:before:kill", "no point"), ("phase:during:kill", "before or")])
def test_unknown_fault_point_is_refused(text: str, says: str) -> None:
    with pytest.raises((LookupError, ValueError), match=says):
        faults.install_from_environment({"ONCEKEY_FAULT": text})
