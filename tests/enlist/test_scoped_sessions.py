"""A ``scoped_session`` in a plain function under ASGI: the request ends in another thread than the handler's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import create_engine, text
from sqlalchemy.orm import scoped_session, sessionmaker

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.core.states import State
from oncekey.web.fastapi import protect


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return f"sqlite:///{tmp_path}/shop.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


async def test_removed_session_that_is_used_again_makes_the_key_unknown(url: str) -> None:
    driver = url.replace("postgresql://", "postgresql+psycopg://")
    arguments = {"check_same_thread": False} if url.startswith("sqlite") else {}
    engine = create_engine(driver, connect_args=arguments)
    with engine.begin() as setup:
        setup.execute(text("CREATE TABLE orders (id INTEGER)"))
    session = scoped_session(sessionmaker(engine))
    app = FastAPI()
    with OnceKey(url, scope=SINGLE_TENANT, policy=Policy(effects="transactional"), migrate=True) as once:
        protect(app, once)

        @app.post("/orders")
        def order() -> dict[str, int]:
            current().blocking.enlist(session)
            session.execute(text("INSERT INTO orders VALUES (1)"))
            session.remove()
            session.execute(text("INSERT INTO orders VALUES (2)"))
            session.commit()
            session.remove()
            return {"ok": 1}

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            sent = [await client.post("/orders", headers={"Idempotency-Key": "k-1"}) for _ in range(3)]
        (record,) = once.store.read([("single-tenant", "k-1")])
    with engine.begin() as look:
        rows = look.execute(text("SELECT id FROM orders")).all()
    engine.dispose()
    assert record is not None
    assert ([each.status_code for each in sent], len(rows), record.state) == ([409] * 3, 1, State.UNKNOWN)
