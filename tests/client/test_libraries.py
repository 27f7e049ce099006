"""The rules, over a real socket, by every library."""

from __future__ import annotations

import gzip
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from oncekey.client import Budget, KeyJar, OutcomeUnsettled, RedirectRefused, Rules
from oncekey.errors import IntentChanged
from oncekey.testing.servers import free_port
from tests.client.libraries import LIBRARIES, NETWORK_ERRORS, Got, NoWait
from tests.client.server import Asked, Reply, Server, problem, serving

UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch
Serve = Callable[..., Server]


class Sender:
    """Sends by one library."""

    def __init__(self, library: str) -> None:
        self._send = LIBRARIES[library]
        self.wait = NoWait()
        self.rules = Rules(budget=Budget(tries=4, seconds=50.0))
        self.jar: KeyJar | None = None

    def __call__(self, method: str, url: str, **options: Any) -> Got:
        return self._send(self.rules, self.wait, self.jar, method, url, **options)


IN_DEPTH = ("httpx-async", "requests", "aiohttp")


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.frameworks if n in IN_DEPTH else ()) for n in LIBRARIES])
def send(request: pytest.FixtureRequest) -> Sender:
    return Sender(request.param)


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as stack:
        yield lambda *replies: stack.enter_context(serving(Server(*replies)))


OK = Reply(201, b'{"id": 1}', (("Content-Type", "application/json"),))


TROUBLES = [
    *(Reply(cut="before"), Reply(201, b"x" * 1000, cut="inside")),
    *(Reply(status) for status in (408, 425, 429, 500, 502, 503, 504)),
    Reply(409, headers=(("Retry-After", "1"),)),
    problem(409, "in-flight", Retry_After="1"),
    Reply(202, b'{"state": "pending"}', (("Retry-After", "1"),)),
]


def test_same_key_is_sent_again_until_the_answer(send: Sender, serve: Serve) -> None:
    server = serve(OK)
    for trouble in TROUBLES:
        server.replies, server.asked, send.wait.waits = [trouble, trouble, OK], [], []
        got = send("POST", f"{server.url}/pay", json={"amount": 5})
        assert (got.status, got.json()) == (201, {"id": 1})
        assert len(server.asked) == 3, trouble
        assert len(set(server.keys)) == 1
        assert UUID(server.keys[0] or "")
        assert {asked.body for asked in server.asked} == {server.asked[0].body}
        assert len(send.wait.waits) == 2


def test_same_key_is_sent_again_after_a_time_out(send: Sender, serve: Serve) -> None:
    """The server does not answer the first request, and the library gives up on it."""
    server, over = serve(OK), threading.Event()
    answer = server.answer

    def silent_at_first(asked: Asked) -> Reply:
        reply = answer(asked)
        if len(server.asked) == 1:
            over.wait(20)
        return reply

    server.answer = silent_at_first  # type: ignore[method-assign]
    try:
        got = send("POST", f"{server.url}/pay", json={"amount": 5}, timeout=1.0)
    finally:
        over.set()
    assert (got.status, got.json()) == (201, {"id": 1})
    assert len(server.asked) > 1
    assert len(set(server.keys)) == 1


def test_other_statuses_are_handed_back_after_one_try(send: Sender, serve: Serve) -> None:
    statuses = [400, 401, 403, 404, 409, 410, 413, 422, 451, 501, 505, 507, 520]
    server = serve(*(Reply(status, b"no") for status in statuses))
    for number, status in enumerate(statuses, start=1):
        got = send("POST", f"{server.url}/pay", content=b"{}")
        assert (got.status, got.body, len(server.asked)) == (status, b"no", number)


def test_two_requests_have_two_keys_and_get_has_none(send: Sender, serve: Serve) -> None:
    server = serve(OK)
    for method in ("POST", "POST", "PATCH", "GET", "PUT", "DELETE"):
        send(method, f"{server.url}/pay")
    assert len(set(server.keys[:3])) == 3
    assert server.keys[3:] == [None, None, None]


def test_key_of_the_caller_is_sent_as_it_is(send: Sender, serve: Serve) -> None:
    server = serve(Reply(503), OK)
    send("POST", f"{server.url}/pay", headers={"idempotency-key": '"my key"'})
    assert server.keys == ['"my key"', '"my key"']


def test_request_that_may_not_be_repeated_is_not(send: Sender, serve: Serve) -> None:
    send.rules = Rules(methods=())
    server = serve(Reply(cut="before"), OK)
    with pytest.raises(NETWORK_ERRORS):
        send("POST", f"{server.url}/pay", content=b"{}")
    server.replies[:0] = [Reply(503)]
    assert send("POST", f"{server.url}/pay", content=b"{}").status == 503
    assert server.keys == [None, None]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_idempotent_method_is_repeated_without_a_key(send: Sender, serve: Serve, method: str) -> None:
    server = serve(Reply(503), Reply(cut="before"), OK)
    assert send(method, f"{server.url}/pay").status == 201
    assert server.keys == [None] * 3


