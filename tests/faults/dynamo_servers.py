"""DynamoDB's API: its server is killed and started again under load, or refuses, hangs and crawls behind a bad network.

The server is dynalite, which keeps what it has answered. Amazon's service was not tried.
"""

from __future__ import annotations

from oncekey.stores.registry import open_store
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import HOST
from tests.faults.campaign import Fault, Run
from tests.faults.local_app import LocalApp
from tests.faults.strikes import Strike, bad_network, killed, under_load_and_checked
from tests.stores.dynamo_rows import through

CLIENTS = 6
"""A round of upkeep is a hundred small requests here, and each takes ten milliseconds of the SDK's and dynalite's."""


def killed_under_load(run: Run) -> None:
    url = run.url()
    _load(run, f"{url}&timeout=5", url, killed(run, run.own_dynalite))


def behind_a_bad_network(run: Run) -> None:
    url = run.url()
    with TcpProxy(HOST, run.own_dynalite.port) as proxy:
        _load(run, f"{through(proxy, url)}&timeout=1", url, bad_network(run, proxy))


def _load(run: Run, url: str, direct: str, strike: Strike) -> None:
    """``direct``: the same table, without what is in the app's way."""
    store = open_store(url)
    store.migrate()
    local = LocalApp(store, upkeep=True, transactions=False, lease=3.0, begin_timeout=2.0, upkeep_every=1.0)
    under_load_and_checked(run, local, strike, f"{direct}&timeout=60", CLIENTS)


FAULTS = (
    Fault(
        "DynamoDB server killed under load",
        killed_under_load,
        {"dynamodb": 20},
        short=1,
        promises=("I1", "I2", "I4", "I7"),
        unit="kills",
        seconds=120.0,
    ),
    Fault(
        "DynamoDB refused, hung, cut or slow under load",
        behind_a_bad_network,
        {"dynamodb": 20},
        short=1,
        promises=("I1", "I2", "I4", "I7"),
        unit="outages",
        seconds=120.0,
    ),
)
