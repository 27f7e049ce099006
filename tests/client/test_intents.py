"""Intents: what closes one, what is left open, ``resume``, and misuse."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from oncekey.client import AsyncClient, Budget, Client, Ended, IntentChanged, KeyJar
from oncekey.errors import ConfigurationError
from oncekey.testing.servers import free_port
from tests.client.jars import OK, Clock, client_of
from tests.client.server import Reply, Server, problem


def test_final_refusal_closes_the_intent_and_a_corrected_body_needs_another(server: Server, jar: KeyJar) -> None:
    server.replies = [Reply(422, b"no")]
    with client_of(server, jar) as client:
        with client.intent("order-1") as intent:
            assert intent.post("/pay", json={"amount": -5}).status_code == 422
        with client.intent("order-1") as intent, pytest.raises(IntentChanged, match="answered 422"):
            intent.post("/pay", json={"amount": 5})
        assert client.resume() == []
        assert jar.forget("order-1")
        with client.intent("order-1") as intent:
            intent.post("/pay", json={"amount": 5})
    assert len(set(server.keys)) == 2


@pytest.mark.parametrize("reply", [Reply(401), Reply(403), Reply(503), Reply(520), problem(422, "mismatch")])
def test_status_that_does_not_prove_the_outcome_leaves_the_intent_open(
    server: Server, jar: KeyJar, reply: Reply
) -> None:
    server.replies = [reply, OK]
    with client_of(server, jar) as client:
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
        assert [row.name for row in jar.open_intents()] == ["order-1"]
        (outcome,) = client.resume()
    assert (outcome.ended, outcome.status) == (Ended.ANSWERED, 201)
    assert len(set(server.keys)) == 1


def test_resume_and_rerun_send_the_timestamp_of_the_first_try(server: Server, jar: KeyJar) -> None:
    """It is the time of the request, not of the try: ``Policy(max_age=…)`` refuses a request without it."""
    server.replies = [Reply(503), Reply(503), OK]
    with client_of(server, jar) as client:
        for made_at in ("2026-11-17T19:30:00Z", "2026-11-17T19:31:00Z"):
            with client.intent("order-1") as intent:
                intent.post("/pay", json={}, headers={"Idempotency-Timestamp": made_at})
        (outcome,) = client.resume()
    assert outcome.ended is Ended.ANSWERED
    assert [asked.headers.get("idempotency-timestamp") for asked in server.asked] == ["2026-11-17T19:30:00Z"] * 3


def test_intent_prepared_without_a_timestamp_is_sent_with_that_of_the_sender(server: Server, jar: KeyJar) -> None:
    for name in ("order-1", "order-2"):
        jar.prepare(name, "POST", f"{server.url}/pay", json={})
    made_at = {"Idempotency-Timestamp": "2026-11-17T19:30:00Z"}
    with client_of(server, jar) as client, client.intent("order-1") as intent:
        intent.post("/pay", json={}, headers=made_at)
    with client_of(server, jar, headers=made_at) as client:
        client.resume("order-2")
    assert [asked.headers.get("idempotency-timestamp") for asked in server.asked] == ["2026-11-17T19:30:00Z"] * 2


def test_server_that_asked_to_come_back_later_is_left_in_peace_by_resume(
    server: Server, jar: KeyJar, clock: Clock
) -> None:
    server.replies = [Reply(429, headers=(("Retry-After", "3600"),)), OK]
    with client_of(server, jar) as client:
        client.rules.wall_clock = clock
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
        assert [each.ended for each in client.resume()] == [Ended.NOT_YET]
        clock.now += 3601
        assert [each.ended for each in client.resume()] == [Ended.ANSWERED]


def test_intent_needs_a_jar_a_name_and_no_intent_around_it(server: Server, jar: KeyJar) -> None:
    with Client(server.url) as bare, pytest.raises(ConfigurationError, match="needs a key jar"), bare.intent("x"):
        pass
    with client_of(server, jar) as client:
        with pytest.raises(ConfigurationError, match="name of your own"), client.intent(" "):
            pass
        with pytest.raises(ConfigurationError, match="inside an intent"), client.intent("a"), client.intent("b"):
            pass
        with client.intent("c") as intent:  # the errors above have left no intent behind
            intent.post("/pay")
        client.post("/pay")
    assert len(set(server.keys)) == 2


@pytest.mark.parametrize("name", [42, b"order-42", None, "", "  "])
async def test_name_that_is_no_text_is_refused_and_nothing_is_sent(server: Server, jar: KeyJar, name: Any) -> None:
    """42 is not "42": another process may look for the text."""
    words = "a name of your own that you find again, such as 'order-42'"
    with client_of(server, jar) as client, pytest.raises(ConfigurationError, match=words), client.intent(name):
        pass
    async with AsyncClient(server.url, jar=jar, transport=httpx.AsyncHTTPTransport(verify=False)) as other:
        with pytest.raises(ConfigurationError, match=words):
            async with other.intent(name):
                pass
    with pytest.raises(ConfigurationError, match=words):
        jar.find(name)
    with pytest.raises(ConfigurationError, match=words):
        jar.prepare(name, "POST", f"{server.url}/pay")
    assert (jar.open_intents(), server.asked) == ([], [])


def test_found_intent_has_the_key_of_its_row_or_a_new_one(server: Server, jar: KeyJar) -> None:
    first, second = jar.find("order-1"), jar.find("order-1")
    assert (first.row, first.answer, first.key == second.key) == (None, None, False)  # nothing is on disk yet
    key = jar.prepare("order-1", "POST", f"{server.url}/pay")
    assert (jar.find("order-1").key, jar.find("order-1", key=key).key) == (key, key)
    with pytest.raises(ConfigurationError, match="has another key already"):
        jar.find("order-1", key="another-key")
    with client_of(server, jar) as client:
        client.resume()
    answer = jar.find("order-1").answer
    assert answer is not None
    assert answer.json() == {"id": 1}


def test_second_request_in_one_intent_is_refused(server: Server, jar: KeyJar) -> None:
    with client_of(server, jar) as client, client.intent("order-1") as intent:
        intent.post("/orders", json={})
        with pytest.raises(IntentChanged, match="intent of its own"):
            intent.post("/payments", json={})
    assert len(server.asked) == 1


def test_reads_in_an_intent_are_not_part_of_it(server: Server, jar: KeyJar) -> None:
    with client_of(server, jar) as client, client.intent("order-1") as intent:
        client.get("/orders")
        assert intent.post("/pay", json={}).status_code == 201
    assert server.keys[0] is None


def test_key_that_the_app_has_already_is_used(server: Server, jar: KeyJar) -> None:
    with client_of(server, jar) as client:
        with client.intent("order-1", key="my-key-42") as intent:
            intent.post("/pay", json={})
        with pytest.raises(ConfigurationError, match="another key"), client.intent("order-1", key="other"):
            pass
        with pytest.raises(ConfigurationError), client.intent("order-2", key="two words"):
            pass
    assert server.keys == ["my-key-42"]


async def test_async_client_keeps_intents_and_resumes(server: Server, jar: KeyJar) -> None:
    server.replies = [Reply(401), OK]
    async with AsyncClient(server.url, jar=jar, transport=httpx.AsyncHTTPTransport(verify=False)) as client:
        async with client.intent("order-1") as intent:
            assert (await intent.post("/pay", json={"a": 1})).status_code == 401
        (outcome,) = await client.resume()
        assert outcome.ended is Ended.ANSWERED
        async with client.intent("order-1") as intent:
            assert (await intent.post("/pay", json={"a": 1})).json() == {"id": 1}
    assert len(server.asked) == 2
    assert len(set(server.keys)) == 1


def test_intent_sends_in_another_thread_and_not_after_its_block(server: Server, jar: KeyJar) -> None:
    with client_of(server, jar) as client:
        with client.intent("order-1") as intent, ThreadPoolExecutor(1) as pool:
            assert pool.submit(intent.post, "/pay", json={}).result().status_code == 201
        with pytest.raises(ConfigurationError, match="is over"):
            intent.post("/pay", json={})
    assert server.keys == [intent.key]


def test_block_in_which_a_library_sends_past_oncekey_is_warned_about(
    server: Server, jar: KeyJar, caplog: pytest.LogCaptureFixture
) -> None:
    with jar.intent("order-1"), httpx.Client(verify=False) as plain:  # noqa: S501 - of a server without TLS
        plain.post(f"{server.url}/pay", json={})
    assert "intent 'order-1': nothing was sent under its key" in caplog.text
    caplog.clear()
    with pytest.raises(ZeroDivisionError), jar.intent("order-2"):
        _ = 1 / 0
    assert caplog.text == ""


def test_resume_does_not_wait_for_a_server_that_is_down(jar: KeyJar) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for number in range(10):
        jar.prepare(f"order-{number}", "POST", f"{url}/pay")
    transport = httpx.HTTPTransport(verify=False)
    with Client(url, jar=jar, budget=Budget(tries=1), transport=transport) as client:
        outcomes = client.resume()
    assert len(outcomes) == 10
    assert sum("not tried" in each.note for each in outcomes) == 7
    assert [row.first_sent_at is None for row in jar.open_intents()] == [False] * 3 + [True] * 7
