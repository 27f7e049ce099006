"""What is on the wire: the marks on every answer, what a replay repeats, and what it never may."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from dataclasses import replace
from email.utils import parsedate_to_datetime
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from starlette.background import BackgroundTask
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse

from oncekey import Policy, current
from oncekey.core.states import State
from tests.web.apps import JSON, MakeApi, World, protected, same, soon
from tests.web.asgi_server import AsgiServer

# ---------------------------------------------------------------- marks


async def test_every_protected_answer_names_its_key_and_its_expiry(make_api: MakeApi, world: World) -> None:
    """``Idempotency-Key`` is echoed as it was sent, ``Idempotency-Expires`` is what the row says."""
    api = make_api()
    for key in ("k-1", '"k-1"'):
        answer = await api.post(key)
        assert answer.headers["idempotency-key"] == key
        record = world.record("k-1")
        assert record is not None
        expires = parsedate_to_datetime(answer.headers["idempotency-expires"]).timestamp()
        assert expires == int(record.expires_at)
        assert 24 * 3600 - 60 <= expires - record.created_at <= 24 * 3600 + 60
    mismatch = await api.post("k-1", "/refunds")
    assert mismatch.headers["idempotency-key"] == "k-1"
    assert "idempotency-expires" in mismatch.headers


async def test_marks_that_a_handler_sets_itself_are_ours(make_api: MakeApi) -> None:
    """A handler cannot pretend to be a replay, nor name another key."""
    forged = {"Idempotency-Replayed": "true", "Idempotency-Key": "other", "Idempotency-Expires": "never"}
    api = make_api(lambda request, run: JSONResponse({}, 201, headers=forged))
    first = await api.post()
    assert "idempotency-replayed" not in first.headers
    assert first.headers.get_list("idempotency-key") == ["k-1"]
    assert first.headers["idempotency-expires"] != "never"
    assert same(first, await api.post())


@pytest.mark.parametrize(
    ("profile", "marker", "mismatch"),
    [
        ("ietf", "idempotency-replayed", 422),
        ("stripe", "idempotent-replayed", 400),
        ("governance", None, 422),
    ],
)
async def test_profiles_mark_replays_and_mismatches_their_way(
    make_api: MakeApi, profile: Any, marker: str | None, mismatch: int
) -> None:
    """Each profile marks a replay in its own way, and refuses a mismatch with its own status and words."""
    api = make_api(profile=profile)
    first, second = await api.post(), await api.post()
    assert same(first, second)
    marks = [name for name in ("idempotency-replayed", "idempotent-replayed") if second.headers.get(name) == "true"]
    assert marks == ([marker] if marker else [])
    assert second.headers["idempotency-key"] == "k-1"
    other = await api.post(body={"amount": 1})
    assert other.status_code == mismatch
    members = {"ietf": "type", "stripe": "error", "governance": "fault"}
    assert members[profile] in other.json()
    missing = await api.post(None)
    assert missing.status_code == 400
    assert members[profile] in missing.json()


# ---------------------------------------------------------------- what a replay repeats


async def test_set_cookie_and_authorization_are_not_replayed_while_location_is(make_api: MakeApi, world: World) -> None:
    """Hazard 13: what belongs to one session goes to the first client only; what names the result is kept (16)."""

    def respond(request: Request, run: int) -> Response:
        answer = JSONResponse({"id": 1}, 201)
        answer.set_cookie("session", "secret-1")
        for name, value in {
            "authorization": "Bearer secret-2",
            "x-secret": "secret-3",
            "location": "/payments/1",
            "etag": '"v1"',
            "content-language": "en",
        }.items():
            answer.headers[name] = value
        answer.headers.append("link", "</a>; rel=prev")
        answer.headers.append("link", "</b>; rel=next")
        return answer

    api = make_api(respond)
    first, second = await api.post(), await api.post()
    assert "secret-1" in first.headers["set-cookie"]
    assert first.headers["authorization"] == "Bearer secret-2"
    assert not {"set-cookie", "authorization", "x-secret"} & set(second.headers)
    for name in ("location", "etag", "content-language", "content-type", "content-length"):
        assert second.headers[name] == first.headers[name]
    assert second.headers.get_list("link") == ["</a>; rel=prev", "</b>; rel=next"]
    record = world.record("k-1")
    assert record is not None
    assert "secret" not in repr(record)


async def test_a_route_may_store_more_headers(make_api: MakeApi) -> None:
    """The allow-list is the route's, in any case of letters."""
    api = make_api(
        lambda request, run: JSONResponse({}, 201, headers={"X-Receipt": f"r-{run}"}),
        policy=Policy(stored_headers=frozenset({"x-ReCeipt", "content-type"})),
    )
    first, second = await api.post(), await api.post()
    assert first.headers["x-receipt"] == second.headers["x-receipt"] == "r-1"


