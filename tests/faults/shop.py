"""A shop: the app of the campaign in warm processes, a provider with its ledger, a database, and what is left of it.

::

    with Shop(run, thinks=0.01) as shop:            # before any event loop or thread
        server = shop.start(upkeep=True)
        history = asyncio.run(clients(shop.port))   # see clients.py
        server.kill()
        check(run, shop.evidence(history))          # see checker.py
"""

from __future__ import annotations

import pickle
import socket
import sqlite3
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from types import TracebackType
from typing import Any, Self

import psycopg

from oncekey.core.jobs import JobState
from oncekey.core.states import State
from oncekey.stores.registry import open_store
from tests.faults import provider
from tests.faults.app import ENTRIES, has_rows, kinds_of, make_app
from tests.faults.campaign import Run
from tests.faults.clients import History
from tests.faults.evidence import Evidence, Row, Tables, handler_runs, look
from tests.faults.fork_server import ForkServer, Process
from tests.stores import mysql


class Shop:
    """``options`` are those of every app process (``tests/faults/app.py``); :meth:`start` may add to them.

    ``url``: of a store that is there already, instead of a new one of the run's kind.
    """

    def __init__(
        self, run: Run, *, url: str | None = None, make_app: Callable[..., Any] = make_app, **options: Any
    ) -> None:
        self.url = url or run.url()
        self.is_sqlite = self.url.startswith("sqlite")
        self.file = self.url.removeprefix("sqlite:///").partition("?")[0]
        self.in_memory = self.url.startswith("memory")
        self.has_rows = has_rows(self.url)
        self.kinds = kinds_of(self.url)
        self._patience = run.pace
        self._ledger = run.folder / "ledger.jsonl"
        self._runs = run.folder / "runs.jsonl"
        self.log = run.folder / "apps.log"
        self._desk = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.forks = ForkServer(make_app, {"provider": provider.serve}, log=self.log)
        self.port = self.forks.port
        self.options = {
            "url": self.url, "provider": self._desk.getsockname()[1], "runs": str(self._runs), **options
        }  # fmt: skip

    def __enter__(self) -> Self:
        if not self.in_memory:
            store = open_store(self.url)
            store.migrate()
            store.disconnect()
            store.close()
        if self.has_rows:
            self.ask(ENTRIES)
        self.forks.__enter__()
        self.provider = self.forks.spawn("provider", path=str(self._ledger), fd=self._desk.fileno())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.forks.__exit__(kind, error, trace)
        self._desk.close()

    def start(self, **options: Any) -> Process:
        return self.forks.start(**{**self.options, **options})

    def ask(self, sql: str) -> list[Any]:
        """SQL that both dialects understand, in a transaction of its own."""
        if self.is_sqlite:
            with closing(sqlite3.connect(self.file, timeout=30)) as own, own:
                return own.execute(sql).fetchall()
        if self.url.startswith("mysql"):
            return mysql.run(self.url, sql)
        with psycopg.connect(self.url) as server:
            cursor = server.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    def tables(self) -> Tables:
        """As they are now. A memory store is asked for them over HTTP: its process must be running."""
        if self.in_memory:
            with urllib.request.urlopen(f"{self.forks.url}/evidence", timeout=30) as answer:  # noqa: S310 - our own server
                tables: Tables = pickle.loads(answer.read())  # noqa: S301 - of our own server
            return tables
        store = open_store(self._patient_url)
        try:
            return look(store)
        finally:
            store.disconnect()
            store.close()

    @property
    def _patient_url(self) -> str:
        """Where the campaign looks: at many keys at once, on a machine that is busy."""
        if self.in_memory or self.has_rows:
            return self.url
        return f"{self.url}{'&' if '?' in self.url else '?'}timeout=60"

    def evidence(self, history: History) -> Evidence:
        asked = self.ask("SELECT scope, of_key, what, attempt FROM entries") if self.has_rows else []
        calls, runs = provider.read(self._ledger), handler_runs(self._runs)
        return Evidence(history, calls, [Row(*row) for row in asked], runs, self.tables(), has_rows=self.has_rows)

    def settle_down(self, seconds: float = 10.0) -> None:
        """Wait until no key is in progress and no job is left; what then is not over is for the checker to see."""
        if not self.has_rows:
            self._settle_keys(seconds * self._patience)
            return
        keys = f"SELECT count(*) FROM idempotency_keys WHERE state = '{State.IN_PROGRESS}'"
        jobs = f"SELECT count(*) FROM idempotency_outbox WHERE state IN ('{JobState.READY}', '{JobState.RUNNING}')"
        deadline = time.monotonic() + seconds
        while (self.ask(keys)[0][0] or self.ask(jobs)[0][0]) and time.monotonic() < deadline:
            time.sleep(0.1)

    def _settle_keys(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with closing(open_store(self._patient_url)) as store:
            while store.counts().counts[State.IN_PROGRESS] and time.monotonic() < deadline:
                time.sleep(0.1)

    def last_words(self) -> str:
        """What went wrong in the processes."""
        return self.log.read_text()[-4_000:] if self.log.exists() else ""
