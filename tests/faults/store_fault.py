"""A store that fails at exactly one operation: refused, hung or slow from the moment before that operation.

:class:`StoreFault` stands in front of a store's verbs and looks at each call. When the operation comes that it waits
for, the outage begins, for all operations, and ends by itself a little later. Every key that reached that operation
during the outage was hit. What an outage is depends on the store:

==========  ==========================  ==============================  ==========================
store       refused                     hung                            slow
==========  ==========================  ==============================  ==========================
memory      every verb raises           every verb waits for the end,   every verb takes 30 ms
                                        then acts after all, or raises
sqlite      the file is moved away      another writer holds the file   the same, for 60 ms
postgres,   connections are reset, and  the network is gone; what was   every byte takes 10 ms
redis,      nothing listens             sent arrives when it is back
mysql
==========  ==========================  ==============================  ==========================
"""

from __future__ import annotations

import contextlib
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from oncekey.errors import StoreUnavailable
from oncekey.stores.api import EventLoops, InLoop, SharedCommit, SharedTurn, Store
from oncekey.testing.proxy import TcpProxy

Kind = Literal["refused", "hung", "slow"]
KINDS: tuple[Kind, ...] = get_args(Kind)
SECONDS: dict[Kind, float] = {"refused": 0.12, "hung": 0.4, "slow": 0.12}
LIMIT = 0.2
"""Seconds that a verb of the store may take, and that a request waits for it: an outage that hangs is longer."""

HOT = ("reserve", "swap")
READS = (
    *("read", "steps", "due", "find", "audit", "listing", "counts"),
    *("jobs", "jobs_of", "job", "deferred_to", "outbox_health"),
)
WRITES = (
    "purge",
    "claim",
    "renew_jobs",
    "conclude",
    "note_provider",
    "redirect",
    "purge_jobs",
    "purge_audit",
    "time_out",
)
VERBS = (*HOT, *READS, *WRITES)

Hit = Callable[[tuple[Any, ...]], Iterable[str]]
"""The keys that a call of a verb is about, of those that are waited for; none: let it pass."""


class Outage(Protocol):
    """How one kind of store fails."""

    def begin(self, kind: Kind) -> bool:
        """Whether nothing can be reserved from now on."""
        ...

    def end(self) -> None: ...

    def suffer(self, verb: str) -> None:
        """Called in the thread of every verb while it lasts."""
        ...


