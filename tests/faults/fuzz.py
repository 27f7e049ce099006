"""Anything at all in the places that bytes come from outside: the header, the body, and damaged rows.

The properties of header, fingerprint and multipart are those of ``tests/core``, which run with every ``make test``;
here they run for longer. Damaged rows are read as the stores read them, and asked for through a real app: a key whose
row is not what we wrote is refused with 503, its handler is not called, and no client gets a response that no
handler made.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx
import orjson
import psycopg
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.core.record import RESPONSE_SCHEMA_VERSION, StoredResponse
from oncekey.core.sealed import SEALED_RESPONSE
from oncekey.errors import StoreError
from oncekey.stores.sql.key_rows import stored_response
from oncekey.web.asgi import IdempotencyMiddleware
from oncekey.web.responses import answer_headers, replay
from tests.core import (
    test_fingerprint,
    test_fingerprint_json,
    test_fingerprint_properties,
    test_header,
    test_multipart,
)
from tests.engine.doubles import record_of, reservation
from tests.faults.campaign import Fault, Run

STORED = StoredResponse(201, (("content-type", "application/json"), ("location", "/payments/é")), b'{"id": 7}')


def search(run: Run, test: Callable[..., None], strategies: dict[str, Any], promise: str, examples: int) -> None:
    """Hypothesis for so many examples; what fails is made short, and told."""
    asked = 0

    def counted(**drawn: Any) -> None:
        nonlocal asked
        asked += 1
        test(**drawn)

    while asked < examples and not run.violations:
        wanted, before = max(examples - asked, 1), asked
        limits = settings(
            max_examples=wanted,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        try:
            seed(run.random.randrange(2**32))(limits(given(**strategies)(counted)))()
        except Exception as error:
            run.violated(promise, "\n".join([repr(error), *getattr(error, "__notes__", [])]))
        run.hit(asked - before)


def long_form_of(*modules: Any, promise: str = "I5") -> Callable[[Run], None]:
    """All property tests of these modules, each with its share of the examples."""
    tests = [
        value
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("test_") and hasattr(value, "hypothesis")
    ]

    def go(run: Run) -> None:
        assert tests, f"{', '.join(module.__name__ for module in modules)}: no property tests"
        for test in tests:
            handle = test.hypothesis
            search(run, handle.inner_test, handle._given_kwargs, promise, -(-run.count // len(tests)))

    return go


# -- rows --------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=6,
)
GOOD_HEADERS = orjson.dumps(STORED.headers).decode()


@st.composite
def edited(draw: st.DrawFn, good: str = GOOD_HEADERS) -> str:
    """What we wrote, with a little of it cut, doubled, or written over."""
    at, length = draw(st.integers(0, len(good))), draw(st.integers(0, 4))
    return (
        good[:at]
        + draw(st.text(max_size=3) | st.sampled_from(["\\r\\n", '"', "]", "[", ",", "\\u0000"]))
        + good[at + length :]
    )


HEADERS = (
    st.just(GOOD_HEADERS)
    | edited()
    | JSON.map(
        lambda value: orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_DATETIME).decode() if _small(value) else "0"
    )
    | st.lists(st.lists(st.text(max_size=5), max_size=3), max_size=3).map(lambda value: orjson.dumps(value).decode())
    | st.none()
    | st.binary(max_size=10)
)
STATUSES = st.just(201) | st.integers(-(10**6), 10**6) | st.none() | st.text(max_size=3) | st.floats()
BODIES = st.just(STORED.body) | st.none() | st.binary(max_size=20) | st.text(max_size=5) | st.integers()
VERSIONS = st.just(RESPONSE_SCHEMA_VERSION) | st.integers(-2, 5) | st.none() | st.text(max_size=2)


def _small(value: Any) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True


class Voice:
    profile = "ietf"
    docs_url = None


def reads_or_refuses(status: Any, headers: Any, body: Any, version: Any) -> None:
    """Read as it was written, or a StoreError; and what was read can be sent."""
    try:
        read = stored_response(status, headers, body, version)
    except StoreError:
        return
    assert read.status == status
    if version != RESPONSE_SCHEMA_VERSION:
        assert not read.replayable
        assert read.headers == ()
    else:
        assert orjson.loads(headers) == [list(pair) for pair in read.headers]
        assert read.body == body
    answer = replay(record_of(reservation(), response=read), Voice())  # type: ignore[arg-type]
    for name, value in answer_headers(answer, b"key", None):
        assert not {*b"\r\n\0"} & {*name, *value}, "a header that ends early"


def responses(run: Run) -> None:
    drawn = {"status": STATUSES, "headers": HEADERS, "body": BODIES, "version": VERSIONS}
    search(run, reads_or_refuses, drawn, "I2", run.count)


# -- through a real app ------------------------------------------------------------------------------------------------

DAMAGE: dict[str, st.SearchStrategy[Any]] = {
    "response_headers": edited().filter(lambda text: text != GOOD_HEADERS and "\0" not in text),
    "response_status": st.integers(-100, 99) | st.integers(600, 2000),
    "response_schema_version": st.integers(2, 100),
    "effects": st.text("abc", min_size=1, max_size=5),
    "fingerprint": st.binary(min_size=32, max_size=32),
    "fingerprint_version": st.integers(3, 9),
    "fingerprint_recipe": st.text("abc{}[]", max_size=5),
}
"""Column -> what may stand in it, of what its type and its constraints let in."""


class Damaged:
    """An app whose table is damaged from outside."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.calls = 0
        self.keys = 0
        self.once = OnceKey(url, scope=SINGLE_TENANT, migrate=True)
        app = Starlette(routes=[Route("/payments", self.pay, methods=["POST"])])
        app.add_middleware(IdempotencyMiddleware, once=self.once)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://damaged")

    async def pay(self, _: Request) -> JSONResponse:
        self.calls += 1
        return JSONResponse({"call": self.calls}, 201, {"Location": f"/payments/{self.calls}"})

    async def post(self, key: str) -> httpx.Response:
        return await self.client.post("/payments", json={"cents": 5}, headers={"Idempotency-Key": key})

    def write(self, key: str, column: str, value: Any) -> None:
        if self.url.startswith("sqlite"):
            with closing(sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=10)) as file, file:
                file.execute(f"UPDATE idempotency_keys SET {column} = ? WHERE key = ?", (value, key))
        else:
            with psycopg.connect(self.url) as connection:
                connection.execute(f"UPDATE idempotency_keys SET {column} = %s WHERE key = %s".encode(), (value, key))

    async def one(self, column: str, value: Any) -> None:
        self.keys += 1
        key = f"key-{self.keys:06d}"
        first = await self.post(key)
        assert first.status_code == 201, first.text
        calls = self.calls
        self.write(key, column, value)
        again = await self.post(key)
        assert self.calls == calls, f"the handler ran a second time: {again.status_code}"
        match column:
            case "response_schema_version" if value == SEALED_RESPONSE:
                assert again.status_code == 503  # a process with the keyring may read it
            case "response_schema_version":
                assert (again.status_code, again.headers["idempotency-replayed"]) == (201, "true")
                assert again.content != first.content, "read by a layout that we do not know"
            case "fingerprint":
                assert again.status_code == 422
            case "response_headers" if again.status_code == 201:
                assert again.content == first.content  # what is well formed cannot be told from what we wrote
            case _:
                assert again.status_code == 503, (again.status_code, again.text)


