"""Bad input gets a clear answer and loses nothing: never a 500 of ours, never a run, never a row left behind."""

from __future__ import annotations

import asyncio
import secrets
import string
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import Policy
from oncekey.telemetry import events
from oncekey.web.asgi_shell import LARGE_BODY_BYTES
from tests.web.apps import MakeApi, World, same, soon
from tests.web.processes import served, talk

JSON = {"content-type": "application/json"}
LIMIT = 1024 * 1024


@pytest.fixture
def framework() -> str:
    """It makes no difference here."""
    return "starlette"


# ---------------------------------------------------------------- the key

BAD_KEYS: dict[str, tuple[list[bytes], str]] = {
    "missing": ([], "requires an Idempotency-Key"),
    "empty": ([b""], "empty or blank"),
    "empty-quoted": ([b'""'], "empty or blank"),
    "blank": ([b"   "], "empty or blank"),
    "blank-quoted": ([b'"   "'], "empty or blank"),
    "256-characters": ([b"x" * 256], "longer than 255"),
    "256-quoted": ([b'"' + b"x" * 256 + b'"'], "longer than 255"),
    "non-ascii": (["schlüssel".encode()], "outside ASCII"),
    "latin-1": ([b"schl\xfcssel"], "outside ASCII"),
    "non-ascii-quoted": (['"schlüssel"'.encode()], "outside ASCII"),
    "unterminated-quote": ([b'"abc'], "no closing one"),
    "quote-inside": ([b'a"b'], "not allowed"),
    "bad-escape": ([rb'"a\b"'], "backslash"),
    "repeated": ([b"a", b"b"], "more than one"),
    "repeated-same": ([b"a", b"a"], "more than one"),
    "comma-list": ([b"a, b"], "more than one"),
    "quoted-comma-list": ([b'"a", "b"'], "more than one"),
    "trailing": ([b'"a" b'], "closing double quote"),
    "control": ([b"a\x01b"], "not allowed"),
    "space-inside": ([b"a b"], "not allowed"),
}


async def test_a_bad_key_is_400_that_names_the_rule(make_api: MakeApi, world: World) -> None:
    """Each malformed header is refused in words that say what is wrong with it; nothing ran, nothing is stored."""
    api = make_api()
    for name, (values, words) in BAD_KEYS.items():
        headers = [(b"Idempotency-Key", value) for value in values]
        answer = await api.client.post("/payments", headers=headers, json={})
        assert answer.status_code == 400, name
        assert answer.headers["content-type"] == "application/problem+json", name
        detail = answer.json()["detail"]
        assert words in detail, (name, detail)
        assert "This request was not executed" in detail, name
        assert "retry-after" not in answer.headers, name
        # A key is a capability: neither repeated nor reflected.
        assert "idempotency-key" not in answer.headers, name
        assert "schl" not in detail, name
    assert (api.runs, world.rows()) == (0, 0)


async def test_255_characters_and_odd_ones_are_good_keys(make_api: MakeApi, world: World) -> None:
    """The limits let through what they promise: any opaque value, kept apart byte by byte (hazard 17)."""
    keys = ["x" * 255, '"' + "y" * 255 + '"', "Abc", "abc", "a/b+c=", '"a, b"', '"a\\"b"', '" a"', '"a "', '"a"']
    api = make_api()
    for key in keys:
        assert (await api.post(key)).status_code == 201, key
    assert (api.runs, world.rows()) == (len(keys), len(keys))


async def test_policies_narrow_the_key(make_api: MakeApi) -> None:
    """Strict syntax, UUIDs and lengths are refused in their own words."""
    api = make_api(
        routes={
            "POST /payments": Policy(key_syntax="strict"),
            "POST /refunds": Policy(key_format="uuid"),
            "PATCH /payments": Policy(key_min_length=8, key_max_length=9),
        }
    )
    for key, path, method, words in [
        ("abc", "/payments", "POST", "requires the quoted form"),
        ("abc", "/refunds", "POST", "not a UUID"),
        ("1234567", "/payments", "PATCH", "shorter than 8"),
        ("1234567890", "/payments", "PATCH", "longer than 9"),
    ]:
        answer = await api.post(key, path, method=method)
        assert (answer.status_code, words in answer.json()["detail"]) == (400, True), answer.text
    assert api.runs == 0
    assert (await api.post('"abc"')).status_code == 201


# ---------------------------------------------------------------- the body


@pytest.mark.parametrize("length", ["declared", "chunked"])
async def test_a_body_over_the_cap_is_413(make_api: MakeApi, world: World, length: str) -> None:
    """One byte too many is refused, with or without a content-length: never a bypass."""
    api = make_api()

    async def pieces(size: int) -> AsyncIterator[bytes]:
        for at in range(0, size, 65536):
            yield b"x" * min(65536, size - at)

    def body(size: int) -> Any:
        return pieces(size) if length == "chunked" else b"x" * size

    refused = await api.post("k-1", content=body(LIMIT + 1))
    assert refused.status_code == 413
    assert refused.json()["type"] == "urn:oncekey:problem:body-too-large"
    assert (api.runs, world.rows()) == (0, 0)
    taken = await api.post("k-1", content=body(LIMIT))
    assert taken.status_code == 201
    assert len(await api.requests[0].body()) == LIMIT
    assert same(taken, await api.post("k-1", content=b"x" * LIMIT))


