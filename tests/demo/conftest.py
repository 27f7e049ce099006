"""The demo on each of its databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count

import pytest

from tests.demo.process import Demo

MakeDemo = Callable[..., Demo]
_numbers = count(1)


@pytest.fixture(scope="module", params=["sqlite", "postgres", pytest.param("mysql", marks=pytest.mark.stores)])
def make_demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeDemo]:
    """Starts demos with the options given, each on a database of its own; all of them end with the module."""
    with ExitStack() as stack:

        def make(*options: str) -> Demo:
            folder = tmp_path_factory.mktemp("demo")
            store = f"sqlite:///{folder / 'demo.db'}"
            if request.param != "sqlite":
                store = request.getfixturevalue(f"{request.param}_server").database(f"demo_{next(_numbers)}")
            return stack.enter_context(Demo(store, folder, *options))

        yield make


ON_BOTH = ("test_identical_twice", "test_app_killed_after_the_charge")
"""What `make test` runs on PostgreSQL as well, and `make stores` on MySQL."""
LONG = ("test_killed_at_random", "test_the_worker_is_killed", "test_everything_is_killed", "test_restarts_lose_nothing")
"""Several kills each: the campaign's short forms kill the same paths in `make test`, these do it in `make faults`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The demo is told by its first minute, on SQLite; on PostgreSQL `make faults` runs all of it.

    The same paths are killed on PostgreSQL at every named point by tests/faults/points.py.
    """
    for item in items:
        if item.path.parent.name != "demo":
            continue
        on_a_server = "make_demo" in getattr(item, "fixturenames", ()) and "[sqlite" not in item.name
        if item.name.startswith(LONG) or (on_a_server and not item.name.startswith(ON_BOTH)):
            item.add_marker(pytest.mark.faults)
