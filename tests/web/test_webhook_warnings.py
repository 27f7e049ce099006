"""A refused signature is told in the log: a wrong secret, a wrong clock or no signature, each with what to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from oncekey import Policy
from oncekey.telemetry import route_warnings
from oncekey.testing.http.stack import Stack
from tests.web.test_webhooks import FOREIGN, SECRET, SENDERS, TIMED, Sender, on_both

UNSIGNED = {
    "stripe": "Stripe-Signature",
    "github": "X-Hub-Signature-256",
    "shopify": "X-Shopify-Hmac-Sha256",
    "standard": "webhook-signature",
}


@pytest.fixture
def make(make_stack: Any, name: str) -> Callable[..., Stack]:
    return lambda **options: make_stack(name, **options)


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING" and " with 401" in each.msg]


@on_both
@pytest.mark.parametrize("which", SENDERS)
def test_wrong_secret_is_told_once_with_what_to_compare(
    make: Callable[..., Stack], which: str, caplog: pytest.LogCaptureFixture
) -> None:
    sender = Sender(which, make)
    for number in range(3):
        assert sender.send(key=f"evt_{number}", secret=FOREIGN).status_code == 401
    (line,) = _told(caplog)
    assert line.startswith("POST /payments refused a request with 401, because the signature does not match the secret")
    assert "compare the secret with the one that the sender shows" in line
    assert SECRET not in line
    assert sender.send().status_code == 201
    assert len(_told(caplog)) == 1


@on_both
@pytest.mark.parametrize("which", TIMED)
@pytest.mark.parametrize(("late", "when"), [(4000, "s ago"), (-4000, "s in the future")])
def test_wrong_clock_is_told_with_its_seconds(
    make: Callable[..., Stack], which: str, late: int, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert Sender(which, make).send(at=time.time() - late).status_code == 401
    (line,) = _told(caplog)
    seconds = int(line.partition("but was made ")[2].partition(" ")[0].replace(",", ""))
    assert abs(seconds - abs(late)) < 60
    assert f"{when}, and 300 s are allowed. Compare the clock" in line


@on_both
@pytest.mark.parametrize("which", SENDERS)
def test_missing_signature_is_told_with_the_header(
    make: Callable[..., Stack], which: str, caplog: pytest.LogCaptureFixture
) -> None:
    sender = Sender(which, make)
    unsigned: dict[str, Any] = {UNSIGNED[which]: ""}
    answer = sender.send(**unsigned)
    assert answer.status_code == 401
    (line,) = _told(caplog)
    assert f"no usable signature: it has no header {UNSIGNED[which]}. " in line
    assert UNSIGNED[which] not in answer.text  # the sender is not told


@pytest.mark.parametrize("name", ["asgi"])
@pytest.mark.parametrize(
    ("which", "headers", "words"),
    [
        ("github", {"X-Hub-Signature-256": "sha1=00"}, "its header X-Hub-Signature-256 is not of the form sha256=…"),
        ("shopify", {"X-Shopify-Hmac-Sha256": "!"}, "is not of the form …, in base64"),
        ("stripe", {"Stripe-Signature": "t=x,v1=y"}, "does not match the secret"),
        ("standard", {"webhook-timestamp": "soon"}, "does not match the secret"),
        ("standard", {"webhook-timestamp": "1e300"}, "does not match the secret"),
    ],
)
def test_odd_headers_are_told_and_raise_nothing(
    make: Callable[..., Stack], which: str, headers: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert Sender(which, make).send(**headers).status_code == 401
    (line,) = _told(caplog)
    assert words in line


@pytest.mark.parametrize("name", ["asgi"])
def test_signed_body_that_is_not_json_is_told(make: Callable[..., Stack], caplog: pytest.LogCaptureFixture) -> None:
    sender = Sender("standard", make)
    body = b"not json"
    headers = sender.sign(body, SECRET, time.time(), "evt_1")
    assert sender.stack.post(None, content=body, headers=headers).status_code == 401
    (line,) = _told(caplog)
    assert "its signature matches, but its body is not JSON" in line


@on_both
def test_refusals_are_told_again_after_a_minute_with_their_number(
    make: Callable[..., Stack], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = Sender("github", make)
    for _ in range(4):
        sender.send(secret=FOREIGN)
    warnings = sender.stack.once.engine.emitter.warnings
    now = time.monotonic() + route_warnings.PAUSE_SECONDS
    monkeypatch.setattr(warnings, "_clock", lambda: now)
    for _ in range(4):
        sender.send(secret=FOREIGN)
    first, second = _told(caplog)
    assert " refused a request with 401" in first
    assert " refused 4 requests since the last such line with 401" in second


@on_both
def test_own_verify_function_that_refuses_is_told(make: Callable[..., Stack], caplog: pytest.LogCaptureFixture) -> None:
    stack = make(scope=lambda request: "acme", policy=Policy(verify=lambda request, body: False))
    answer: httpx.Response = stack.post("k-1")
    assert answer.status_code == 401
    (line,) = _told(caplog)
    assert "its verify function did not return True" in line


@on_both
def test_verify_function_that_raises_is_told_once_with_its_traceback_only(
    make: Callable[..., Stack], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(request: Any, body: bytes) -> bool:
        raise RuntimeError("a bug")

    stack = make(scope=lambda request: "acme", policy=Policy(verify=broken))
    assert [stack.post(key).status_code for key in ("k-1", "k-2")] == [401, 401]
    (line,) = _told(caplog)
    assert "its verify function raised" in line
