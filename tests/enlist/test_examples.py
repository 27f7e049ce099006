"""The examples do what they say, and so do the pieces of code in docs/transactions.md."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psycopg
import pytest
import sqlalchemy as sa
from fastapi import Depends, HTTPException

from oncekey.core.states import State
from oncekey.testing.servers import PostgresServer
from tests.enlist.shop import Shop

ROOT = Path(__file__).parents[2]


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


async def test_fastapi_sqlalchemy_example_runs(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres_server.database("example_orders")
    monkeypatch.setenv("DATABASE_URL", url)
    example = load("fastapi_sqlalchemy")
    transport = httpx.ASGITransport(example.app)
    async with (
        example.lifespan(example.app),
        httpx.AsyncClient(transport=transport, base_url="http://example") as http,
    ):

        async def order(key: str, quantity: Any) -> httpx.Response:
            return await http.post(
                "/orders", headers={"Idempotency-Key": key}, json={"item": "tea", "quantity": quantity}
            )

        first, second = await order("o-1", 2), await order("o-1", 2)
        assert first.json() == {"id": 1, "left": 1}
        assert second.content == first.content
        assert (await order("o-2", 2)).status_code == 409
        assert (await order("o-3", "many")).status_code == 422
        assert (await order("o-3", 1)).json()["left"] == 0
        await example.once.aclose()
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*), sum(quantity) FROM orders").fetchall() == [(2, 3)]
        states = connection.execute("SELECT key, state FROM idempotency_keys ORDER BY key").fetchall()
    assert states == [("o-1", "completed"), ("o-2", "failed"), ("o-3", "completed")]
    postgres_server.drop_database("example_orders")


def test_flask_sqlalchemy_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    example = load("flask_sqlalchemy_app")
    http = example.app.test_client()

    def transfer(key: str, cents: int, to: str = "bob") -> Any:
        return http.post("/transfers", headers={"Idempotency-Key": key}, json={"from": "ann", "to": to, "cents": cents})

    first, second = transfer("t-1", 700), transfer("t-1", 700)
    assert first.get_json() == {"ann": 300, "bob": 1700}
    assert second.data == first.data
    assert transfer("t-2", 700).status_code == 409
    assert transfer("t-3", 1, to="nobody").status_code == 404
    assert transfer("t-4", 300).get_json() == {"ann": 0, "bob": 2000}
    example.once.close()
    with example.app.app_context():
        example.db.session.remove()
        example.db.engine.dispose()


def blocks() -> list[str]:
    """The pieces of code of docs/transactions.md: plain, ``commit="caller"``, Litestar."""
    text = (ROOT / "docs" / "transactions.md").read_text("utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(names: dict[str, Any], code: str) -> None:
    exec(compile(code, "transactions.md", "exec"), names)


async def test_first_code_of_the_page_runs(sqlite_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first piece of code, as it stands there."""
    monkeypatch.setenv("DATABASE_URL", sqlite_shop.url)
    names: dict[str, Any] = {"__name__": "documentation"}
    run(names, blocks()[0])
    transport = httpx.ASGITransport(names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://docs") as http:
        for _ in range(2):
            answer = await http.post("/payments", headers={"Idempotency-Key": "k-1"}, json={"cents": 5})
            assert (answer.status_code, answer.json()) == (201, {"paid": 5})
    assert (sqlite_shop.payments(), sqlite_shop.state()) == (1, State.COMPLETED)
    await names["once"].aclose()
    names["engine"].dispose()


@pytest.mark.parametrize(("status", "rows", "state"), [(201, 1, State.COMPLETED), (409, 0, State.FAILED)])
async def test_the_dependency_that_commits_itself(
    sqlite_shop: Shop, monkeypatch: pytest.MonkeyPatch, status: int, rows: int, state: State
) -> None:
    """The dependency of ``commit="caller"``: it commits what was returned, and nothing of what was raised."""
    monkeypatch.setenv("DATABASE_URL", sqlite_shop.url)
    names: dict[str, Any] = {"__name__": "documentation"}
    for code in blocks()[:2]:
        run(names, code)

    work = Depends(names["unit_of_work"])

    @names["app"].post("/own", status_code=201)
    def own(session: Any = work) -> None:
        session.execute(sa.text("INSERT INTO payments (key, cents) VALUES ('k-1', 5)"))
        if status == 409:
            raise HTTPException(409)

    transport = httpx.ASGITransport(names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://docs") as http:
        answers = [await http.post("/own", headers={"Idempotency-Key": "k-1"}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [status, status]
    assert answers[1].headers["idempotency-replayed"] == "true"
    assert (sqlite_shop.payments(), sqlite_shop.state()) == (rows, state)
    await names["once"].aclose()
    names["engine"].dispose()


async def test_the_litestar_app_of_the_documentation(sqlite_shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is open until the response is stored, and closed after it, whether the handler returned or raised."""
    monkeypatch.setenv("DATABASE_URL", sqlite_shop.url.replace("sqlite:", "sqlite+aiosqlite:"))
    module = ModuleType("documentation")
    monkeypatch.setitem(sys.modules, "documentation", module)  # where Litestar looks for the names of annotations
    names = vars(module)
    run(names, blocks()[2])
    transport = httpx.ASGITransport(names["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://docs") as http:

        async def pay(key: str, **body: Any) -> httpx.Response:
            answer = await http.post("/payments", headers={"Idempotency-Key": key}, json=body)
            assert names["engine"].pool.checkedout() == 0
            return answer

        first, second = [await pay("k-1", cents=5) for _ in range(2)]
        assert (first.status_code, first.json()) == (201, {"paid": 5})
        assert (second.content, second.headers["idempotency-replayed"]) == (first.content, "true")
        assert (await pay("k-2", euros=5)).status_code == 500
    assert (sqlite_shop.payments(), sqlite_shop.state()) == (1, State.COMPLETED)
    await names["once"].aclose()
    await names["engine"].dispose()
