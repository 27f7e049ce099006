"""Redis comes back empty under a running app: 503, and no handler runs (hazard 24)."""

from __future__ import annotations

from datetime import timedelta

import pytest

from oncekey import Policy
from oncekey.core.audit import Audit
from oncekey.stores.redis import RedisStore
from oncekey.testing.servers import RedisServer
from tests.web.apps import PATIENCE, Api, World
from tests.web.checks import assert_refused


def _initialised(url: str) -> str:
    store = RedisStore(url)
    store.init()
    store.close()
    return url


async def test_redis_that_restarts_empty_gets_503_and_no_handler_runs() -> None:
    """For keys that were there, for new ones, and for a process that starts after the loss."""
    with RedisServer() as server:
        world = World(_initialised(server.url))
        api = Api(world, "starlette", policy=PATIENCE)
        assert (await api.post("k-1")).status_code == 201
        server.restart()  # nothing is on disk: it comes back empty
        for key in ("k-1", "k-2", "k-1"):
            assert_refused(await api.post(key))
        later = Api(world, "starlette", policy=PATIENCE)
        assert_refused(await later.post("k-1"))
        assert (api.runs, later.runs, world.rows()) == (1, 0, 0)

        operator = RedisStore(server.url)
        operator.accept_loss(Audit("ana", "the disk is gone"))
        operator.close()
        assert_refused(await api.post("k-3"))  # it knows the old epoch, until it is restarted
        restarted = Api(world, "starlette", policy=PATIENCE)
        assert (await restarted.post("k-3")).status_code == 201
        for each in (api, later, restarted):
            await each.close()


@pytest.mark.stores
@pytest.mark.parametrize("kill", [True, False])
async def test_durable_redis_that_restarts_has_all_that_clients_have_seen(kill: bool) -> None:
    """I2: with appendfsync always, what was answered is replayed after a kill and after a clean restart."""
    with RedisServer(durable=True) as server:
        world = World(_initialised(server.url))
        api = Api(world, "starlette", policy=Policy(begin_timeout=timedelta(seconds=20)))  # a disk may be busy
        answers = [await api.post(f"k-{number}") for number in range(50)]
        assert {each.status_code for each in answers} == {201}
        if kill:
            server.kill()
            server.start()
        else:
            server.restart("clean")
        again = [await api.post(f"k-{number}") for number in range(50)]
        assert [each.content for each in again] == [each.content for each in answers]
        assert api.runs == 50
        await api.close()
