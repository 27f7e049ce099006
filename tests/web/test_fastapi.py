"""FastAPI: which requests use up their key, and which never began."""

from __future__ import annotations

import functools
import runpy
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Body, Depends, FastAPI, Form, Header, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.routing import Router

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.record import Record
from oncekey.errors import ConfigurationError, NoOperation
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.fastapi import CurrentOperation, OptionalOperation, protect

GOOD = {"amount": 10}
BAD = {"amount": "ten"}


class Payment(BaseModel):
    amount: int


class Pay:
    """An endpoint that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, payment: Payment) -> dict[str, int]:
        self.calls += 1
        return {"paid": payment.amount, "calls": self.calls}


@pytest.fixture(params=["memory", "sqlite"])
def once(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OnceKey]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/keys.db"
    with OnceKey(url, scope=SINGLE_TENANT) as made:
        yield made


@pytest.fixture
def pay() -> Pay:
    return Pay()


@pytest.fixture
def app(once: OnceKey, pay: Pay) -> FastAPI:
    app = FastAPI()
    app.post("/payments", status_code=201)(pay.__call__)
    protect(app, once)
    return app


def fresh() -> str:
    return str(uuid.uuid4())


async def post(app: Any, path: str, key: str, **request: Any) -> httpx.Response:
    if "content" not in request:
        request.setdefault("json", GOOD)
    headers = {"Idempotency-Key": key, **request.pop("headers", {})}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(request.pop("method", "POST"), path, headers=headers, **request)


def row(once: OnceKey, key: str) -> Record | None:
    return once.store.read([("single-tenant", key)])[0]


def state(once: OnceKey, key: str) -> str | None:
    found = row(once, key)
    return None if found is None else str(found.state)


async def assert_spared(app: Any, once: OnceKey, path: str = "/payments", status: int = 422, **bad: Any) -> None:
    """The bad request leaves no row, and the same key then takes a good one."""
    key = fresh()
    refused = await post(app, path, key, **(bad or {"json": BAD}))
    assert refused.status_code == status, refused.text
    assert row(once, key) is None
    accepted = await post(app, path, key)
    assert accepted.status_code == 201, accepted.text
    assert state(once, key) == "completed"


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


async def test_included_routers_and_sync_endpoints(once: OnceKey) -> None:
    """A router in a router, with an endpoint that runs in a thread, spares keys too."""
    app, outer, inner = FastAPI(), APIRouter(prefix="/v1"), APIRouter(prefix="/api")

    @inner.post("/payments", status_code=201)
    def pay(payment: Payment, op: CurrentOperation) -> str:
        return op.key

    outer.include_router(inner)
    app.include_router(outer)
    protect(app, once)
    await assert_spared(app, once, "/v1/api/payments")


@pytest.mark.parametrize("how", ["directly", "in a router", "behind middleware"])
async def test_handlers_of_mounted_apps_are_wrapped(once: OnceKey, pay: Pay, how: str) -> None:
    """An app mounted in the protected one has handlers of its own, and they are watched as well."""
    app, mounted, router = FastAPI(), FastAPI(), APIRouter()
    mounted.post("/payments", status_code=201)(pay.__call__)
    protect(app, once)
    if how == "in a router":
        router.mount("/sub", mounted)
        app.mount("", router)
    else:
        app.mount("/sub", mounted if how == "directly" else Outside(mounted))
    await assert_spared(app, once, "/sub/payments")
    key = fresh()
    assert (await post(app, "/sub/nowhere", key)).status_code == 404
    assert row(once, key) is None


class Outside:
    """Middleware around a mounted app; it copies the scope, as some do."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(dict(scope), receive, send)


async def test_middleware_around_a_fastapi_app_finds_its_endpoints(once: OnceKey, pay: Pay) -> None:
    inner = FastAPI()
    inner.post("/payments", status_code=201)(pay.__call__)
    await assert_spared(IdempotencyMiddleware(inner, once), once)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["async", "sync", "partial", "object"])
async def test_the_apps_own_handler_is_kept(once: OnceKey, pay: Pay, when: str, kind: str) -> None:
    """A handler for validation errors, registered on either side of protect(), still writes the answer."""

    async def asynchronous(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"mine": True}, 418)

    def synchronous(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"mine": True}, 418)

    class Handler:
        async def __call__(self, request: Request, error: Exception) -> JSONResponse:
            return await asynchronous(request, error)

    handler: Any = {
        "async": asynchronous,
        "sync": synchronous,
        "partial": functools.partial(asynchronous),
        "object": Handler(),
    }[kind]
    app = FastAPI()
    app.post("/payments", status_code=201)(pay.__call__)
    if when == "before":
        app.add_exception_handler(RequestValidationError, handler)
    protect(app, once)
    if when == "after":
        app.add_exception_handler(RequestValidationError, handler)
    await assert_spared(app, once, status=418)


async def test_a_route_class_that_translates_the_error(once: OnceKey) -> None:
    """The documented recipe of catching the error in a route class and raising another spares the key too."""

    class Translating(APIRoute):
        def get_route_handler(self) -> Any:
            original = super().get_route_handler()

            async def handle(request: Request) -> Any:
                try:
                    return await original(request)
                except RequestValidationError as error:
                    raise HTTPException(400, "not so") from error

            return handle

    app = FastAPI()
    app.router.route_class = Translating
    protect(app, once)

    @app.post("/payments", status_code=201)
    async def pay(payment: Payment) -> None:
        pass

    await assert_spared(app, once, status=400)


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


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/nowhere", 404), ("PATCH", "/payments", 405), ("PATCH", "/v1/more", 405), ("POST", "/sub/no", 404)],
)
@pytest.mark.parametrize("own", [False, True], ids=["", "own 404 page"])
async def test_request_without_a_route_leaves_the_key_unused(
    app: FastAPI, once: OnceKey, method: str, path: str, status: int, own: bool
) -> None:
    """404 and 405 by a router, with or without a handler of the app's own for them, leave the key unused."""
    router = APIRouter(prefix="/v1")
    router.post("/more")(lambda: None)
    app.include_router(router)
    app.mount("/sub", FastAPI())
    if own:
        for code in (404, 405):
            app.add_exception_handler(code, lambda request, error: JSONResponse("mine", error.status_code))
    key = fresh()
    assert (await post(app, path, key, method=method)).status_code == status
    assert row(once, key) is None


@pytest.mark.parametrize("prefix", ["", "/v1", "/sub"])
async def test_the_routers_redirect_leaves_the_key_to_the_request_that_follows(
    once: OnceKey, pay: Pay, prefix: str
) -> None:
    """307 to the path without the slash: the client sends the same key there, and it runs."""
    app, mounted, router = FastAPI(), FastAPI(), APIRouter(prefix="/v1")
    for part in (app, mounted, router):
        part.post("/payments", status_code=201)(pay.__call__)
    app.include_router(router)
    app.mount("/sub", mounted)
    protect(app, once)
    key = fresh()
    redirected = await post(app, f"{prefix}/payments/", key)
    assert redirected.status_code == 307
    followed = await post(app, redirected.headers["location"], key)
    assert (followed.status_code, pay.calls) == (201, 1)


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
