"""Responses that cannot be stored: too large, endless, broken off, or without an end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from oncekey.core.states import State
from oncekey.telemetry import events
from tests.web.apps import JSON, Gate, MakeApi, World, protected, same, soon
from tests.web.asgi_server import AsgiServer

LARGE = 1024 * 1024 + 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_more_than_a_mebibyte_leaves_a_tombstone(make_api: MakeApi, world: World, streamed: bool) -> None:
    """Too large to store: the first client gets all of it, a retry its status and a note, and nothing runs twice."""
    body = b"x" * LARGE

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, LARGE, 65536):
            yield body[at : at + 65536]

    headers = {"location": "/files/1", "etag": '"v1"', "content-disposition": "attachment"}

    def respond(request: Request, run: int) -> Response:
        if streamed:
            return StreamingResponse(pieces(), 201, headers=headers)
        return Response(body, 201, headers=headers)

    api = make_api(respond)
    first, second = await api.post(), await api.post()
    assert (first.status_code, first.content) == (201, body)
    assert "idempotency-expires" in first.headers
    assert second.status_code == 201
    assert second.json()["type"] == "urn:oncekey:problem:body-not-kept"
    assert second.headers["location"] == "/files/1"
    assert second.headers["idempotency-replayed"] == "true"
    assert int(second.headers["content-length"]) == len(second.content)
    assert not {"etag", "content-disposition"} & set(second.headers)
    assert api.runs == 1
    record = world.record("k-1")
    assert record is not None
    assert record.state is State.COMPLETED
    assert record.response is not None
    assert record.response.body is None
    assert len(api.saw(events.Tombstoned)) == 1


async def test_exactly_a_mebibyte_is_stored(make_api: MakeApi) -> None:
    """The limit is the last size that is kept."""
    body = b"x" * (LARGE - 1)
    api = make_api(lambda request, run: Response(body, 201))
    assert same(await api.post(), await api.post())
    assert api.runs == 1


async def test_an_event_stream_passes_as_it_comes_and_leaves_a_tombstone(make_api: MakeApi) -> None:
    """Events reach the client before the stream ends; its end waits for the store; a retry does not run again."""
    gate = Gate()

    async def stream() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        await gate.wait()
        yield b"data: 2\n\n"

    api = make_api(lambda request, run: StreamingResponse(stream(), media_type="text/event-stream"))
    server = AsgiServer(api.app)
    task = server.start()
    await soon(gate.entered.wait())
    assert (server.status, server.body, server.ended) == (200, b"data: 1\n\n", False)
    assert (await api.post(content=b'{"amount":1000,"currency":"EUR"}', headers=JSON)).status_code == 409
    gate.go.set()
    await soon(task)
    assert server.body == b"data: 1\n\ndata: 2\n\n"
    assert server.ended
    assert "content-length" not in server.headers
    retry = await api.post(content=b'{"amount":1000,"currency":"EUR"}', headers=JSON)
    assert retry.status_code == 200
    assert retry.headers["content-type"] == "application/json"
    assert retry.json()["type"] == "urn:oncekey:problem:body-not-kept"
    assert api.runs == 1


async def test_a_stream_that_breaks_is_not_stored_as_whole(make_api: MakeApi, world: World) -> None:
    """Hazard 15: what came before the failure is no answer; the key says that the outcome is unknown."""

    async def broken() -> AsyncIterator[bytes]:
        yield b"half of "
        raise RuntimeError("the disk is gone")

    api = make_api(lambda request, run: StreamingResponse(broken(), 201))
    assert (await api.post()).status_code == 500
    record = world.record("k-1")
    assert record is not None
    assert (record.state, record.response) == (State.UNKNOWN, None)
    assert (await api.post()).status_code == 409


async def test_an_app_that_returns_without_an_end_is_not_stored(make_api: MakeApi, world: World) -> None:
    """A response without an end is not stored, although the app returned without an exception."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    api = make_api()
    server = AsgiServer(protected(app, api))
    await soon(server.start())
    assert server.body == b""
    record = world.record("k-1")
    assert record is not None
    assert record.state is State.UNKNOWN
