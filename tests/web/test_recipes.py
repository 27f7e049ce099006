"""What makes two requests the same, and a deploy that changes it. On every store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from oncekey import Policy
from oncekey.core.recipe import Parts, Recipe
from oncekey.telemetry import events
from oncekey.testing.http.base import MakeStack
from oncekey.testing.http.checks import problem, replays
from tests.web.apps import Api, World, same

MakeApi = Callable[..., Api]


@pytest.fixture
def framework() -> str:
    return "starlette"


# ---------------------------------------------------------------- headers and forms


def test_if_match_makes_another_request(name: str, make_stack: MakeStack) -> None:
    """A write under another condition is another write: it must not get the first one's 412."""
    stack = make_stack(name)
    first = stack.post(headers={"If-Match": '"1"'})
    assert replays(first, stack.post(headers={"if-match": '"1"'}))
    for headers in ({"If-Match": '"2"'}, {"If-Match": ""}, {}, {"If-Match": '"1"', "If-None-Match": "*"}):
        other = stack.post(headers=headers)
        assert (other.status_code, problem(other)) == (422, "mismatch"), headers
    assert stack.runs == 1


def test_other_headers_count_where_the_policy_names_them(name: str, make_stack: MakeStack) -> None:
    named = make_stack(name, policy=Policy(fingerprint_headers=("Stripe-Account",)))
    unnamed = make_stack(name, policy=Policy(fingerprint_headers=()))
    for stack, again in ((named, 422), (unnamed, 201)):
        stack.post(headers={"Stripe-Account": "acct_1", "If-Match": "1"})
        assert stack.post(headers={"Stripe-Account": "acct_2"}).status_code == again
        assert stack.runs == 1


def test_order_of_names_in_query_and_form_makes_no_difference(name: str, make_stack: MakeStack) -> None:
    """As the same client library sends it with its keyword arguments in another order."""
    stack = make_stack(name)
    form: dict[str, Any] = {"headers": {"content-type": "application/x-www-form-urlencoded"}}
    first = stack.post(path="/payments?x=1&y=2", content=b"amount=5&currency=eur", **form)
    assert replays(first, stack.post(path="/payments?y=2&x=1", content=b"currency=eur&amount=5", **form))
    assert stack.post(path="/payments?x=1&y=2", content=b"amount=6&currency=eur", **form).status_code == 422
    assert stack.post(path="/payments?x=2&y=1", content=b"amount=5&currency=eur", **form).status_code == 422
    assert stack.runs == 1


# ---------------------------------------------------------------- a deploy changes the recipe


POLICIES = {
    "default": Policy(),
    "no headers": Policy(fingerprint_headers=()),
    "accept": Policy(fingerprint_headers=("if-match", "accept")),
    "fields": Policy(fingerprint_fields=("amount",)),
    "other fields": Policy(fingerprint_fields=("amount", "currency"), fingerprint_headers=("accept",)),
}
HEADERS = {"If-Match": '"1"', "Accept": "application/json"}


@pytest.mark.parametrize("after", POLICIES)
@pytest.mark.parametrize("before", POLICIES)
async def test_identical_retry_is_replayed_after_a_deploy_that_changes_the_recipe(
    make_api: MakeApi, world: World, before: str, after: str
) -> None:
    old, new = make_api(policy=POLICIES[before]), make_api(policy=POLICIES[after])
    first = await old.post("k-1", headers=HEADERS)
    assert first.status_code == 201
    assert same(first, await new.post("k-1", headers=HEADERS))
    other = await new.post("k-1", headers=HEADERS, body={"amount": 7})
    assert other.status_code == 422
    assert new.runs == 0
    record = world.record("k-1")
    assert record is not None
    assert record.fingerprint_recipe == POLICIES[before].recipe.text


async def test_row_of_version_1_is_replayed(make_api: MakeApi, world: World) -> None:
    """Written by the version before this one, which knew neither headers nor recipes."""
    api = make_api()
    sent: dict[str, Any] = {"content": b'{"amount": 5}', "headers": {**HEADERS, "content-type": "application/json"}}
    first = await api.post("k-1", "/payments?b=1&a=2", **sent)
    parts: Parts = ("POST", "/payments", b"b=1&a=2", "application/json", b'{"amount":5}', lambda names: [])
    digest = Recipe(None, frozenset(), None).fingerprint(parts, 1)
    world.change("k-1", fingerprint_version=1, fingerprint=digest)
    assert same(first, await api.post("k-1", "/payments?b=1&a=2", **sent))
    assert (await api.post("k-1", "/payments?a=2&b=1", **sent)).status_code == 422
    assert api.runs == 1


@pytest.mark.parametrize(("column", "value"), [("fingerprint_version", 3), ("fingerprint_recipe", '{"cookies":["a"]}')])
@pytest.mark.parametrize("profile", ["ietf", "stripe", "governance"])
async def test_recipe_of_a_newer_version_is_503(
    make_api: MakeApi, world: World, column: str, value: Any, profile: Any
) -> None:
    """Neither 422, since it may be the same, nor 409, nor a second run; the words are for the client."""
    api = make_api(profile=profile)
    await api.post("k-1")
    world.change("k-1", **{column: value})
    again = await api.post("k-1")
    assert (again.status_code, api.runs) == (503, 1)
    assert int(again.headers["retry-after"]) >= 1
    assert "Keep the key" in again.text
    assert "recipe" not in again.text
    assert "Policy" not in again.text
    assert [event for event in api.events if isinstance(event, events.FoundUnreadable)]
