"""The public suite over frameworks under real servers, each in a process of its own, on real stores."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oncekey.errors import ConfigurationError
from oncekey.testing.framework_suite import Framework, ServedSuite
from oncekey.testing.http.served import SERVERS, ServedStack, Server
from oncekey.testing.http.served_suite import NOT_ON_A_WIRE
from oncekey.testing.servers import ServerFailed
from tests.web.frameworks import framework_of

pytestmark = pytest.mark.frameworks

COMMANDS = {"uvicorn-h11": (*SERVERS["uvicorn"], "--http", "h11")}
SERVED = (
    *("django gunicorn sqlite", "django gunicorn postgres"),
    *("django-async uvicorn sqlite", "django-async uvicorn postgres"),
    *("django-drf gunicorn sqlite", "django-drf gunicorn postgres"),
    *("django-sync uvicorn sqlite", "django-drf-asgi uvicorn sqlite", "django-drf-asgi uvicorn postgres"),
    *("flask gunicorn sqlite", "fastapi-async uvicorn sqlite", "litestar-async uvicorn-h11 sqlite"),
)
"""Framework, server and store."""


@pytest.fixture(scope="module", params=SERVED)
def combination(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    framework, server, store = request.param.split(" ")
    return framework, server, store


def test_only_these_tests_of_the_suite_are_not_run_over_http() -> None:
    assert {name: list(parameters) for name, parameters in NOT_ON_A_WIRE.items()} == {
        "test_a_malformed_key_is_400": ["blank"]
    }
    assert all(hasattr(ServedSuite, name) for name in NOT_ON_A_WIRE)


def test_app_that_the_server_cannot_import_is_named(tmp_path: Path) -> None:
    """The server is not asked: its process would not find the function."""
    server: Any = SimpleNamespace(ask=lambda *given: pickle.dumps(given))
    with pytest.raises(ConfigurationError, match=r"make_app .*lambda"):
        ServedStack(server, f"sqlite:///{tmp_path / 'keys.db'}", Framework(lambda payments, once: None))


def test_store_in_the_memory_of_one_process_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="two processes cannot share memory://"):
        ServedStack(SimpleNamespace(), "memory://", framework_of("flask"))  # type: ignore[arg-type]


def test_server_that_the_suite_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="knows gunicorn and uvicorn, not 'hypercorn'"):
        Server("hypercorn")


def test_wsgi_app_under_an_asgi_server_is_refused(tmp_path: Path) -> None:
    server = Server("uvicorn")
    try:
        with pytest.raises(ServerFailed, match="the framework makes WSGI apps, and this server serves ASGI"):
            ServedStack(server, f"sqlite:///{tmp_path / 'keys.db'}", framework_of("flask"))
    finally:
        server.stop()


class TestServed(ServedSuite):
    @pytest.fixture(scope="module")
    @classmethod
    def running_server(cls, combination: tuple[str, str, str]) -> Iterator[Server]:
        server = Server(COMMANDS.get(combination[1], combination[1]))
        yield server
        server.stop()

    @pytest.fixture
    def under_test(self, combination: tuple[str, str, str]) -> Framework:
        return framework_of(combination[0])

    @pytest.fixture
    def store_url(self, request: pytest.FixtureRequest, combination: tuple[str, str, str], tmp_path: Path) -> str:
        if combination[2] == "postgres":
            url: str = request.getfixturevalue("ready_url")
            return url
        return f"sqlite:///{tmp_path / 'keys.db'}"
