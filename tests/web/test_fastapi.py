"""FastAPI: which requests use up their key, and which never began."""

from __future__ import annotations

import runpy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Body, Depends, FastAPI, Form, Header, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from starlette.routing import Router

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.errors import ConfigurationError, NoOperation
from oncekey.web.fastapi import CurrentOperation, OptionalOperation, protect
from tests.web.fastapi_payments import BAD, GOOD, Pay, Payment, app, assert_spared, fresh, once, pay, post, row, state

__all__ = ["app", "once", "pay"]


async def test_a_bad_body_does_not_use_up_the_key(app: FastAPI, once: OnceKey, pay: Pay) -> None:
    """422 by validation, then the corrected body under the same key runs, once."""
    await assert_spared(app, once)
    assert pay.calls == 1


async def test_a_retry_of_the_corrected_request_is_a_replay(app: FastAPI, once: OnceKey, pay: Pay) -> None:
    """After the correction the key is an ordinary one: the handler does not run twice, and the marker says so."""
    key = fresh()
    await post(app, "/payments", key, json=BAD)
    first = await post(app, "/payments", key)
    again = await post(app, "/payments", key)
    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
    assert pay.calls == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"content": b'{"amount": ', "headers": {"content-type": "application/json"}},
        {"content": b"\xff\xfe{}\x00", "headers": {"content-type": "application/json"}},
        {"content": b"", "headers": {"content-type": "application/json"}},
    ],
    ids=["not json", "not text", "empty"],
)
async def test_a_body_that_cannot_be_read_does_not_use_up_the_key(
    app: FastAPI, once: OnceKey, bad: dict[str, Any]
) -> None:
    """Malformed, undecodable and missing bodies are refused before the endpoint, with 400 or 422."""
    key = fresh()
    assert (await post(app, "/payments", key, **bad)).status_code in (400, 422)
    assert row(once, key) is None


async def test_a_broken_form_does_not_use_up_the_key(once: OnceKey) -> None:
    """A multipart body without its boundary is FastAPI's 400, not the endpoint's."""
    app = FastAPI()
    protect(app, once)

    @app.post("/payments")
    async def upload(amount: Annotated[int, Form()]) -> int:
        return amount

    key = fresh()
    broken = {"content-type": "multipart/form-data; boundary=x"}
    assert (await post(app, "/payments", key, content=b"no parts at all", headers=broken)).status_code in (400, 422)
    assert row(once, key) is None


async def test_an_endpoint_that_raises_the_error_itself_did_begin(once: OnceKey) -> None:
    """RequestValidationError out of the endpoint is its answer: stored as final, and replayed without a second run."""
    app = FastAPI()
    protect(app, once)
    calls = []

    @app.post("/payments")
    async def pay(payment: Payment) -> None:
        calls.append(payment)
        raise RequestValidationError([{"type": "funds", "loc": ("body",), "msg": "too little", "input": None}])

    key = fresh()
    first = await post(app, "/payments", key)
    again = await post(app, "/payments", key)
    assert (first.status_code, again.content, len(calls)) == (422, first.content, 1)
    assert state(once, key) == "failed"


async def test_an_endpoint_that_answers_404_did_begin(once: OnceKey) -> None:
    """Not found, as said by the endpoint, is final: only the router's own 404 leaves the key alone."""
    app = FastAPI()
    protect(app, once)

    @app.post("/payments")
    async def pay() -> None:
        raise HTTPException(404)

    key = fresh()
    await post(app, "/payments", key)
    assert state(once, key) == "failed"


async def test_a_yield_dependency_sees_the_error_and_passes_it_on(once: OnceKey, pay: Pay) -> None:
    """A session that rolls back and raises again does not hide where the error came from."""
    app, seen = FastAPI(), []

    async def session() -> AsyncIterator[None]:
        try:
            yield
        except RequestValidationError as error:
            seen.append(error)
            raise

    app.post("/payments", status_code=201, dependencies=[Depends(session)])(pay.__call__)
    protect(app, once)
    await assert_spared(app, once)


async def test_a_dependency_that_used_a_verb_has_begun(once: OnceKey) -> None:
    """A verb before the body was validated may have had effects: the 422 is stored, and the key used."""
    app, names = FastAPI(), []
    protect(app, once)

    async def charge(op: CurrentOperation) -> None:
        names.append(op.downstream_key("charge"))

    @app.post("/payments", dependencies=[Depends(charge)])
    async def pay(payment: Payment) -> None:
        pass

    key = fresh()
    assert (await post(app, "/payments", key, json=BAD)).status_code == 422
    assert state(once, key) == "failed"
    assert (await post(app, "/payments", key, json=BAD)).headers["idempotency-replayed"] == "true"
    assert len(names) == 1


