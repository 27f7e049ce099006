"""The cache in front of a store: lanes look a key up here before they reserve it.

Only final rows are in the cache, and only a row counts: a miss always means that the store is asked, so the cache is
never the reason why a request runs. Rows get there in two ways, both after their commit: when a lane has ended an
attempt, and when a lane has read a final row. A thread of its own writes them, so that no request waits for it.

``forget`` deletes a final row. It first leaves a mark in the cache, which opens as no entry, and writers add only
where nothing is. The mark outlives every write that may still be on its way, so a row that is too old is not written.
If the mark cannot be written, a replay can be served for ``ttl`` seconds more: an entry carries the time of its row,
and does not open ``ttl`` seconds after that. The age of a row counts from before the store was asked (``clocks``),
because the process may be stopped at any place after the store has answered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from oncekey.core.record import Found, Record, Reservation
from oncekey.core.states import Event
from oncekey.core.swaps import End, Swap
from oncekey.stores.api import InLoop
from oncekey.stores.cache.client import CacheClient, CacheDown, Identified, InLoopCache
from oncekey.stores.cache.entries import Entries, NotSealed, cacheable, name_of
from oncekey.telemetry.redaction import describe

MARK = b"forgotten"
"""What ``forget`` leaves in the place of an entry."""
MAX_WAITING = 10_000
"""How many rows may wait to be written. More are dropped: the cache costs nothing but speed."""
MAX_AGE_SECONDS = 10.0
"""A row that is older is not written, so that no write outlives the mark of ``forget``. It is enough for a store that
answers at the end of its timeout (5 seconds) and for a queue."""
MARK_SECONDS = 60.0
"""How long a mark stays: far longer than ``MAX_AGE_SECONDS``."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""For how many seconds a cache that failed is left alone. The pause doubles with each failure."""

Clocks = tuple[float, float]
"""One moment: on the clock of this process (``time.monotonic``), and on the clock of the host (``time.time``)."""

_log = logging.getLogger("oncekey")


def clocks() -> Clocks:
    """Now. Read them before a store is asked: no row of its answer is older."""
    return time.monotonic(), time.time()


