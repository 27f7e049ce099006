"""The suite over an app that runs under a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from oncekey.testing.http.base import SuiteBase
from oncekey.testing.http.served import ServedStack, Server
from oncekey.testing.http.stack import Stack

NOT_ON_A_WIRE = {
    "test_a_malformed_key_is_400": {
        "blank": "HTTP has no blank values: test_line_that_names_no_key_is_400 sends spaces"
    }
}
"""Tests of the suite that mean nothing over HTTP: the name, and the parameter with the reason."""


class ServedBase(SuiteBase):
    """Gives the tests of other suites an app in a server process."""

    server: str | Sequence[str]
    """``"gunicorn"`` or ``"uvicorn"``; or the arguments of ``python -m`` for another server."""

    @pytest.fixture(scope="class")
    @classmethod
    def running_server(cls) -> Iterator[Server]:
        """One process for all tests of the class."""
        server = Server(cls.server)
        yield server
        server.stop()

    @pytest.fixture
    def store_url(self) -> str:
        """Override it: the address of an empty store, which other processes can read. Tables are made by the suite."""
        raise NotImplementedError("a served suite needs a fixture `store_url`: an address of an empty store")

    @pytest.fixture(autouse=True)
    def _only_what_goes_over_a_wire(self, request: pytest.FixtureRequest) -> None:
        function: pytest.Function = request.node
        for parameter, reason in NOT_ON_A_WIRE.get(function.originalname, {}).items():
            if parameter in function.callspec.id.split("-"):
                pytest.skip(reason)

    @pytest.fixture
    def stack_type(self, running_server: Server, store_url: str) -> Callable[..., Stack]:
        return partial(ServedStack, running_server, store_url)
