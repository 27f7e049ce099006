"""A shop on one Galera node, whose enlisted transaction meets the write of another node at a moment that a test names.

Each payment writes two rows: the payment, and the balance of one account, which the other node writes too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pymysql
import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from starlette.requests import Request
from starlette.responses import Response

from oncekey import Policy, current
from oncekey.testing.servers import GaleraCluster
from tests.enlist.mysql_shop import MysqlShop
from tests.enlist.shop import TRANSACTIONAL, Api, paid
from tests.stores.mysql import connect

_BALANCE = "SELECT cents FROM accounts WHERE id = 1"


class NodeShop(MysqlShop):
    """The shop's app on one node. ``meet_at``: when :meth:`meet` is called, once: "handler", which awaits it, or
    "commit"."""

    def __init__(
        self, cluster: GaleraCluster, name: str, node: int, driver: str, policy: Policy = TRANSACTIONAL
    ) -> None:
        super().__init__(cluster.nodes[node].url_of(name))
        self._engine = sa.create_engine("mysql+pymysql://", creator=self._open, poolclass=NullPool)
        self._driver = driver
        self.meet_at: str | None = None
        self.meet: Callable[[], Awaitable[None] | None] = lambda: None
        self.commits: list[int | None] = []
        """The error of each COMMIT of the app; None: it succeeded."""
        self.runs = 0
        self._opened: list[Any] = []
        self.app: Api = self.api(self._pay, policy)

    def open_account(self, cents: int) -> None:
        self.ask("CREATE TABLE IF NOT EXISTS accounts (id integer PRIMARY KEY, cents integer NOT NULL)")
        self.ask(f"REPLACE INTO accounts VALUES (1, {cents})")

    def take(self, cents: int) -> None:
        """A write of another program on this node, committed at once."""
        self.ask(f"UPDATE accounts SET cents = cents - {cents} WHERE id = 1")

    def balance(self) -> int:
        """As this node has it, once it has applied what the other nodes had committed before."""
        with connect(self.url, init_command="SET SESSION wsrep_sync_wait = 1") as own, own.cursor() as cursor:
            cursor.execute(_BALANCE)
            return int((cursor.fetchone() or (0,))[0])

    def _open(self) -> pymysql.Connection:
        made = connect(self.url)
        commit = made.commit

        def watched() -> None:
            self._reached("commit")
            try:
                commit()
            except pymysql.MySQLError as error:
                self.commits.append(error.args[0])
                raise
            self.commits.append(None)

        made.commit = watched  # type: ignore[method-assign]
        return made

    def _reached(self, moment: str) -> Any:
        if moment == self.meet_at:
            self.meet_at = None
            return self.meet()
        return None

    async def _pay(self, request: Request) -> Response:
        del request
        self.runs += 1
        op = current()
        thing: Any = self._open() if self._driver == "pymysql" else Session(self._engine)
        self._opened.append(thing)
        await op.enlist(thing)
        for sql in (
            "UPDATE accounts SET cents = cents - 5 WHERE id = 1",
            f"INSERT INTO payments (`key`, cents) VALUES ('{op.key}', 5)",
        ):
            if self._driver == "pymysql":
                thing.cursor().execute(sql)
            else:
                thing.execute(sa.text(sql))
        if (meeting := self._reached("handler")) is not None:
            await meeting
        return paid(op.key)

    async def close(self) -> None:
        while self._opened:
            self._opened.pop().close()
        await self.app.close()
        self._engine.dispose()


@asynccontextmanager
async def two_shops(
    cluster: GaleraCluster, name: str, driver: str, policy: Policy = TRANSACTIONAL
) -> AsyncIterator[list[NodeShop]]:
    """The same app on two nodes, and one account with 100 cents."""
    shops = [NodeShop(cluster, name, node, driver, policy) for node in range(2)]
    shops[0].open_account(100)
    try:
        yield shops
    finally:
        for shop in shops:
            await shop.close()
