"""How long an intent may be sent: what the server said about its key, and what is assumed if it never said."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from oncekey.client import Answer, Budget, Client, Ended, IntentExpired, KeyJar, Outcome, Rules
from oncekey.client.attempts import Attempts
from oncekey.client.httpx import IdempotentTransport
from oncekey.errors import ConfigurationError
from tests.client.jars import DAY, OK, Clock, client_of
from tests.client.server import Asked, Reply, Server, serving


def test_intent_without_a_word_of_expiry_is_not_resumed_after_a_day(server: Server, jar: KeyJar, clock: Clock) -> None:
    server.replies = [Reply(503), OK]
    with client_of(server, jar) as client:
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
        clock.now += DAY + 1
        with pytest.raises(IntentExpired, match="order-1") as raised:
            client.resume()
        assert raised.value.names == ("order-1",)
        with client.intent("order-1") as intent, pytest.raises(IntentExpired):
            intent.post("/pay", json={})
        assert len(server.asked) == 1
        (outcome,) = client.resume(again=True)
    assert outcome.ended is Ended.ANSWERED
    assert len(set(server.keys)) == 1


def test_last_expiry_that_the_server_named_counts(server: Server, jar: KeyJar, clock: Clock) -> None:
    def told(moment: str) -> Reply:
        return Reply(503, headers=(("Idempotency-Expires", moment), ("Date", "Fri, 15 Jan 2027 08:00:00 GMT")))

    server.replies = [told("Fri, 15 Jan 2027 10:00:00 GMT"), told("Mon, 18 Jan 2027 08:00:00 GMT"), OK]
    with client_of(server, jar) as client:
        client.rules.wall_clock = clock
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
        clock.now += 3 * 3600  # over two hours, so the first word would forbid it
        with pytest.raises(IntentExpired, match="the server said"), client.intent("order-1") as intent:
            intent.post("/pay", json={})
        clock.now -= 2 * 3600
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
        clock.now += 2.5 * DAY
        (outcome,) = client.resume()
    assert outcome.ended is Ended.ANSWERED


def test_expired_intent_does_not_keep_the_others(server: Server, jar: KeyJar, clock: Clock) -> None:
    with client_of(server, jar) as client:
        server.replies = [Reply(503)]
        with client.intent("old") as intent:
            intent.post("/pay", json={})
        clock.now += DAY + 1
        with client.intent("new") as intent:
            intent.post("/pay", json={})
        server.replies = [OK]
        outcomes: list[Outcome] = []
        with pytest.raises(IntentExpired) as raised:
            client.resume(on_outcome=outcomes.append)
    assert raised.value.outcomes == outcomes
    assert [(each.name, each.ended) for each in outcomes] == [("old", Ended.EXPIRED), ("new", Ended.ANSWERED)]


def test_expired_intent_is_named_though_its_server_asked_to_wait_longer(server: Server, url: str, clock: Clock) -> None:
    """ "Come back later" would be the wrong advice: later, the server may run it as new."""
    server.replies = [Reply(503, headers=(("Retry-After", "7200"),))]
    jar = KeyJar(url, clock=clock, key_lifetime=timedelta(hours=1))
    with client_of(server, jar) as client:
        client.rules.wall_clock = clock
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
        (waits,) = client.resume()
        clock.now += 3601
        with pytest.raises(IntentExpired, match="order-1"):
            client.resume()
    jar.close()
    assert (waits.ended, len(server.asked)) == (Ended.NOT_YET, 1)


def test_sent_again_after_its_time_an_intent_has_a_new_time(server: Server, jar: KeyJar, clock: Clock) -> None:
    server.replies = [Reply(503)]
    with client_of(server, jar) as client:
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
        clock.now += 2 * DAY
        client.resume(again=True)
        clock.now += 3600
        (outcome,) = client.resume()
    assert outcome.ended is Ended.OPEN
    assert len(server.asked) == 3


def test_prepared_intent_that_was_never_sent_does_not_expire(server: Server, jar: KeyJar, clock: Clock) -> None:
    key = jar.prepare("order-1", "POST", f"{server.url}/pay", json={"amount": 5})
    clock.now += 30 * DAY
    with client_of(server, jar) as client:
        (outcome,) = client.resume()
    assert (outcome.ended, server.keys) == (Ended.ANSWERED, [key])
    assert server.asked[0].headers["content-type"] == "application/json"


# -- the server never said how long it keeps a key -------------------------------------------------------------------


class Forgetful(Server):
    """Keeps a key for an hour, never says so, and runs a request whose key it has forgotten as new."""

    def __init__(self, clock: Clock, known: Reply = OK) -> None:
        super().__init__()
        self.clock = clock
        self.known = known
        self.effects: list[str | None] = []
        self._known: dict[str | None, float] = {}

    def answer(self, asked: Asked) -> Reply:
        if self.clock.now > self._known.get(asked.key, 0.0):
            self._known[asked.key] = self.clock.now + 3600
            self.effects.append(asked.key)
            return Reply(cut="before")
        return self.known


def test_resume_past_the_key_lifetime_does_not_run_the_request_a_second_time(url: str, clock: Clock) -> None:
    jar = KeyJar(url, clock=clock, key_lifetime=timedelta(hours=1))
    with serving(Forgetful(clock)) as server, client_of(server, jar) as client:
        with client.intent("order-1") as intent, pytest.raises(httpx.TransportError):
            intent.post("/pay", json={})
        clock.now += 3601
        with pytest.raises(IntentExpired, match="order-1"):
            client.resume()
        with client.intent("order-1") as intent, pytest.raises(IntentExpired, match=r"never said .* \(key_lifetime\)"):
            intent.post("/pay", json={})
        assert len(server.effects) == 1
    jar.close()


def test_key_lifetime_is_kept_with_the_intent_for_processes_that_do_not_set_it(url: str, clock: Clock) -> None:
    jar = KeyJar(url, clock=clock, key_lifetime=timedelta(hours=1))
    with serving(Forgetful(clock)) as server:
        with client_of(server, jar) as client, client.intent("order-1") as intent, pytest.raises(httpx.TransportError):
            intent.post("/pay", json={})
        jar.close()
        clock.now += 3601
        plain = KeyJar(url, clock=clock)
        with client_of(server, plain) as client, pytest.raises(IntentExpired):
            client.resume()
        plain.close()
        longer = KeyJar(url, clock=clock, key_lifetime=timedelta(hours=2))  # the operator knows better now
        with client_of(server, longer) as client:
            client.resume()
        longer.close()
        assert len(server.effects) == 2


def test_word_of_the_server_counts_more_than_the_key_lifetime(server: Server, url: str, clock: Clock) -> None:
    told = (("Idempotency-Expires", "Mon, 18 Jan 2027 08:00:00 GMT"), ("Date", "Fri, 15 Jan 2027 08:00:00 GMT"))
    server.replies = [Reply(503, headers=told), OK]
    jar = KeyJar(url, clock=clock, key_lifetime=timedelta(hours=1))
    with client_of(server, jar) as client:
        client.rules.wall_clock = clock
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
        clock.now += 2 * DAY
        (outcome,) = client.resume()
    jar.close()
    assert outcome.ended is Ended.ANSWERED


# -- tries that go on while the key expires ---------------------------------------------------------------------------


def patient_rules(clock: Clock, seconds: float = 30_000) -> Rules:
    """Tries every ten minutes. No clock but that of the test."""
    budget = Budget(tries=1000, seconds=seconds, first_wait=600, longest_wait=600)
    return Rules(budget=budget, clock=clock, wall_clock=clock, chance=lambda: 1.0)


def send_patiently(server: Server, jar: KeyJar, clock: Clock) -> float:
    """Send an intent by a client that waits as its clock says. Returns how long it tried."""

    def sleep(seconds: float) -> None:
        clock.now += seconds

    began = clock.now
    transport = IdempotentTransport(httpx.HTTPTransport(), rules=patient_rules(clock), sleep=sleep)
    with httpx.Client(transport=transport) as http, jar.intent("order-1"):
        assert http.post(f"{server.url}/pay", json={}).status_code == 503
    return clock.now - began


def test_tries_end_before_the_key_lifetime_does(file: Path, clock: Clock) -> None:
    jar = KeyJar(f"sqlite:///{file}", clock=clock, key_lifetime=timedelta(hours=1), create=True)
    with serving(Forgetful(clock, known=Reply(503))) as server:
        assert 2400 <= send_patiently(server, jar, clock) < 3600
        assert len(server.effects) == 1
    jar.close()


def test_tries_go_by_the_last_expiry_that_the_server_named(server: Server, file: Path, clock: Clock) -> None:
    headers = (("Idempotency-Expires", "Fri, 15 Jan 2027 10:00:00 GMT"), ("Date", "Fri, 15 Jan 2027 08:00:00 GMT"))
    for lifetime, name in ((timedelta(hours=1), "shorter"), (timedelta(hours=5), "longer")):
        server.replies = [Reply(503, headers=headers), Reply(503)]
        jar = KeyJar(f"sqlite:///{file}.{name}", clock=clock, key_lifetime=lifetime, create=True)
        assert 6000 <= send_patiently(server, jar, clock) < 7200, name
        jar.close()


def begun(jar: KeyJar, clock: Clock, *, again: bool = False) -> Attempts:
    with jar.intent("order-1", again=again):
        attempts = patient_rules(clock, seconds=90).attempts("POST", "https://api.example.com/pay", (), b"")
        attempts.begin()
    return attempts


def test_try_gets_no_more_time_than_the_server_keeps_the_key(file: Path, clock: Clock) -> None:
    jar = KeyJar(f"sqlite:///{file}", clock=clock, key_lifetime=timedelta(minutes=1), create=True)
    assert begun(jar, clock).seconds_left == 60
    clock.now += 40
    assert begun(jar, clock).seconds_left == 20
    clock.now += 40
    assert begun(jar, clock, again=True).seconds_left == 60  # as for a new one
    jar.close()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "answer",
    [
        Answer(307, (("location", "/payments"),), b""),
        Answer(400, (), b'{"type": "urn:oncekey:problem:key-malformed"}'),
    ],
    ids=["redirect", "spelling"],
)
def test_request_is_not_sent_on_after_its_key_has_expired(file: Path, clock: Clock, answer: Answer, late: bool) -> None:
    jar = KeyJar(f"sqlite:///{file}", clock=clock, key_lifetime=timedelta(minutes=1), create=True)
    attempts = begun(jar, clock)
    clock.now += 60 if late else 59
    assert attempts.answered(answer).again is not late
    jar.close()


@pytest.mark.parametrize("given", [3600, timedelta(0), "1h"])
def test_key_lifetime_that_is_no_length_of_time_is_refused(file: Path, given: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"key_lifetime=.*timedelta\(hours=1\)"):
        Client("https://api.example.com", jar=f"sqlite:///{file}", key_lifetime=given)
    with pytest.raises(ConfigurationError, match="give it to the KeyJar"):
        Client("https://api.example.com", key_lifetime=timedelta(hours=1))
