"""The key jar: what is on disk and when, and what is never there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oncekey.client import Answer, Budget, Client, IntentExpired, KeyJar
from oncekey.client.calls import Request
from oncekey.client.spelling import KeyForm
from oncekey.errors import ConfigurationError
from tests.client.jars import DAY, OK, Clock, client_of
from tests.client.server import Reply, Server


def test_row_is_on_disk_before_the_first_byte_is_sent(server: Server, jar: KeyJar, url: str) -> None:
    """Another connection reads it when the request arrives."""
    seen = []

    def answer(asked: Any) -> Reply:
        beside = KeyJar(url)
        seen.append((beside.read("order-1"), asked.key))
        beside.close()
        return OK

    server.answer = answer  # type: ignore[method-assign]
    with client_of(server, jar) as client, client.intent("order-1") as intent:
        intent.post("/pay", json={"amount": 5})
    ((row, key),) = seen
    assert row is not None
    assert (row.key, row.request.body, row.finished_at) == (key, b'{"amount":5}', None)
    assert row.first_sent_at is not None


def test_answer_is_kept_with_its_headers(server: Server, jar: KeyJar) -> None:
    cookies = (("Set-Cookie", "session=secret"), ("Location", "/pay/1"), ("Content-Type", "application/json"))
    server.replies = [Reply(201, b'{"id": 1}', cookies)]
    with client_of(server, jar) as client:
        for _ in range(2):
            with client.intent("order-1") as intent:
                response = intent.post("/pay", json={})
            assert (response.status_code, response.json(), response.headers["location"]) == (201, {"id": 1}, "/pay/1")
    assert len(server.asked) == 1
    row = jar.read("order-1")
    assert row is not None
    assert isinstance(row.answer, Answer)
    assert row.answer.header("set-cookie") is None


def test_credentials_are_never_on_disk(server: Server, file: Path) -> None:
    secrets = {"Authorization": "Bearer s3cret-1", "Cookie": "sid=s3cret-2", "X-API-Key": "s3cret-3"}
    server.replies = [Reply(503)]
    with Client(server.url, jar=f"sqlite:///{file}", headers=secrets, budget=Budget(tries=1)) as client:
        with client.intent("order-1") as intent:
            intent.post("/pay", json={"amount": 5}, headers={"X-Trace": "s3cret-4"})
        assert server.asked[0].headers["authorization"] == "Bearer s3cret-1"
        data = b"".join(path.read_bytes() for path in file.parent.glob("intents.db*"))
    assert b"order-1" in data
    assert b"s3cret" not in data
    with pytest.raises(ConfigurationError, match="authorization"):
        KeyJar(f"sqlite:///{file}", keep_headers=["Authorization"])


def test_new_jar_is_readable_by_its_owner_only(file: Path) -> None:
    KeyJar(f"sqlite:///{file}").close()
    assert file.stat().st_mode & 0o777 == 0o600


def test_bytes_of_the_first_request_are_sent_again_though_json_is_in_another_order(server: Server, jar: KeyJar) -> None:
    server.replies = [Reply(503), OK]
    with client_of(server, jar) as client:
        for body in (b'{"a": 1, "b": 2}', b'{"b":2,"a":1}'):
            with client.intent("order-1") as intent:
                intent.post("/pay", content=body, headers={"Content-Type": "application/json"})
    assert [asked.body for asked in server.asked] == [b'{"a": 1, "b": 2}'] * 2


def test_two_processes_that_open_an_intent_at_once_send_one_key(server: Server, jar: KeyJar) -> None:
    request = Request("POST", f"{server.url}/pay", (), b"{}")
    first, second = jar.find("order-1"), jar.find("order-1")
    assert first.key != second.key
    for intent in (first, second):
        intent.begin(request, KeyForm("Idempotency-Key", "bare"))
    assert first.key == second.key == jar.find("order-1").key


def test_answer_too_large_to_keep_is_asked_for_again(server: Server, url: str, clock: Clock) -> None:
    server.replies = [Reply(200, b"x" * 100)]
    jar = KeyJar(url, longest_answer=10, clock=clock)
    with client_of(server, jar) as client:
        for _ in range(2):
            with client.intent("order-1") as intent:
                assert intent.post("/pay").content == b"x" * 100
        assert client.resume() == []
        clock.now += 2 * DAY
        with client.intent("order-1") as intent, pytest.raises(IntentExpired):
            intent.post("/pay")
    jar.close()
    assert len(server.asked) == 2
    assert len(set(server.keys)) == 1


def test_events_that_answer_an_intent_are_kept_whole(server: Server, jar: KeyJar) -> None:
    server.replies = [Reply(200, b"data: 1\n\n", (("Content-Type", "text/event-stream"),))]
    with client_of(server, jar) as client:
        for _ in range(2):
            with client.intent("order-1") as intent:
                assert intent.post("/pay", json={}).content == b"data: 1\n\n"
    assert len(server.asked) == 1


def test_old_answers_can_be_forgotten(server: Server, jar: KeyJar, clock: Clock) -> None:
    with client_of(server, jar) as client:
        for name in ("a", "b"):
            with client.intent(name) as intent:
                intent.post("/pay", json={})
            clock.now += 20 * DAY
        jar.prepare("open", "POST", f"{server.url}/pay")
        assert jar.count_finished(older_than=30 * DAY) == 1
        assert jar.forget_finished(older_than=30 * DAY) == 1
    assert jar.finished() == {"b": 201}
    assert len(jar.open_intents()) == 1


def test_printed_intents_and_outcomes_show_no_key_and_no_body(server: Server, jar: KeyJar) -> None:
    key = jar.prepare("order-1", "POST", f"{server.url}/pay", json={"card": "4242"})
    with client_of(server, jar) as client:
        printed = repr((jar.open_intents(), client.resume(), jar.read("order-1")))
    assert "order-1" in printed
    assert key not in printed
    assert "4242" not in printed


def test_accounts_do_not_see_each_others_intents(server: Server, url: str) -> None:
    ada, eve = KeyJar(url, account="ada"), KeyJar(url, account="eve")
    ada.prepare("order-1", "POST", f"{server.url}/pay", json={"for": "ada"})
    with client_of(server, eve) as client:
        assert client.resume() == []
        with client.intent("order-1") as intent:
            intent.post("/pay", json={"for": "eve"})
    assert len(ada.open_intents()) == 1
    ada.close()
    eve.close()