def rows(run: Run) -> None:
    with asyncio.Runner() as runner:
        damaged = Damaged(run.url())

        def test(damage: tuple[str, Any]) -> None:
            run.asked(2)
            runner.run(damaged.one(*damage))

        columns = st.sampled_from(sorted(DAMAGE)).flatmap(lambda name: st.tuples(st.just(name), DAMAGE[name]))
        try:
            search(run, test, {"damage": columns}, "I2", run.count)
        finally:
            runner.run(damaged.client.aclose())
            runner.run(damaged.once.aclose())


FINGERPRINT = long_form_of(test_fingerprint, test_fingerprint_json, test_fingerprint_properties)
FAULTS = (
    Fault("fuzz: header", long_form_of(test_header), {"-": 20_000}, 0, ("I5",), "examples", 60.0),
    Fault("fuzz: fingerprint", FINGERPRINT, {"-": 10_000}, 0, ("I5",), "examples", 120.0),
    Fault("fuzz: multipart", long_form_of(test_multipart), {"-": 10_000}, 0, ("I5",), "examples", 60.0),
    Fault("fuzz: stored responses", responses, {"-": 20_000}, 300, ("I2",), "examples", 60.0),
    Fault("fuzz: damaged rows", rows, {"sqlite": 1_000, "postgres": 500}, 20, ("I2", "I5", "I7"), "examples", 60.0),
)
