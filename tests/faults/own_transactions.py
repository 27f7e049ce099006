"""A handler that ends its own enlisted transaction: in every way, with every driver, and however it ends then.

The ways are those of ``tests/enlist/own_endings.py``. Each case is one key, sent three times: at most one attempt has
committed rows, and the key is completed with them, or unknown, or may be retried and has none.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from oncekey import current
from tests.enlist.own_endings import ENDINGS, WAYS, Ending, check, handler_of
from tests.enlist.shop import POSTGRES, SQLITE, Payer, Shop
from tests.faults.asgi_request import quiet
from tests.faults.campaign import Fault, Run

SENDS = 3
DRIVERS: dict[str, dict[str, type[Payer]]] = {"sqlite": SQLITE, "postgres": POSTGRES}


@dataclass(frozen=True)
class Case:
    driver: str
    way: str
    ending: Ending
    swallows: bool
    """The handler goes on after what its way raises."""


def cases(store: str) -> Iterator[Case]:
    for driver in DRIVERS[store]:
        for name, way in WAYS.items():
            if not way.beneath or driver.startswith("sa-"):  # else there is nothing beneath it
                for ending in ENDINGS:
                    yield Case(driver, name, ending, swallows=True)
                    yield Case(driver, name, ending, swallows=False)


EVERYTHING = {store: sum(1 for _ in cases(store)) for store in DRIVERS}


class Tills:
    """The cases of one run: one database, a payer for each driver, and one app whose handler is the case's."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.shop = Shop(run.url())
        self.payers = {name: payer(self.shop) for name, payer in DRIVERS[run.store].items()}
        self.api = self.shop.api(self._pay)
        self.ended: Counter[str] = Counter()

    async def _pay(self, request: Request) -> Response:
        answer: Response = await self.handlers[current().key](request)
        return answer

    async def one(self, case: Case) -> None:
        key, payer, way = f"key-{self.run.hits}", self.payers[case.driver], WAYS[case.way]
        self.handlers = {key: handler_of(payer, way, case.ending, swallows=case.swallows)}
        told = []
        for _ in range(SENDS):
            told.append((await self.api.post(key)).status_code)
            await payer.close_opened()
        self.run.asked(SENDS)
        for what in check(self.shop, payer, way, key, told):
            self.run.violated("I1", f"{what}: {case}")
        self.ended[str(self.shop.state(key))] += 1
        self.run.hit()

    async def close(self) -> None:
        for payer in self.payers.values():
            await payer.close()
        await self.api.close()


def own_transactions(run: Run) -> None:
    """All cases, or a sample of them."""
    planned = list(cases(run.store))
    if run.count < len(planned):
        planned = run.random.sample(planned, run.count)

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        payers = Tills(run)
        try:
            for case in planned:
                await payers.one(case)
        finally:
            await payers.close()
        run.notes.append(", ".join(f"{count} {state}" for state, count in payers.ended.most_common()))

    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of drivers, about transactions that were ended beneath them
        asyncio.run(play())


FAULTS = (
    Fault(
        "handler ends its own transaction",
        own_transactions,
        counts=EVERYTHING,
        short=40,
        promises=("I1",),
        seconds=300.0,
    ),
)
