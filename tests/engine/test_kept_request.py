"""``Policy(keep_request=True)``: what is kept of a request, when, and where it is shown."""

from __future__ import annotations

from typing import Any

import flask
import orjson
import pytest
from starlette.responses import JSONResponse, Response

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, Policy, current
from oncekey.admin.key_view import look
from oncekey.cli.descriptions import print_sight, sight_json
from oncekey.core.kept_request import KeptRequest, as_step, kept_request, request_in
from oncekey.core.states import State
from oncekey.core.steps import REQUEST, StepKind, StepsOf, StepState
from oncekey.core.verdicts import Inquiry
from oncekey.engine.operation import Operation
from oncekey.errors import ConfigurationError, StepError
from oncekey.stores.registry import open_store
from oncekey.web.flask import protect
from tests.engine.phased_api import SCOPE, PhasedApi

KEEPS = Policy(effects="phased", keep_request=True, fingerprint_headers=("if-match", "x-account"))


async def stumble(phased: PhasedApi, op: Operation, connection: Any) -> Response:
    """A row, and a crash on the first attempt."""
    row = await op.phase("row", phased.pay, connection, on=connection)
    if op.attempt == 1:
        raise ConnectionError("stumbled")
    last = await op.phase("last", phased.pay, connection, name="last", on=connection)
    return JSONResponse([row, last], 201)


def kept(phased: PhasedApi) -> KeptRequest | None:
    store = open_store(phased.shop.url)
    try:
        (steps,) = store.steps([StepsOf(SCOPE, "k-1")])
    finally:
        store.close()
    return request_in(steps)


async def test_request_is_kept_with_its_first_step(phased: PhasedApi) -> None:
    api = phased.api(stumble, KEEPS)
    headers = {"X-Account": "a-7", "Authorization": "Bearer secret", "Cookie": "session=secret", "X-Other": "no"}
    answer = await api.post("k-1", 5, **headers)
    assert answer.status_code == 500
    request = kept(phased)
    assert request is not None
    assert (request.method, request.path, request.query) == ("POST", "/payments", "")
    assert request.json() == {"cents": 5}
    assert request.headers == {"content-type": "application/json", "x-account": "a-7"}
    (row,) = phased.shop.ask(f"SELECT result FROM idempotency_steps WHERE name = '{REQUEST}'")
    assert "secret" not in row[0]


async def test_kept_request_is_no_step(phased: PhasedApi) -> None:
    """The next attempt goes on as it would without it, and writes it no second time."""
    api = phased.api(stumble, KEEPS)
    assert (await api.post("k-1", 5)).status_code == 500
    assert (phased.state, phased.record.recovery_point) == (State.FAILED_RETRYABLE, "row")
    phased.shop.ask(f"UPDATE idempotency_steps SET result = 'null' WHERE name = '{REQUEST}'")
    answer = await api.post("k-1", 5)
    assert (answer.status_code, answer.json()) == (201, [{"paid": 1}, {"paid": 1}])
    assert phased.steps()[REQUEST].result == b"null", "not written again"
    assert list(phased.steps()) == [REQUEST, "row", "last"]


async def test_request_is_kept_before_the_first_step_of_a_later_attempt(phased: PhasedApi) -> None:
    """The first attempt took no step, or ran before the policy was changed: the second keeps it."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        if op.attempt == 1:
            raise ConnectionError("before any step")
        await op.effect("charge", phased.call, "charge", repeatable=True)

    assert (await phased.post(serve)).status_code == 500
    assert kept(phased) is None
    assert (await phased.post(serve, policy=KEEPS)).status_code == 201
    assert kept(phased) is not None
    assert list(phased.steps()) == [REQUEST, "charge"]


async def test_attempt_that_ends_after_its_request_was_kept_has_no_steps(phased: PhasedApi) -> None:
    """The step did not begin, so the key has done nothing, and expires as such a key does."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        def refuse() -> None:
            raise NotExecuted("the other side is closed")

        await op.phase("row", refuse, on=connection)

    assert (await phased.post(serve, policy=KEEPS)).status_code == 503
    assert (phased.state, phased.record.has_steps) == (State.FAILED_RETRYABLE, False)
    phased.let_it_expire()
    store = open_store(phased.shop.url)
    assert store.purge(10) == 1
    store.close()
    assert phased.steps() == {}


