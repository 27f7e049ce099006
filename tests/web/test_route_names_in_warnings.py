"""Log lines name the route, not the path: paths have e-mail addresses and tokens, and clients invent them."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.policy import KeyPer
from oncekey.core.states import State
from tests.cli.key_table import runner
from tests.web.django_apps import configure, make_handler, urls

SETTLES = re.compile(r"`(oncekey keys resolve .*?)`")


def _fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("the provider hung up")


def _django(once: OnceKey) -> Any:
    configure()
    from django.urls import path

    return make_handler(urls(path("und/<token>", _fails)), once, asgi=False)


def _flask(once: OnceKey) -> Any:
    from flask import Flask

    from oncekey.web.flask import protect

    app = Flask("shop")
    app.post("/und/<token>")(_fails)
    protect(app, once)
    return app


def _fastapi(once: OnceKey) -> Any:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    from oncekey.web.fastapi import protect

    app = FastAPI()

    @app.post("/und/{token}")
    def fails(token: str) -> None:
        _fails()

    protect(app, once)
    return TestClient(app, raise_server_exceptions=False)


def _client(app: Any) -> Any:
    if hasattr(app, "post") and not hasattr(app, "wsgi_app"):
        return app  # a client already
    transport = httpx.WSGITransport(app, raise_app_exceptions=False)
    return httpx.Client(transport=transport, base_url="http://testserver")


@pytest.mark.parametrize("per", ["tenant", "endpoint"])
@pytest.mark.parametrize("make", [_django, _flask, _fastapi])
def test_failing_requests_of_a_route_are_told_once_and_no_line_has_their_paths(
    make: Callable[[OnceKey], Any],
    per: KeyPer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    policy = Policy(effects="external", key_per=per)
    with (
        caplog.at_level(logging.INFO, "oncekey"),
        OnceKey(url, scope=SINGLE_TENANT, policy=policy) as once,
        _client(make(once)) as client,
    ):
        for number in range(40):
            sent = {"Idempotency-Key": f"a-long-key-of-{number}"}
            assert client.post(f"/und/ann{number}@example.org", headers=sent).status_code == 500
    ours = [record for record in caplog.records if record.name == "oncekey"]
    told = [each.getMessage() for each in ours if "left a key whose outcome is unknown" in each.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("POST /und/{token} left a key")
    assert [each.getMessage() for each in ours if "example.org" in each.getMessage()] == []
    assert any("operation='POST /und/{token}'" in each.getMessage() for each in ours)

    operate = runner(url, monkeypatch, capsys)
    did, _ = SETTLES.findall(told[0])
    words = [word if word != "JSON" else "{}" for word in shlex.split(did)[1:]]
    assert operate(*words, "--yes")[0] == 0
    with OnceKey(url, scope=SINGLE_TENANT) as once:
        assert len(once.store.listing(State.COMPLETED)) == 1