async def test_a_header_with_a_line_break_is_never_stored(make_api: MakeApi, world: World) -> None:
    """A value that would end its header early is left out of the record, so no replay can be split by it."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"location", b"/a\r\nset-cookie: evil=1"), (b"etag", b'"v1"'), (b"link", b"x\0y")]
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})

    api = make_api()
    await soon(AsgiServer(protected(app, api)).start())
    record = world.record("k-1")
    assert record is not None
    assert record.response is not None
    assert dict(record.response.headers) == {"etag": '"v1"'}


@pytest.mark.parametrize("store_url", ["memory://"])  # where a row can be forged
async def test_a_row_from_somewhere_else_cannot_split_a_replay(make_api: MakeApi, world: World) -> None:
    """CR and LF are refused on replay as well as on write: rows can be older than the check."""
    api = make_api()
    await api.post()
    store: Any = world.store()
    row = store._rows["single-tenant", "k-1"]
    forged = (("link", "a\r\nset-cookie: evil=1"), ("l\xefnk", "evil"), ("etag", "evil\u20ac"), ("x-kept", "caf\xe9\t"))
    response = replace(row.response, headers=(*row.response.headers, *forged))
    store._rows["single-tenant", "k-1"] = replace(row, response=response)
    answer = await api.post()
    assert answer.status_code == 201
    assert "link" not in answer.headers
    assert b"evil" not in b"".join([*chain.from_iterable(answer.headers.raw)])
    assert (b"x-kept", "caf\xe9\t".encode("latin-1")) in answer.headers.raw


@pytest.mark.parametrize("store_url", ["memory://"])  # where a row can be forged
async def test_an_unknown_layout_of_the_response_is_a_tombstone(make_api: MakeApi, world: World) -> None:
    """A row that a later version wrote is done and not readable: never a 500, never a second run."""
    api = make_api()
    await api.post()
    store: Any = world.store()
    row = store._rows["single-tenant", "k-1"]
    store._rows["single-tenant", "k-1"] = replace(row, response=replace(row.response, schema_version=99))
    answer = await api.post()
    assert answer.status_code == 201
    assert answer.json()["type"] == "urn:oncekey:problem:body-not-kept"
    assert api.runs == 1


async def test_204_has_no_length_and_no_body(make_api: MakeApi) -> None:
    """A 204 is replayed as one: RFC 9110 forbids it a content-length."""
    api = make_api(lambda request, run: Response(status_code=204))
    first, second = await api.post(), await api.post()
    assert (first.status_code, first.content) == (204, b"")
    assert "content-length" not in first.headers
    assert same(first, second)
    assert api.runs == 1


async def test_an_empty_body_is_replayed_as_one(make_api: MakeApi) -> None:
    """Nothing, stored, is not the same as not stored."""
    api = make_api(lambda request, run: Response(b"", 201))
    first, second = await api.post(), await api.post()
    assert first.headers["content-length"] == "0"
    assert same(first, second)
    assert api.runs == 1


async def test_any_bytes_come_back_as_they_were(make_api: MakeApi) -> None:
    """Bodies are bytes: no text, no encoding, no NUL stops them."""
    everything = bytes(range(256)) * 20
    api = make_api(lambda request, run: Response(everything, 200, media_type="application/octet-stream"))
    first, second = await api.post(), await api.post()
    assert first.content == second.content == everything
    assert same(first, second)


async def test_a_redirect_is_stored(make_api: MakeApi) -> None:
    """303 with a Location is how many APIs answer a POST: it is a success like another."""
    api = make_api(lambda request, run: Response(status_code=303, headers={"location": f"/payments/{run}"}))
    first, second = await api.post(), await api.post()
    assert second.headers["location"] == "/payments/1"
    assert same(first, second)


async def test_a_small_stream_is_stored_whole(make_api: MakeApi) -> None:
    """Hazard 15: a body that comes in pieces is stored when the last one is there, and with its length."""

    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b"one,", b"", b"two,", b"three"):
            yield piece

    api = make_api(lambda request, run: StreamingResponse(pieces(), 201, media_type="text/csv"))
    first, second = await api.post(), await api.post()
    assert first.content == b"one,two,three"
    assert first.headers["content-length"] == "13"
    assert "transfer-encoding" not in first.headers
    assert same(first, second)
    assert api.runs == 1


async def test_a_file_goes_through_us_and_not_around(make_api: MakeApi, tmp_path: Path) -> None:
    """A server's shortcut for files (pathsend) would pass the store by: the app does not see that it exists."""
    file = tmp_path / "receipt.txt"
    file.write_bytes(b"receipt 1")
    api = make_api(lambda request, run: FileResponse(file))
    server = AsgiServer(api.app, extensions={"http.response.pathsend": {}, "http.response.debug": {}})
    await soon(server.start())
    assert server.body == b"receipt 1"
    assert all(message["type"] != "http.response.pathsend" for message in server.sent)
    file.write_bytes(b"receipt 2")
    assert (await api.post(content=b'{"amount":1000,"currency":"EUR"}', headers=JSON)).content == b"receipt 1"
    assert "http.response.debug" in api.requests[0].scope["extensions"]


