"""Fingerprints of an app with a keyring, over HTTP on every store: retries, other requests, deploys, lost keys."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import Policy, current
from oncekey.core.recipe import Parts, Recipe
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.encryption import Keyring
from oncekey.encryption.rotation import Rotation, raw_values
from oncekey.telemetry import events
from oncekey.testing.http.base import MakeStack
from oncekey.testing.http.checks import problem, replays
from tests.encryption.rings import ONE, TWO, ring
from tests.web.apps import Api, Gate, MakeApi, World, held, same, soon

POLICIES = {
    "default": Policy(),
    "no headers": Policy(fingerprint_headers=()),
    "fields": Policy(fingerprint_fields=("amount",)),
    "fields and headers": Policy(fingerprint_fields=("amount", "currency"), fingerprint_headers=("accept",)),
}
HEADERS = {"If-Match": '"1"', "Accept": "application/json"}
RETRYABLE = Policy(effects="repeatable")


@pytest.fixture
def framework() -> str:
    return "starlette"


def row(world: World, key: str = "k-1") -> Record:
    found = world.record(key)
    assert found is not None
    return found


def unreadable(api: Api) -> list[str]:
    """The reasons in the events of requests that could not be compared."""
    return [event.reason for event in api.saw(events.FoundUnreadable)]


# -- one app -------------------------------------------------------------------------------------------------------


async def test_new_row_has_a_keyed_fingerprint_and_is_compared_by_it(make_api: MakeApi, world: World) -> None:
    api = make_api(encryption=ring(2, 1))
    first = await api.post()
    assert same(first, await api.post())
    other = await api.post(body={"amount": 7})
    assert (first.status_code, other.status_code, api.runs) == (201, 422, 1)
    found = row(world)
    assert (found.fingerprint_version, len(found.fingerprint)) == (2 * 256 + 2, 36)
    assert not unreadable(api)


async def test_request_in_flight_is_409_and_another_request_422(make_api: MakeApi) -> None:
    gate = Gate()
    api = make_api(held(gate), encryption=ring())
    first = api.start()
    await soon(gate.entered.wait())
    assert [(await api.post()).status_code, (await api.post(body={"amount": 7})).status_code] == [409, 422]
    gate.go.set()
    assert same(await soon(first), await api.post())
    assert api.runs == 1


async def test_fingerprints_of_two_keyrings_and_of_two_rows_differ(make_api: MakeApi, world: World) -> None:
    one, other = make_api(encryption=Keyring({1: ONE})), make_api(encryption=Keyring({1: TWO}))
    plain = make_api()
    for api, key in ((one, "k-1"), (one, "k-2"), (other, "k-3"), (plain, "k-4")):
        await api.post(key)
    found = [row(world, f"k-{number}").fingerprint for number in range(1, 5)]
    assert len({fingerprint[-32:] for fingerprint in found}) == 4
    assert found[0][:4] == found[1][:4] != found[2][:4]


# -- a deploy switches encryption on, or replaces a key ------------------------------------------------------------


@pytest.mark.parametrize("before", POLICIES)
async def test_plain_row_of_any_recipe_is_replayed_after_encryption_is_switched_on(
    make_api: MakeApi, world: World, before: str
) -> None:
    old = make_api(policy=POLICIES[before])
    first = await old.post(headers=HEADERS)
    for after in POLICIES.values():
        new = make_api(policy=after, encryption=ring())
        assert same(first, await new.post(headers=HEADERS))
        assert (await new.post(headers=HEADERS, body={"amount": 7})).status_code == 422
        assert new.runs == 0
    assert row(world).fingerprint_version == 2


async def test_row_of_version_1_is_replayed_with_a_keyring(make_api: MakeApi, world: World) -> None:
    old, new = make_api(), make_api(encryption=ring())
    sent: dict[str, Any] = {"content": b'{"amount": 5}', "headers": {"content-type": "application/json"}}
    first = await old.post(**sent)
    parts: Parts = ("POST", "/payments", b"", "application/json", b'{"amount":5}', lambda names: [])
    digest = Recipe(None, frozenset(), None).fingerprint(parts, 1)
    world.change("k-1", fingerprint_version=1, fingerprint=digest)
    assert same(first, await new.post(**sent))
    assert (await new.post(body={"amount": 7})).status_code == 422
    assert new.runs == 0


async def test_bound_key_is_compared_after_encryption_is_switched_on_and_its_key_replaced(make_api: MakeApi) -> None:
    policy = Policy(bind=lambda request: request.headers["x-user"])
    rings: list[Keyring | None] = [None, ring(1), ring(2, 1)]
    apis = [make_api(policy=policy, bind_secret="s" * 32, encryption=keyring) for keyring in rings]
    ann, bob = {"X-User": "ann"}, {"X-User": "bob"}
    for number, maker in enumerate(apis):
        key = f"k-{number}"
        first = await maker.post(key, headers=ann)
        for later in apis[number:]:
            assert same(first, await later.post(key, headers=ann))
            assert (await later.post(key, headers=bob)).status_code == 422
            assert (await later.post(key, headers=ann, body={"amount": 7})).status_code == 422
    assert [api.runs for api in apis] == [1, 1, 1]


async def test_row_under_an_older_key_of_the_ring_is_replayed(make_api: MakeApi, world: World) -> None:
    old, new = make_api(encryption=ring(1)), make_api(encryption=ring(2, 1))
    first = await old.post()
    assert same(first, await new.post())
    assert (await new.post(body={"amount": 7})).status_code == 422
    assert (old.runs, new.runs, row(world).fingerprint_version) == (1, 0, 1 * 256 + 2)


async def test_process_that_has_the_new_key_but_does_not_use_it_yet_compares_both_ways(make_api: MakeApi) -> None:
    """How to replace a key without a 503: first every process knows it, then it becomes the current one."""
    before, after = make_api(encryption=ring(1, 2)), make_api(encryption=ring(2, 1))
    for maker, other, key in ((before, after, "k-1"), (after, before, "k-2")):
        first = await maker.post(key)
        assert same(first, await other.post(key))
        assert (await other.post(key, body={"amount": 7})).status_code == 422
    assert (before.runs, after.runs) == (1, 1)


@pytest.mark.parametrize("direction", ["plain first", "keyed first"])
async def test_old_and_new_process_during_a_deploy_never_run_one_key_twice(
    make_api: MakeApi, world: World, direction: str
) -> None:
    """The first request runs in one process, and its client retries at both, before and after it has ended."""
    gate = Gate()
    plain: dict[str, Any] = {}
    keyed: dict[str, Any] = {"encryption": ring()}
    here, there = (plain, keyed) if direction == "plain first" else (keyed, plain)
    first, second = make_api(held(gate), **here), make_api(**there)
    running = first.start()
    await soon(gate.entered.wait())
    elsewhere = 409 if direction == "plain first" else 503
    assert [(await first.post()).status_code, (await second.post()).status_code] == [409, elsewhere]
    gate.go.set()
    answer = await soon(running)
    assert answer.status_code == 201
    assert same(answer, await first.post())
    again = await second.post()
    if direction == "plain first":
        assert same(answer, again)
    else:
        assert (again.status_code, problem(again)) == (503, "not-comparable")
        assert "and this process has no keyring" in unreadable(second)[-1]
    assert (first.runs, second.runs, world.rows()) == (1, 0, 1)


async def test_clients_that_retry_at_all_processes_of_two_deploys_get_one_run_each(make_api: MakeApi) -> None:
    """Processes without a keyring, with one, and with its next key, all at once. A client asks any of them until it has
    its answer."""
    ran: Counter[str] = Counter()

    async def respond(request: Request, run: int) -> Response:
        ran[current().key] += 1
        await asyncio.sleep(0)
        return JSONResponse({"key": current().key, "run": run}, 201)

    rings: tuple[Keyring | None, ...] = (None, ring(1), ring(1, 2), ring(2, 1))
    processes = [make_api(respond, encryption=keyring) for keyring in rings]
    chance = random.Random(7)
    seen: set[int] = set()

    async def client(key: str) -> None:
        answers: list[httpx.Response] = []
        while len(answers) < 3:
            answer = await chance.choice(processes).post(key)
            seen.add(answer.status_code)
            if answer.status_code == 201:
                answers.append(answer)
        assert {each.json()["key"] for each in answers} == {key}
        assert len({each.content for each in answers}) == 1

    keys = [f"k-{number}" for number in range(16)]
    await soon(asyncio.gather(*(client(key) for key in [*keys, *keys])), 60.0)
    assert ran == Counter(keys)
    assert {201, 503} <= seen <= {201, 409, 503}


async def test_new_process_retries_a_plain_row_and_the_old_one_refuses_it(make_api: MakeApi, world: World) -> None:
    """The row keeps its fingerprint, so the key of the provider stays the same, and both processes can compare. But the
    old process cannot read the response, and a 201 without its body would look final to the client."""
    seen: list[str] = []

    def respond(request: Request, run: int) -> Response:
        del request
        seen.append(current().downstream_key("charge"))
        return JSONResponse({"run": run}, 500 if len(seen) == 1 else 201)

    old, new = (make_api(respond, policy=RETRYABLE, **more) for more in ({}, {"encryption": ring()}))
    assert (await old.post()).status_code == 500
    made = row(world)
    assert made.state is State.FAILED_RETRYABLE
    second = await new.post()
    assert second.status_code == 201
    kept = row(world)
    assert (kept.fingerprint, kept.fingerprint_version, kept.attempt) == (made.fingerprint, 2, 2)
    assert seen[0] == seen[1]
    refused = await old.post()
    assert (refused.status_code, problem(refused)) == (503, "not-comparable")
    assert (await old.post(body={"amount": 7})).status_code == 422
    assert same(second, await new.post())
    assert (old.runs, new.runs) == (1, 1)


async def test_expired_key_starts_over_with_a_keyed_fingerprint(make_api: MakeApi, world: World) -> None:
    old, new = make_api(), make_api(encryption=ring())
    await old.post()
    world.age("k-1", 10_000_000)
    assert (await new.post(body={"amount": 7})).status_code == 201
    assert (row(world).fingerprint_version, new.runs) == (258, 1)
    assert (await new.post()).status_code == 422


# -- lost keys -----------------------------------------------------------------------------------------------------


LOST = {
    "another key": (ring(3), ring(2, 1), "needs encryption key 3, which is not in the keyring of this process"),
    "no keyring": (ring(3), None, "made with encryption key 3, and this process has no keyring"),
    "same id": (Keyring({1: ONE}), Keyring({1: TWO}), "another encryption key 1 than this process has"),
}


@pytest.mark.parametrize("case", LOST)
@pytest.mark.parametrize("state", ["completed", "failed_retryable", "in_progress"])
async def test_row_under_a_lost_key_is_503_and_does_not_run(
    make_api: MakeApi, world: World, case: str, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In every state, also where a retry would run it again; the log names the key and says what to do."""
    before, after, words = LOST[case]
    gate = Gate()
    respond = held(gate, lambda request, run: Response(b"", 500 if state == "failed_retryable" else 201))
    old = make_api(respond, policy=RETRYABLE, encryption=before)
    new = make_api(policy=RETRYABLE, encryption=after)
    first = old.start()
    await soon(gate.entered.wait())
    if state == "in_progress":
        world.age("k-1", 3600)  # its lease is over
    else:
        gate.go.set()
        await soon(first)
    assert row(world).state == state
    with caplog.at_level(logging.WARNING, "oncekey"):
        for body in ({"amount": 1000, "currency": "EUR"}, {"amount": 7}):
            answer = await new.post(body=body)
            assert (answer.status_code, problem(answer)) == (503, "not-comparable")
            assert int(answer.headers["retry-after"]) >= 1
            assert "Keep the key" in answer.text
            assert "encryption" not in answer.text
    assert (old.runs, new.runs) == (1, 0)
    assert [words in reason for reason in unreadable(new)] == [True, True]
    lines = [line for line in caplog.messages if line.startswith("FoundUnreadable")]
    assert [words in line and "OnceKey(encryption=…)" in line for line in lines] == [True, True]
    gate.go.set()
    await soon(first)