class StoreFault:
    def __init__(self, store: Store, outage_kind: Outage) -> None:
        self.store = store
        self.outage: int | None = None
        """The number of the outage in which nothing can be reserved, while there is one."""
        self.hits: set[str] = set()
        self._outage_kind = outage_kind
        self._verb = ""
        self._hit: Hit = lambda args: ()
        self._kind: Kind = "refused"
        self._enough = 0
        self._failing = False
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._over.set()
        for verb in VERBS:
            if hasattr(store, verb):
                setattr(store, verb, self._watched(verb, getattr(store, verb)))
        if isinstance(store, SharedCommit):
            store.both = self._watched("both", store.both)  # type: ignore[method-assign]
        if isinstance(store, SharedTurn):
            store.turn = self._watched("turn", store.turn)  # type: ignore[method-assign]
        if isinstance(store, EventLoops):
            inner = store.in_loop
            store.in_loop = lambda: self._watch_loop(inner())  # type: ignore[method-assign]

    def wait_for(self, verb: str, hit: Hit, kind: Kind, enough: int) -> None:
        """From now on, and until so many were hit or :meth:`rest`."""
        self.hits = set()
        self._verb, self._hit, self._kind, self._enough = verb, hit, kind, enough

    def rest(self) -> None:
        """Wait for nothing more, and return when the outage is over."""
        self._verb = ""
        if not self._over.wait(10.0):
            raise TimeoutError("an outage did not end")

    def pass_by(self, verb: str, args: tuple[Any, ...]) -> None:
        """A verb of the store is about to run. No key begins two outages, or its retries would have no end of them."""
        if verb == "both":
            begins, ends = args
            self.pass_by("swap", (ends,))
            self.pass_by("reserve", (begins,))
            return
        if verb == "turn":
            ended, *claim = args
            self.pass_by("conclude", (ended,))
            self.pass_by("claim", tuple(claim))
            return
        keys = set(self._hit(args)) - self.hits if verb == self._verb else set()
        if keys and len(self.hits) < self._enough:
            with self._lock:
                if not self._failing:
                    self._begin()
            self.hits |= keys

    def _begin(self) -> None:
        self._over.clear()
        gone = self._outage_kind.begin(self._kind)
        self._failing = True
        self.outage = next(self._numbers) if gone else None
        timer = threading.Timer(SECONDS[self._kind], self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        with self._lock:
            self.outage = None  # before the outage ends: a request that is let through from now on may succeed
            self._outage_kind.end()
            self._failing = False
        self._over.set()

    def _watched(self, verb: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.pass_by(verb, args)
            if self._failing:
                self._outage_kind.suffer(verb)
            return ask(*args, **kwargs)

        return watched

    def _watch_loop(self, inner: InLoop | None) -> InLoop | None:
        if inner is None:
            return None
        for verb in (*HOT, "both"):
            ask = getattr(inner, verb)

            async def watched(*args: Any, verb: str = verb, ask: Any = ask) -> Any:
                self.pass_by(verb, args)
                return await ask(*args)

            setattr(inner, verb, watched)
        return inner


class InMemory:
    """Verbs that raise, wait, or take their time."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._kind: Kind = "slow"
        self._over = threading.Event()

    def begin(self, kind: Kind) -> bool:
        self._kind = kind
        self._over.clear()
        return kind != "slow"

    def end(self) -> None:
        self._over.set()

    def suffer(self, verb: str) -> None:
        match self._kind:
            case "slow":
                time.sleep(0.03)
            case "refused":
                raise StoreUnavailable("refused")
            case "hung":
                self._over.wait(5.0)
                if self._chance.random() < 0.5:
                    raise StoreUnavailable("no answer")


class InFile:
    """SQLite. Readers need no lock there, so verbs that only read wait by themselves."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kind: Kind = "slow"
        self._away = path.with_name(f"{path.name}.away")
        self._rival = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
        self._over = threading.Event()

    def begin(self, kind: Kind) -> bool:
        self._kind = kind
        self._over.clear()
        if kind == "refused":
            self._path.rename(self._away)
            return True
        try:
            self._rival.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            time.sleep(SECONDS[kind] / 2)  # a request has the lock: it is as slow as with a slow disk
            return False
        if kind == "slow":
            threading.Timer(0.06, self._let_go).start()
        return kind == "hung"

    def end(self) -> None:
        if self._kind == "refused":
            self._away.rename(self._path)
        self._let_go()
        self._over.set()

    def _let_go(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._rival.in_transaction:
                self._rival.execute("ROLLBACK")

    def suffer(self, verb: str) -> None:
        if verb in READS and self._kind == "slow":
            time.sleep(0.03)
        elif verb in READS and self._kind == "hung":
            self._over.wait(5.0)
            raise StoreUnavailable("no answer")

    def close(self) -> None:
        self._rival.close()


class OnTheWire:
    """PostgreSQL, Redis or MySQL behind the proxy."""

    def __init__(self, proxy: TcpProxy) -> None:
        self._proxy = proxy

    def begin(self, kind: Kind) -> bool:
        match kind:
            case "refused":
                self._proxy.refuse()
            case "hung":
                self._proxy.hang()
            case "slow":
                self._proxy.delay(0.01)
        return kind != "slow"

    def end(self) -> None:
        self._proxy.pass_through()

    def suffer(self, verb: str) -> None:
        return None
