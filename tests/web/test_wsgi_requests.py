"""What a WSGI request brings: its body in every length, its whole path, and whose key it is."""

from __future__ import annotations

import io
from typing import Any

import pytest

from oncekey import Policy
from oncekey.errors import ConfigurationError
from oncekey.web.wsgi import IdempotencyMiddleware
from tests.web.wsgi_server import BODY, JSON, MakeServer, paid

# ---------------------------------------------------------------- the request's body


def echo(environ: dict[str, Any], start_response: Any) -> list[bytes]:
    """Answers with the body that the app was given, and its length."""
    start_response("200 OK", JSON)
    return [environ["CONTENT_LENGTH"].encode(), b":", environ["wsgi.input"].read()]


def test_a_chunked_body_is_read_to_its_end(make_server: MakeServer) -> None:
    """With ``wsgi.input_terminated`` a body without a length is read, hashed, and handed on with its length."""
    server = make_server(echo)
    chunked: dict[str, Any] = {
        "CONTENT_LENGTH": None,
        "wsgi__input_terminated": True,
        "HTTP_TRANSFER_ENCODING": "chunked",
    }
    first = server.post(body=b"", wsgi__input=io.BytesIO(BODY), **chunked)
    assert first.body == b"15:" + BODY
    assert server.post(body=b"", wsgi__input=io.BytesIO(BODY), **chunked).body == first.body
    assert server.post(body=b"", wsgi__input=io.BytesIO(b"{}"), **chunked).status == 422
    assert server.post(body=BODY).headers["idempotency-replayed"] == "true"
    assert server.runs == 1


def test_a_chunked_body_over_the_cap_is_413(make_server: MakeServer) -> None:
    """No more of it is read than the cap allows, and nothing runs."""
    server = make_server(echo, max_request_bytes=100)
    stream = io.BytesIO(b"x" * 1000)
    answer = server.post(body=b"", CONTENT_LENGTH=None, wsgi__input_terminated=True, wsgi__input=stream)
    assert (answer.status, server.runs, server.state) == (413, 0, None)
    assert stream.tell() <= 101


def test_a_body_that_says_it_is_over_the_cap_is_not_read(make_server: MakeServer) -> None:
    """The declared length is enough to refuse: nothing is read into memory."""
    server = make_server(echo, max_request_bytes=100)
    stream = io.BytesIO(b"x" * 1000)
    answer = server.post(wsgi__input=stream, CONTENT_LENGTH="1000")
    assert (answer.status, server.runs, stream.tell()) == (413, 0, 0)


@pytest.mark.parametrize(
    ("length", "status"),
    [("9" * 5_000, 413), ("1" + "0" * 30, 413), ("0" * 5_000 + "15", 200), ("1_5", 200), ("\u0665", 200)],
)
def test_a_length_may_have_any_number_of_digits(make_server: MakeServer, length: str, status: int) -> None:
    """Python reads no number of more than 4,300 of them. What is no length is none: an empty body."""
    assert make_server(echo).post(CONTENT_LENGTH=length).status == status


class Endless(io.RawIOBase):
    """A socket that never ends: to read without a length would hang."""

    def read(self, size: int = -1) -> bytes:
        raise AssertionError("read without a length")


@pytest.mark.parametrize("length", [None, ""], ids=["missing", "empty"])
def test_without_a_length_there_is_no_body(make_server: MakeServer, length: str | None) -> None:
    """PEP 3333: no CONTENT_LENGTH and no terminated input is an empty body, and the socket is not read."""
    server = make_server(echo)
    answer = server.post(CONTENT_LENGTH=length, wsgi__input=Endless())
    assert (answer.status, answer.body) == (200, b"0:")
    assert server.post(CONTENT_LENGTH=length, wsgi__input=Endless()).body == b"0:"
    assert server.runs == 1


def test_a_body_that_breaks_off_is_not_executed(make_server: MakeServer) -> None:
    """A client that left while it was sending has asked for nothing: half a body must not run, nor take the key."""
    server = make_server(echo)
    answer = server.post(body=BODY[:7], CONTENT_LENGTH=str(len(BODY)))
    assert server.runs == 0
    assert (answer.status, b"body-incomplete" in answer.body) == (400, True)
    assert server.state is None
    assert server.post().status == 200


def test_truncated_retry_is_not_answered_that_its_key_is_unused(make_server: MakeServer) -> None:
    """The key was not looked up: with a new key, the client would be charged again."""
    server = make_server(echo)
    assert server.post().status == 200
    answer = server.post(body=BODY[:7], CONTENT_LENGTH=str(len(BODY)))
    assert b"with the same key" in answer.body
    assert b"unused" not in answer.body


def test_a_body_that_cannot_be_read_takes_no_key(make_server: MakeServer) -> None:
    """A connection that broke, or chunks that are none: 400, before anything was reserved, and no error of ours."""

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise ConnectionResetError("the client has gone")

    server = make_server(echo)
    chunked: dict[str, Any] = {"CONTENT_LENGTH": None, "wsgi__input_terminated": True}
    for how in ({}, chunked):
        answer = server.post(wsgi__input=Broken(), **how)
        assert (answer.status, b"body-incomplete" in answer.body) == (400, True)
    assert (server.runs, server.state) == (0, None)


