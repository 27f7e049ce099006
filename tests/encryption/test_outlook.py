"""``oncekey keys show`` on encrypted rows says what a process with the same keyring then answers."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, Policy, current
from oncekey.core.decision import NEWER_VERSION, Claim, Replay, Unreadable, decide_retry
from oncekey.core.states import State
from oncekey.encryption import Keyring
from oncekey.encryption.fingerprints import KeyedFingerprints
from oncekey.encryption.rotation import Rotation, raw_values
from oncekey.web.starlette import protect
from tests.cli.key_table import KeyTable, Run, runner
from tests.encryption.kept_rows import reservation
from tests.encryption.rings import ONE, THREE, TWO, ring

RINGS = {
    "same": f"1:{base64.b64encode(ONE).decode()}",
    "missing": f"2:{base64.b64encode(TWO).decode()}",
    "lost": f"2:{base64.b64encode(TWO).decode()},1:lost",
    "another secret": f"1:{base64.b64encode(THREE).decode()}",
    "plain": f"plain,1:{base64.b64encode(ONE).decode()}",
}


class Shop:
    """An app with a flat route that succeeds, one that fails and may be repeated, and one that fails after a step."""

    def __init__(self, url: str, keyring: Keyring | None) -> None:
        self.ran = 0
        routes = {
            "POST /flat": Policy(),
            "POST /failing": Policy(effects="repeatable"),
            "POST /phased": Policy(effects="phased"),
        }
        self.once = OnceKey(url, scope=SINGLE_TENANT, encryption=keyring, routes=routes)
        names = ("flat", "failing", "phased")
        self.app = Starlette(routes=[Route(f"/{name}", getattr(self, name), methods=["POST"]) for name in names])
        protect(self.app, self.once, upkeep=False)

    async def flat(self, request: Request) -> JSONResponse:
        self.ran += 1
        return JSONResponse({"card": 4242}, 201)

    async def failing(self, request: Request) -> JSONResponse:
        self.ran += 1
        raise NotExecuted("not now")

    async def phased(self, request: Request) -> JSONResponse:
        async def charge() -> dict[str, int]:
            return {"card": 4242}

        await current().effect("charge", charge, repeatable=True)
        self.ran += 1
        raise RuntimeError("the second effect failed")

    async def post(self, route: str) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
            return await client.post(f"/{route}", json={}, headers={"Idempotency-Key": f"{route}-1"})


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'keys.db'}"


@pytest.fixture
def operate(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(url, monkeypatch, capsys)


@pytest.mark.parametrize("route", ["flat", "failing", "phased"])
@pytest.mark.parametrize("name", RINGS)
async def test_predicted_response_equals_the_real_response(
    url: str, operate: Run, monkeypatch: pytest.MonkeyPatch, name: str, route: str
) -> None:
    """It said 201 or that it runs, where the app answered 503 or 410."""
    first = Shop(url, ring(1))
    await first.post(route)
    await first.once.aclose()
    monkeypatch.setenv("ONCEKEY_KEYS", RINGS[name])
    told = json.loads(operate("keys", "show", f"{route}-1", "--json")[1])["now"]

    shop = Shop(url, Keyring.from_env())
    answer = await shop.post(route)
    await shop.once.aclose()
    assert told["runs"] == bool(shop.ran)
    if not told["runs"]:
        assert told["status"] == answer.status_code
        problem = answer.json().get("type") if answer.status_code >= 400 else None
        assert told["problem"] == problem
    expected = {"missing": 503, "another secret": 503, "lost": 410 if route == "flat" else 503}
    if name in expected:
        assert (told["runs"], told["status"]) == (False, expected[name])


@pytest.mark.parametrize("route", ["flat", "failing", "phased"])
async def test_command_without_a_keyring_does_not_speak_for_the_app(
    url: str, operate: Run, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """A process without one answers 503 in each of these cases; the app has one, and answers otherwise."""
    first = Shop(url, ring(1))
    await first.post(route)
    await first.once.aclose()
    monkeypatch.delenv("ONCEKEY_KEYS", raising=False)
    told = json.loads(operate("keys", "show", f"{route}-1", "--json")[1])["now"]
    assert (told["runs"], told["status"], told["problem"]) == (False, None, None)
    assert "a process without it, as this command, answers 503; set ONCEKEY_KEYS" in told["words"]
    shop = Shop(url, None)
    assert ((await shop.post(route)).status_code, shop.ran) == (503, 0)
    await shop.once.aclose()


async def test_answer_alone_under_a_missing_key_is_a_note_with_the_first_status(
    url: str, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is from before encryption, and was re-encrypted: its requests can be compared."""
    first = Shop(url, None)
    await first.post("flat")
    Rotation(raw_values(first.once.store), ring(1), trust_key=True).run()
    await first.once.aclose()
    monkeypatch.setenv("ONCEKEY_KEYS", RINGS["missing"])
    out = operate("keys", "show", "flat-1")[1]
    assert (
        "the same request gets now: 201: a note: the body cannot be read (encrypted with key 1, which this process "
        "does not have)"
    ) in out
    shop = Shop(url, Keyring.from_env())
    assert ((await shop.post("flat")).status_code, shop.ran) == (201, 0)
    await shop.once.aclose()


