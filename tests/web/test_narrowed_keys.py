"""A deploy that narrows the form of keys: a known key is answered as before, and a new one is refused.

A client that gets 400 for the retry of a payment that ran takes a new key, and pays twice.
"""

from __future__ import annotations

from typing import Any

import pytest

from oncekey import Policy
from oncekey.telemetry import events
from oncekey.testing.http.checks import replays
from oncekey.webhooks import header

KNOWN = "order-7"
NARROWED: dict[str, tuple[dict[str, Any], str]] = {
    "uuid": ({"key_format": "uuid"}, "order-8"),
    "longer": ({"key_min_length": 16}, "order-8"),
    "shorter": ({"key_max_length": 6}, "order-8"),
    "quoted": ({"key_syntax": "strict"}, "order-8"),
}


@pytest.mark.parametrize("rule", NARROWED)
def test_known_key_is_answered_although_the_route_takes_no_new_key_of_its_form(
    name: str, make_stack: Any, rule: str
) -> None:
    """In every framework."""
    options, new = NARROWED[rule]
    before = make_stack(name, policy=Policy(effects="repeatable"))
    first = before.post(KNOWN)
    assert before.post("order-5", "return-500").status_code == 500
    after = make_stack(name, store=before.store, policy=Policy(effects="repeatable", **options))
    assert replays(first, after.post(KNOWN))
    assert after.post(KNOWN, body={"amount": 7}).status_code == 422
    after.payments.healed = True
    assert after.post("order-5", "return-500").status_code == 201
    runs = after.runs
    refused = after.post(new)
    assert (refused.status_code, refused.json()["type"]) == (400, "urn:oncekey:problem:key-malformed")
    assert after.runs == runs
    assert {record.key for record in after.store.listing()} == {KNOWN, "order-5"}
    assert [event.reason for event in after.saw(events.TurnedAway)] == ["key-malformed"]


@pytest.mark.parametrize("name", ["asgi", "wsgi"])
def test_known_key_of_a_sender_is_answered_although_it_is_too_long_now(name: str, make_stack: Any) -> None:
    before = make_stack(name, policy=Policy(key_from=header("idempotency-key")))
    first = before.post(KNOWN)
    after = make_stack(name, store=before.store, policy=Policy(key_from=header("idempotency-key"), key_max_length=6))
    assert replays(first, after.post(KNOWN))
    refused = after.post("order-8")
    assert (refused.status_code, refused.json()["type"]) == (400, "urn:oncekey:problem:key-malformed")
    assert [record.key for record in after.store.listing()] == [KNOWN]


@pytest.mark.parametrize("name", ["asgi", "wsgi"])
@pytest.mark.parametrize("key", ["", '" "', "k" * 256, "two,keys", "back\\slash"])
def test_value_that_no_route_takes_is_refused_without_the_store(name: str, make_stack: Any, key: str) -> None:
    stack = make_stack(name, policy=Policy(key_format="uuid"))
    stack.store.down.update({"reserve", "swap", "read"})
    assert stack.post(key).status_code == 400
