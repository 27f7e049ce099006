"""The programs of docs/functions.md, run as they stand there."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import celery
import grpc
import grpc.aio
import pytest
from mcp import Client

from oncekey import SINGLE_TENANT, InProgress, KeyReused, NotExecuted, OnceKey
from oncekey.core.problem_texts import Situation
from oncekey.functions.function import OPTIONS
from oncekey.functions.grpc import CODES

PAGE = Path(__file__).parents[2] / "docs" / "functions.md"


class Provider:
    def __init__(self) -> None:
        self.charged: list[tuple[int, str]] = []

    def charge(self, cents: int, *, key: str) -> dict[str, Any]:
        self.charged.append((cents, key))
        return {"id": len(self.charged)}


@pytest.fixture
def page() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def test_functions_of_the_page_run_once(page: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    provider = Provider()
    names: dict[str, Any] = {"provider": provider}
    for block in page[:3]:
        exec(block, names)
    try:
        assert provider.charged == [(500, "order-42")]
        parcel = SimpleNamespace(number=7, address="Paris")
        assert names["ship"](parcel, object()) == names["ship"](parcel, object()) == "shipped to Paris"
        parcel.address = "Rome"
        with pytest.raises(KeyReused):
            names["ship"](parcel, object())
        with closing(sqlite3.connect("shop.db")) as db:
            db.execute("CREATE TABLE payments (order_id text, cents integer)")
        assert names["task"]("order-1", 5) == names["task"]("order-1", 5) == {"paid": 5}
        with closing(sqlite3.connect("shop.db")) as db:
            assert db.execute("SELECT * FROM payments").fetchall() == [("order-1", 5)]
    finally:
        names["once"].close()


@pytest.mark.frameworks
def test_task_of_the_page_is_retried_and_charges_once(page: list[str]) -> None:
    class Refusing(Provider):
        refuses = 2

        def charge(self, cents: int, *, key: str) -> dict[str, Any]:
            self.refuses -= 1
            if self.refuses >= 0:
                raise ConnectionRefusedError
            return super().charge(cents, key=key)

    app, provider = celery.Celery("shop", set_as_current=False), Refusing()
    app.conf.task_always_eager = True
    with OnceKey("memory://", scope=SINGLE_TENANT) as once:
        names: dict[str, Any] = {
            "once": once,
            "app": app,
            "provider": provider,
            "NotExecuted": NotExecuted,
            "InProgress": InProgress,
        }
        exec(page[3], names)
        assert [names["charge_task"].delay("order-1", 5).get() for _ in range(2)] == [{"id": 1}, {"id": 1}]
    assert provider.charged == [(5, "order-1")]


@pytest.mark.frameworks
async def test_grpc_server_and_mcp_tool_of_the_page_run(page: list[str]) -> None:
    with OnceKey("memory://", scope=SINGLE_TENANT) as once:
        names: dict[str, Any] = {"once": once}
        for block in page[4:]:
            exec(block, names)
        server, charged = names["server"], []

        async def charge(request: bytes, context: Any) -> bytes:
            charged.append(request)
            return b"ok"

        handlers: dict[str, Any] = {"Charge": grpc.unary_unary_rpc_method_handler(charge)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("shop.Payments", handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call: Any = channel.unary_unary("/shop.Payments/Charge")
            answers = [await call(b"500", metadata=[("idempotency-key", "k-1")]) for _ in range(2)]
        await server.stop(None)
        assert (answers, charged) == ([b"ok", b"ok"], [b"500"])

        async with Client(names["mcp_server"]) as client:
            arguments, meta = {"order_id": "42", "cents": 500}, cast("Any", {"idempotency-key": "k-1"})
            answer = await client.call_tool("charge_card", arguments, meta=meta)
        assert answer.structured_content == {"charged": 500}


def test_page_has_the_status_of_every_situation() -> None:
    text = PAGE.read_text("utf-8")
    told = [Situation.KEY_MISSING, Situation.KEY_MALFORMED, Situation.MISMATCH, Situation.IN_FLIGHT, Situation.UNKNOWN]
    told += [Situation.KEY_PERSONAL, Situation.STORE_UNAVAILABLE, Situation.NOT_STORED, Situation.NOT_AUTHENTICATED]
    for situation in told:
        [line] = [line for line in text.splitlines() if line.startswith("|") and f"`{situation}`" in line]
        assert f"`{CODES[situation].name}`" in line


def test_page_names_every_option() -> None:
    text = PAGE.read_text("utf-8")
    assert [option for option in OPTIONS if f"`{option}" not in text] == []
