"""Webhooks that are received: the key is the sender's id, and the signature is checked before any look-up."""

from __future__ import annotations

import base64
import hmac
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient
from standardwebhooks import Webhook
from stripe import WebhookSignature

from oncekey import SINGLE_TENANT, NotAuthenticated, NotAuthorized, NotExecuted, OnceKey, Policy
from oncekey.core.policy import EffectsName
from oncekey.core.record import Record
from oncekey.errors import ConfigurationError
from oncekey.testing.http.stack import Stack
from oncekey.web.fastapi import protect
from oncekey.webhooks import github, header, hmac_sha256, json_field, shopify, standard_webhooks, stripe

SECRET, OLD, FOREIGN = "whsec_" + base64.b64encode(b"n" * 24).decode(), "whsec_b2xk" + "b2xk" * 6, "whsec_" + "Zm9y" * 8
EVENT = {"id": "evt_1", "type": "invoice.paid", "pending_webhooks": 2}
BAD_IDS: tuple[Any, ...] = (None, "", True, 1.5, {}, [])
Sign = Callable[..., dict[str, str]]


def sign_stripe(body: bytes, secret: str, at: float, key: str) -> dict[str, str]:
    return {"Stripe-Signature": WebhookSignature.generate_signature_header(body.decode(), secret, int(at))}


def sign_github(body: bytes, secret: str, at: float, key: str) -> dict[str, str]:
    digest = hmac.digest(secret.encode(), body, "sha256").hex()
    return {"X-Hub-Signature-256": f"sha256={digest}"} | ({"X-GitHub-Delivery": key} if key else {})


def sign_shopify(body: bytes, secret: str, at: float, key: str) -> dict[str, str]:
    digest = base64.b64encode(hmac.digest(secret.encode(), body, "sha256")).decode()
    ids = {"X-Shopify-Event-Id": key, "X-Shopify-Topic": "orders/paid"} if key else {}
    return {"X-Shopify-Hmac-Sha256": digest} | ids


def sign_standard(body: bytes, secret: str, at: float, key: str) -> dict[str, str]:
    moment = datetime.fromtimestamp(at, UTC)
    signature = Webhook(secret).sign(key or "none", moment, body.decode())
    ids = {"webhook-id": key} if key else {}
    return {"webhook-timestamp": str(int(at)), "webhook-signature": signature} | ids


SENDERS: dict[str, tuple[Callable[..., Policy], Sign]] = {
    "stripe": (stripe, sign_stripe),
    "github": (github, sign_github),
    "shopify": (shopify, sign_shopify),
    "standard": (standard_webhooks, sign_standard),
}
on_both = pytest.mark.parametrize("name", ["asgi", "wsgi"])
TIMED = ("stripe", "standard")


class Sender:
    """One sender, and the app that gets its webhooks at POST /payments."""

    def __init__(self, which: str, make: Callable[..., Stack], *, secret: Any = SECRET, **options: Any) -> None:
        preset, self.sign = SENDERS[which]
        self.which = which
        policy = preset(secret, effects="repeatable")
        self.stack = make(routes={"POST /payments": policy}, scope=_known_accounts, authorize=_refuse, **options)

    def send(
        self, event: Any = EVENT, key: str = "evt_1", *, secret: str = SECRET, at: float | None = None, **more: Any
    ) -> httpx.Response:
        body = json.dumps(event).encode()
        headers = self.sign(body, secret, time.time() if at is None else at, key)
        return self.stack.post(None, content=body, headers={"Content-Type": "application/json", **headers, **more})

    @property
    def rows(self) -> list[Record]:
        return self.stack.store.listing()


def _known_accounts(request: Any) -> str:
    raise NotAuthenticated("no account")


def _refuse(request: Any, operation: str) -> None:
    raise NotAuthorized("no permission")


@pytest.fixture
def make(make_stack: Any, name: str) -> Callable[..., Stack]:
    return lambda **options: make_stack(name, **options)