def test_budget_ends_with_the_error_of_the_library(send: Sender) -> None:
    with pytest.raises(NETWORK_ERRORS):
        send("POST", f"http://127.0.0.1:{free_port()}/pay", content=b"{}")
    assert len(send.wait.waits) == 3


def test_budget_ends_with_the_last_answer(send: Sender, serve: Serve) -> None:
    server = serve(Reply(503, b"later"))
    got = send("POST", f"{server.url}/pay", content=b"{}")
    assert (got.status, got.body, len(server.asked)) == (503, b"later", 4)


def test_retry_after_is_waited_for(send: Sender, serve: Serve) -> None:
    server = serve(Reply(429, headers=(("Retry-After", "7"),)), OK)
    send("POST", f"{server.url}/pay", content=b"{}")
    (wait,) = send.wait.waits
    assert 7.0 <= wait <= 7.5


def test_one_try_does_not_outlast_the_budget(send: Sender, serve: Serve) -> None:
    """Though the time-out of the library is longer."""
    send.rules = Rules(budget=Budget(tries=3, seconds=0.3))
    server, over = serve(OK), threading.Event()
    server.answer = lambda asked: Reply(200 if over.wait(20) else 500)  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(NETWORK_ERRORS):
        send("POST", f"{server.url}/pay", content=b"{}", timeout=15.0)
    over.set()
    assert time.monotonic() - began < 10


def test_unknown_outcome_is_an_error_of_its_own_with_the_key(send: Sender, serve: Serve) -> None:
    server = serve(problem(409, "outcome-unknown", Retry_After="60"))
    with pytest.raises(OutcomeUnsettled, match="550e~0f1e2d3c") as raised:
        send("POST", f"{server.url}/pay", content=b"{}")
    assert (raised.value.key, raised.value.retry_after) == (server.keys[0], 60.0)
    assert raised.value.reference == "550e~0f1e2d3c"
    assert len(server.asked) == 1


def test_compressed_answers_are_understood(send: Sender, serve: Serve) -> None:
    unknown = problem(409, "outcome-unknown")
    squeezed = Reply(409, gzip.compress(unknown.body), (*unknown.headers, ("Content-Encoding", "gzip")))
    server = serve(Reply(201, gzip.compress(b'{"id": 1}'), (("Content-Encoding", "gzip"),)), squeezed)
    assert send("POST", f"{server.url}/pay", content=b"{}").json() == {"id": 1}
    with pytest.raises(OutcomeUnsettled):
        send("POST", f"{server.url}/pay", content=b"{}")


@pytest.mark.parametrize("status", [307, 308])
def test_redirect_to_the_same_origin_keeps_key_method_and_body(send: Sender, serve: Serve, status: int) -> None:
    server = serve(Reply(status, headers=(("Location", "/v2/pay"),)), Reply(503), OK)
    assert send("POST", f"{server.url}/pay", json={"amount": 5}).status == 201
    assert [(asked.method, asked.path) for asked in server.asked] == [
        ("POST", "/pay"),
        ("POST", "/v2/pay"),
        ("POST", "/v2/pay"),
    ]
    assert len(set(server.keys)) == 1
    assert len({asked.body for asked in server.asked}) == 1


@pytest.mark.parametrize("follow", [False, True])
def test_redirect_to_another_origin_is_refused_and_nothing_goes_there(send: Sender, serve: Serve, follow: bool) -> None:
    other = serve(OK)
    server = serve(Reply(307, headers=(("Location", f"{other.url}/pay"),)))
    with pytest.raises(RedirectRefused) as raised:
        send("POST", f"{server.url}/pay", content=b"{}", follow=follow)
    assert (raised.value.key, raised.value.location) == (server.keys[0], f"{other.url}/pay")
    assert other.asked == []


@pytest.mark.parametrize("mine", [False, True])
@pytest.mark.parametrize("status", [301, 302, 303])
def test_redirect_to_a_get_is_followed_without_the_key(send: Sender, serve: Serve, status: int, mine: bool) -> None:
    other = serve(OK)
    server = serve(Reply(status, headers=(("Location", f"{other.url}/paid"),)))
    headers = {"Idempotency-Key": "mine"} if mine else {}
    got = send("POST", f"{server.url}/pay", content=b"{}", follow=True, headers=headers)
    if got.status == status:  # the wrapper of aiohttp hands it back
        assert other.asked == []
    else:
        assert [(asked.method, asked.key) for asked in other.asked] == [("GET", None)]


def test_endless_redirects_end(send: Sender, serve: Serve) -> None:
    server = serve(Reply(307, headers=(("Location", "/pay"),)))
    assert send("POST", f"{server.url}/pay", content=b"{}").status == 307
    assert len(server.asked) == 6


