"""Every situation in every profile, and how a test reads its answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from oncekey.core.problems import (
    PROFILES,
    Answer,
    ProfileName,
    Situation,
)

# Situation -> statuses in ietf, stripe, governance; and whether it carries Retry-After.
STATUSES = {
    "key-missing": (400, 400, 400),
    "key-malformed": (400, 400, 400),
    "key-personal": (400, 400, 400),
    "mismatch": (422, 400, 422),
    "in-flight": (409, 409, 409),
    "accepted": (202, 202, 202),
    "outcome-unknown": (409, 409, 409),
    "deferred": (202, 202, 202),
    "limited": (429, 429, 429),
    "body-too-large": (413, 413, 413),
    "body-incomplete": (400, 400, 400),
    "store-unavailable": (503, 503, 503),
    "not-stored": (503, 503, 503),
    "not-authenticated": (401, 401, 401),
    "signature-invalid": (401, 401, 401),
    "timestamp-refused": (400, 400, 400),
    "not-authorized": (403, 403, 403),
    "not-comparable": (503, 503, 503),
    "answer-lost": (410, 410, 410),
    "not-executed": (503, 503, 503),
    "not-finished": (503, 503, 503),
    "failed": (500, 500, 500),
    "refused": (422, 422, 422),
    "refused-late": (422, 422, 422),
    "status-expired": (410, 410, 410),
    "status-not-found": (404, 404, 404),
    "status-retryable": (409, 409, 409),
    "timed-out": (408, 408, 408),
}
EVERY = [(profile, situation) for profile in PROFILES for situation in Situation]
every = pytest.mark.parametrize(("profile", "situation"), EVERY)
each_profile = pytest.mark.parametrize("profile", PROFILES)


def headers_of(answer: Answer) -> dict[str, str]:
    return {name.decode(): value.decode("latin-1") for name, value in answer.headers}


def body_of(answer: Answer) -> dict[str, Any]:
    """The body as JSON, which must be an object."""
    members = json.loads(answer.body)
    assert isinstance(members, dict)
    return members


def message_of(profile: ProfileName, answer: Answer) -> str:
    """The sentence for humans, wherever the profile has it."""
    members = body_of(answer)
    if answer.status == 202 or profile == "ietf":
        return str(members["detail"])
    if profile == "stripe":
        return str(members["error"]["message"])
    return str(members["fault"]["errors"][0]["description"])