@pytest.fixture(params=SENDERS)
def which(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- the four senders --------------------------------------------------------------------------------------------------


def test_event_that_is_delivered_again_runs_once(make: Callable[..., Stack], which: str) -> None:
    """In every framework, though the app's scope and authorize functions know no such caller."""
    sender = Sender(which, make)
    first, again = sender.send(), sender.send(at=time.time() + 1)
    assert (first.status_code, again.status_code, sender.stack.runs) == (201, 201, 1)
    assert (again.content, again.headers["idempotency-replayed"]) == (first.content, "true")
    assert "idempotency-key" not in first.headers
    (row,) = sender.rows
    assert row.scope.startswith(f"sender:{'standard-webhooks' if which == 'standard' else which}\x1f")
    assert row.key == ("evt_1|orders/paid" if which == "shopify" else "evt_1")


@on_both
def test_bad_signature_is_401_and_leaves_no_row(make: Callable[..., Stack], which: str) -> None:
    sender = Sender(which, make)
    names = {"stripe": "Stripe-Signature", "github": "X-Hub-Signature-256"}
    name = names.get(which, "X-Shopify-Hmac-Sha256" if which == "shopify" else "webhook-signature")
    lines: list[dict[str, Any]] = [{name: bad} for bad in ("", "nonsense", "v1,", "t=x,v1=y", "sha256=zz", "sha256=")]
    refused = [
        sender.send(secret=FOREIGN),
        *[sender.send(**each) for each in lines],
    ]
    assert [answer.status_code for answer in refused] == [401] * len(refused)
    assert {answer.json()["type"] for answer in refused} == {"urn:oncekey:problem:signature-invalid"}
    assert (sender.rows, sender.stack.runs) == ([], 0)


@on_both
def test_known_key_under_a_bad_signature_is_not_replayed(make: Callable[..., Stack], which: str) -> None:
    sender = Sender(which, make)
    sender.send()
    assert sender.send(secret=FOREIGN).status_code == 401


@on_both
def test_event_without_an_id_is_400_and_leaves_no_row(make: Callable[..., Stack], which: str) -> None:
    sender = Sender(which, make)
    answers = [sender.send({"type": "invoice.paid"}, key="")]
    if which == "stripe":
        answers += [sender.send({**EVENT, "id": bad}) for bad in BAD_IDS] + [sender.send([])]
    # Standard Webhooks sign the id, so there is no signature without it.
    assert {answer.status_code for answer in answers} == {401 if which == "standard" else 400}
    if which != "standard":
        assert {answer.json()["type"] for answer in answers} == {"urn:oncekey:problem:key-missing"}
    assert (sender.rows, sender.stack.runs) == ([], 0)


@on_both
@pytest.mark.parametrize("which", TIMED)
@pytest.mark.parametrize(("outside", "inside"), [(-301, -240), (360, 240)])
def test_signature_outside_of_the_window_is_refused(
    make: Callable[..., Stack], which: str, outside: float, inside: float
) -> None:
    """A signature from the future comes nearer while the test runs, so it is a minute outside."""
    sender = Sender(which, make)
    answer = sender.send(at=time.time() + outside)
    assert (answer.status_code, sender.rows) == (401, [])
    assert sender.send(at=time.time() + inside).status_code == 201


@on_both
def test_secret_that_is_replaced_counts_beside_the_new_one(make: Callable[..., Stack], which: str) -> None:
    sender = Sender(which, make, secret=[SECRET, OLD])
    assert sender.send(secret=OLD).status_code == 201
    assert sender.send(secret=SECRET).headers["idempotency-replayed"] == "true"
    assert sender.send(secret=FOREIGN).status_code == 401


@on_both
@pytest.mark.parametrize("profile", ["ietf", "stripe", "governance"])
def test_refusals_have_the_form_of_each_profile(make: Callable[..., Stack], profile: str) -> None:
    sender = Sender("stripe", make, profile=profile)
    bad, missing = sender.send(secret=FOREIGN), sender.send({"type": "x"})
    assert (bad.status_code, missing.status_code) == (401, 400)
    texts = {
        "ietf": lambda body: body["type"].rpartition(":")[2],
        "stripe": lambda body: body["error"]["code"],
        "governance": lambda body: body["fault"]["errors"][0]["errorCode"],
    }
    said = {
        "ietf": ("signature-invalid", "key-missing"),
        "stripe": ("signature_invalid", "idempotency_key_missing"),
        "governance": ("SIGNATURE_INVALID", "IDEMPOTENCY_KEY_MISSING"),
    }
    assert (texts[profile](bad.json()), texts[profile](missing.json())) == said[profile]
    assert SECRET not in bad.text + missing.text


# -- one sender, one framework -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["asgi"])
def test_stripes_counter_of_open_deliveries_does_not_make_another_event(make: Callable[..., Stack]) -> None:
    sender = Sender("stripe", make)
    sender.send()
    assert sender.send({**EVENT, "pending_webhooks": 1}).headers["idempotency-replayed"] == "true"
    assert sender.send({**EVENT, "type": "invoice.voided"}).status_code == 422


@on_both
def test_one_event_of_shopify_runs_once_for_each_topic(make: Callable[..., Stack]) -> None:
    sender = Sender("shopify", make)
    topics: list[dict[str, Any]] = [
        {"X-Shopify-Topic": topic} for topic in ("orders/paid", "orders/updated", "orders/paid")
    ]
    answers = [sender.send(**topic) for topic in topics]
    assert ["idempotency-replayed" in answer.headers for answer in answers] == [False, False, True]


@on_both
def test_same_event_at_two_endpoints_runs_at_each(make: Callable[..., Stack]) -> None:
    policy = github(SECRET, effects="repeatable")
    stack = make(routes={"POST /payments": policy, "POST /payments/{id}/refunds": policy})
    headers = {"Content-Type": "application/json", **sign_github(b"{}", SECRET, 0, "d-1")}
    answers = [
        stack.post(None, content=b"{}", headers=headers, path=path)
        for path in ("/payments", "/payments/1/refunds", "/payments/1/refunds")
    ]
    assert [answer.status_code for answer in answers] == [201] * 3
    assert stack.runs == 2


@on_both
def test_store_that_is_down_is_503_so_that_the_sender_tries_again(make: Callable[..., Stack]) -> None:
    sender = Sender("stripe", make)
    sender.stack.store.down.add("reserve")
    assert sender.send().status_code == 503
    sender.stack.store.down.clear()
    assert sender.send().status_code == 201


@on_both
def test_bad_signature_is_refused_without_a_look_up(make: Callable[..., Stack], which: str) -> None:
    """A store that is down would be a 503."""
    sender = Sender(which, make)
    sender.stack.store.down |= {"reserve", "read", "swap"}
    assert [sender.send(secret=FOREIGN).status_code for _ in range(2)] == [401, 401]


@on_both
def test_large_body_is_verified_too(make: Callable[..., Stack]) -> None:
    sender = Sender("github", make)
    event = {"text": "x" * 100_000}
    assert sender.send(event, secret=FOREIGN).status_code == 401
    assert [sender.send(event).status_code for _ in range(2)] == [201, 201]
    assert sender.stack.runs == 1
    assert sender.send({"text": "x" * 2_000_000}).status_code == 413


# -- key_from and verify of your own -----------------------------------------------------------------------------------


@on_both
def test_key_from_takes_the_place_of_the_header(make: Callable[..., Stack]) -> None:
    """Without a sender, the scope function says whose keys they are; an Idempotency-Key is then ignored."""
    policy = Policy(key_from=header("X-Request-Nr"))
    stack = make(routes={"POST /payments": policy}, scope=lambda request: request.headers["x-account"])

    def post(number: str, account: str = "ann", key: str | None = None) -> httpx.Response:
        return stack.post(key, headers={"X-Request-Nr": number, "X-Account": account})

    answers = [post("7"), post("7", key="other"), post("7", "bob"), post("8")]
    assert ["idempotency-replayed" in answer.headers for answer in answers] == [False, True, False, False]
    assert {(row.scope, row.key) for row in stack.store.listing()} == {("ann", "7"), ("bob", "7"), ("ann", "8")}
    bad = [post(""), post("   "), post("x" * 256), post("a,b"), post("k\x7f")]
    assert [answer.status_code for answer in bad] == [400] * 5
    assert stack.post(None, headers={"X-Account": "ann"}).json()["type"] == "urn:oncekey:problem:key-missing"


@on_both
def test_json_field_reads_nested_texts_and_whole_numbers(make: Callable[..., Stack]) -> None:
    stack = make(routes={"POST /payments": Policy(key_from=json_field("event", "id"))})
    for event, key in (({"event": {"id": 42}}, "42"), ({"event": {"id": "e-1"}}, "e-1")):
        assert stack.post(None, body=event).status_code == 201
        assert stack.record(key) is not None
    bad = [{}, {"event": 1}, {"event": {"id": True}}, {"event": {"id": "ü"}}, []]
    assert [stack.post(None, body=event).status_code for event in bad] == [400] * 5
    assert stack.post(None, content=b"{not json", headers={"Content-Type": "application/json"}).status_code == 400


@on_both
@pytest.mark.parametrize("answer", [False, None, 1, "yes", NotAuthenticated("unknown sender"), KeyError("signature")])
def test_only_true_lets_a_request_pass(
    make: Callable[..., Stack], answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def verify(request: Any, body: bytes) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    stack = make(routes={"POST /payments": Policy(verify=verify)})
    said = stack.post()
    assert (said.status_code, stack.runs, stack.store.listing()) == (401, 0, [])
    assert ("its verify function raised" in caplog.text) == isinstance(answer, KeyError)
    assert ("unknown sender" in said.text) == isinstance(answer, NotAuthenticated)


@on_both
def test_verify_of_an_ordinary_route_leaves_scope_and_header_as_they_are(make: Callable[..., Stack]) -> None:
    policy = Policy(verify=hmac_sha256("X-Signature", "s"))
    stack = make(routes={"POST /payments": policy}, scope=lambda request: "ann")
    signed = {"X-Signature": hmac.digest(b"s", b"{}", "sha256").hex(), "Content-Type": "application/json"}
    first = stack.post("k-1", content=b"{}", headers=signed)
    assert (first.status_code, first.headers["idempotency-key"]) == (201, "k-1")
    assert stack.record("k-1", "ann") is not None
    assert stack.post("k-1", content=b"{ }", headers=signed).status_code == 401


@on_both
def test_key_from_that_returns_no_text_is_an_error_of_the_app(make: Callable[..., Stack]) -> None:
    stack = make(routes={"POST /payments": Policy(key_from=lambda request, body: 7)})  # type: ignore[arg-type,return-value]
    assert (stack.post(None).status_code, stack.runs) == (500, 0)


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("which", "days"), [("stripe", 4), ("github", 4), ("shopify", 1), ("standard", 4)])
def test_preset_keeps_keys_for_a_day_longer_than_the_sender_retries(which: str, days: int) -> None:
    preset = SENDERS[which][0]
    assert preset(SECRET, effects="external").ttl >= timedelta(days=days)
    assert preset(SECRET, effects="external", ttl=timedelta(days=30)).ttl == timedelta(days=30)
    with pytest.raises(ConfigurationError, match="a day longer"):
        preset(SECRET, effects="external", ttl=timedelta(hours=24))


def test_preset_wants_effects_declared(which: str) -> None:
    with pytest.raises(TypeError, match="effects"):
        SENDERS[which][0](SECRET)


@pytest.mark.parametrize("secret", ["", " ", [], [SECRET, ""], None])
def test_preset_refuses_an_empty_secret(which: str, secret: Any) -> None:
    with pytest.raises(ConfigurationError, match="missing or empty"):
        SENDERS[which][0](secret, effects="external")


def test_preset_keeps_its_own_key_and_signature() -> None:
    effects: EffectsName = "external"
    with pytest.raises(ConfigurationError, match="the preset is for"):
        github(SECRET, effects=effects, verify=lambda request, body: True)
    with pytest.raises(ConfigurationError, match="base64"):
        standard_webhooks("whsec_é", effects=effects)


async def _async(request: Any, body: bytes) -> Any: ...


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"key_from": "id"}, "function"),
        ({"key_from": header}, r"header\('webhook-id'\)"),
        ({"verify": True}, "function"),
        ({"key_from": _async}, "async"),
        ({"verify": _async}, "async"),
        ({"key_from": header("id"), "required": False}, "required=False"),
        ({"verify": print, "required": False}, "required=False"),
        ({"key_from": header("id"), "key_format": "uuid"}, "key_format"),
        ({"sender": "stripe"}, "verify"),
        ({"sender": "", "verify": print}, "printable"),
        ({"sender": "a\x1fb", "verify": print}, "printable"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        Policy(**options)


@pytest.mark.parametrize("source", [header, lambda: header("a b"), json_field, lambda: json_field("")])
def test_sources_without_a_name_are_refused(source: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError, match="such as"):
        source()


def test_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "stripe", None)
    with pytest.raises(ConfigurationError, match=r"oncekey\[stripe\]"):
        stripe(SECRET, effects="external")