async def test_handler_sees_the_request_only_where_it_is_kept(phased: PhasedApi) -> None:
    seen: list[KeptRequest | None] = []

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        seen.append(op.request)

    await phased.post(serve, "with", KEEPS)
    await phased.post(serve, "without")
    assert seen[0] is not None
    assert seen[0].json() == {"cents": 5}
    assert seen[1] is None


async def test_step_cannot_take_the_name_of_the_request(phased: PhasedApi) -> None:
    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        await op.effect(REQUEST, phased.call, "charge", repeatable=True)

    assert (await phased.post(serve)).status_code == 500
    assert isinstance(phased.errors[0], StepError)
    assert phased.calls == {}


async def test_resolver_and_operator_see_the_request_apart_from_the_steps(
    phased: PhasedApi, capsys: pytest.CaptureFixture[str]
) -> None:
    await phased.post(stumble, policy=KEEPS)
    store = open_store(phased.shop.url)
    (steps,) = store.steps([StepsOf(SCOPE, "k-1")])
    inquiry = Inquiry(phased.record, tuple(steps))
    assert [step.name for step in inquiry.steps] == ["row"]
    assert inquiry.request is not None
    assert inquiry.request.json() == {"cents": 5}
    sight = look(store, SCOPE, "k-1")
    store.close()
    print_sight(sight, reveal=False)
    shown = capsys.readouterr().out
    (line,) = [line.split() for line in shown.splitlines() if REQUEST in line]
    assert line[:3] == [REQUEST, "request", "kept"]
    assert "cents" not in shown
    (step, _) = sight_json(sight, reveal=False)["steps"]
    assert (step["kind"], step["state"], step["result"]) == ("request", "kept", None)


def test_wsgi_keeps_the_request_too(tmp_path: Any) -> None:
    path = tmp_path / "keys.db"
    app = flask.Flask(__name__)
    once = OnceKey(f"sqlite:///{path}", scope=SINGLE_TENANT, policy=KEEPS)

    @app.post("/rides/<name>")
    def ride(name: str) -> Any:
        current().blocking.effect("charge", lambda: name, repeatable=True)
        return {"ride": name}, 201

    protect(app, once)
    sent: dict[str, Any] = {"headers": {"Idempotency-Key": "k-1", "X-Account": "a-7"}, "data": b"\xff\x00raw"}
    answer = app.test_client().post("/rides/n%C3%A4h?fast=1", **sent)
    assert answer.status_code == 201
    (steps,) = once.store.steps([StepsOf(SCOPE, "k-1")])
    once.close()
    request = request_in(steps)
    assert request is not None
    assert (request.method, request.query, request.body) == ("POST", "fast=1", b"\xff\x00raw")
    assert request.path in ("/rides/n%C3%A4h", "/rides/näh")
    assert request.headers == {"x-account": "a-7"}


@pytest.mark.parametrize("body", [b"", b"{}", "ä\0".encode(), b"\xff\xfe", b'{"a": "\\u0000"}'])
def test_body_comes_back_byte_for_byte(body: bytes) -> None:
    lines = [(b"if-match", b'"1"'), (b"if-match", b'"2"')]
    request = kept_request(("POST", "/a\udcff", b"q=%20", None, body, lambda _: lines), frozenset({b"if-match"}))
    assert request is not None
    step = as_step(request)
    assert (step.kind, step.state) == (StepKind.PHASE, StepState.INTENDED)
    again = request_in([step])
    assert again == request
    assert again.headers == {"if-match": '"1", "2"'}
    assert body.decode("latin-1") not in repr(again) or not body


def test_older_version_takes_no_notice_of_the_row() -> None:
    """It reads kind and state by their words, and looks only at what is done."""
    request = kept_request(("POST", "/", b"", None, b"", lambda _: ()), frozenset())
    assert request is not None
    step = as_step(request)
    assert (step.kind, step.state) == ("phase", "intended")
    assert orjson.loads(step.result or b"")["method"] == "POST"


@pytest.mark.parametrize("effects", ["external", "transactional", "repeatable"])
def test_only_a_phased_route_keeps_its_request(effects: Any) -> None:
    with pytest.raises(ConfigurationError, match="only effects='phased' keeps the request"):
        Policy(effects=effects, keep_request=True)
    with pytest.raises(ConfigurationError, match="True or False"):
        Policy(effects="phased", keep_request=1)  # type: ignore[arg-type]
