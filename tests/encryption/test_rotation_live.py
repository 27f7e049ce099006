"""A rotation beside a running app, and one that is killed: no answer changes, and no write is lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey
from oncekey.encryption import Keyring
from oncekey.encryption.renewal import Renewal
from oncekey.encryption.rotation import Rotation, raw_values
from oncekey.stores.api import Store
from oncekey.stores.registry import open_store
from oncekey.web.asgi import IdempotencyMiddleware
from tests.cli.test_re_encrypt import entry
from tests.encryption.kept_rows import kept
from tests.encryption.rings import ring

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["sqlite", *(pytest.param(name, marks=pytest.mark.stores) for name in ("postgres", "mysql"))])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'keys.db'}"
    found: str = request.getfixturevalue("ready_url" if request.param == "postgres" else "ready_mysql")
    return found


@pytest.fixture
def raw(url: str) -> Iterator[Store]:
    store = open_store(url)
    store.migrate()
    yield store
    store.close()


class Shop:
    """An app that remembers each answer that its handler gave, and fails each key's first attempt of every third."""

    def __init__(self, url: str, keyring: Keyring | None) -> None:
        self.ran: Counter[str] = Counter()
        self.once = OnceKey(url, scope=SINGLE_TENANT, encryption=keyring)
        app = Starlette(routes=[Route("/payments", self.pay, methods=["POST"])])
        transport = httpx.ASGITransport(IdempotencyMiddleware(app, once=self.once), raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://shop", timeout=60)

    async def pay(self, request: Request) -> Response:
        key = request.headers["idempotency-key"]
        self.ran[key] += 1
        if int(key.rpartition("-")[2]) % 3 == 0 and self.ran[key] == 1:
            raise NotExecuted(f"not now, {key}")
        return Response(f"receipt of {key}: {random.random()}", 201, {"location": f"/payments/{key}"})

    async def post(self, key: str) -> httpx.Response:
        return await self.client.post("/payments", headers={"idempotency-key": key}, content=key)

    async def paid(self, key: str) -> tuple[int, bytes, str | None]:
        """The answer, after as many retries as it needs."""
        while (answer := await self.post(key)).status_code in (409, 503):
            await asyncio.sleep(0)
        return answer.status_code, answer.content, answer.headers.get("location")

    async def close(self) -> None:
        await self.client.aclose()
        await self.once.aclose()


def keys_of(raw: Store) -> set[int]:
    """The numbers of the keys that values are under; 0: a value is plain."""
    renewal = Renewal(ring(3, 2, 1))
    return {number for row in kept(raw) for number in (*renewal(row).sealed, *renewal(row).lost)}


async def test_rotation_beside_a_running_app_changes_no_answer(raw: Store, url: str) -> None:
    """Old answers are replayed, half-done keys are finished and new ones begin, while all rows are written again."""
    before, old = Shop(url, None), Shop(url, ring(1))
    plain = {key: await before.paid(key) for key in (f"plain-{n}" for n in range(1, 60))}
    first = {key: await old.paid(key) for key in (f"old-{n}" for n in range(1, 120))}
    failed = [f"later-{number}" for number in range(3, 180, 3)]
    assert {(await old.post(key)).status_code for key in failed} == {503}
    await before.close()
    await old.close()
    assert keys_of(raw) == {0, 1}

    new = Shop(url, ring(2, 1))
    reports: list[Any] = []
    rotating = asyncio.create_task(asyncio.to_thread(rotate_until_done, url, reports))
    seen: dict[str, list[tuple[int, bytes, str | None]]] = {}

    async def client(number: int) -> None:
        chosen = random.Random(number)
        turn = 0
        while turn < 40 or not rotating.done():
            turn += 1
            key = chosen.choice([*plain, *first, *failed, f"new-{chosen.randrange(1, 200)}"])
            seen.setdefault(key, []).append(await new.paid(key))

    await asyncio.gather(*(client(number) for number in range(8)), rotating)
    for key, answers in seen.items():
        assert set(answers) == {plain.get(key) or first.get(key) or answers[0]}, key
    assert all(new.ran[key] == 0 for key in (*plain, *first))
    for key in (key for key in seen if key.startswith(("new-", "later-"))):
        assert new.ran[key] == (2 if int(key.rpartition("-")[2]) % 3 == 0 else 1), key
    await new.close()

    assert reports[0].rewritten.total() >= len(plain) + len(first)
    assert keys_of(raw) == {2}
    last = Shop(url, ring(2))  # the old key is removed
    for key, answer in {**plain, **{key: seen[key][0] for key in seen if key.startswith("new-")}}.items():
        assert await last.paid(key) == answer
    await last.close()
    both = Shop(url, ring(2, 1))  # the fingerprints of these were made with the old key
    for key, answer in first.items():
        assert await both.paid(key) == answer
    await both.close()


def rotate_until_done(url: str, reports: list[Any]) -> None:
    store = open_store(url)
    try:
        for _ in range(5):
            reports.append(Rotation(raw_values(store), ring(2, 1), trust_key=True, page=20).run())
            if not reports[-1].left:
                return
    finally:
        store.disconnect()
        store.close()


async def test_killed_rotation_is_started_again_and_ends(raw: Store, url: str) -> None:
    """kill -9 in the middle of the fourth page: what is written is whole, and the next run does the rest."""
    shop = Shop(url, ring(1))
    answers = {key: await shop.paid(key) for key in (f"key-{number}" for number in range(1, 150))}
    await shop.close()
    environment = {**os.environ, "ONCEKEY_KEYS": entry(2, 1), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "tests.encryption.rotating", url, "10"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--step"], cwd=ROOT, env=environment, **pipes) as process:  # type: ignore[call-overload]
        for _ in range(3):
            assert process.stdout.readline()
            process.stdin.write("\n")
            process.stdin.flush()
        os.kill(process.pid, signal.SIGKILL)  # in the fourth page or at its end: the fifth needs another line
        said = process.stdout.read()
    assert process.returncode == -signal.SIGKILL
    assert "left" not in said
    assert keys_of(raw) == {1, 2}

    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.splitlines()[-1] == "left 0"
    assert keys_of(raw) == {2}
    both = Shop(url, ring(2, 1))
    for key, answer in answers.items():
        assert await both.paid(key) == answer
    assert not both.ran
    await both.close()