@pytest.mark.parametrize("name", ["fastapi-async"])
def test_openapi_declares_the_signature_and_no_header(make: Callable[..., Stack]) -> None:
    stack = Sender("stripe", make).stack
    operation = stack.app.openapi()["paths"]["/payments"]["post"]
    assert not any(one["name"] == "Idempotency-Key" for one in operation.get("parameters", []))
    assert "signature-invalid" in operation["responses"]["401"]["content"]["application/problem+json"]["examples"]
    assert "403" not in operation["responses"]


# -- what a sender cannot know -----------------------------------------------------------------------------------------


def _hook(effects: Any, answers: list[Any], **options: Any) -> tuple[TestClient, OnceKey]:
    app = FastAPI()
    once = OnceKey("memory://", scope=SINGLE_TENANT, routes={"POST /hook": github(SECRET, effects=effects, **options)})
    protect(app, once)

    @app.post("/hook")
    async def hook() -> JSONResponse:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return JSONResponse({}, answer)

    return TestClient(app), once


def _deliver(client: TestClient, path: str = "/hook") -> int:
    body = json.dumps(EVENT).encode()
    return client.post(path, content=body, headers=sign_github(body, SECRET, 0, "d-1")).status_code


@pytest.mark.parametrize(
    ("effects", "options", "second"),
    [
        ("repeatable", {}, 200),
        ("external", {}, 404),
        ("external", {"final_client_errors": False}, 200),
        ("repeatable", {"final_client_errors": True}, 404),
    ],
)
def test_delivery_after_a_4xx_of_the_handler_runs_unless_effects_forbid_it(
    effects: str, options: dict[str, Any], second: int
) -> None:
    """A sender cannot change its event, so a stored 404 would lose it for ever."""
    client, once = _hook(effects, [404, 200], **options)
    with client:
        assert (_deliver(client), _deliver(client)) == (404, second)
    once.close()