async def test_step_alone_under_a_missing_key_is_503(url: str, operate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its fingerprint is plain, and its result was re-encrypted: the app begins, and none of its steps runs."""
    first = Shop(url, None)
    await first.post("phased")
    Rotation(raw_values(first.once.store), ring(1), trust_key=True).run()
    await first.once.aclose()
    monkeypatch.setenv("ONCEKEY_KEYS", RINGS["missing"])
    out = operate("keys", "show", "phased-1")[1]
    assert (
        "gets now: 503: none of its steps runs: the result of step 'charge' cannot be read (encrypted with key 1" in out
    )
    shop = Shop(url, Keyring.from_env())
    assert ((await shop.post("phased")).status_code, shop.ran) == (503, 0)
    await shop.once.aclose()
    monkeypatch.delenv("ONCEKEY_KEYS")
    assert "this cannot be told without the keyring of the app" in operate("keys", "show", "phased-1")[1]


async def test_row_of_a_newer_version_is_503_without_a_word_about_keyrings(
    url: str, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONCEKEY_KEYS", raising=False)
    first = Shop(url, None)
    await first.post("flat")
    await first.once.aclose()
    table = KeyTable(url)
    table.execute("UPDATE idempotency_keys SET fingerprint_version = 99")
    table.close()
    told = json.loads(operate("keys", "show", "flat-1", "--json")[1])["now"]
    assert (told["status"], told["problem"]) == (503, "urn:oncekey:problem:not-comparable")


# -- the decision alone ------------------------------------------------------------------------------------------------


def row(keyring: Keyring | None, **changes: Any) -> Any:
    wanted = reservation("key")
    made = wanted if keyring is None else KeyedFingerprints(keyring)(wanted)
    return replace(made.record(0.0), state=State.COMPLETED, **changes)


def test_retry_is_compared_with_the_key_of_the_row() -> None:
    under = KeyedFingerprints(ring(2, 1)).under_key
    assert isinstance(decide_retry(row(ring(1)), under), Replay)
    assert isinstance(decide_retry(row(ring(3)), under), Unreadable)
    assert isinstance(decide_retry(row(Keyring({1: THREE})), under), Unreadable)
    assert isinstance(decide_retry(row(None), under), Replay)
    assert isinstance(decide_retry(row(None), None), Replay)


def test_reason_of_a_process_without_a_keyring_speaks_of_no_keyring_of_its_own() -> None:
    decision = decide_retry(row(ring(3)), None)
    assert isinstance(decision, Unreadable)
    assert "its fingerprint was made with encryption key 3, and this process has no keyring" in decision.reason
    decision = decide_retry(row(None, fingerprint_recipe="of a newer version"), None)
    assert isinstance(decision, Unreadable)
    assert decision.reason == NEWER_VERSION


def test_expired_row_is_compared_with_nothing() -> None:
    assert isinstance(decide_retry(row(ring(3), expires_at=-1.0), None), Claim)
