"""Encryption is switched on and off under load: old and new processes over one store answer every retry.

The stages of the deploys in docs/encryption.md. In each, two processes with different keyrings run side by side, and
each gets the retries of what the other one did first.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import SINGLE_TENANT, KeyReused, OnceKey, OutcomeUnknown, Policy, current
from oncekey.consumers import MessageNotRun, Situation
from oncekey.core.jobs import JobState
from oncekey.core.record import StoredResponse
from oncekey.core.responses import Response
from oncekey.core.states import Event, State
from oncekey.core.verdicts import Confirmed
from oncekey.encryption import Keyring
from oncekey.encryption.keyring import PLAIN
from oncekey.encryption.rotation import Rotation, raw_values
from oncekey.encryption.store import sealed
from oncekey.outbox.worker import Worker
from oncekey.stores.api import Outbox, Store
from oncekey.stores.kept_api import KeptJob, KeptKey, KeptStep
from oncekey.stores.memory import MemoryStore
from oncekey.stores.registry import open_store
from oncekey.upkeep import Upkeep
from oncekey.web.starlette import protect
from tests.encryption.kept_rows import SCOPE, SECRET, fill, kept, move, raw_text, readable, reserved
from tests.encryption.rings import ONE, ring
from tests.stores import mysql

OPENS = Keyring({1: ONE}, encrypt=False)
STAGES: dict[str, tuple[Keyring | None, Keyring | None]] = {
    "on-1": (None, OPENS),
    "on-2": (OPENS, ring(1)),
    "off-1": (ring(1), OPENS),
    "off-2": (OPENS, None),
}
STORES = [
    "sqlite",
    "postgres",
    pytest.param("mysql", marks=pytest.mark.stores),
    pytest.param("redis", marks=pytest.mark.stores),
    pytest.param("dynamodb", marks=pytest.mark.stores),
]


class Shop:
    """What all processes share: the store, and what their handlers did."""

    def __init__(self, url: str, connect: Callable[[], Any] | None) -> None:
        self.url = url
        self.connect = connect
        self.did: Counter[str] = Counter()
        self.processes: list[Process] = []

    def process(self, keyring: Keyring | None) -> Process:
        self.processes.append(Process(self, keyring))
        return self.processes[-1]


class Process:
    """An app with its keyring, or without one."""

    def __init__(self, shop: Shop, keyring: Keyring | None) -> None:
        self.shop = shop
        self.keyring = keyring
        self._kept: list[Any] = []
        own = Policy(effects="transactional" if shop.connect else "external")
        self.once = OnceKey(
            shop.url,
            scope=SINGLE_TENANT,
            routes={
                "POST /phased": Policy(effects="phased"),
                **{f"POST /{name}": own for name in ("enlisted", "deferred")},
            },
            encryption=keyring,
        )
        self.charge = self.once.function("charge", key="order")(self._charge)
        self.once.resolve_with("POST /unknown", lambda inquiry: Confirmed(201, {"found": inquiry.key}))
        names = ("flat", "phased", "unknown", *(("enlisted", "deferred") if shop.connect else ()))
        handlers = [Route(f"/{name}", getattr(self, f"_{name}"), methods=["POST"]) for name in names]
        self.app = Starlette(routes=handlers)
        protect(self.app, self.once, upkeep=False)

    def _count(self, what: str) -> dict[str, int]:
        key = current().key
        self.shop.did[f"{what} {key}"] += 1
        return {key: self.shop.did[f"{what} {key}"]}

    async def _flat(self, request: Request) -> JSONResponse:
        return JSONResponse(self._count("flat"), 201, {"location": "/payments/1"})

    async def _unknown(self, request: Request) -> JSONResponse:
        self._count("unknown")
        raise OutcomeUnknown("no answer of the provider")

    def _phased(self, request: Request) -> JSONResponse:
        op = current().blocking
        charged = op.effect("charged", self._count, "charge", repeatable=False)
        self.shop.did[f"attempt {current().key}"] += 1
        if self.shop.did[f"attempt {current().key}"] == 1:
            raise RuntimeError("half done")
        return JSONResponse({"charged": charged}, 201)

    def _enlisted(self, request: Request) -> JSONResponse:
        op = current().blocking
        op.enlist(self._connection())
        op.enqueue("send", {"of": current().key})
        return JSONResponse(self._count("enlisted"), 201)

    def _deferred(self, request: Request) -> JSONResponse:
        op = current().blocking
        op.enlist(self._connection())
        op.defer("settle", {"of": current().key})
        self._count("deferred")
        return JSONResponse({}, 202)

    def _connection(self) -> Any:
        assert self.shop.connect is not None
        self._kept.append(self.shop.connect())
        return self._kept[-1]

    async def _charge(self, order: str, amount: int) -> dict[str, int]:
        return self._count(f"function {order}")

    # -- what its clients and its operators do ---------------------------------------------------------------------

    async def post(self, path: str, key: str, amount: int = 5) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:
            return await client.post(f"/{path}", json={"amount": amount}, headers={"Idempotency-Key": key})

    def deliver(self, name: str, body: bytes = b"{}") -> Situation:
        message = self.once.message("payments", name, body)
        with suppress(MessageNotRun), message:
            self._count("message")
        assert message.outcome is not None
        return message.outcome.situation

    async def work(self) -> None:
        """A worker with the keyring of this process runs all jobs."""
        worker = Worker(self.shop.url, encryption=self.keyring)

        @worker.task("send")
        def send(context: Any, payload: Any) -> None:
            self.shop.did[f"send {payload['of']}"] += 1

        @worker.task("settle")
        def settle(context: Any, payload: Any) -> Response:
            self.shop.did[f"settle {payload['of']}"] += 1
            return Response(201, {"settled": payload["of"]})

        await worker.serve(until="drained")

    def read(self, key: str) -> Any:
        (found,) = self.once.store.read([("single-tenant", key)])
        return found

    async def close(self) -> None:
        for connection in self._kept:
            connection.close()
        await self.once.aclose()


@pytest.fixture(params=STORES)
async def shop(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Shop]:
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    connect: Callable[[], Any] | None = partial(
        sqlite3.connect, tmp_path / "keys.db", timeout=5.0, check_same_thread=False
    )
    match request.param:
        case "postgres":
            url = request.getfixturevalue("ready_url")
            connect = partial(psycopg.connect, url)
        case "mysql":
            url = request.getfixturevalue("ready_mysql")
            connect = partial(mysql.connect, url)
        case "redis" | "dynamodb" as name:
            url, connect = request.getfixturevalue(f"ready_{name}_url"), None
    shop = Shop(url, connect)
    yield shop
    for process in shop.processes:
        await process.close()


@pytest.fixture(params=["old-first", "new-first"])
def order(request: pytest.FixtureRequest) -> slice:
    return slice(None) if request.param == "old-first" else slice(None, None, -1)


stages = pytest.mark.parametrize("stage", STAGES)


def pair(shop: Shop, stage: str, order: slice) -> tuple[Process, Process]:
    """The process that gets the first request, and the one that gets the retry."""
    rings = list(STAGES[stage])
    first, second = (shop.process(keyring) for keyring in rings[order])
    return first, second


def is_replay(answer: httpx.Response, first: httpx.Response) -> bool:
    same = (answer.status_code, answer.content) == (first.status_code, first.content)
    return same and answer.headers.get("idempotency-replayed") == "true"


# -- requests, functions and messages ----------------------------------------------------------------------------------


@stages
async def test_retry_at_the_other_process_is_answered_from_the_store(shop: Shop, stage: str, order: slice) -> None:
    one, other = pair(shop, stage, order)
    for path in ("flat", *(("enlisted",) if shop.connect else ())):
        for number in range(5):  # the first ones go through a lane, the others through the event loop
            first = await one.post(path, f"{path}-{number}")
            assert first.status_code == 201
            for process in (other, one):
                assert is_replay(await process.post(path, f"{path}-{number}"), first)
                assert (await process.post(path, f"{path}-{number}", amount=6)).status_code == 422
    assert set(shop.did.values()) == {1}


@stages
async def test_half_done_request_goes_on_at_the_other_process(shop: Shop, stage: str, order: slice) -> None:
    one, other = pair(shop, stage, order)
    assert (await one.post("phased", "phased-1")).status_code >= 500
    first = await other.post("phased", "phased-1")
    assert (first.status_code, first.json()) == (201, {"charged": {"phased-1": 1}})
    assert is_replay(await one.post("phased", "phased-1"), first)
    assert shop.did["charge phased-1"] == 1


@stages
async def test_call_and_message_are_known_to_the_other_process(shop: Shop, stage: str, order: slice) -> None:
    one, other = pair(shop, stage, order)
    first = await one.charge("o-1", 5)
    assert first == await other.charge("o-1", 5)
    with pytest.raises(KeyReused):
        await other.charge("o-1", 6)
    assert one.deliver("m-1") is Situation.HANDLED
    assert [other.deliver("m-1"), other.deliver("m-1", b"other")] == [Situation.DUPLICATE, Situation.OTHER_BODY]
    assert set(shop.did.values()) == {1}


# -- worker and upkeep -------------------------------------------------------------------------------------------------


@stages
async def test_worker_of_either_keyring_runs_every_job(shop: Shop, stage: str, order: slice) -> None:
    if shop.connect is None:
        pytest.skip("this store has no outbox")
    one, other = pair(shop, stage, order)
    for process, number in ((one, 1), (other, 2)):
        assert (await process.post("enlisted", f"enlisted-{number}")).status_code == 201
        assert (await process.post("deferred", f"deferred-{number}")).status_code == 202
    await other.work()
    assert isinstance(other.once.store, Outbox)
    assert other.once.store.jobs(JobState.DEAD, 10) == []
    for number in (1, 2):
        for process in (one, other):
            answer = await process.post("deferred", f"deferred-{number}")
            assert (answer.status_code, answer.json()) == (201, {"settled": f"deferred-{number}"})
    assert {name.partition(" ")[0] for name in shop.did} == {"enlisted", "deferred", "send", "settle"}
    assert set(shop.did.values()) == {1}


@stages
async def test_upkeep_of_the_other_process_settles_an_unknown_key(shop: Shop, stage: str, order: slice) -> None:
    one, other = pair(shop, stage, order)
    for process in (one, other):
        assert (await process.post("unknown", "unknown-1")).status_code == 409
    await asyncio.to_thread(Upkeep(other.once).run_once)
    assert one.read("unknown-1").state is State.COMPLETED
    for process in (one, other):
        answer = await process.post("unknown", "unknown-1")
        assert (answer.status_code, answer.json()) == (201, {"found": "unknown-1"})
    assert shop.did["unknown unknown-1"] == 1


# -- what a keyring that does not encrypt writes -----------------------------------------------------------------------


async def test_keyring_that_does_not_encrypt_writes_what_a_process_without_one_writes(shop: Shop) -> None:
    """Key 1 is needed by nothing of it, so the keyring can be removed again at once."""
    process = shop.process(OPENS)
    await process.post("flat", "flat-1")
    await process.post("phased", "phased-1")
    await process.post("unknown", "unknown-1")
    if shop.connect is not None:
        assert (await process.post("deferred", "deferred-1")).status_code == 202
    kinds = {type(row) for row in kept(process.once.store.inner)}  # type: ignore[attr-defined]
    assert kinds == {KeptKey, KeptStep, *([KeptJob] if shop.connect else [])}
    report = Rotation(raw_values(process.once.store), OPENS, dry_run=True).run()
    assert set(report.found) == set(report.fingerprints) == {PLAIN}
    assert "oncekey-sealed" not in raw_text(process.once.store.inner)  # type: ignore[attr-defined]
    assert (await shop.process(None).post("flat", "flat-1")).json() == {"flat-1": 1}


@pytest.mark.parametrize("keyring", [OPENS, ring(1)], ids=["opens", "encrypts"])
async def test_keyring_of_another_secret_is_noticed_and_a_plain_row_is_compared(shop: Shop, keyring: Keyring) -> None:
    """Two plain fingerprints name no key: requests that differ are a mismatch, and not incomparable."""
    await shop.process(None).post("flat", "flat-1")
    assert (await shop.process(keyring).post("flat", "flat-1", amount=6)).status_code == 422
    await shop.process(ring(1)).post("flat", "flat-2")
    stranger = shop.process(Keyring({1: bytes(32)}, encrypt=False))
    assert [(await stranger.post("flat", "flat-2", amount)).status_code for amount in (5, 6)] == [503, 503]
    assert set(shop.did.values()) == {1}


# -- switched off: all values are written again as plain text ----------------------------------------------------------


@pytest.fixture(params=["memory", *STORES])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    match request.param:
        case "memory":
            return "memory://"
        case "sqlite":
            return f"sqlite:///{tmp_path / 'keys.db'}"
        case name:
            names = {"postgres": "ready_url", "mysql": "ready_mysql"}
            found: str = request.getfixturevalue(names.get(name, f"ready_{name}_url"))
            return found


def test_rotation_with_a_keyring_that_does_not_encrypt_writes_plain_values(url: str) -> None:
    raw = open_store(url)
    raw.migrate()
    _put_bodies(sealed(raw, ring(1)))
    before: dict[str, Any] = {}
    if url != "memory://":
        fill(raw, url)
        before = readable(raw, ring(2, 1))
    opens = Keyring({2: bytes(range(32, 64)), 1: ONE}, encrypt=False)
    report = Rotation(raw_values(raw), opens).run()
    assert (report.left, report.rewritten[PLAIN], report.rewritten[1] > 0) == (Counter(), 0, True)
    assert "oncekey-sealed" not in raw_text(raw)
    assert [_body(raw, name) for name in BODIES] == list(BODIES.values())
    if url != "memory://":
        assert readable(raw, opens) == before
        assert SECRET in raw_text(raw)
    again = Rotation(raw_values(raw), opens).run()
    assert (again.rewritten.total(), again.left) == (0, Counter())
    back = Rotation(raw_values(raw), ring(2, 1), trust_key=True).run()  # and on again
    assert (back.left, SECRET in raw_text(raw)) == (Counter(), False)
    raw.close()


BODIES = {
    "full": StoredResponse(201, (("x-note", "é"),), b"\x00\xff body"),
    "empty": StoredResponse(204, (), b""),
    "tombstone": StoredResponse(200, (("content-type", "text/csv"),), None),
}


def _put_bodies(store: Store) -> None:
    for name, response in BODIES.items():
        move(store, reserved(store, name, 258), Event.COMPLETE, response=response)


def _body(raw: Store, key: str) -> StoredResponse | None:
    (record,) = raw.read([(SCOPE, key)])
    assert record is not None
    return record.response


def test_damaged_value_does_not_stop_a_rotation_to_plain_text() -> None:
    """A damaged value counts as plain, which is current here: that is no sign of a wrong key."""
    raw = MemoryStore()
    _put_bodies(sealed(raw, ring(1)))
    record = raw._rows[(SCOPE, "full")]
    raw._rows[(SCOPE, "a-damaged")] = replace(record, key="a-damaged", response=StoredResponse(200, (), b"", 2))
    report = Rotation(raw_values(raw), OPENS).run()
    assert (report.lost[PLAIN], report.rewritten[1]) == (1, len(BODIES))
