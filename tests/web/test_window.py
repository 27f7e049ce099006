"""``Policy(max_age=…)``: a new request must be young, and a known key is answered at any age."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import httpx
import pytest

from oncekey import SINGLE_TENANT, OnceKey, Policy, Refused
from oncekey.core.guards import moment
from oncekey.errors import ConfigurationError
from oncekey.telemetry import events
from oncekey.testing.http.stack import Stack, until
from oncekey.webhooks import hmac_sha256

HEADER = "Idempotency-Timestamp"
WINDOW = timedelta(minutes=10)
on_both = pytest.mark.parametrize("name", ["asgi", "wsgi"])


@pytest.fixture
def make(make_stack: Any, name: str) -> Callable[..., Stack]:
    def made(policy: Policy | None = None, **options: Any) -> Stack:
        stack: Stack = make_stack(name, policy=policy or Policy(max_age=WINDOW), **options)
        return stack

    return made


def ask(stack: Stack, seconds: float | str | None, key: str = "k-1", **more: Any) -> httpx.Response:
    """A request that was made so many seconds ago, or with this text as its time."""
    text = seconds if isinstance(seconds, str) else str(time.time() - (seconds or 0))
    return stack.post(key, headers={} if seconds is None else {HEADER: text}, **more)


def test_young_request_runs_and_old_one_is_refused(make: Callable[..., Stack]) -> None:
    """In every framework; and what is refused writes nothing, and leaves its key free."""
    stack = make()
    refused = [ask(stack, seconds) for seconds in (605, 86_400, -75, None)]
    assert [answer.status_code for answer in refused] == [400] * 4
    assert {answer.json()["type"] for answer in refused} == {"urn:oncekey:problem:timestamp-refused"}
    assert (stack.store.listing(), stack.runs) == ([], 0)
    assert [ask(stack, seconds, f"k-{seconds}").status_code for seconds in (0, 590, -50)] == [201] * 3


@on_both
def test_known_key_is_answered_at_any_age(make: Callable[..., Stack]) -> None:
    stack = make()
    first = ask(stack, 5)
    again = [ask(stack, seconds) for seconds in (5, 100_000, -1000, None, "nonsense")]
    assert {answer.content for answer in again} == {first.content}
    assert {answer.headers["idempotency-replayed"] for answer in again} == {"true"}
    assert ask(stack, 100_000, body={"amount": 7}).status_code == 422
    assert stack.runs == 1


@on_both
def test_old_duplicate_of_a_running_request_gets_409(make: Callable[..., Stack]) -> None:
    stack = make()
    first = stack.start(m="slow", headers={HEADER: str(time.time())})
    stack.payments.entered.wait(10)
    assert ask(stack, 100_000, m="slow").status_code == 409
    stack.payments.go.set()
    assert first.result(10).status_code == 201


@on_both
def test_old_request_does_not_run_after_the_first_left_its_key_unused(
    make: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the first, which is discarded: the key is new again, and the request is too old for a new one."""
    stack = make(Policy(max_age=WINDOW, in_flight="wait", effects="repeatable"))
    payments, entries = stack.payments, []

    def refuse(mode: str) -> Any:
        entries.append(mode)
        payments.entered.set()
        payments.go.wait(10)
        raise Refused("not now")

    async def refuse_async(mode: str) -> Any:
        return await asyncio.to_thread(refuse, mode)

    monkeypatch.setattr(payments, "handle", refuse)
    monkeypatch.setattr(payments, "handle_async", refuse_async)
    first = stack.start(headers={HEADER: str(time.time())})
    payments.entered.wait(10)
    old = stack.start(headers={HEADER: "1000"})
    until(lambda: stack.once.engine.waiters, "the second request waits")
    payments.go.set()
    assert first.result(10).status_code == 422
    assert old.result(20).json()["type"] == "urn:oncekey:problem:timestamp-refused"
    assert len(entries) == 1


@on_both
def test_expired_key_counts_as_new(make: Callable[..., Stack]) -> None:
    stack = make()
    ask(stack, 0)
    stack.store._clock = lambda: time.time() + 10**9
    assert ask(stack, 100_000).status_code == 400
    assert ask(stack, 0).status_code == 201
    assert stack.runs == 2


@on_both
def test_time_is_no_part_of_the_fingerprint(make: Callable[..., Stack]) -> None:
    stack = make(Policy(max_age=WINDOW, timestamp_header="X-Made-At"))
    made = [stack.post(headers={"X-Made-At": str(time.time() - seconds)}) for seconds in (0, 5)]
    assert made[1].headers["idempotency-replayed"] == "true"