# ---------------------------------------------------------------- compression


async def test_gzip_in_front_of_us(make_api: MakeApi, world: World) -> None:
    """Hazard 16: identity bytes are stored, so each client gets the encoding that it asked for itself."""
    text = {"text": "abc" * 1000}
    api = make_api(
        lambda request, run: JSONResponse(text, 201),
        behind=lambda app: GZipMiddleware(app, minimum_size=100),
    )
    zipped = await api.post(headers={"accept-encoding": "gzip"})
    plain = await api.post(headers={"accept-encoding": "identity"})
    again = await api.post(headers={"accept-encoding": "gzip"})
    assert zipped.headers["content-encoding"] == again.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert zipped.json() == plain.json() == again.json() == text
    assert int(plain.headers["content-length"]) == len(plain.content)
    assert api.runs == 1
    record = world.record("k-1")
    assert record is not None
    assert record.response is not None
    assert record.response.body == plain.content


async def test_response_is_stored_without_gzip_of_the_app(make_api: MakeApi) -> None:
    """Hazard 16: an app that could compress does not, since its bytes are for every later client."""
    text = {"text": "abc" * 1000}
    api = make_api(
        lambda request, run: JSONResponse(text, 201),
        prepare=lambda app: app.add_middleware(GZipMiddleware, minimum_size=100),
    )
    first = await api.post(headers={"accept-encoding": "gzip"})
    second = await api.post(headers={"accept-encoding": "identity"})
    assert "content-encoding" not in first.headers
    assert same(first, second)
    assert second.json() == text
    assert int(second.headers["content-length"]) == len(second.content)


async def test_an_app_that_compresses_by_itself_is_replayed_with_its_encoding(make_api: MakeApi) -> None:
    """Bytes and their encoding stay together."""
    packed = gzip.compress(b"hello" * 100)
    api = make_api(lambda request, run: Response(packed, 201, headers={"content-encoding": "gzip"}))
    first, second = await api.post(), await api.post()
    assert first.content == second.content == b"hello" * 100
    assert second.headers["content-encoding"] == "gzip"
    assert same(first, second)


# ---------------------------------------------------------------- background tasks


async def test_background_tasks_run_after_and_cannot_change_the_record(make_api: MakeApi, world: World) -> None:
    """The response is stored and sent before a background task begins, and its failure changes nothing."""
    seen: list[Any] = []

    async def later(server: AsgiServer) -> None:
        record = world.record("k-1")
        seen.append((record.state if record else None, server.ended, current().attempt))
        raise RuntimeError("the receipt printer is on fire")

    wires: list[AsgiServer] = []
    api = make_api(lambda request, run: JSONResponse({"run": run}, 201, background=BackgroundTask(later, wires[0])))
    wires.append(AsgiServer(api.app))
    with pytest.raises(RuntimeError, match="on fire"):
        await soon(wires[0].start())
    assert seen == [(State.COMPLETED, True, 1)]
    assert (wires[0].status, wires[0].body) == (201, b'{"run":1}')
    retry = await api.post(content=b'{"amount":1000,"currency":"EUR"}', headers=JSON)
    assert (retry.status_code, retry.content) == (201, b'{"run":1}')
    assert len(seen) == 1


async def test_background_task_of_an_error_runs_after_the_key_is_moved(make_api: MakeApi, world: World) -> None:
    """A 5xx is no exception: its background task comes after, and its failure changes nothing."""
    seen: list[Any] = []

    async def later(server: AsgiServer) -> None:
        record = world.record("k-1")
        seen.append((record.state if record else None, server.ended))
        raise RuntimeError("on fire")

    wires: list[AsgiServer] = []
    api = make_api(lambda request, run: JSONResponse({"run": run}, 503, background=BackgroundTask(later, wires[0])))
    wires.append(AsgiServer(api.app))
    with pytest.raises(RuntimeError, match="on fire"):
        await soon(wires[0].start())
    assert seen == [(State.UNKNOWN, True)]
    record = world.record("k-1")
    assert record is not None
    assert record.state is State.UNKNOWN


async def test_a_response_is_stored_before_it_is_sent(make_api: MakeApi, world: World) -> None:
    """I2: nothing of the answer leaves before the store has all of it."""
    states: list[Any] = []

    class Watching(AsgiServer):
        async def send(self, message: Any) -> None:
            record = world.record("k-1")
            states.append(record.state if record else None)
            await super().send(message)

    api = make_api()
    await soon(Watching(api.app).start())
    assert states == [State.COMPLETED, State.COMPLETED]