# -- every framework -----------------------------------------------------------------------------------------------


def test_every_framework_makes_and_compares_keyed_fingerprints(name: str, make_stack: MakeStack) -> None:
    stack = make_stack(name, encryption=ring(2, 1))
    first = stack.post()
    assert replays(first, stack.post())
    assert (problem(stack.post(body={"amount": 7})), stack.runs) == ("mismatch", 1)
    found = stack.record()
    assert found is not None
    assert found.fingerprint_version == 2 * 256 + 2
    lacks_key = make_stack(name, store=stack.store, encryption=ring(1))
    assert (problem(lacks_key.post()), lacks_key.runs) == ("not-comparable", 0)
    assert [event.reason for event in lacks_key.saw(events.FoundUnreadable)]


@pytest.mark.parametrize("flat", [True, False])
def test_every_framework_without_a_keyring_refuses_an_encrypted_response(
    name: str, make_stack: MakeStack, caplog: pytest.LogCaptureFixture, flat: bool
) -> None:
    """The fingerprint is plain, as of every row from before encryption that re-encrypt has rewritten."""
    plain = make_stack(name, policy=Policy() if flat else Policy(pii="warn"))
    first = plain.post()
    assert replays(first, plain.post())
    Rotation(raw_values(plain.store), ring(2), trust_key=True).run()
    for _ in range(2):
        answer = plain.post()
        assert (answer.status_code, problem(answer), plain.runs) == (503, "not-comparable", 1)
        assert int(answer.headers["retry-after"]) >= 1
        assert "idempotency-replayed" not in answer.headers
        assert not any(word in answer.text for word in ("keyring", "encrypt", "version", "compare"))
    reasons = [event.reason for event in plain.saw(events.FoundUnreadable)]
    assert ["encrypted with key 2, and this process has no keyring" in each for each in reasons] == [True, True]
    assert "OnceKey(encryption=…)" in caplog.text
    lost = make_stack(name, store=plain.store, encryption=ring(1)).post()
    assert (lost.status_code, lost.json()["title"]) == (201, "The response body cannot be read right now")
    assert "with the same key later" in lost.text
    assert replays(first, make_stack(name, store=plain.store, encryption=ring(2)).post())