@on_both
def test_signed_time_is_believed_only_with_its_signature(
    make: Callable[..., Stack], caplog: pytest.LogCaptureFixture
) -> None:
    def verify(request: Any, body: bytes) -> bool:
        signed = hmac.digest(b"secret", request.headers[HEADER].encode() + body, "sha256").hex()
        return hmac.compare_digest(signed, request.headers.get("x-signature", ""))

    stack = make(Policy(max_age=WINDOW, verify=verify))
    assert "without verify" not in caplog.text
    old, now = str(time.time() - 5000), str(time.time())
    signature = hmac.digest(b"secret", old.encode() + b"{}", "sha256").hex()
    headers = {"Content-Type": "application/json", "X-Signature": signature}
    forged = stack.post(content=b"{}", headers=headers | {HEADER: now})
    honest = stack.post(content=b"{}", headers=headers | {HEADER: old})
    assert (forged.status_code, honest.status_code, stack.runs) == (401, 400, 0)


@pytest.mark.parametrize("name", ["asgi"])
def test_unsigned_time_is_warned_of_once(make: Callable[..., Stack], caplog: pytest.LogCaptureFixture) -> None:
    make(routes={"POST /payments": Policy(max_age=WINDOW)})
    [line] = [line for line in caplog.messages if "not an attacker" in line]
    assert "POST /payments: max_age without verify" in line


@pytest.mark.parametrize(
    ("verify", "warned"),
    [
        (hmac_sha256("X-Signature", "the secret"), True),
        (lambda request, body: True, False),  # it may check a time: oncekey cannot know
    ],
)
def test_signature_over_the_body_alone_is_warned_of_with_its_route(
    verify: Any, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    signed = Policy(max_age=WINDOW, verify=verify)
    once = OnceKey("memory://", scope=SINGLE_TENANT, routes={"POST /hook": signed, "POST /other": Policy()})

    @once.policy(signed)
    def declared() -> None: ...

    once.close()
    lines = [line for line in caplog.messages if "not an attacker" in line]
    assert len(lines) == (2 if warned else 0)
    for line, name in zip(lines, ("(POST /hook", "declared"), strict=False):
        assert f"{name}: max_age with a signature over the body alone)" in line


@on_both
@pytest.mark.parametrize("profile", ["ietf", "stripe", "governance"])
def test_refusal_has_the_form_of_each_profile(make: Callable[..., Stack], profile: str) -> None:
    stack = make(profile=profile)
    answer = ask(stack, None)
    words = {"ietf": "timestamp-refused", "stripe": "timestamp_refused", "governance": "TIMESTAMP_REFUSED"}
    assert (answer.status_code, words[profile] in answer.text, HEADER in answer.text) == (400, True, True)
    assert [event.reason for event in stack.saw(events.TurnedAway)] == ["timestamp-refused"]


@pytest.mark.parametrize("name", ["asgi"])
def test_milliseconds_are_named_in_the_answer(make: Callable[..., Stack]) -> None:
    assert "not milliseconds" in ask(make(), str(int(time.time() * 1000))).text


@on_both
def test_store_that_is_down_is_503_for_an_old_request(make: Callable[..., Stack]) -> None:
    stack = make()
    stack.store.down.add("read")
    assert ask(stack, 100_000).status_code == 503


# -- the time itself ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1700000000", 1_700_000_000),
        (" 1700000000.25 ", 1_700_000_000.25),
        ("2023-11-14T22:13:20Z", 1_700_000_000),
        ("2023-11-14t23:13:20.5+01:00", 1_700_000_000.5),
        ("2023-11-14 22:13:20.123456789Z", 1_700_000_000.123456),
        ("2016-12-31T23:59:60Z", 1_483_228_799),
        *[(bad, None) for bad in ("", "x", "-5", "1e9", "nan", "inf", "2023-11-14", "2023-11-14T22:13:20", "\u0661")],
        *[(bad, None) for bad in ("2023-13-14T22:13:20Z", "2023-11-14T25:13:20Z", "0000-01-01T00:00:00Z", "1, 2")],
        ("9" * 400, None),
    ],
)
def test_time_is_read_in_two_forms(text: str, seconds: float | None) -> None:
    assert moment(text) == (None if seconds is None else pytest.approx(seconds, abs=1e-5))


def test_every_spelling_of_now_is_taken() -> None:
    now = datetime.now(timezone(timedelta(hours=-7)))
    for text in (now.isoformat(), now.astimezone(UTC).isoformat().replace("+00:00", "Z"), str(now.timestamp())):
        assert moment(text) == pytest.approx(now.timestamp(), abs=1e-3)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"max_age": 600}, "timedelta"),
        ({"max_age": timedelta(0)}, "longer than zero"),
        ({"max_age": timedelta(hours=24)}, "make ttl longer"),
        ({"max_age": timedelta(hours=23), "skew": timedelta(hours=2)}, "make ttl longer"),
        ({"skew": timedelta(seconds=-1)}, "longer than zero"),
        ({"max_age": WINDOW, "timestamp_header": "a b"}, "name of a header"),
        ({"max_age": WINDOW, "timestamp_header": "x-at", "fingerprint_headers": ["X-At"]}, "no part of it"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        Policy(**options)


def test_window_may_be_as_long_as_the_ttl() -> None:
    assert Policy(max_age=timedelta(hours=24) - timedelta(seconds=60)).guarded
