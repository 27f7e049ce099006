"""Policies for the webhooks of well-known senders: where their id is, how they sign, and for how long they retry.

Each takes ``effects``, which has no default here: a webhook that was cut off is sent again without a person who looks,
so the app must say what a second run would do. Other options of a Policy may follow; ``ttl`` may only be longer.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from oncekey.core.policy import EffectsName, Policy
from oncekey.errors import ConfigurationError
from oncekey.webhooks.keys import header, json_field
from oncekey.webhooks.signatures import (
    TOLERANCE,
    Secrets,
    hmac_sha256,
    standard_signature,
    stripe_signature,
)

A_DAY = timedelta(days=1)
"""Keys are kept for this long after the sender's last retry: clocks differ, and operators send events again by hand."""

STRIPE_RETRIES = timedelta(days=3)
GITHUB_REDELIVERIES = timedelta(days=3)
"""GitHub does not retry by itself. Its deliveries of the last three days can be sent again."""
SHOPIFY_RETRIES = timedelta(hours=4)
STANDARD_RETRIES = timedelta(hours=76)
"""The schedule that Standard Webhooks recommends ends after 75 h 35 min."""


def stripe(secret: Secrets, *, effects: EffectsName, tolerance: timedelta = TOLERANCE, **options: Any) -> Policy:
    """Events of Stripe. The key is the event's id.

    Of the body only id and type are compared: ``pending_webhooks`` differs from one delivery to the next.
    """
    options.setdefault("fingerprint_fields", ("id", "type"))
    return _policy(
        "stripe",
        STRIPE_RETRIES,
        effects,
        options,
        key_from=json_field("id"),
        verify=stripe_signature(secret, tolerance),
    )


def github(secret: Secrets, *, effects: EffectsName, **options: Any) -> Policy:
    """Deliveries of GitHub. The key is X-GitHub-Delivery, which a redelivery keeps."""
    return _policy(
        "github",
        GITHUB_REDELIVERIES,
        effects,
        options,
        key_from=header("X-GitHub-Delivery"),
        verify=hmac_sha256("X-Hub-Signature-256", secret, prefix="sha256="),
    )


def shopify(secret: Secrets, *, effects: EffectsName, **options: Any) -> Policy:
    """Webhooks of Shopify. The key is the event's id with its topic: one event may have several topics."""
    return _policy(
        "shopify",
        SHOPIFY_RETRIES,
        effects,
        options,
        key_from=header("X-Shopify-Event-Id", "X-Shopify-Topic"),
        verify=hmac_sha256("X-Shopify-Hmac-Sha256", secret, encoding="base64"),
    )


def standard_webhooks(
    secret: Secrets, *, effects: EffectsName, sender: str = "standard-webhooks", **options: Any
) -> Policy:
    """Senders that follow Standard Webhooks. The key is webhook-id.

    ``sender``: a name for each sender, if there are several: their ids need not differ.
    """
    return _policy(
        sender,
        STANDARD_RETRIES,
        effects,
        options,
        key_from=header("webhook-id"),
        verify=standard_signature(secret),
    )


def _policy(sender: str, retries: timedelta, effects: EffectsName, options: dict[str, Any], **own: Any) -> Policy:
    if changed := sorted(options.keys() & {"key_from", "verify", "sender"}):
        raise ConfigurationError(f"{changed[0]} is what the preset is for: write a Policy instead, to choose it")
    least = retries + A_DAY
    ttl = options.pop("ttl", max(least, A_DAY))
    if isinstance(ttl, timedelta) and ttl < least:
        raise ConfigurationError(
            f"ttl={ttl}: {sender} sends an event again for {retries}, and its key is kept for a day longer: {least} or "
            "more"
        )
    # Two endpoints of one app may get the same event, and each must run. A sender cannot change what it sends, so a
    # 4xx that is stored would lose the event: the next delivery runs, unless the handler's effects forbid it.
    usual = {"key_per": "endpoint", "final_client_errors": effects == "external"}
    return Policy(**{**usual, **options, **own, "effects": effects, "sender": sender, "ttl": ttl})
