"""What schemathesis is used for can be seen to fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from oncekey.core.judgment import Judgment, judge
from oncekey.core.states import Event
from oncekey.demo.app import make_app
from oncekey.demo.book import Book
from oncekey.web import endings
from tests.faults.campaign import Run
from tests.faults.schema import TENANT, Caller, _once_of, provider_in


def keeps_what_was_refused(*seen: Any, **more: Any) -> Judgment:
    judgment = judge(*seen, **more)
    return Judgment(Event.RELEASE) if judgment.event is Event.DISCARD else judgment


@pytest.mark.parametrize("broken", [False, True])
async def test_a_rejected_request_that_uses_up_its_key_is_seen(tmp_path: Path, broken: bool) -> None:
    run = Run("sqlite", 1, 1, tmp_path)
    with provider_in(tmp_path) as (provider, ledger):
        url = run.url()
        Book(url).create_tables()
        app = make_app(url, provider)
        caller = Caller(run, app, ledger)
        try:
            with patch.object(endings, "judge", keeps_what_was_refused if broken else judge):
                rejected = await caller.client.post("/payments", json={}, headers=TENANT | {"Idempotency-Key": "k-1"})
            assert rejected.status_code == 422
            if broken:
                with pytest.raises(AssertionError, match="422"):
                    await caller.then_a_good_one("k-1")
            else:
                await caller.then_a_good_one("k-1")
        finally:
            await caller.client.aclose()
            await _once_of(app).aclose()
