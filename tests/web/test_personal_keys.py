"""``Policy(pii=…)``: keys that look like personal data are warned of, or refused if they are not known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import httpx
import pytest

from oncekey import SINGLE_TENANT, NotAuthenticated, OnceKey, Policy
from oncekey.core.problem_texts import Situation
from oncekey.core.routes import Route
from oncekey.engine.personal_keys import FOUND
from oncekey.errors import ConfigurationError
from oncekey.functions.attempt import Attempt
from oncekey.telemetry import events
from oncekey.testing.http.checks import replays
from oncekey.testing.http.flaky import NOW
from oncekey.testing.http.stack import Stack
from oncekey.web import openapi
from oncekey.web.status import status_app

KEYS = {
    "email": "ann.planted@example.com",
    "phone": "+49 151 70012345",
    "card": "4111111111111111",
    "token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiI3In0.c2lnbmF0dXJl",
}
WORDS = {"email": "e-mail address", "phone": "phone number", "card": "card number", "token": "JWT"}
on_both = pytest.mark.parametrize("name", ["asgi", "wsgi"])


@pytest.fixture
def make(make_stack: Any, name: str) -> Callable[..., Stack]:
    def made(pii: Any = "refuse", policy: Policy | None = None, **options: Any) -> Stack:
        stack: Stack = make_stack(name, policy=policy or Policy(pii=pii), **options)
        return stack

    return made


def quoted(key: str) -> str:
    return f'"{key}"'


def test_personal_key_is_refused_and_leaves_no_row(make: Callable[..., Stack]) -> None:
    """In every framework. A random key runs."""
    stack = make()
    for kind, key in KEYS.items():
        answer = stack.post(quoted(key))
        assert (answer.status_code, answer.json()["type"]) == (400, "urn:oncekey:problem:key-personal")
        assert WORDS[kind] in answer.json()["detail"]
        assert "random UUID" in answer.json()["detail"]
        assert "no earlier one with this key is known" in answer.json()["detail"]
        assert key not in answer.text + str(answer.headers)
    assert (stack.store.listing(), stack.runs) == ([], 0)
    assert stack.post("550e8400-e29b-41d4-a716-446655440000").status_code == 201


def test_retry_of_a_personal_key_from_before_the_option_is_answered(name: str, make_stack: Any) -> None:
    """In every framework. The payment was made: a refusal would make its client pay again under another key."""
    before = make_stack(name, policy=Policy(effects="repeatable"))
    first = before.post(KEYS["email"])
    assert before.post(quoted(KEYS["phone"]), "return-500").status_code == 500
    after = make_stack(name, store=before.store, policy=Policy(effects="repeatable", pii="refuse"))
    assert replays(first, after.post(KEYS["email"]))
    assert after.post(KEYS["email"], body={"amount": 7}).status_code == 422
    after.payments.healed = True
    assert after.post(quoted(KEYS["phone"]), "return-500").status_code == 201
    assert after.post(KEYS["card"]).status_code == 400
    assert {record.key for record in after.store.listing()} == {KEYS["email"], KEYS["phone"]}
    assert [event.kind for event in after.saw(events.PersonalKeyFound)] == ["card"]


@on_both
def test_refusal_reads_and_does_not_write(make: Callable[..., Stack]) -> None:
    stack = make()
    stack.store.down.update({"reserve", "swap"})
    assert stack.post(KEYS["email"]).status_code == 400
    stack.store.down.add("read")
    assert stack.post(KEYS["email"]).status_code == 503


@on_both
def test_personal_key_that_is_too_old_as_well_is_refused_as_personal(make: Callable[..., Stack]) -> None:
    answer = make(policy=Policy(pii="refuse", max_age=timedelta(minutes=10))).post(KEYS["email"])
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:oncekey:problem:key-personal")


@on_both
def test_expired_personal_key_is_refused(make_stack: Any, name: str) -> None:
    before = make_stack(name, policy=Policy(ttl=timedelta(hours=1)))
    before.post(KEYS["email"])
    after = make_stack(name, store=before.store, policy=Policy(pii="refuse"))
    after.store._clock = lambda: NOW + 3601
    assert after.post(KEYS["email"]).status_code == 400


@on_both
@pytest.mark.parametrize("profile", ["ietf", "stripe", "governance"])
def test_refusal_has_the_form_of_each_profile(make: Callable[..., Stack], profile: str) -> None:
    answer = make(profile=profile).post(KEYS["email"])
    words = {"ietf": "key-personal", "stripe": "idempotency_key_personal", "governance": "IDEMPOTENCY_KEY_PERSONAL"}
    assert (answer.status_code, f'{words[profile]}"' in answer.text) == (400, True)
    assert "oncekey" not in answer.text.replace("urn:oncekey:problem", "")
    assert "planted" not in answer.text + str(answer.headers)


@on_both
def test_refusal_is_an_event_without_the_key(make: Callable[..., Stack], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    stack = make()
    stack.post(KEYS["email"])
    (event,) = stack.saw(events.PersonalKeyFound)
    assert (event.scope, event.operation, event.kind, event.answer) == (
        *("single-tenant", "POST /payments"),
        *("email", "refused"),
    )
    assert "planted" not in caplog.text + repr(stack.events)


@on_both
def test_warning_is_said_once_per_route_and_kind_and_counted_each_time(
    make: Callable[..., Stack], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "oncekey")
    stack = make("warn")
    answers = [stack.post(quoted(key)) for key in (*KEYS.values(), KEYS["email"])]
    assert [answer.status_code for answer in answers] == [201] * 5
    warned = [line for line in caplog.records if line.msg == FOUND]
    assert [line.levelname for line in warned] == ["WARNING"] * 4
    assert [WORDS[kind] in line.getMessage() for kind, line in zip(KEYS, warned, strict=True)] == [True] * 4
    assert [(event.kind, event.answer) for event in stack.saw(events.PersonalKeyFound)] == [
        *((kind, "taken") for kind in KEYS),
        ("email", "taken"),
    ]
    shown = caplog.text + repr(stack.events)
    assert not any(key in shown or key[:4] + "~" in shown for key in KEYS.values())


@on_both
def test_keys_are_not_looked_at_without_the_option(
    make: Callable[..., Stack], caplog: pytest.LogCaptureFixture
) -> None:
    stack = make(None)
    assert stack.post(KEYS["email"]).status_code == 201
    assert (stack.saw(events.PersonalKeyFound), [line for line in caplog.records if line.msg == FOUND]) == (
        [],
        [],
    )


def test_option_leaves_the_flat_way_only_if_it_is_set() -> None:
    assert [Policy(pii=pii).flat for pii in (None, "warn", "refuse")] == [True, False, False]


@on_both
def test_caller_is_asked_for_before_its_key_is_looked_at(make: Callable[..., Stack]) -> None:
    def unknown_caller(request: Any) -> str:
        raise NotAuthenticated

    assert make(scope=unknown_caller).post(KEYS["email"]).status_code == 401


@on_both
def test_key_in_the_body_is_looked_at_too(make: Callable[..., Stack]) -> None:
    policy = Policy(pii="refuse", key_from=lambda request, body: KEYS["email"])
    assert make(policy=policy).post(None).status_code == 400


@on_both
def test_refused_key_counts_for_no_limit(make: Callable[..., Stack]) -> None:
    stack = make(policy=Policy(pii="refuse", limit="1/hour"))
    assert [stack.post(key).status_code for key in (KEYS["email"], KEYS["card"], "k-1", "k-2")] == [400, 400, 201, 429]


@on_both
def test_only_the_routes_that_say_so_refuse(make: Callable[..., Stack]) -> None:
    stack = make(policy=Policy(), routes={"POST /payments": Policy(pii="refuse")})
    assert stack.post(KEYS["email"]).status_code == 400


async def test_status_of_a_key_from_before_the_option_is_answered() -> None:
    """A client that is refused now can still ask what became of its first request."""
    with OnceKey("memory://", scope=SINGLE_TENANT, policy=Policy(pii="refuse")) as once:
        before = Route("POST /payments", Policy())
        async with Attempt(once, before, tenant="single-tenant", key=KEYS["email"], body=b"{}") as attempt:
            attempt.keep(b'"paid"')
        transport = httpx.ASGITransport(status_app(once))
        async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
            answer = await client.get("/", headers={"Idempotency-Key": KEYS["email"]})
    assert (answer.status_code, answer.json()) == (200, "paid")


async def test_404_of_a_personal_key_says_that_a_refusal_executes_nothing() -> None:
    """The advice is to send the request with this key. For a personal key that ends in a 400, which is safe."""
    with OnceKey("memory://", scope=SINGLE_TENANT, policy=Policy(pii="refuse")) as once:
        transport = httpx.ASGITransport(status_app(once))
        async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
            answers = [await client.get("/", headers={"Idempotency-Key": key}) for key in (KEYS["email"], "k-1")]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert answers[0].content == answers[1].content
    advice = (
        "send it with this key. If the operation does not take this key, the answer says so, and nothing is executed."
    )
    assert answers[0].json()["detail"].endswith(advice)


def test_openapi_document_has_the_answer_and_the_rule() -> None:
    policy = Policy(pii="refuse")
    assert Situation.KEY_PERSONAL in openapi.situations(policy)
    assert "e-mail address" in openapi.description(policy)
    assert openapi.extension(policy)["pii"] == "refuse"


def test_wrong_value_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="None, warn, refuse"):
        Policy(pii="log")  # type: ignore[arg-type]
