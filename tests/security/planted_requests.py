"""Every way that a request, a question for a key, a call and a message can go, with planted secrets in all of them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import httpx

from oncekey import OnceKey
from oncekey.errors import OnceKeyError
from tests.security.planted import MARK, PERSONAL, Witness, secret, sentence

KEYS = {
    name: f"{secret('key')}-{name}" for name in ("ok", "plain", "unknown", "half", "effect", "later", "sql", "large")
}
APPS_OWN_WORDS = ("/raises/refused",)
"""Its handler raises ``Refused``, whose words are for the client."""


def headers(key: str | None, **more: str) -> dict[str, str]:
    sent = {"Authorization": f"Bearer {secret('authorization')}", "Cookie": f"session={secret('cookie')}"}
    return (
        sent | ({} if key is None else {"Idempotency-Key": key}) | {name.replace("_", "-"): more[name] for name in more}
    )


def client_of(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://api.test")


def hear_refusal(witness: Witness, answer: httpx.Response) -> int:
    """A refusal, with all headers but that with the client's own key. Answers below 400 are the app's own."""
    if answer.request.url.path in APPS_OWN_WORDS:
        assert MARK in answer.text
    elif answer.status_code >= 400:
        echoed = [item for item in answer.headers.items() if item[0] != "idempotency-key"]
        witness.hear("answer", f"{answer.status_code} {echoed} {answer.text}")
    return answer.status_code


async def ask(witness: Witness, app: Any, path: str, key: str | None, body: Any = None, **more: str) -> int:
    async with client_of(app) as client:
        sent = {"card": secret("body")} if body is None else body
        asked = client.post(f"{path}?token={secret('query')}", headers=headers(key, **more), json=sent)
        return hear_refusal(witness, await asked)


def new(name: str) -> str:
    return f"{secret('key')}-{name}"


REQUESTS: tuple[tuple[int, str, str | None, dict[str, Any]], ...] = (
    *(
        (201, "/ok", KEYS["ok"], {}),
        (201, "/ok", KEYS["ok"], {}),
        (422, "/ok", KEYS["ok"], {"body": {"card": "another"}}),
    ),
    *((200, "/large", KEYS["large"], {}), (200, "/large", KEYS["large"], {})),
    *((400, "/ok", f"{new('a')},{new('b')}", {}), (400, "/ok", None, {}), (413, "/small", new("small"), {})),
    *((500, "/raises/plain", KEYS["plain"], {}), (409, "/raises/plain", KEYS["plain"], {})),
    *((409, "/raises/unknown", KEYS["unknown"], {}), (503, "/raises/not", new("not"), {})),
    (422, "/raises/refused", new("refused"), {}),
    *((500, "/repeatable", new("r"), {}), (500, "/repeatable", new("r"), {}), (500, "/sql", KEYS["sql"], {})),
    (500, "/phased", KEYS["half"], {"body": {"then": "half"}}),
    (500, "/phased", KEYS["effect"], {"body": {"then": "effect"}}),
    *((202, "/later", KEYS["later"], {}), (202, "/later", KEYS["later"], {})),
    *(
        (200, "/personal", f"{MARK}@example.com", {}),
        (400, "/refuses", f"{MARK}@example.org", {}),
        (401, "/signed", new("s"), {}),
    ),
    *((400, "/refuses", f'"{key}"', {}) for key in PERSONAL),
    *((200, "/personal", f'"{key}"', {}) for key in PERSONAL),
    *((400, "/aged", new("aged"), {"idempotency_timestamp": secret("time")}), (400, "/aged", new("aged"), {})),
    *((200, "/limited", new("first"), {}), (429, "/limited", new("second"), {}), (403, "/forbidden", new("f"), {})),
    (200, "/bound", new("bound"), {"x_user": secret("user")}),
    (422, "/bound", new("bound"), {"x_user": secret("other-user")}),
    *((401, "/ok", new("nobody"), {"x_nobody": "1"}), (500, "/ok", "broken", {"x_broken": "1"})),
)
"""The status of each answer, and what is asked."""


async def requests(witness: Witness, app: Any) -> None:
    for status, path, key, more in REQUESTS:
        assert (path, await ask(witness, app, path, key, **more)) == (path, status)
    together = await asyncio.gather(*(ask(witness, app, "/slow", new("slow")) for _ in range(2)))
    assert sorted(together) == [200, 409]


async def questions(witness: Witness, app: Any) -> None:
    """The status endpoint, until the limit of misses."""
    asked = (KEYS["ok"], KEYS["plain"], KEYS["later"], *(new(f"guess-{number}") for number in range(4)))
    async with client_of(app) as client:
        answers = [await client.get(f"/idempotency/{key}", headers=headers(None)) for key in asked]
        answers += [await client.get("/idempotency/", headers=headers(f"{new('a')},{new('b')}"))]
    assert [hear_refusal(witness, answer) for answer in answers] == [201, 409, 202, 404, 404, 404, 429, 400]


def functions(witness: Witness, once: OnceKey) -> None:
    """Functions and messages: oncekey's own exceptions are heard, those of the app are its own."""

    @once.function("charge", key="key", scope=lambda key, card: "acme")
    def charge(key: str, card: str) -> None:
        raise RuntimeError(sentence("function"))

    def deliver(body: str) -> None:
        with once.message("payments", new("message"), body):
            raise RuntimeError(sentence("message"))

    calls = [partial(charge, new("function"), secret(name)) for name in ("argument", "argument", "other")]
    calls += [partial(deliver, secret(name)) for name in ("message", "message", "other")]
    for call in calls:
        try:
            call()
        except OnceKeyError as error:
            witness.hear("exception", f"{error} {error!r} {getattr(error, 'outcome', None)}")
        except RuntimeError:
            pass  # the app's own
