"""A server, and a jar in each kind of database, for the tests of the client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from oncekey.client import KeyJar
from tests.client.jars import OK, Clock
from tests.client.server import Server, serving


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server(OK)) as running:
        yield running


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "intents.db"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgres", pytest.param("mysql", marks=pytest.mark.stores)])
def url(request: pytest.FixtureRequest, file: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{file}"
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture
def jar(url: str, clock: Clock) -> Iterator[KeyJar]:
    opened = KeyJar(url, clock=clock)
    yield opened
    opened.close()