class Cache:
    """Reads and writes rows in the cache. A cache that is down answers nothing, and is left alone for a while."""

    def __init__(self, client: CacheClient, entries: Entries, store: Identified) -> None:
        self.client = client
        self._entries = entries
        self._store = store
        self._identity: str | None = None
        self._told_not_sealed = False
        self._paused_until = 0.0
        self._pause = FIRST_PAUSE
        self._waiting: deque[tuple[Clocks, Record]] = deque(maxlen=MAX_WAITING)
        """Rows, each with the moment before the store was asked."""
        self._work = threading.Event()
        self._writer: threading.Thread | None = None
        self._writing = False
        """Whether the writer has taken rows out of ``_waiting`` that are not written yet."""
        self._closed = False
        self._lock = threading.Lock()

    # -- reading -------------------------------------------------------------------------------------------------

    def look_up(self, wanted: Sequence[Reservation]) -> list[Record | None]:
        """The rows that are in the cache; None: ask the store. In the thread of a lane, which may ask the store."""
        if self._identity is None:
            self._identity = self._store.identity()
        if self.pauses:
            return [None] * len(wanted)
        names = self._names(wanted)
        try:
            return self._opened(wanted, names, self.client.get(names))
        except Exception as error:  # noqa: BLE001 - a cache that cannot be read is a miss, whatever is wrong with it
            self.failed(error)
            return [None] * len(wanted)

    def _names(self, wanted: Sequence[Reservation]) -> list[bytes]:
        return [name_of(self._identity or "", each.scope, each.key) for each in wanted]

    async def look_up_in_loop(self, client: InLoopCache, wanted: Sequence[Reservation]) -> list[Record | None]:
        """As ``look_up``, in an event loop."""
        if self.pauses or self._identity is None:
            return [None] * len(wanted)
        names = self._names(wanted)
        try:
            return self._opened(wanted, names, await client.get(names))
        except Exception as error:  # noqa: BLE001 - as in look_up
            self.failed(error)
            return [None] * len(wanted)

    def _opened(
        self, wanted: Sequence[Reservation], names: Sequence[bytes], entries: Sequence[bytes | None]
    ) -> list[Record | None]:
        self._pause = FIRST_PAUSE
        now = time.time()
        found: list[Record | None] = []
        for each, name, entry in zip(wanted, names, entries, strict=True):
            try:
                missing = entry is None or entry == MARK
                found.append(None if missing else self._entries.open(name, each.scope, each.key, entry or b"", now))
            except NotSealed:
                found.append(None)
                self._tell_not_sealed()
        return found

    def _tell_not_sealed(self) -> None:
        if not self._told_not_sealed:
            self._told_not_sealed = True
            _log.warning(
                "an entry of the cache was not sealed with this process's cache_secret, so the store is asked instead. "
                "Give all processes of the app the same secret; if they have it, another program writes to this cache. "
                "This is said once per process"
            )

    @property
    def pauses(self) -> bool:
        return self._paused_until > 0.0 and time.monotonic() < self._paused_until

    def failed(self, error: Exception) -> None:
        """Leave the cache alone for a while."""
        if self.pauses:
            return
        reason = error if isinstance(error, CacheDown) else describe(error)
        _log.warning(
            "the cache does not answer, so every replay asks the store for the next %g s: %s", self._pause, reason
        )
        self._paused_until = time.monotonic() + self._pause
        self._pause = min(LONGEST_PAUSE, self._pause * 2)

    # -- writing -------------------------------------------------------------------------------------------------

    def keep(self, records: Sequence[Record], asked: Clocks) -> None:
        """Have these committed rows written soon. Rows that are not final are left out. ``asked``: ``clocks()`` before
        the store was asked for them."""
        fresh = [(asked, record) for record in records if cacheable(record)]
        if not fresh or self._closed or self.pauses or self._identity is None:
            return
        self._waiting.extend(fresh)
        if self._writer is None:
            self._start()
        self._work.set()

    def _start(self) -> None:
        with self._lock:
            if self._writer is None and not self._closed:
                self._writer = threading.Thread(target=self._write_all, name="oncekey-cache", daemon=True)
                self._writer.start()

    def _write_all(self) -> None:
        while not self._closed:
            self._work.wait()
            self._work.clear()
            while self._waiting and not self._closed:
                self._writing = True  # before they leave ``_waiting``: flush looks at both
                self._write([self._waiting.popleft() for _ in range(min(len(self._waiting), 256))])
                self._writing = False

    def _write(self, rows: list[tuple[Clocks, Record]]) -> None:
        now = time.monotonic()
        entries, seconds = {}, {}
        for (asked_at, read_at), record in rows:
            age = now - asked_at
            left = min(self._entries.ttl, record.expires_at - record.now) - age
            if age > MAX_AGE_SECONDS or left <= 0.0:
                continue
            name = name_of(self._identity or "", record.scope, record.key)
            entry = self._entries.seal(name, record, read_at)
            if entry is not None:
                entries[name], seconds[name] = entry, left
        try:
            if entries and not self.pauses:
                self.client.add(entries, seconds)
        except Exception as error:  # noqa: BLE001 - the thread goes on with later rows
            self.failed(error)

    def forget(self, scope: str, key: str) -> bool:
        """Leave a mark in the place of this key's entry. False: the cache did not answer."""
        try:
            mark_forgotten(self.client, self._store, scope, key)
        except CacheDown as error:
            _log.warning(
                "the cache could not be told that a key is forgotten: it may be replayed for another %g s: %s",
                self._entries.ttl,
                error,
            )
            return False
        return True

    def flush(self, timeout: float = 10.0) -> None:
        """Wait until the rows that were kept so far are written, or the cache has failed; for tests."""
        until = time.monotonic() + timeout
        while (self._waiting or self._writing) and time.monotonic() < until and not self.pauses:
            time.sleep(0.001)

    def close(self) -> None:
        self._closed = True
        self._work.set()
        if (writer := self._writer) is not None:
            writer.join(1.0)
        self.client.close()
        self._writer, self._closed = None, False

    def after_fork(self) -> None:
        """In a child: the writer's thread and the rows that wait are the parent's."""
        self._waiting.clear()
        self._work, self._lock, self._writer, self._writing = threading.Event(), threading.Lock(), None, False