@pytest.mark.parametrize(
    ("effects", "options", "first", "answers"),
    [
        ("repeatable", {}, 500, (500, 200)),
        ("external", {}, 500, (500, 409)),
        ("external", {"on_server_error": "retry"}, 500, (500, 200)),
        ("external", {}, NotExecuted("nothing happened"), (503, 200)),
    ],
)
def test_delivery_after_a_5xx_of_the_handler_runs_unless_effects_forbid_it(
    effects: str, options: dict[str, Any], first: Any, answers: tuple[int, int]
) -> None:
    """As docs/webhooks.md says it: with ``external`` a 5xx does not bring the event again."""
    client, once = _hook(effects, [first, 200], **options)
    with client:
        assert (_deliver(client), _deliver(client)) == answers
    once.close()


def test_signed_route_that_no_route_of_the_app_has_is_an_error_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """With only='declared' the real route would take unsigned webhooks, and the log would not say so."""
    app, router = FastAPI(), APIRouter()
    once = OnceKey("memory://", scope=SINGLE_TENANT, routes={"POST /hook": github(SECRET, effects="repeatable")})
    protect(app, once, only="declared")

    @router.post("/hook")
    async def hook() -> dict[str, str]:
        return {}

    app.include_router(router, prefix="/v1")
    with caplog.at_level("ERROR", "oncekey"), TestClient(app):
        pass
    (told,) = [line for line in caplog.messages if "no signature is checked" in line]
    assert "POST /hook" in told
    once.close()
