"""What only a real server has: bytes that a client sends, connections that it keeps or cuts."""

from __future__ import annotations

import json
import socket
from types import TracebackType
from typing import Any, Self

import h11
import httpx
import pytest

from oncekey import Policy
from oncekey.testing.http.base import MakeStack, SuiteBase
from oncekey.testing.http.checks import problem, replays, state_of
from oncekey.testing.http.served import without_headers_of_server
from oncekey.testing.http.stack import PAYMENT, SECONDS, Stack, until
from oncekey.testing.servers.processes import HOST

BODY = json.dumps(PAYMENT, separators=(",", ":")).encode()


def head(*lines: str, line: str = "POST /payments HTTP/1.1") -> bytes:
    """The bytes before a body. ``lines`` are headers beside Host and the media type."""
    return "\r\n".join((line, "Host: api.test", "Content-Type: application/json", *lines, "", "")).encode("latin-1")


def whole(*lines: str, body: bytes = BODY, **more: str) -> bytes:
    """A request with the length of its body."""
    return head(f"Content-Length: {len(body)}", *lines, **more) + body


def chunked(*lines: str, pieces: tuple[bytes, ...]) -> bytes:
    """A request without a length, in pieces."""
    parts = (b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (*pieces, b""))
    return head("Transfer-Encoding: chunked", *lines) + b"".join(parts)


