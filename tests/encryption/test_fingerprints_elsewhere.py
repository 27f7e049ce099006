"""Keyed fingerprints of what is no HTTP request, or not the client's: functions, messages, status."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from oncekey import SINGLE_TENANT, KeyReused, OnceKey
from oncekey.admin.outlook import outlook
from oncekey.consumers import Action, MessageNotRun, Situation
from oncekey.encryption import Keyring
from oncekey.encryption.rotation import Rotation, raw_values
from oncekey.errors import ResultNotKept, StoreUnavailable
from oncekey.functions.refusals import NotComparable
from oncekey.functions.wire import told
from oncekey.web.status import status_wsgi
from tests.encryption.rings import ONE, TWO, ring

Make = Callable[[Keyring | None], OnceKey]

READABLE = {
    "plain, then keyed": (None, ring(1)),
    "the same ring": (ring(1), ring(1)),
    "a new key": (ring(1), ring(2, 1)),
    "a key that is not used yet": (ring(2, 1), ring(1, 2)),
}
LOST = {
    "another key": (ring(1), ring(2), "needs encryption key 1"),
    "no keyring": (ring(1), None, "made with encryption key 1, and this process has no keyring"),
    "same id": (Keyring({1: ONE}), Keyring({1: TWO}), "another encryption key 1"),
}
readable = pytest.mark.parametrize("case", READABLE)
lost = pytest.mark.parametrize("case", LOST)


@pytest.fixture(params=["sqlite", "postgres"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes one process after the other, on one store."""
    url = f"sqlite:///{tmp_path / 'keys.db'}" if request.param == "sqlite" else request.getfixturevalue("ready_url")
    made: list[OnceKey] = []

    def process(keyring: Keyring | None) -> OnceKey:
        made.append(OnceKey(url, scope=SINGLE_TENANT, encryption=keyring))
        return made[-1]

    yield process
    for once in made:
        once.close()


# -- functions and messages --------------------------------------------------------------------------------------------


def charge_of(once: OnceKey, charged: list[str]) -> Callable[..., Any]:
    @once.function("charge", key="order", effects="repeatable")
    def charge(order: str, amount: int) -> dict[str, int]:
        charged.append(order)
        return {"amount": amount}

    return charge


@readable
def test_call_is_compared_under_the_key_of_its_row(make: Make, case: str) -> None:
    charged: list[str] = []
    first, second = (charge_of(make(keyring), charged) for keyring in READABLE[case])
    assert first("o-1", 5) == second("o-1", 5) == {"amount": 5}
    with pytest.raises(KeyReused):
        second("o-1", 6)
    assert charged == ["o-1"]


@lost
def test_call_under_a_lost_key_does_not_run(make: Make, case: str) -> None:
    before, after, words = LOST[case]
    charged: list[str] = []
    charge_of(make(before), charged)("o-1", 5)
    second = charge_of(make(after), charged)
    for amount in (5, 6):
        with pytest.raises(StoreUnavailable, match=words) as caught:
            second("o-1", amount)
        assert isinstance(caught.value, NotComparable)
        answer = told(caught.value, None)  # as gRPC and MCP say it
        assert answer is not None
        assert answer.type.endswith("not-comparable")
    assert charged == ["o-1"]


def deliver(once: OnceKey, body: bytes) -> tuple[Situation, Action, str]:
    message = once.message("payments", "m-1", body)
    try:
        with message:
            pass
    except MessageNotRun:
        pass
    assert message.outcome is not None
    return message.outcome.situation, message.outcome.action, message.outcome.reason


@readable
def test_message_is_compared_under_the_key_of_its_row(make: Make, case: str) -> None:
    first, second = (make(keyring) for keyring in READABLE[case])
    assert deliver(first, b"{}")[:2] == (Situation.HANDLED, Action.ACK)
    assert deliver(second, b"{}")[:2] == (Situation.DUPLICATE, Action.ACK)
    assert deliver(second, b"other")[:2] == (Situation.OTHER_BODY, Action.DEAD_LETTER)


@lost
def test_message_under_a_lost_key_is_delivered_again(make: Make, case: str) -> None:
    before, after, _ = LOST[case]
    deliver(make(before), b"{}")
    second = make(after)
    for body in (b"{}", b"other"):
        situation, action, reason = deliver(second, body)
        assert (situation, action) == (Situation.NOT_COMPARABLE, Action.RETRY)
        assert "keyring" in reason


# -- status ------------------------------------------------------------------------------------------------------------


RINGS = [case[:2] for case in LOST.values() if case[1] is not None]


@pytest.mark.parametrize(("before", "after"), [*READABLE.values(), *RINGS], ids=str)
def test_status_needs_no_comparison(make: Make, before: Keyring | None, after: Keyring | None) -> None:
    """It asks by tenant and key, so it answers whatever key the fingerprint was made with."""
    charge_of(make(before), [])("o-1", 5)
    app = status_wsgi(make(after), operation="charge")
    with httpx.Client(transport=httpx.WSGITransport(app), base_url="http://s") as client:
        answer = client.get("/o-1")
    assert answer.status_code == 200
    assert answer.headers["idempotency-key"] == "o-1"


# -- a response that is encrypted, with a plain fingerprint, and a process without a keyring ---------------------------


def re_encrypt(make: Make) -> None:
    Rotation(raw_values(make(None).store), ring(1), trust_key=True).run()


def test_call_of_a_process_without_a_keyring_gets_no_lost_result(make: Make) -> None:
    charged: list[str] = []
    plain = charge_of(make(None), charged)
    plain("o-1", 5)
    re_encrypt(make)
    with pytest.raises(NotComparable, match="this process has no keyring"):
        plain("o-1", 5)
    with pytest.raises(KeyReused):
        plain("o-1", 6)
    with pytest.raises(ResultNotKept, match="does not open with the keyring of this process"):
        charge_of(make(ring(2)), charged)("o-1", 5)
    assert charge_of(make(ring(2, 1)), charged)("o-1", 5) == {"amount": 5}
    assert charged == ["o-1"]


def test_message_of_a_process_without_a_keyring_is_delivered_again(make: Make) -> None:
    plain = make(None)
    deliver(plain, b"{}")
    re_encrypt(make)
    assert deliver(plain, b"{}")[:2] == (Situation.NOT_COMPARABLE, Action.RETRY)
    assert deliver(make(ring(2)), b"{}")[:2] == (Situation.DUPLICATE, Action.ACK)


@pytest.mark.parametrize("before", [None, ring(1)], ids=str)
def test_status_of_a_process_without_a_keyring_is_503(
    make: Make, before: Keyring | None, caplog: pytest.LogCaptureFixture
) -> None:
    charge_of(make(before), [])("o-1", 5)
    if before is None:
        re_encrypt(make)
    app = status_wsgi(make(None), operation="charge")
    with httpx.Client(transport=httpx.WSGITransport(app), base_url="http://s") as client:
        answer = client.get("/o-1")
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:oncekey:problem:not-comparable")
    assert int(answer.headers["retry-after"]) >= 1
    assert "this process has no keyring" in caplog.text


def test_command_without_a_keyring_does_not_say_what_the_app_answers(make: Make) -> None:
    charge_of(make(ring(1)), [])("o-1", 5)
    (found,) = make(None).store.read([(make(None).key_scope("single-tenant", "charge"), "o-1")])
    assert found is not None
    told = outlook(found, [])
    assert (told.runs, told.status, told.problem) == (False, None, None)
    assert "this cannot be told without the keyring of the app" in told.words
