"""Webhooks that this app receives: the sender's id is the key, after a check of its signature (docs/webhooks.md)."""

from oncekey.webhooks.keys import header, json_field
from oncekey.webhooks.presets import github, shopify, standard_webhooks, stripe
from oncekey.webhooks.signatures import hmac_sha256, standard_signature, stripe_signature

__all__ = [
    "github",
    "header",
    "hmac_sha256",
    "json_field",
    "shopify",
    "standard_signature",
    "standard_webhooks",
    "stripe",
    "stripe_signature",
]
