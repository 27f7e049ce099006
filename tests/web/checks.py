"""What more than one module of the HTTP tests asks of an answer, or of a key."""

from __future__ import annotations

from typing import Any

import httpx

from oncekey.core.states import State
from tests.web.apps import ONE, World


def assert_refused(answer: httpx.Response, kind: str = "store-unavailable") -> None:
    assert answer.status_code == 503
    assert answer.json()["type"] == f"urn:oncekey:problem:{kind}"
    assert int(answer.headers["retry-after"]) >= 1
    assert "Keep the key" in answer.json()["detail"]


def assert_state(world: World, state: State, key: str = "k-1", scope: str = ONE) -> Any:
    record = world.record(key, scope)
    assert record is not None
    assert record.state is state
    return record
