"""Redis is killed and started again under load, or refuses, hangs and crawls behind a bad network."""

from __future__ import annotations

from oncekey.stores.redis import RedisStore
from oncekey.testing.proxy import TcpProxy
from tests.faults.campaign import Fault, Run
from tests.faults.local_app import LocalApp
from tests.faults.strikes import Strike, bad_network, killed, under_load_and_checked


def killed_under_load(run: Run) -> None:
    """With appendfsync always, a server that is killed comes back with all that it has answered."""
    server = run.own_redis
    _load(run, f"{server.url}?timeout=2", killed(run, server))


def behind_a_bad_network(run: Run) -> None:
    with TcpProxy("127.0.0.1", run.own_redis.port) as proxy:
        url = f"{proxy.rewrite(run.own_redis.url)}?timeout=0.6&replicas_timeout=0.1"
        _load(run, url, bad_network(run, proxy))


def _load(run: Run, url: str, strike: Strike) -> None:
    local = LocalApp(RedisStore(url), upkeep=True, transactions=False)
    under_load_and_checked(run, local, strike, f"{run.own_redis.url}?timeout=60")


FAULTS = (
    Fault(
        "Redis killed under load, appendfsync always",
        killed_under_load,
        {"redis": 50},
        short=1,
        promises=("I1", "I2", "I4", "I7"),
        unit="kills",
        seconds=90.0,
    ),
    Fault(
        "Redis refused, hung, cut or slow under load",
        behind_a_bad_network,
        {"redis": 50},
        short=1,
        promises=("I1", "I2", "I4", "I7"),
        unit="outages",
        seconds=120.0,
    ),
)