def test_no_more_is_read_than_the_length_says(make_server: MakeServer) -> None:
    """What follows the body on a kept-alive connection is the next request's."""
    server = make_server(echo)
    stream = io.BytesIO(BODY + b"POST /next HTTP/1.1")
    assert server.post(wsgi__input=stream, CONTENT_LENGTH=str(len(BODY))).body == b"15:" + BODY
    assert stream.tell() == len(BODY)


# ---------------------------------------------------------------- paths and headers


def test_the_path_is_the_whole_path_in_utf_8(make_server: MakeServer) -> None:
    """A mounted app's keys are told apart by the path that the client used, not by the part behind the mount."""
    server = make_server(paid)
    mounted = {"SCRIPT_NAME": "/eu", "PATH_INFO": "/payments/ü".encode().decode("latin-1")}
    server.post(**mounted)
    record = server.record()
    assert record is not None
    assert record.operation == "POST /eu/payments/ü"
    assert server.post(**mounted | {"SCRIPT_NAME": "/us"}).status == 422


def test_a_listed_route_is_found_behind_a_mount(make_server: MakeServer) -> None:
    """As under ASGI: where it is mounted is not known where its routes are listed. The whole path will do as well."""
    for listed in ("PUT /stock", "PUT /api/stock"):
        server = make_server(paid, routes={listed: Policy()})
        mounted = {"SCRIPT_NAME": "/api", "PATH_INFO": "/stock", "REQUEST_METHOD": "PUT"}
        server.post(**mounted)
        server.post(**mounted)
        assert server.runs == 1


def test_an_exemption_is_not_looked_for_behind_a_mount(make_server: MakeServer) -> None:
    """It says which path, and another app's may be the same behind another mount."""
    server = make_server(paid, routes={"POST /open": None})
    for _ in range(2):
        server.post(SCRIPT_NAME="/api", PATH_INFO="/open")
    assert server.runs == 1


def test_two_paths_that_are_no_utf_8_are_two(make_server: MakeServer) -> None:
    server = make_server(paid)
    assert server.post(PATH_INFO="/files/\xff").status == 201
    assert server.post(PATH_INFO="/files/\xfe").status == 422


def test_a_scope_function_can_print_any_path(make_server: MakeServer) -> None:
    """What is no UTF-8 is replaced for it: a client's path must not break the app's own code."""
    server = make_server(paid, scope=lambda request: request.path.encode().hex())
    assert server.post(PATH_INFO="/caf\xe9").status == 201


def test_a_method_in_small_letters_is_protected(make_server: MakeServer) -> None:
    """Werkzeug takes ``post`` for POST, and so must we."""
    server = make_server(paid)
    for method in ("POST", "post", "Post"):
        server.post(REQUEST_METHOD=method)
    assert server.runs == 1


def test_of_two_protections_the_outer_one_counts(make_server: MakeServer) -> None:
    """The inner one would find the outer one's reservation, and answer that it is in flight."""
    server = make_server(paid)
    server.app = IdempotencyMiddleware(server.app, once=server.once)
    assert [server.post().status for _ in range(2)] == [201, 201]
    assert server.runs == 1


def test_the_scope_function_sees_method_path_headers_and_environ(make_server: MakeServer) -> None:
    """Whose key it is may depend on all of the request but its body."""
    seen = []

    def tenant(request: Any) -> str:
        seen.append(request)
        return "ann"

    server = make_server(paid, scope=tenant)
    server.post(HTTP_X_API_KEY="secret")
    request = seen[0]
    assert (request.method, request.path) == ("POST", "/payments")
    assert request.headers["x-api-key"] == "secret"
    assert request.headers["content-type"] == "application/json"
    assert request.raw["SERVER_NAME"] == "api.test"
    assert server.store.read([("ann", "k-1")])[0] is not None


@pytest.mark.parametrize("tenant", ["", None, 7])
def test_a_tenant_that_cannot_be_one_never_runs(make_server: MakeServer, tenant: Any) -> None:
    """Else all callers whom the function could not name would share their keys, and their answers."""
    server = make_server(paid, scope=lambda request: tenant)
    with pytest.raises(ConfigurationError, match="printable characters that name the tenant"):
        server.post()
    assert server.runs == 0
    assert server.store._rows == {}


def test_an_async_scope_function_is_refused_with_a_clear_error(make_server: MakeServer) -> None:
    """A WSGI app has no loop to await in: the developer is told what to change, and nothing is looked up or run."""

    async def tenant(request: Any) -> str:
        return "ann"

    server = make_server(paid, scope=tenant)
    with pytest.raises(ConfigurationError, match=r"async.*WSGI.*plain function"):
        server.post()
    assert server.runs == 0
    assert server.store._rows == {}
