"""The apps and the table of docs/webhooks.md, as they stand there."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from stripe import WebhookSignature

from oncekey import OnceKey
from oncekey.web.openapi import in_words
from oncekey.webhooks import github, shopify, standard_webhooks, stripe

PAGE = (Path(__file__).parents[2] / "docs/webhooks.md").read_text("utf-8")
SECRET = "whsec_" + "bmV3" * 8


def example(word: str) -> dict[str, Any]:
    """What the example with this word defines."""
    source = next(one for one in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if word in one)
    names: dict[str, Any] = {"__name__": "example_of_the_docs"}
    exec(compile(source, "docs/webhooks.md", "exec"), names)
    return names


async def test_first_example_takes_an_event_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRIPE_WEBHOOK_SECRET", SECRET)
    names = example("from oncekey.webhooks import stripe")
    body = json.dumps({"id": "evt_1", "type": "invoice.paid"})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(names["app"]), base_url="http://docs") as client:

        async def deliver(secret: str) -> httpx.Response:
            signed = WebhookSignature.generate_signature_header(body, secret, int(time.time()))
            headers = {"Stripe-Signature": signed, "Content-Type": "application/json"}
            return await client.post("/stripe", content=body, headers=headers)

        answers = [await deliver(secret) for secret in (SECRET, SECRET, "whsec_bad")]
    assert [answer.status_code for answer in answers] == [200, 200, 401]
    assert capsys.readouterr().out == "once: evt_1 invoice.paid\n"
    await names["once"].aclose()


def test_second_example_makes_policies_for_other_senders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    once: OnceKey = example("X-Acme-Event")["once"]
    acme, orders = (once.routes.match("POST", path) for path in ("/acme", "/orders"))
    assert acme is not None
    assert orders is not None
    assert (acme.policy.sender_scope, repr(orders.policy.key_from)) == ("sender:acme", "json_field('order', 'id')")
    once.close()


@pytest.mark.parametrize("preset", [stripe, github, shopify, standard_webhooks])
def test_table_has_the_time_for_which_a_preset_keeps_keys(preset: Any) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{preset.__name__}(")]
    kept = in_words(preset(SECRET, effects="external").retention_seconds)
    assert row.split("|")[5].strip() == kept
