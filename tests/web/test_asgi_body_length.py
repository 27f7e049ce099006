"""Under ASGI, a body that is not the one that the client sent is refused before anything is reserved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.web.apps import Api, World
from tests.web.asgi_server import AsgiServer
from tests.web.processes import served, talk

MakeApi = Callable[..., Api]
BODY = b'{"amount":1000}'


@pytest.fixture(params=["starlette"])
def framework(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("arrived", [b"", BODY[:-1], BODY + b" "], ids=["empty", "shorter", "longer"])
async def test_body_of_another_length_is_refused_and_takes_no_key(
    make_api: MakeApi, world: World, arrived: bytes
) -> None:
    api = make_api()
    server = AsgiServer(api.app, body=arrived, headers={"content-length": str(len(BODY))})
    await server.start()
    assert (server.status, b"body-incomplete" in server.body) == (400, True)
    assert b"with the same key" in server.body
    assert (api.runs, world.record("k-1")) == (0, None)
    whole = AsgiServer(api.app, body=BODY, headers={"content-length": str(len(BODY))})
    await whole.start()
    assert (whole.status, api.runs) == (201, 1)


@pytest.mark.parametrize("store_url", ["memory://"])
@pytest.mark.parametrize(
    "headers",
    [{}, {"transfer-encoding": "chunked"}, {"transfer-encoding": "chunked", "content-length": "999"}],
    ids=["neither", "chunked", "both"],
)
@pytest.mark.parametrize("body", [b"", BODY], ids=["empty", "body"])
async def test_body_without_a_length_that_counts_passes(make_api: MakeApi, headers: Any, body: bytes) -> None:
    """RFC 9112: where both are sent, the length does not count (h11 hands both over)."""
    api = make_api()
    server = AsgiServer(api.app, body=body, headers=headers)
    await server.start()
    assert (server.status, api.runs) == (201, 1)


@pytest.mark.parametrize("http", ["h11", "httptools"])
async def test_payment_whose_body_the_server_dropped_does_not_run(make_api: MakeApi, world: World, http: str) -> None:
    """Java's HttpClient asks for ``Upgrade: h2c``; uvicorn with httptools then hands an empty body over."""
    pytest.importorskip(http)

    async def respond(request: Request, run: int) -> Response:
        return JSONResponse({"size": len(await request.body())}, 201)

    api = make_api(respond)
    head = b"POST /payments HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    java = b"connection: Upgrade, HTTP2-Settings, close\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    with_length = b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    with served(api.app, http) as port:
        for key, framed in (("length", with_length), ("chunked", chunked)):
            line = b"idempotency-key: %b\r\n" % key.encode()
            said = await asyncio.to_thread(talk, port, head + line + java + framed)
            if http == "h11":
                assert said.endswith(b'{"size":%d}' % len(BODY)), key
                continue
            assert said.startswith(b"HTTP/1.1 400"), key
            assert b"body-incomplete" in said, key
            assert b"without that header" in said, key
            assert world.record(key) is None
            said = await asyncio.to_thread(talk, port, head + line + b"connection: close\r\n" + framed)
            assert said.endswith(b'{"size":%d}' % len(BODY)), key
    assert api.runs == 2