def mark_forgotten(client: CacheClient, store: Identified, scope: str, key: str) -> bool:
    """Leave the mark of ``forget`` in the place of this key's entry. False: there was no entry. The mark is left then,
    too, since a process may be about to write the entry."""
    name = name_of(store.identity(), scope, key)
    (entry,) = client.get([name])
    client.replace(name, MARK, MARK_SECONDS)
    return entry not in (None, MARK)


# -- in front of the verbs of a store ----------------------------------------------------------------------------------

Reserve = Callable[[Sequence[Reservation]], list[Found]]
Move = Callable[[Sequence[Swap]], list[Record | None]]


def reserve_behind(cache: Cache, reserve: Reserve) -> Reserve:
    """``reserve`` of a store, for the keys that are not in the cache."""

    def look_up_first(batch: Sequence[Reservation]) -> list[Found]:
        cached = cache.look_up(batch)
        rest = [each for each, record in zip(batch, cached, strict=True) if record is None]
        asked = clocks()
        answers = reserve(rest) if rest else []
        cache.keep([each.record for each in answers if each.record is not None], asked)
        found = iter(answers)
        return [next(found) if record is None else Found(record) for record in cached]

    return look_up_first


def swap_behind(cache: Cache, swap: Move) -> Move:
    """``swap`` of a store. A key that is forgotten leaves the cache first."""

    def forget_first(batch: Sequence[Swap]) -> list[Record | None]:
        for change in batch:
            if change.event is Event.FORGET:
                cache.forget(change.scope, change.key)
        asked = clocks()
        moved = swap(batch)
        kept = [
            record
            for change, record in zip(batch, moved, strict=True)
            if record is not None and change.to_state is not None  # None: the row is deleted
        ]
        cache.keep(kept, asked)
        return moved

    return forget_first


class CachedInLoop:
    """The same for the verbs of an event loop, which move no final rows."""

    def __init__(self, store: InLoop, cache: Cache) -> None:
        self._store = store
        self._cache = cache
        self._client = cache.client.in_loop()

    async def reserve(self, batch: Sequence[Reservation]) -> Sequence[float | Record | None]:
        found, _ = await self.both(batch, ())
        return found

    async def swap(self, batch: Sequence[End | Swap]) -> Sequence[float | None]:
        asked = clocks()
        times = await self._store.swap(batch)
        self._keep_ended(batch, times, asked)
        return times

    async def both(
        self, begins: Sequence[Reservation], ends: Sequence[End | Swap]
    ) -> tuple[Sequence[float | Record | None], Sequence[float | None]]:
        cached = await self._cache.look_up_in_loop(self._client, begins)
        rest = [each for each, record in zip(begins, cached, strict=True) if record is None]
        if not rest and not ends:
            return cached, ()
        asked = clocks()
        answers: Sequence[float | Record | None] = ()
        times: Sequence[float | None] = ()
        if rest and ends:
            answers, times = await self._store.both(rest, ends)
        elif rest:
            answers = await self._store.reserve(rest)
        else:
            times = await self._store.swap(ends)
        self._cache.keep([each for each in answers if isinstance(each, Record)], asked)
        self._keep_ended(ends, times, asked)
        found = iter(answers)
        return [next(found) if record is None else record for record in cached], times

    def _keep_ended(self, ends: Sequence[End | Swap], times: Sequence[float | None], asked: Clocks) -> None:
        moved = []
        for end, at in zip(ends, times, strict=True):
            change = end.swap() if isinstance(end, End) else end
            if at is not None and change.seen is not None:
                moved.append(change.moved(change.seen, at))
        self._cache.keep(moved, asked)

    def abandon(self) -> None:
        self._store.abandon()
        self._client.abandon()
