"""``replicas=1`` over HTTP: what no replica has confirmed does not count, at each write of a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from datetime import timedelta

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oncekey import Policy, current
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.errors import StoreUnavailable
from oncekey.stores.redis import RedisStore
from oncekey.telemetry import events
from oncekey.testing.servers import HOST, RedisServer, ServerUnavailable
from tests.web.apps import ONE, Api, World, until
from tests.web.checks import assert_refused

pytestmark = [pytest.mark.stores, pytest.mark.timeout(120)]


class Pair:
    """A master and its replica, which a test stalls."""

    def __init__(self, master: RedisServer, replica: RedisServer) -> None:
        self.master, self.replica = master, replica

    @property
    def url(self) -> str:
        return f"{self.master.url}?replicas=1&replicas_timeout=0.2&timeout=2"

    def in_step(self) -> bool:
        """Whether the replica confirms what is written now: after a stall it has to catch up."""
        with closing(RedisStore(self.url)) as store:
            try:
                return store.read([(ONE, "none")]) == [None]
            except StoreUnavailable:
                return False

    def row(self, key: str) -> Record | None:
        """The row on the master, whatever the replica has."""
        with closing(RedisStore(self.master.url)) as store:
            return store.read([(ONE, key)])[0]


@pytest.fixture(scope="module")
def servers() -> Iterator[Pair]:
    settings = {"repl-diskless-sync-delay": "0"}
    try:
        with RedisServer(settings=settings) as master, RedisServer(settings=settings) as replica:
            replica.command("REPLICAOF", HOST, str(master.port))
            yield Pair(master, replica)
    except ServerUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture
async def pair(servers: Pair) -> AsyncIterator[Pair]:
    servers.master.flush()
    with closing(RedisStore(servers.master.url)) as store:
        store.init()
    await until(servers.in_step, "the replica is in step", 30.0)
    yield servers
    servers.replica.resume()


class Shop:
    """An app with one effect, which stalls the replica at one moment of the first request."""

    def __init__(self, pair: Pair, stall_at: str | None = None) -> None:
        self.pair, self.stall_at = pair, stall_at
        self.charges = 0
        policy = Policy(effects="phased", begin_timeout=timedelta(seconds=3))
        self.api = Api(World(pair.url), "starlette", self._respond, policy=policy)

    def _reached(self, moment: str) -> None:
        if moment == self.stall_at:
            self.stall_at = None
            self.pair.replica.pause()

    async def _charge(self) -> int:
        self.charges += 1
        self._reached("effect")
        return self.charges

    async def _respond(self, request: Request, run: int) -> Response:
        del request, run
        self._reached("intent")
        charge = await current().effect("charge", self._charge, repeatable=False)
        self._reached("end")
        return JSONResponse({"charge": charge}, 201)

    async def pay_until_stored(self) -> httpx.Response:
        """Retry, as a client does, until the answer is there."""
        for _ in range(200):
            if (answer := await self.api.post()).status_code == 201:
                return answer
            await asyncio.sleep(0.05)
        raise AssertionError("the answer is never there")


async def test_reservation_that_no_replica_confirmed_is_503_and_discarded(pair: Pair) -> None:
    shop = Shop(pair)
    pair.replica.pause()
    assert_refused(await shop.api.post())
    await until(lambda: pair.row("k-1") is None, "the owner has discarded its reservation")
    assert (shop.api.runs, shop.charges) == (0, 0)
    pair.replica.resume()
    assert (await shop.pay_until_stored()).status_code == 201
    assert (shop.api.runs, shop.charges) == (1, 1)
    await shop.api.close()


async def test_effect_is_not_called_if_no_replica_confirmed_its_intent(pair: Pair) -> None:
    """The master has the intent of an effect that may not be repeated, so the key becomes unknown (docs/stores.md)."""
    shop = Shop(pair)
    assert (await shop.api.post("k-0")).status_code == 201  # the server now has all scripts
    shop.stall_at = "intent"
    assert (await shop.api.post()).status_code == 503
    assert (shop.api.runs, shop.charges) == (2, 1)
    row = pair.row("k-1")
    assert row is not None
    assert row.recovery_point is not None, "the intent is on the master, and does not count"
    pair.replica.resume()
    await until(lambda: pair.row("k-1").state is State.UNKNOWN, "the key is unknown")  # type: ignore[union-attr]
    assert (await shop.api.post()).status_code == 409
    assert (shop.api.runs, shop.charges) == (2, 1)
    await shop.api.close()


async def test_result_of_an_effect_is_written_until_a_replica_confirms_it(pair: Pair) -> None:
    """Only this attempt knows the result, so the handler does not go on without it."""
    shop = Shop(pair, "effect")
    paying = shop.api.start()
    await until(lambda: len(shop.api.saw(events.StoreFailed)) > 1, "the result was refused, and tried again")
    assert (paying.done(), shop.charges) == (False, 1)
    pair.replica.resume()
    assert (await paying).json() == {"charge": 1}
    assert shop.charges == 1
    await shop.api.close()


async def test_answer_that_no_replica_confirmed_is_503_until_the_store_has_it(pair: Pair) -> None:
    """The process keeps trying, without a retry of the client: first in vain, then a replica confirms it. No request
    runs the handler again, and a retry gets the first answer."""
    shop = Shop(pair, "end")
    keeper = shop.api.once.engine.keeper
    assert (await shop.api.post()).status_code == 503
    assert (shop.charges, len(keeper._live)) == (1, 1)
    refused = len(shop.api.saw(events.StoreFailed))
    await until(lambda: len(shop.api.saw(events.StoreFailed)) > refused, "the keeper has tried, and was refused")
    pair.replica.resume()
    await until(lambda: not keeper._live, "the keeper has stored the answer", 30.0)
    assert keeper._unfinished == []
    paid = await shop.pay_until_stored()
    assert (paid.json(), paid.headers["idempotency-replayed"]) == ({"charge": 1}, "true")
    assert (shop.api.runs, shop.charges) == (1, 1)
    await shop.api.close()
