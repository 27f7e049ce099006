"""The answer to a commit is lost, or the commit itself: the error does not tell which of the two (hazard 9).

Cut by the proxy, on two kinds of connection. The engine commits a batch with its one statement: every key in it is hit,
at its reservation or at its outcome. The app commits its enlisted transaction, or a phase of it, by ``COMMIT``: the
key that it belongs to is hit. Half of the keys are hit by each.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Literal
from urllib.parse import urlsplit

from oncekey.testing.proxy import TcpProxy
from oncekey.testing.proxy_links import When
from tests.faults.campaign import Fault, Run, on_a_server
from tests.faults.local_app import LocalApp, gather
from tests.faults.local_app_check import checked, prepare

LARGEST_WAVE = 24
_KEY = re.compile(rb"key-\d{6}")
_PAID = re.compile(rb'"paid":"(key-\d{6})"')

COMMITS = {"postgres": b"COMMIT", "mysql": b"\x03COMMIT"}
"""As the app sends it. On MySQL the engine's own packets end with COMMIT, too; this one is a packet by itself."""

What = Literal["reservations", "outcomes"]


class Batch:
    """Asked by the proxy about every chunk to the server: is this the statement of a batch that is to be cut?"""

    def __init__(self, what: What) -> None:
        self._what = what
        self.hit: set[bytes] = set()

    def __call__(self, chunk: bytes) -> bool:
        keys = set(_PAID.findall(chunk))
        if self._what == "reservations":
            keys = set() if keys or b"POST /" not in chunk else set(_KEY.findall(chunk))
        self.hit |= keys
        return bool(keys)


def cut(when: When, run: Run) -> None:
    url = run.url()
    prepare(url)
    port = urlsplit(url).port
    assert port is not None
    with TcpProxy("127.0.0.1", port) as proxy:
        asyncio.run(_cut(when, run, proxy, url))


async def _cut(when: When, run: Run, proxy: TcpProxy, url: str) -> None:
    far = proxy.rewrite(url)
    local = LocalApp(on_a_server(far, timeout=2.0), url=far, begin_timeout=1.0, works=True)
    half = run.count // 2
    by_engine = by_app = 0
    async with local.open():
        await gather([local.pay(local.story()) for _ in range(5)])
        while run.wanting:
            size = run.random.randint(1, LARGEST_WAVE)
            times = run.random.choice((1, 1, 1, 2, 3))  # by the third the engine gives up, and the client asks again
            if by_engine < half:
                batch = Batch(run.random.choice(("reservations", "outcomes")))
                struck = proxy.cut_on("to_server", batch, when=when, times=times)
                await gather(
                    [local.pay(local.story(run.random.choice(("external", "repeatable")))) for _ in range(size)]
                )
                struck.cancel()
                hit = len(batch.hit) if struck.struck else 0
                by_engine += hit
            else:
                kinds = ("transactional", "transactional", "phased", "deferred")
                # A third of them: the first to come are of as many keys, before any of these asks again.
                struck = proxy.cut_on("to_server", COMMITS[run.store], when=when, times=max(1, size // 3))
                await gather([local.pay(local.story(run.random.choice(kinds))) for _ in range(size)])
                struck.cancel()
                hit = struck.struck
                by_app += hit
            if not hit:
                raise RuntimeError("a wave of keys went by without a commit that could be cut")
            run.hit(hit)
            run.asked(sum(local.statuses.values()) - run.requests)
    await checked(run, local, url)
    run.notes += [f"{by_engine} in batches of the engine, {by_app} in transactions of the app"]


FAULTS = tuple(
    Fault(
        f"COMMIT cut {'before it reaches' if when == 'before' else 'after it has reached'} the server",
        partial(cut, when),
        {"postgres": 500, "mysql": 200},
        short=16,
        promises=("I1", "I2", "I3", "I4", "I8"),
    )
    for when in ("before", "after")
)
