"""Keys, tenants and paths that are SQL, Lua, JSON or format strings stay what they are: values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from oncekey import OnceKey, Policy
from oncekey.web.asgi import IdempotencyMiddleware

HOSTILE = (
    "'; DROP TABLE idempotency_keys; --",
    '"; DROP TABLE idempotency_keys; --',
    "' OR '1'='1",
    "\\'; SELECT pg_sleep(9); --",
    "%s %(key)s %d %n",
    "{0} {key} {0.__class__}",
    "$1 :key ? @key",
    "${7*7} {{7*7}} <%= 7*7 %>",
    "]] redis.call('FLUSHALL') --[[",
    '{"$gt": ""}',
    "../../etc/passwd",
    "<script>alert(1)</script>",
)


@pytest.fixture(params=["sqlite", "postgres"])
def once(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OnceKey]:
    postgres = request.param == "postgres"
    url = request.getfixturevalue("ready_url") if postgres else f"sqlite:///{tmp_path / 'keys.db'}"
    policy = Policy(key_per="endpoint")  # so that the path is part of the row's name
    with OnceKey(url, scope=lambda request: request.headers["x-tenant"], policy=policy, migrate=True) as made:
        yield made


async def test_hostile_texts_are_keys_tenants_and_paths_like_any_other(once: OnceKey) -> None:
    runs: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(scope["path"])
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"run %d" % len(runs)})

    transport = httpx.ASGITransport(IdempotencyMiddleware(app, once, upkeep=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://api") as client:

        async def post(key: str, tenant: str, path: str) -> httpx.Response:
            quoted = '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
            return await client.post(path, headers={"Idempotency-Key": quoted, "X-Tenant": tenant})

        requests = [(text, "ann", "/pay") for text in HOSTILE]
        requests += [("k-1", text, "/pay") for text in HOSTILE]
        requests += [("k-1", "ann", f"/{text}") for text in HOSTILE if "../" not in text]
        first = [await post(*each) for each in requests]
        again = [await post(*each) for each in requests]
    assert [answer.status_code for answer in first + again] == [201] * 2 * len(requests)
    assert len(runs) == len(requests)
    assert [answer.content for answer in again] == [answer.content for answer in first]
    assert all(answer.headers["idempotency-replayed"] == "true" for answer in again)
    rows = once.engine.store.listing(limit=100)
    assert {row.key for row in rows} == {key for key, _, _ in requests}
    assert len(rows) == len(requests)