async def test_a_length_over_the_cap_is_refused_before_the_body_is_asked_for(make_api: MakeApi) -> None:
    """A client that says ``Expect: 100-continue`` is not told to go on, and one that sends nothing gets its answer."""
    sent: list[int] = []

    async def receive() -> Any:
        raise AssertionError("100 Continue")

    async def send(message: Any) -> None:
        sent.append(message.get("status", 0))

    headers = [(b"idempotency-key", b"k-1"), (b"content-length", str(LIMIT + 1).encode())]
    scope = {"type": "http", "method": "POST", "path": "/payments", "query_string": b"", "headers": headers}
    await make_api().app(scope, receive, send)
    assert sent == [413, 0]


async def test_a_large_body_is_read_beside_the_event_loop(make_api: MakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fingerprint takes milliseconds, and a hostile one's more: other requests do not wait for that."""
    threads: list[bool] = []
    api = make_api()
    reservation = api.once.reservation

    def seen(*args: Any, **more: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return reservation(*args, **more)

    monkeypatch.setattr(api.once, "reservation", seen)
    for key, size in (("k-1", LARGE_BODY_BYTES), ("k-2", LARGE_BODY_BYTES + 1)):
        assert (await api.post(key, content=b"x" * size)).status_code == 201
    assert threads == [True, False]


ODD_BODIES = {
    "not-json": b"amount=1",
    "empty": b"",
    "half": b'{"amount":',
    "nesting": b"[" * 10_000 + b"]" * 10_000,
    "nesting-objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "unclosed-nesting": b"[" * 10_000,
    "5000-digits": b'{"amount":' + b"9" * 5000 + b"}",
    "5000-digits-and-a-fraction": b'{"amount":0.' + b"9" * 5000 + b"}",
    "huge-exponent": b'{"amount":1e999999999}',
    "past-2-53": b'{"amount":9007199254740993}',
    "duplicate-names": b'{"amount":1,"amount":2}',
    "bad-utf-8": b'{"name":"\xff\xfe"}',
    "lone-surrogate": b'{"name":"\\ud800"}',
    "nul": b'{"name":"\\u0000"}',
    "nul-byte": b"\0",
    "bom": b'\xef\xbb\xbf{"amount":1}',
    "nan": b'{"amount":NaN}',
    "bare": b"1",
}


async def test_odd_bodies_are_protected_like_any_other(make_api: MakeApi) -> None:
    """What is no JSON, or strange JSON, is the handler's to judge: it runs once, replays, and a change is a 422."""
    api = make_api(lambda request, run: JSONResponse({"run": run}, 201))
    for run, (name, body) in enumerate(ODD_BODIES.items(), start=1):
        first = await api.post(f"k-{name}", content=body, headers=JSON)
        assert (first.status_code, first.json()) == (201, {"run": run}), name
        assert await api.requests[-1].body() == body, name
        assert same(first, await api.post(f"k-{name}", content=body, headers=JSON)), name
        other = await api.post(f"k-{name}", content=body + b"x", headers=JSON)
        assert other.status_code == 422, name
    assert api.runs == len(ODD_BODIES)


async def test_bodies_that_look_alike_to_a_lax_parser_are_different_requests(make_api: MakeApi) -> None:
    """Hazard 19: neither a rounded integer nor the last of two names makes two requests one."""
    api = make_api()
    pairs = [
        (b'{"amount":9007199254740992}', b'{"amount":9007199254740993}'),
        (b'{"amount":1,"amount":2}', b'{"amount":2}'),
        (b'{"amount":1,"amount":2}', b'{"amount":3,"amount":2}'),
    ]
    for number, (one, other) in enumerate(pairs):
        assert (await api.post(f"k-{number}", content=one, headers=JSON)).status_code == 201
        assert (await api.post(f"k-{number}", content=other, headers=JSON)).status_code == 422


ODD_TYPES = ["", ";", "application/json; charset=utf-16", "x" * 5000, "multipart/form-data", "a/b; c=\xff", '"']


async def test_odd_media_types_are_no_error(make_api: MakeApi) -> None:
    """A content-type that is none is hashed as it is."""
    api = make_api()
    for number, kind in enumerate(ODD_TYPES):
        sent: dict[str, Any] = {"content-type": kind.encode("latin-1")}
        assert (await api.post(f"k-{number}", content=b"{}", headers=sent)).status_code == 201, kind
    assert api.runs == len(ODD_TYPES)


async def test_a_new_multipart_boundary_is_the_same_request(make_api: MakeApi) -> None:
    """Hazard 21: a client that builds its form again chooses another boundary, and gets its replay."""
    api = make_api()

    boundaries: list[str] = []

    async def form(amount: str) -> Any:
        files = {"amount": (None, amount), "f": ("a.txt", b"x")}
        request = api.client.build_request("POST", "/payments", headers={"idempotency-key": "k-1"}, files=files)  # type: ignore[arg-type]
        boundaries.append(request.headers["content-type"])
        return await soon(api.client.send(request))

    first, second = await form("1"), await form("1")
    assert boundaries[0] != boundaries[1]
    assert same(first, second)
    assert (await form("2")).status_code == 422
    assert api.runs == 1


# ---------------------------------------------------------------- the path


async def test_one_clients_odd_path_does_not_close_the_door_to_everybody(make_api: MakeApi) -> None:
    """A path with a NUL byte may be refused, but it is no failure of the store: the breaker stays closed, and a good
    request right after it is served."""
    api = make_api()
    for number in range(8):
        await api.post(f"bad-{number}", "/files/a%00b")
    assert not api.saw(events.BreakerOpened)
    assert (await api.post("good")).status_code == 201


async def test_a_nul_byte_in_the_path_is_not_503(make_api: MakeApi) -> None:
    """A client must not be told to come again for what will never work: it is served, or refused as its own mistake."""
    api = make_api()
    answer = await api.post("k-1", "/files/a%00b")
    assert answer.status_code < 500, answer.text


async def test_a_long_path_is_protected_per_endpoint_too(make_api: MakeApi) -> None:
    """The path is part of the scope with ``key_per="endpoint"``: whatever its length, it is no failure of the store."""
    path = "/files/" + "".join(secrets.choice(string.ascii_letters) for _ in range(6000))
    api = make_api(policy=Policy(key_per="endpoint"))
    first = await api.post("k-1", path)
    assert first.status_code < 500, first.text
    assert not api.saw(events.StoreFailed)
    assert same(first, await api.post("k-1", path))


async def test_an_undecodable_path_is_no_500(make_api: MakeApi) -> None:
    """Percent-encoded bytes that are no UTF-8 get an answer of the app's."""
    api = make_api()
    first = await api.post("k-1", "/files/%ff%fe")
    assert first.status_code == 201
    assert same(first, await api.post("k-1", "/files/%ff%fe"))


# ---------------------------------------------------------------- a real server, raw bytes


@pytest.mark.parametrize("http", ["h11", "httptools"])
@pytest.mark.parametrize("store_url", ["memory://"])
async def test_odd_requests_on_a_socket_are_answered_in_order(make_api: MakeApi, http: str) -> None:
    """``Expect: 100-continue``, chunks, repeated and odd headers, on a socket to uvicorn: every answer is in order."""

    async def respond(request: Request, run: int) -> Response:
        return JSONResponse({"run": run, "size": len(await request.body())}, 201)

    api = make_api(respond)
    post = b"POST /payments HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
    key, length, chunked = b"idempotency-key: ", b"content-length: 2\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"
    expect = b"expect: 100-continue\r\n"
    questions: dict[str, list[bytes]] = {
        "expect": [post + key + b"e\r\n" + expect + length, b"{}"],
        "expect again": [post + key + b"e\r\n" + expect + length, b"{}"],
        "chunks": [post + key + b"c\r\n" + chunked + b"1\r\n{\r\n", b"1\r\n}\r\n0\r\n\r\n"],
        "whole": [post + key + b"c\r\n" + length + b"{}"],
        "twice": [post + key + b"t\r\n" + key + b"t\r\n" + length + b"{}"],
        "upper case": [post + b"IDEMPOTENCY-KEY:  e \r\n" + length + b"{}"],
        "non-ascii": [post + key + b"\xc3\xa4\r\n" + length + b"{}"],
        "no key": [post + length + b"{}"],
        "expect and refused": [post + expect + length, b"{}"],
        "head": [b"HEAD /payments HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"],
        "options": [b"OPTIONS /payments HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"],
        "large": [post + key + b"l\r\n" + chunked, *[b"8000\r\n" + b"x" * 32768 + b"\r\n"] * 33],
    }
    with served(api.app, http) as port:
        said = {name: await asyncio.to_thread(talk, port, *pieces) for name, pieces in questions.items()}
    first = b'{"run":1,"size":2}'
    assert said["expect"].startswith(b"HTTP/1.1 100 ")
    assert b"HTTP/1.1 201" in said["expect"]
    assert said["expect"].endswith(first)
    for name in ("expect again", "upper case"):
        assert said[name].endswith(first)
        assert b"idempotency-replayed: true" in said[name]
    assert said["chunks"].endswith(b'{"run":2,"size":2}')
    assert said["whole"].endswith(b'{"run":2,"size":2}')
    for name in ("twice", "non-ascii", "no key", "expect and refused"):
        assert b"HTTP/1.1 400" in said[name], name
        assert b"application/problem+json" in said[name], name
    assert said["head"].startswith(b"HTTP/1.1 201")
    assert said["options"].startswith(b"HTTP/1.1 201")
    assert said["large"].startswith(b"HTTP/1.1 413")
