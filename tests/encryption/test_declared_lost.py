"""A key that is declared lost for good: its finished requests get a final refusal, and never another one's answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.consumers import Action, MessageNotRun, Situation
from oncekey.core import problem_texts
from oncekey.core.decision import Unreadable, decide
from oncekey.core.problems import PROFILES, ProfileName
from oncekey.core.recipe import DEFAULT, Parts
from oncekey.core.record import Reservation
from oncekey.core.states import FINAL, Effects, State
from oncekey.encryption import Keyring
from oncekey.encryption.fingerprints import KeyedFingerprints
from oncekey.encryption.rotation import Rotation, raw_values
from oncekey.errors import OutcomeUnknown
from oncekey.functions.refusals import AnswerLost, NotComparable
from oncekey.functions.wire import told
from oncekey.web.starlette import protect
from tests.encryption.rings import TWO, ring

LOST = Keyring({2: TWO}, lost=[1])
Make = Callable[..., OnceKey]


@pytest.fixture(params=["sqlite", "postgres"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes one process after the other, on one store."""
    url = f"sqlite:///{tmp_path / 'keys.db'}" if request.param == "sqlite" else request.getfixturevalue("ready_url")
    made: list[OnceKey] = []

    def process(keyring: Keyring | None, **options: Any) -> OnceKey:
        made.append(OnceKey(url, scope=SINGLE_TENANT, encryption=keyring, **options))
        return made[-1]

    yield process
    for once in made:
        once.close()


class Shop:
    def __init__(self, once: OnceKey) -> None:
        self.runs = 0
        self.app = Starlette(routes=[Route("/payments", self._pay, methods=["POST"])])
        protect(self.app, once, upkeep=False)

    async def _pay(self, request: Request) -> JSONResponse:
        self.runs += 1
        return JSONResponse({"card": 4242}, 201)

    async def post(self, amount: int = 5) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://api.test") as client:
            return await client.post("/payments", json={"amount": amount}, headers={"Idempotency-Key": "order-1"})


# -- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("profile", PROFILES)
async def test_retry_of_a_finished_request_gets_a_final_refusal_and_does_not_run(
    make: Make, profile: ProfileName, flat: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The same one and another one get the same: neither the first status nor a word of which of them it is."""
    policy = Policy() if flat else Policy(pii="warn")
    await Shop(make(ring(1), policy=policy)).post()
    shop = Shop(make(LOST, profile=profile, policy=policy))
    with caplog.at_level(logging.WARNING, "oncekey"):
        same, other = await shop.post(), await shop.post(amount=6)
    for answer in (same, other):
        assert (answer.status_code, shop.runs) == (410, 0)
        assert "retry-after" not in answer.headers
        assert "idempotency-replayed" not in answer.headers
        assert "whether the operation took effect" in answer.text
        assert not any(word in answer.text for word in ("keyring", "encrypt", "4242"))
    assert {"ietf": "urn:oncekey:problem:answer-lost", "stripe": "idempotency_answer_lost"}.get(
        profile, "IDEMPOTENCY_ANSWER_LOST"
    ) in same.text
    assert "encryption key 1, which the keyring of this process declares lost" in caplog.text
    assert "Add key 1" not in caplog.text


async def test_key_that_is_only_missing_and_a_key_with_an_answer_are_as_before(make: Make) -> None:
    await Shop(make(ring(1))).post()
    assert (await Shop(make(Keyring({2: TWO}, lost=[3]))).post()).status_code == 503
    again = await Shop(make(Keyring({1: bytes(range(32)), 2: TWO}, lost=[3]))).post()
    assert (again.status_code, again.json()) == (201, {"card": 4242})


async def test_response_under_a_lost_key_with_a_fingerprint_that_is_compared_has_its_status(make: Make) -> None:
    """As of a row from before encryption that re-encrypt has rewritten: it is the same request, for certain."""
    plain = make(None)
    await Shop(plain).post()
    Rotation(raw_values(plain.store), ring(1), trust_key=True).run()
    shop = Shop(make(LOST))
    assert [(await shop.post()).status_code, (await shop.post(amount=6)).status_code] == [201, 422]
    assert shop.runs == 0


PARTS: Parts = ("POST", "/payments", b"", "application/json", b"{}", lambda names: [])


def wanted(keyring: Keyring, **changes: Any) -> Reservation:
    digest = DEFAULT.fingerprint(PARTS)
    made = Reservation("tenant", "key", "POST /payments", digest, 2, Effects.EXTERNAL, "owner", 60.0, 3600.0)
    return KeyedFingerprints(keyring)(replace(made, parts=PARTS, **changes))


@pytest.mark.parametrize("state", State)
def test_only_a_final_row_is_refused_for_good(state: State) -> None:
    """Another one may still be settled by an operator or the sweeper."""
    record = replace(wanted(ring(1)).record(0.0), state=state)
    decision = decide(record, wanted(LOST, owner="another"))
    if state is State.EXPIRED:
        assert not isinstance(decision, Unreadable)  # it is over, and its key is free
        return
    assert isinstance(decision, Unreadable)
    assert decision.is_lost == (state in FINAL)


def test_row_with_a_fingerprint_that_is_damaged_equals_no_request() -> None:
    record = replace(wanted(ring(1)).record(0.0), state=State.COMPLETED, fingerprint=b"")
    assert isinstance(decide(record, wanted(LOST, owner="another")), Unreadable)


# -- functions and messages --------------------------------------------------------------------------------------------


def charge_of(once: OnceKey, charged: list[str]) -> Callable[..., Any]:
    @once.function("charge", key="order", effects="repeatable")
    def charge(order: str, amount: int) -> dict[str, int]:
        charged.append(order)
        return {"amount": amount}

    return charge


def test_call_is_neither_a_result_nor_worth_another_try(make: Make) -> None:
    charged: list[str] = []
    charge_of(make(ring(1)), charged)("o-1", 5)
    second = charge_of(make(LOST), charged)
    for amount in (5, 6):
        with pytest.raises(AnswerLost, match="can never be read again") as caught:
            second("o-1", amount)
        assert isinstance(caught.value, OutcomeUnknown)
        assert not isinstance(caught.value, NotComparable)
        answer = told(caught.value, None)  # as gRPC and MCP say it
        assert answer is not None
        assert (answer.situation, answer.retry_after) == (problem_texts.Situation.ANSWER_LOST, None)
    assert charged == ["o-1"]


def test_message_is_a_dead_letter(make: Make) -> None:
    with make(ring(1)).message("payments", "m-1", b"{}"):
        pass
    message = make(LOST).message("payments", "m-1", b"{}")
    with pytest.raises(MessageNotRun), message:
        pass
    assert message.outcome is not None
    assert (message.outcome.situation, message.outcome.action) == (Situation.ANSWER_LOST, Action.DEAD_LETTER)