async def test_a_later_attempt_stays_retryable(once: OnceKey) -> None:
    """The second attempt has a history: a refusal of it neither discards the key nor makes the refusal final."""
    app = FastAPI()
    protect(app, once)
    answers = [JSONResponse("busy", 429), JSONResponse("paid", 201)]

    @app.post("/payments")
    async def pay(payment: Payment, version: Annotated[int, Header()]) -> JSONResponse:
        return answers.pop(0)

    key, good = fresh(), {"version": "1"}
    assert (await post(app, "/payments", key, headers=good)).status_code == 429
    assert (await post(app, "/payments", key, headers={"version": "one"})).status_code == 422
    assert state(once, key) == "failed_retryable"
    mismatch = await post(app, "/payments", key, json=BAD, headers=good)
    assert (mismatch.status_code, mismatch.json()["title"]) == (422, "Idempotency-Key is already used")
    assert state(once, key) == "failed_retryable"
    assert (await post(app, "/payments", key, headers=good)).status_code == 201


async def test_missing_credentials_leave_no_row(once: OnceKey) -> None:
    """What fastapi.security refuses never began."""
    app = FastAPI()
    protect(app, once)

    @app.post("/payments", status_code=201)
    async def pay(who: Annotated[Any, Depends(HTTPBearer())]) -> None:
        pass

    key = fresh()
    assert (await post(app, "/payments", key)).status_code in (401, 403)
    assert row(once, key) is None
    assert (await post(app, "/payments", key, headers={"authorization": "Bearer me"})).status_code == 201


async def test_an_endpoint_that_fails_in_framework_code_did_begin(once: OnceKey) -> None:
    """The framework's own exception, raised below an endpoint's frame, is the endpoint's."""
    app = FastAPI()
    protect(app, once)

    @app.post("/payments")
    async def pay(request: Request) -> None:
        await Router().not_found(request.scope, request.receive, request._send)

    key = fresh()
    assert (await post(app, "/payments", key)).status_code == 404
    assert state(once, key) == "failed"


async def test_the_operation_is_a_dependency(once: OnceKey) -> None:
    """CurrentOperation is the Operation of the request; OptionalOperation is None where there is none."""
    app = FastAPI()
    optional = OnceKey(once.store, scope=SINGLE_TENANT, policy=Policy(required=False))
    protect(app, optional)

    @app.post("/named")
    async def named(op: CurrentOperation) -> list[Any]:
        return [op.key, op.attempt, op.name]

    @app.post("/maybe")
    def maybe(op: OptionalOperation, amount: Annotated[int, Body(embed=True)]) -> str | None:
        return op.key if op else None

    key = fresh()
    assert (await post(app, "/named", key)).json() == [key, 1, "POST /named"]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.post("/maybe", json=GOOD)).json() is None
        with pytest.raises(NoOperation, match="OptionalOperation"):
            await client.post("/named", json=GOOD)
    optional.close()


async def test_protecting_twice_is_an_error(app: FastAPI, once: OnceKey) -> None:
    """Two layers would each hold the key against the other."""
    with pytest.raises(ConfigurationError, match="already"):
        protect(app, once)


async def test_fastapi_example_runs_as_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/fastapi_payments.py does what its first lines promise."""
    monkeypatch.setenv("ONCEKEY_STORE", f"sqlite:///{tmp_path}/payments.db")
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "fastapi_payments.py"))
    app, ann, bob = example["app"], {"x-api-key": "ann-secret"}, {"x-api-key": "bob-secret"}
    with example["once"]:
        key = "order-1001"
        assert (await post(app, "/payments", key, json={"amount": 500})).status_code == 401
        assert (await post(app, "/payments", key, json={"amount": -1}, headers=ann)).status_code == 422
        paid = await post(app, "/payments", key, json={"amount": 500}, headers=ann)
        again = await post(app, "/payments", key, json={"amount": 500}, headers=ann)
        other = await post(app, "/payments", key, json={"amount": 501}, headers=ann)
        others = await post(app, "/payments", key, json={"amount": 501}, headers=bob)
    assert (paid.status_code, paid.json()["amount"]) == (201, 500)
    assert (again.content, again.headers["idempotency-replayed"]) == (paid.content, "true")
    assert (other.status_code, others.status_code) == (422, 201)
    assert "x-idempotency" in app.openapi()["paths"]["/payments"]["post"]