def test_server_that_wants_quotes_gets_them_from_then_on(send: Sender, serve: Serve) -> None:
    server = serve(problem(400, "key-malformed"), OK)
    assert send("POST", f"{server.url}/pay", content=b"{}").status == 201
    assert send("POST", f"{server.url}/pay", content=b"{}").status == 201
    bare, quoted, next_one = server.keys
    assert quoted == f'"{bare}"'
    assert (next_one or "").startswith('"')


def test_request_that_was_cut_off_on_its_way_is_sent_again(send: Sender, serve: Serve) -> None:
    """oncekey says so by its type. Any other 400 is an answer."""
    server = serve(problem(400, "body-incomplete"), OK)
    assert send("POST", f"{server.url}/pay", content=b"{}").status == 201
    assert len(set(server.keys)) == 1
    server.replies = [Reply(400)]
    assert send("POST", f"{server.url}/pay", content=b"{}").status == 400
    assert len(server.asked) == 3


def test_key_that_is_refused_in_both_spellings_is_handed_back(send: Sender, serve: Serve) -> None:
    server = serve(problem(400, "key-malformed"))
    assert send("POST", f"{server.url}/pay", content=b"{}").status == 400
    assert len(server.asked) == 2


def test_header_of_another_name_is_used(send: Sender, serve: Serve) -> None:
    send.rules = Rules(header="PayPal-Request-Id", spelling="bare")
    server = serve(OK)
    send("POST", f"{server.url}/pay", content=b"{}")
    assert server.asked[0].key is None
    assert UUID(server.asked[0].headers["paypal-request-id"])


# -- with a key jar --------------------------------------------------------------------------------------------------


@pytest.fixture
def jar(send: Sender, tmp_path: Path) -> Iterator[KeyJar]:
    send.jar = KeyJar(f"sqlite:///{tmp_path}/intents.db")
    yield send.jar
    send.jar.close()


def test_answer_of_an_intent_is_asked_for_once(send: Sender, serve: Serve, jar: KeyJar) -> None:
    server = serve(Reply(201, b'{"id": 1}', (("Content-Type", "application/json"), ("Location", "/pay/1"))))
    first, second = (send("POST", f"{server.url}/pay", json={"a": 1}, intent="order-1") for _ in range(2))
    assert (first.status, first.json(), first.headers["location"]) == (201, {"id": 1}, "/pay/1")
    assert (second.status, second.json(), second.headers["location"]) == (201, {"id": 1}, "/pay/1")
    assert len(server.asked) == 1


def test_intent_without_an_answer_is_asked_again_with_its_key(send: Sender, serve: Serve, jar: KeyJar) -> None:
    server = serve(Reply(503))
    assert send("POST", f"{server.url}/pay", json={"a": 1}, intent="order-1").status == 503
    server.replies = [OK]
    assert send("POST", f"{server.url}/pay", json={"a": 1}, intent="order-1").status == 201
    assert len(server.asked) == 5
    assert len(set(server.keys)) == 1
    row = jar.read("order-1")
    assert row is not None
    assert (row.key, row.status) == (server.keys[0], 201)


def test_changed_body_under_an_intent_is_not_sent(send: Sender, serve: Serve, jar: KeyJar) -> None:
    server = serve(Reply(503))
    send("POST", f"{server.url}/pay", json={"a": 1}, intent="order-1")
    before = len(server.asked)
    for options in ({"json": {"a": 2}}, {"content": b"{}"}):
        with pytest.raises(IntentChanged, match="order-1"):
            send("POST", f"{server.url}/pay", **options, intent="order-1")
    with pytest.raises(IntentChanged, match="/refund"):
        send("POST", f"{server.url}/refund", json={"a": 1}, intent="order-1")
    assert len(server.asked) == before


def test_unknown_outcome_leaves_the_intent_open(send: Sender, serve: Serve, jar: KeyJar) -> None:
    server = serve(problem(409, "outcome-unknown"), OK)
    with pytest.raises(OutcomeUnsettled):
        send("POST", f"{server.url}/pay", json={"a": 1}, intent="order-1")
    assert [row.name for row in jar.open_intents()] == ["order-1"]
    assert send("POST", f"{server.url}/pay", json={"a": 1}, intent="order-1").status == 201
    assert len(set(server.keys)) == 1


def test_intent_whose_tries_are_used_up_says_how_to_go_on(send: Sender, serve: Serve, jar: KeyJar) -> None:
    server = serve(Reply(cut="before"))
    with pytest.raises(NETWORK_ERRORS) as raised:
        send("POST", f"{server.url}/pay", json={"a": 1}, intent="order-1")
    assert len(server.asked) == 4
    (note,) = raised.value.__notes__
    assert note.startswith("intent 'order-1' is open")
    assert "`oncekey client resume`" in note
