"""The app of docs/phases.md, run as it stands there."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from oncekey import OnceKey
from oncekey.testing import faults
from oncekey.upkeep import Upkeep
from oncekey.web.asgi import IdempotencyMiddleware
from tests.faults.points import CASES

PAGE = Path(__file__).parents[2] / "docs" / "phases.md"


class Provider:
    """It honours keys, and its line is cut after the first charge."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    async def charge(self, cents: int, *, key: str) -> dict[str, str]:
        self.calls[key] += 1
        if self.calls[key] == 1:
            raise ConnectionError("cut")
        return {"id": f"ch_{cents}"}


async def test_app_of_the_page_runs_as_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("rides.db")) as db:
        db.execute("CREATE TABLE rides (id integer PRIMARY KEY, cents integer, charge text)")
    provider = Provider()
    names: dict[str, Any] = {"provider": provider}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0], names)
    transport = httpx.ASGITransport(names["app"], raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://rides") as http:
        sent: dict[str, Any] = {"headers": {"Idempotency-Key": "r-1"}, "json": {"cents": 2000}}
        answers = [await http.post("/rides", **sent) for _ in range(3)]
    await names["once"].aclose()
    assert [answer.status_code for answer in answers] == [500, 201, 201]
    assert answers[1].json() == answers[2].json() == {"ride": 1, "charge": "ch_2000"}
    assert list(provider.calls.values()) == [2]
    with closing(sqlite3.connect("rides.db")) as db:
        assert db.execute("SELECT * FROM rides").fetchall() == [(1, 2000, "ch_2000")]
        assert db.execute("SELECT task, payload FROM idempotency_outbox").fetchall() == [("send_receipt", '{"ride":1}')]


async def test_upkeep_goes_on_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sends its request once. The provider's line is cut, and upkeep ends the ride."""
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("rides.db")) as db:
        db.execute("CREATE TABLE rides (id integer PRIMARY KEY, cents integer, charge text)")
    provider = Provider()
    names: dict[str, Any] = {"provider": provider}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[:2]:
        exec(block, names)
    once: OnceKey = names["rides"]
    app = Starlette(routes=[Route("/rides", names["handle"], methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, once=once)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://rides") as http:
        sent: dict[str, Any] = {"headers": {"Idempotency-Key": "r-1"}, "json": {"cents": 2000}}
        assert (await http.post("/rides", **sent)).status_code == 500
        with closing(sqlite3.connect("rides.db")) as db:
            db.execute("UPDATE idempotency_keys SET reconcile_at = reconcile_at - 30")
            db.commit()
        (turn,) = [turn for turn in await asyncio.to_thread(Upkeep(once).run_once) if turn.duty == "resume"]
        assert turn.result is not None
        assert turn.result.as_json()["completed"] == 1
        answer = await http.post("/rides", **sent)
    await once.aclose()
    await names["once"].aclose()
    assert (answer.status_code, answer.headers["idempotency-replayed"]) == (201, "true")
    assert answer.json() == {"ride": 1, "charge": "ch_2000"}
    with closing(sqlite3.connect("rides.db")) as db:
        assert db.execute("SELECT * FROM rides").fetchall() == [(1, 2000, "ch_2000")]
        assert db.execute("SELECT task, payload FROM idempotency_outbox").fetchall() == [("send_receipt", '{"ride":1}')]


def test_counts_of_the_page_are_right() -> None:
    (number,) = re.findall(r"each of (\d+) named points", PAGE.read_text())
    killed = {case.point.partition(":")[0] for case in CASES}
    assert killed == {point for point in faults.POINTS if not point.startswith("upkeep.")}
    assert int(number) == len(killed)
