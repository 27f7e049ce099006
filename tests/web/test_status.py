"""The status endpoint: what became of a key, without sending its request again. On every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

from oncekey import NotAuthenticated, NotExecuted, OnceKey, OutcomeUnknown, Policy
from oncekey import Request as KeyRequest
from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.memory import MemoryStore
from oncekey.web.flask import protect
from oncekey.web.route_audit import audit
from oncekey.web.status import status_app, status_path, status_wsgi
from tests.web.apps import ONE, Api, Gate, World

MakeApi = Callable[..., Api]
DAY = 86_400.0
RESULT = StoredResponse(201, (("content-type", "application/json"), ("location", "/payments/7")), b'{"id":7}')


@pytest.fixture
def framework() -> str:
    return "starlette"


def tenant_of(request: KeyRequest) -> str:
    token = request.headers.get("authorization", "")
    if token not in ("ann", "bob"):
        raise NotAuthenticated("this token is not valid")
    return token


def mounted(api: Api, **options: Any) -> Api:
    api.app.mount("/idempotency", status_app(api.once, **options))
    return api


async def ask(api: Api, key: str, method: str = "GET", query: str = "", **headers: str) -> httpx.Response:
    path = f"/idempotency/{quote(key, safe='')}{query}"
    return await api.client.request(method, path, headers=headers)


class Rows:
    """Rows as requests leave them, without the requests."""

    def __init__(self, world: World) -> None:
        self.store = world.store()
        self.store.migrate()

    def close(self) -> None:
        self.store.disconnect()

    def reserve(self, key: str, effects: Effects = Effects.EXTERNAL, lease: float = 60.0) -> Record:
        wanted = Reservation(ONE, key, "POST /payments", b"f" * 32, 1, effects, f"owner of {key}", lease, DAY)
        (found,) = self.store.reserve([wanted])
        assert found.record is not None
        return found.record

    def move(self, record: Record, event: Event, by: Actor = Actor.OWNER, **more: Any) -> Record:
        (moved,) = self.store.swap([swap(record, event, by, **more)])
        assert moved is not None
        return moved


@pytest.fixture
def rows(world: World) -> Iterator[Rows]:
    made = Rows(world)
    yield made
    made.close()


# ---------------------------------------------------------------- the states


async def test_done_is_the_stored_response(make_api: MakeApi) -> None:
    """Status, headers and body of the first answer, with the marks of a replay; nothing runs."""
    api = mounted(make_api())
    first = await api.post("k-1")
    answer = await ask(api, "k-1")
    assert (answer.status_code, answer.content) == (201, first.content)
    for name in ("location", "content-type", "content-length", "idempotency-key", "idempotency-expires"):
        assert answer.headers[name] == first.headers[name]
    assert answer.headers["idempotency-replayed"] == "true"
    assert api.runs == 1


async def test_a_stored_error_is_the_result_too(make_api: MakeApi) -> None:
    api = mounted(make_api(lambda request, run: JSONResponse({"error": "declined"}, 402)))
    first = await api.post("k-1")
    answer = await ask(api, "k-1")
    assert (answer.status_code, answer.content) == (402, first.content)


async def test_a_running_request_is_202(make_api: MakeApi) -> None:
    """With when and where to ask again; then it is the result."""
    gate = Gate()

    async def slow(request: Request, run: int) -> Response:
        await gate.wait()
        return JSONResponse({"run": run})

    api = mounted(make_api(slow))
    running = api.start("k-1")
    await gate.entered.wait()
    answer = await ask(api, "k-1")
    assert (answer.status_code, answer.json()["state"]) == (202, "in_progress")
    assert (answer.headers["retry-after"], answer.headers["location"]) == ("1", "/idempotency/k-1")
    assert (answer.headers["idempotency-key"], answer.headers["cache-control"]) == ("k-1", "no-store")
    gate.go.set()
    assert (await ask(api, "k-1")).status_code in (200, 202)
    await running
    assert (await ask(api, "k-1")).json() == {"run": 1}


async def test_a_deferred_request_is_202_until_it_is_settled(make_api: MakeApi, rows: Rows) -> None:
    """Pending in the outbox, then what the worker settled it with."""
    api = mounted(make_api())
    pending = rows.move(rows.reserve("k-1"), Event.DEFER)
    answer = await ask(api, "k-1")
    assert (answer.status_code, answer.headers["retry-after"]) == (202, "1")
    rows.store.swap([swap(pending, Event.SETTLE, Actor.WORKER, to_state=State.COMPLETED, response=RESULT)])
    answer = await ask(api, "k-1")
    assert (answer.status_code, answer.json(), answer.headers["location"]) == (201, {"id": 7}, "/payments/7")
    assert answer.headers["idempotency-replayed"] == "true"


async def test_status_of_an_unknown_key_is_409(make_api: MakeApi) -> None:
    def fails(request: Request, run: int) -> Response:
        raise OutcomeUnknown

    api = mounted(make_api(fails))
    await api.post("k-1")
    answer = await ask(api, "k-1")
    assert (answer.status_code, answer.json()["type"]) == (409, "urn:oncekey:problem:outcome-unknown")
    assert "retry-after" in answer.headers


async def test_status_of_a_retryable_key_is_409_with_advice(make_api: MakeApi) -> None:
    """Nothing is running, so asking again is no use, and sending it again is harmless. Asking changes nothing."""

    def not_yet(request: Request, run: int) -> Response:
        if run == 1:
            raise NotExecuted
        return JSONResponse({"run": run})

    api = mounted(make_api(not_yet))
    await api.post("k-1")
    for _ in range(2):
        answer = await ask(api, "k-1")
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:oncekey:problem:status-retryable")
        assert "send the same request with the same Idempotency-Key" in answer.json()["detail"]
    assert (await api.post("k-1")).json() == {"run": 2}


@pytest.mark.parametrize(
    ("effects", "problem"), [(Effects.PHASED, "status-retryable"), (Effects.EXTERNAL, "outcome-unknown")]
)
async def test_status_of_a_lapsed_lease_is_the_decision_of_a_retry(
    make_api: MakeApi, world: World, rows: Rows, effects: Effects, problem: str
) -> None:
    """Taken over, or in doubt; and the row is as it was: a question is no retry."""
    api = mounted(make_api())
    rows.reserve("k-1", effects)
    world.age("k-1", 61.0)
    before = world.record("k-1")
    answer = await ask(api, "k-1")
    assert (answer.status_code, answer.json()["type"]) == (409, f"urn:oncekey:problem:{problem}")
    assert ("idempotency-expires" in answer.headers) == (effects is Effects.PHASED), "what is unknown does not expire"
    assert "idempotency-key" in answer.headers
    after = world.record("k-1")
    assert before is not None
    assert after is not None
    assert (after.state, after.owner, after.attempt) == (before.state, before.owner, before.attempt)


async def test_past_its_expiry_is_410(make_api: MakeApi, world: World) -> None:
    """The result is not kept any more, and nothing of it is shown."""
    api = mounted(make_api())
    await api.post("k-1")
    world.age("k-1", DAY + 1)
    answer = await ask(api, "k-1")
    assert (answer.status_code, answer.json()["type"]) == (410, "urn:oncekey:problem:status-expired")
    assert not {"location", "idempotency-expires", "idempotency-replayed"} & set(answer.headers)


async def test_a_retryable_key_past_its_expiry_never_happened(make_api: MakeApi, world: World, rows: Rows) -> None:
    """There was no result that could have expired."""
    api = mounted(make_api())
    rows.move(rows.reserve("k-1"), Event.RELEASE)
    world.age("k-1", DAY + 1)
    assert (await ask(api, "k-1")).status_code == 404


# ---------------------------------------------------------------- whose key


async def test_never_seen_and_another_tenants_are_the_same_404(make_api: MakeApi) -> None:
    """The same words, the same headers, the same look-up."""
    api = mounted(make_api(scope=tenant_of))
    await api.post("k-1", headers={"authorization": "ann"})
    theirs = await ask(api, "k-1", authorization="bob")
    never = await ask(api, "k-2", authorization="bob")
    assert (theirs.status_code, theirs.content, dict(theirs.headers)) == (404, never.content, dict(never.headers))
    assert "idempotency-key" not in theirs.headers
    assert (await ask(api, "k-1", authorization="ann")).status_code == 201


async def test_both_404_ask_the_store_once(make_api: MakeApi) -> None:
    """The time that it takes tells nothing either: one read, of the caller's own scope."""

    class Watched(MemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.reads: list[Any] = []

        def read(self, keys: Any) -> Any:
            self.reads.append(list(keys))
            return super().read(keys)

    store = Watched()
    api = mounted(make_api(scope=tenant_of, store=store))
    await api.post("k-1", headers={"authorization": "ann"})
    for key in ("k-1", "k-2"):
        assert (await ask(api, key, authorization="bob")).status_code == 404
    assert store.reads == [[("bob", "k-1")], [("bob", "k-2")]]


async def test_status_of_an_unauthenticated_request_is_401(make_api: MakeApi) -> None:
    """Before any look-up, and whatever the key looks like."""
    api = mounted(make_api(scope=tenant_of))
    for key in ("k-1", "x" * 300, ""):
        answer = await ask(api, key, authorization="eve")
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


async def test_keys_of_an_endpoint_are_asked_for_with_its_name(make_api: MakeApi) -> None:
    """In the query, or fixed by the app."""
    places: list[str] = []

    def paid(request: Request, run: int) -> Response:
        places.append(status_path("/idempotency", request.scope["oncekey"]))
        return JSONResponse({"run": run})

    api = mounted(make_api(paid, policy=Policy(key_per="endpoint")))
    api.app.mount("/refund-status", status_app(api.once, operation="POST /refunds"))
    await api.post("k 1/2".join('""'), "/payments")
    await api.post('"k 1/2"', "/refunds")
    assert (await ask(api, "k 1/2")).status_code == 404
    assert [(await api.client.get(place)).json() for place in places] == [{"run": 1}, {"run": 2}]
    assert (await api.client.get("/refund-status/k%201%2F2")).json() == {"run": 2}
    assert (await ask(api, "k 1/2", query="?operation=POST%20/payments")).json() == {"run": 1}
    assert (await ask(api, "k 1/2", query="?operation=%00")).status_code == 404


# ---------------------------------------------------------------- on the wire


@pytest.mark.parametrize("key", ["a/b", "/a", "a//b", "a%2Fb", "a b", 'say "hi"', "a\\b", "a+b=", "a?b#c", "%", "~.-_"])
async def test_any_key_can_be_asked_for(make_api: MakeApi, key: str) -> None:
    """Percent-encoded, whatever is in it; the echoed key can be sent as it stands."""
    api = mounted(make_api())
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    await api.post(f'"{escaped}"')
    answer = await ask(api, key)
    assert answer.status_code == 201
    again = await api.post(answer.headers["idempotency-key"])
    assert again.headers["idempotency-replayed"] == "true"


async def test_a_slash_need_not_be_encoded(make_api: MakeApi) -> None:
    api = mounted(make_api())
    await api.post("orders/7/pay")
    assert (await api.client.get("/idempotency/orders/7/pay")).status_code == 201


async def test_a_key_may_stay_out_of_the_address(make_api: MakeApi) -> None:
    """The key may be in the header instead: to keep it out of access logs, or because it is no path (``..``)."""
    api = mounted(make_api())
    await api.post("..")
    answer = await api.client.get("/idempotency/", headers={"Idempotency-Key": '".."'})
    assert answer.status_code == 201
    missing = (await api.client.get("/idempotency/")).json()
    assert missing["type"].endswith("key-missing")
    assert "new unique key" not in missing["detail"], "a client that asks about a request has sent it already"
    malformed = await api.client.get("/idempotency/", headers={"Idempotency-Key": '"'})
    assert malformed.json()["type"].endswith("key-malformed")


@pytest.mark.parametrize("key", ["x" * 256, "käse", "a\x00b", "a\tb", "\ud800"])
async def test_status_of_an_impossible_key_is_404(make_api: MakeApi, key: str) -> None:
    """And the store, which may not take it, is not asked."""
    api = mounted(make_api())
    path = f"/idempotency/{quote(key, safe='', errors='surrogatepass')}"
    answer = await api.client.get(path)
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:oncekey:problem:status-not-found")


async def test_head_has_the_headers_and_no_body(make_api: MakeApi) -> None:
    api = mounted(make_api())
    await api.post("k-1")
    get, head = await ask(api, "k-1"), await ask(api, "k-1", "HEAD")
    assert (head.status_code, head.content, head.headers) == (201, b"", get.headers)
    assert (await ask(api, "k-2", "HEAD")).status_code == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS"])
async def test_status_by_another_method_is_405(make_api: MakeApi, method: str) -> None:
    api = mounted(make_api())
    answer = await ask(api, "k-1", method)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert answer.headers["cache-control"] == "no-store"


async def test_the_result_is_not_cached(make_api: MakeApi) -> None:
    """What a POST allowed is wrong for this GET: the answer changes, and is the caller's own."""
    kept = {"cache-control": "public, max-age=60", "etag": '"1"', "expires": "Thu, 01 Dec 2094 16:00:00 GMT"}
    api = mounted(make_api(lambda request, run: JSONResponse({}, headers=kept)))
    await api.post("k-1")
    answer = await ask(api, "k-1")
    assert answer.headers.get_list("cache-control") == ["no-store"]
    assert not {"etag", "expires"} & set(answer.headers)


async def test_a_store_that_is_down_is_503(make_api: MakeApi) -> None:
    class Down(MemoryStore):
        def read(self, keys: Any) -> Any:
            raise StoreUnavailable("down")

    api = mounted(make_api(store=Down()))
    answer = await ask(api, "k-1")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_the_route_says_when_to_ask_again(make_api: MakeApi, rows: Rows) -> None:
    """Its own Retry-After, as for its duplicates."""
    api = mounted(make_api(routes={"POST /payments": Policy(retry_after=timedelta(seconds=7))}))
    rows.reserve("k-1")
    assert (await ask(api, "k-1")).headers["retry-after"] == "7"


async def test_in_fastapi_behind_a_proxys_prefix(world: World, rows: Rows) -> None:
    """Mounted in FastAPI, and the prefix that a proxy took away is in Location again."""
    once = OnceKey(world.store(), scope=lambda request: "single-tenant", migrate=True)
    app = FastAPI()
    app.mount("/idempotency", status_app(once))
    rows.reserve("k/1")
    transport = httpx.ASGITransport(app=app, root_path="/api")
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
        answer = await client.get("/api/idempotency/k%2F1")
        assert (answer.status_code, answer.headers["location"]) == (202, "/api/idempotency/k%2F1")
    await once.aclose()


# ---------------------------------------------------------------- WSGI


def test_status_under_wsgi_answers_the_same(world: World) -> None:
    """The same answers under WSGI."""
    app = Flask("status")
    once = OnceKey(world.store(), scope=tenant_of, policy=Policy(key_per="tenant"), migrate=True)
    protect(app, once)
    app.add_url_rule("/payments", "pay", lambda: ({"id": 7}, 201, {"Location": "/payments/7"}), methods=["POST"])
    client = Client(DispatcherMiddleware(app.wsgi_app, {"/idempotency": status_wsgi(once)}))
    ann, bob = {"Authorization": "ann"}, {"Authorization": "bob"}
    first = client.post("/payments", headers=ann | {"Idempotency-Key": "a/b"}, json={})
    answer = client.get("/idempotency/a%2Fb", headers=ann)
    assert (answer.status_code, answer.data) == (201, first.data)
    assert (answer.headers["Location"], answer.headers["Idempotency-Replayed"]) == ("/payments/7", "true")
    theirs, never = (client.get(f"/idempotency/{key}", headers=bob) for key in ("a%2Fb", "c"))
    assert (theirs.status_code, theirs.data) == (404, never.data)
    assert client.get("/idempotency/a%2Fb").status_code == 401
    assert client.post("/idempotency/a%2Fb", headers=ann).status_code == 405
    assert client.get("/idempotency/", headers=ann | {"Idempotency-Key": "a/b"}).status_code == 201
    head = client.head("/idempotency/a%2Fb", headers=ann)
    assert (head.status_code, head.data) == (201, b"")
    once.close()


def test_under_wsgi_a_running_request_is_202(world: World, rows: Rows) -> None:
    once = OnceKey(world.store(), scope=lambda request: ONE, migrate=True)
    rows.reserve("k 1")
    client = Client(DispatcherMiddleware(Flask("status"), {"/idempotency": status_wsgi(once)}))
    answer = client.get("/idempotency/k%201")
    assert (answer.status_code, answer.headers["Location"]) == (202, "/idempotency/k%201")
    assert (answer.headers["Retry-After"], answer.headers["Idempotency-Key"]) == ("1", '"k 1"')
    once.close()


async def test_the_audit_of_routes_knows_that_it_changes_nothing(make_api: MakeApi) -> None:
    """``oncekey routes --strict`` asks for no protection of what only answers questions."""
    api = mounted(make_api())
    assert not [place for place in audit(api.app).endpoints if "/idempotency" in place.path]
    assert api.once.routes.match("GET", "/idempotency/k-1") is None