class Wire:
    """One connection to the server. A test says bytes, and hears responses as h11 reads them."""

    def __init__(self, stack: Any) -> None:
        self._socket = socket.create_connection((HOST, stack.server.port), SECONDS)
        self._rest = b""
        self.interim: list[int] = []
        """The statuses of interim responses, such as 100."""

    def say(self, *pieces: bytes) -> None:
        self._socket.sendall(b"".join(pieces))

    def hear(self, method: str = "POST") -> httpx.Response:
        """The next response."""
        reader = h11.Connection(h11.CLIENT)
        reader.send(h11.Request(method=method, target="/", headers=[("host", "api.test")]))
        reader.send(h11.EndOfMessage())
        start: h11.Response | None = None
        content = b""
        if self._rest:
            reader.receive_data(self._rest)
        while True:
            match reader.next_event():
                case h11.NEED_DATA:
                    reader.receive_data(self._socket.recv(65536))
                case h11.InformationalResponse(status_code=status):
                    self.interim.append(status)
                case h11.Response() as start:
                    pass
                case h11.Data(data=piece):
                    content += piece
                case h11.EndOfMessage():
                    break
                case event:
                    raise AssertionError(f"the server closed the connection: {event}")
        self._rest = reader.trailing_data[0]
        assert start is not None
        headers = [(name, value) for name, value in start.headers.raw_items() if name.lower() != b"transfer-encoding"]
        return without_headers_of_server(httpx.Response(start.status_code, headers=headers, content=content))

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class WireSuite(SuiteBase):
    """What only a real server has; for apps under one."""

    # ---------------------------------------------------------------- bodies

    def test_chunked_body_is_the_same_request(self, stack: Stack) -> None:
        """A body in pieces, without a length, is read whole, and has the fingerprint of the same body with one."""
        with Wire(stack) as wire:
            wire.say(chunked("Idempotency-Key: k-1", pieces=(BODY[:5], BODY[5:6], BODY[6:])))
            first = wire.hear()
            wire.say(whole("Idempotency-Key: k-1"))
            second = wire.hear()
        assert first.status_code == 201
        assert replays(first, second)
        assert stack.runs == 1

    def test_other_chunked_body_is_422(self, stack: Stack) -> None:
        """A body without a length is no empty body: another one under the same key is another request."""
        with Wire(stack) as wire:
            wire.say(chunked("Idempotency-Key: k-1", pieces=(BODY,)))
            assert wire.hear().status_code == 201
            wire.say(chunked("Idempotency-Key: k-1", pieces=(b'{"amount":', b"1}")))
            assert problem(wire.hear()) == "mismatch"
        assert stack.runs == 1

    @pytest.mark.parametrize("kind", ["length", "chunked"])
    def test_rest_of_a_refused_body_is_no_request(self, make_stack: MakeStack, kind: str) -> None:
        """A body over the cap is refused before it was read. Its bytes are never taken for a request."""
        stack = make_stack(policy=Policy(max_request_bytes=100))
        body = b"x" * 200 + whole("Idempotency-Key: k-smuggled", body=b"{}")
        with Wire(stack) as wire:
            if kind == "length":
                wire.say(whole("Idempotency-Key: k-1", body=body))
            else:
                wire.say(chunked("Idempotency-Key: k-1", pieces=(body[:200], body[200:])))
            assert problem(wire.hear()) == "body-too-large"
        assert stack.post("k-2", content=b"{}").status_code == 201  # every byte before it was handled
        assert [row.key for row in stack.rows()] == ["k-2"]
        assert stack.runs == 1

    def test_client_that_expects_100_gets_it_and_its_response(self, stack: Stack) -> None:
        """A client that waits before it sends its body is not left waiting."""
        with Wire(stack) as wire:
            for _ in range(2):
                wire.say(head("Idempotency-Key: k-1", f"Content-Length: {len(BODY)}", "Expect: 100-continue"))
                wire.say(BODY)
            first, second = wire.hear(), wire.hear()
        assert 100 in wire.interim
        assert replays(first, second)
        assert stack.runs == 1

    # ---------------------------------------------------------------- headers

    @pytest.mark.parametrize("line", ["IDEMPOTENCY-KEY:k-1", "idempotency-key:   k-1 \t "], ids=["case", "space"])
    def test_key_is_the_same_in_every_spelling_of_its_line(self, stack: Stack, line: str) -> None:
        first = stack.post()
        with Wire(stack) as wire:
            wire.say(whole(line))
            assert replays(first, wire.hear())
        assert stack.runs == 1

    @pytest.mark.parametrize(
        "lines",
        [
            ("Idempotency-Key:   ",),
            ("Idempotency-Key: k\xff",),
            ("Idempotency-Key: k-1", " k-2"),
        ],
        ids=["blank", "not-ascii", "folded"],
    )
    def test_line_that_names_no_key_is_400(self, stack: Stack, lines: tuple[str, ...]) -> None:
        """The server or oncekey refuses it, and nothing runs."""
        with Wire(stack) as wire:
            wire.say(whole(*lines))
            assert wire.hear().status_code == 400
        assert (stack.runs, stack.rows()) == (0, [])

    def test_head_has_no_body_and_leaves_no_key(self, stack: Stack) -> None:
        with Wire(stack) as wire:
            wire.say(head("Idempotency-Key: k-1", line="HEAD /status HTTP/1.1"))
            answer = wire.hear("HEAD")
            assert answer.status_code in (200, 405)  # some frameworks answer HEAD wherever they answer GET
            wire.say(head(line="GET /status HTTP/1.1"))
            assert wire.hear("GET").content == b'{"operation":null}'
        assert not any(name.startswith("idempotency") for name in answer.headers)
        assert stack.rows() == []

    # ---------------------------------------------------------------- connections

    @pytest.mark.parametrize("m", ["ok", "stream", "204", "large", "refused", "not-executed", "unknown"])
    def test_connection_is_kept_after_every_ending(self, stack: Stack, m: str) -> None:
        """Each response ends where its length or last chunk says, so the next one is read whole."""
        with Wire(stack) as wire:
            for _ in range(2):
                wire.say(whole("Idempotency-Key: k-1", line=f"POST /payments?m={m} HTTP/1.1"))
                wire.hear()
            wire.say(head(line="GET /status HTTP/1.1"))
            assert wire.hear("GET").content == b'{"operation":null}'

    def test_pipelined_duplicate_is_a_replay(self, stack: Stack) -> None:
        """A client that sends both requests before it reads gets one effect."""
        with Wire(stack) as wire:
            wire.say(whole("Idempotency-Key: k-1"), whole("Idempotency-Key: k-1"))
            first, second = wire.hear(), wire.hear()
        assert replays(first, second)
        assert stack.runs == 1

    def test_http_1_0_client_gets_the_response_and_its_replay(self, stack: Stack) -> None:
        answers = []
        for _ in range(2):
            with Wire(stack) as wire:
                wire.say(whole("Idempotency-Key: k-1", line="POST /payments?m=stream HTTP/1.0"))
                answers.append(wire.hear())
        assert answers[0].content == b'{"id":"pay_1"}'
        assert replays(*answers)
        assert stack.runs == 1

    def test_client_that_leaves_while_the_handler_runs_finds_its_response(self, stack: Stack) -> None:
        """The handler runs to its end and its response is stored: the retry gets it."""
        with Wire(stack) as wire:
            wire.say(whole("Idempotency-Key: k-1", line="POST /payments?m=slow HTTP/1.1"))
            assert stack.payments.entered.wait(SECONDS)
        stack.payments.go.set()
        until(lambda: state_of(stack) == "completed", "the response is stored")
        again = stack.post(m="slow")
        assert (again.status_code, again.headers["idempotency-replayed"]) == (201, "true")
        assert stack.runs == 1

    def test_client_that_leaves_within_its_body_has_used_no_key(self, stack: Stack) -> None:
        """Half a body is no request: no handler runs, and the key is free for the whole one."""
        with Wire(stack) as wire:
            wire.say(whole("Idempotency-Key: k-1")[:-5])
        assert stack.post("k-2").status_code == 201
        assert stack.post().status_code == 201
        assert sorted(run.key for run in stack.payments.runs) == ["k-1", "k-2"]
        assert state_of(stack) == "completed"
