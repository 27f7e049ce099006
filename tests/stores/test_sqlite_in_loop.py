"""SQLite's hot verbs in an event loop: the same answers and the same rows as the store's own, in time or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncekey.core.record import StoredResponse
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import SchemaError, StoreError, StoreUnavailable
from oncekey.stores.api import LostRace
from oncekey.stores.sqlite import SqliteStore, batch, in_loop
from oncekey.stores.sqlite.in_loop import SqliteInLoop
from oncekey.stores.sqlite.store import Writer
from tests.engine.doubles import RESPONSE, reservation
from tests.stores.begun_keys import completion, reserved
from tests.stores.wholes import check_recipes, moved_by, moves_of, reserved_by, rows_of
from tests.stores.writers import ready


@pytest.fixture(params=["thread", "process"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(tmp_path / "keys.db", writer=request.param)) as made:
        made.check()
        yield made


by_thread = pytest.mark.parametrize("store", ["thread"], indirect=True)
"""For what a writer process does in another way: test_sqlite_writer_process.py has that."""


@pytest.fixture
async def fast(store: SqliteStore) -> AsyncIterator[SqliteInLoop]:
    made = SqliteInLoop(store)
    yield await ready(made)
    made.abandon()


async def test_reads_while_another_writes(store: SqliteStore, fast: SqliteInLoop, tmp_path: Path) -> None:
    """A writer that holds the file holds up no replay."""
    reserved(store, "there")
    writer = sqlite3.connect(tmp_path / "keys.db", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")

    (known,) = await fast.reserve([reservation("there")])
    assert known is not None
    writer.execute("ROLLBACK")
    writer.close()


@by_thread
async def test_does_not_wait_in_the_loop(store: SqliteStore, fast: SqliteInLoop, tmp_path: Path) -> None:
    """Where SQLite would have it wait, it raises at once, and the lane takes over."""
    reserved(store, "there")
    store.close()
    holder = sqlite3.connect(tmp_path / "keys.db", isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    holder.execute("UPDATE idempotency_keys SET attempt = attempt")

    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await fast.reserve([reservation("there")])
    assert time.monotonic() - began < 2
    holder.execute("ROLLBACK")
    holder.close()


async def test_creates_no_tables_in_the_loop(tmp_path: Path) -> None:
    """Migrations are the lane's."""
    with closing(sqlite3.connect(tmp_path / "keys.db")) as own:
        own.execute("CREATE TABLE business (id INTEGER)")

    with closing(SqliteStore(tmp_path / "keys.db")) as store, pytest.raises(SchemaError):
        await SqliteInLoop(store).reserve([reservation("a")])


class Still:
    """A clock that stands."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.125

    def __call__(self) -> float:
        return self.now


class Twins:
    """Two stores with one clock: one is asked in the loop, the other as ever, and their rows must be the same."""

    def __init__(self, folder: Path, writer: Writer) -> None:
        self.clock = Still()
        self.fast_store = SqliteStore(folder / "fast.db", clock=self.clock, writer=writer)
        self.slow = SqliteStore(folder / "slow.db", clock=self.clock)
        self.fast_store.check()
        self.fast = SqliteInLoop(self.fast_store)

    def alike(self) -> bool:
        return everything(self.fast_store.path) == everything(self.slow.path)

    def close(self) -> None:
        self.fast.abandon()
        self.fast_store.close()
        self.slow.close()


@pytest.fixture(params=["thread", "process"])
async def twins(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Twins]:
    with closing(Twins(tmp_path, request.param)) as made:
        await ready(made.fast)
        yield made


ENDINGS = [
    (Event.COMPLETE, RESPONSE, None),
    (Event.COMPLETE, StoredResponse(204, (), b""), None),
    (Event.COMPLETE, StoredResponse(200, (("x", 'quo"te'), ("y", "\u00e9 \U0001f600")), None), "too large to be kept"),
    (Event.COMPLETE, StoredResponse(200, (), bytes(range(256)) * 300), None),
    (Event.FAIL, StoredResponse(402, (("content-type", "text/plain"),), b"no"), None),
]


def everything(path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT * FROM idempotency_keys ORDER BY scope, key").fetchall()


async def test_leaves_the_rows_that_the_store_leaves(twins: Twins) -> None:
    """Column for column, by way of JSON and a trigger: beginnings, and endings of all kinds."""
    twins.slow.check()
    twins.fast_store.check()
    begins = [reservation(f"k-{number}", scope="t\u00e9nant") for number in range(len(ENDINGS))]
    found = await reserved_by(twins.fast, begins)
    expected = twins.slow.reserve(begins)
    assert found == [each.record for each in expected]
    assert twins.alike()
    twins.clock.now += 7
    changes = [
        swap(there.record, event, Actor.OWNER, response=response, last_error=why)
        for there, (event, response, why) in zip(expected, ENDINGS, strict=True)
        if there.record is not None
    ]
    assert all(change.ends for change in changes)
    more = [reservation("next")]
    begun, moved = await twins.fast.both(more, changes)
    there, ended = twins.slow.both(more, changes)
    assert (rows_of(more, begun), moves_of(changes, moved)) == ([each.record for each in there], ended)
    assert twins.alike()


@pytest.mark.parametrize(("event", "response", "why"), ENDINGS)
async def test_leaves_the_row_that_the_store_leaves_alone_in_its_batch(
    twins: Twins, event: Event, response: StoredResponse, why: str | None
) -> None:
    """Nothing but an empty body, or no body: an empty one is not a tombstone."""
    begin = reservation("k")
    (found,), _ = twins.fast_store.reserve([begin]), twins.slow.reserve([begin])
    assert found.record is not None
    change = swap(found.record, event, Actor.OWNER, response=response, last_error=why)
    assert await moved_by(twins.fast, [change]) == twins.slow.swap([change])
    assert twins.alike()
    assert twins.fast_store.read([(begin.scope, begin.key)]) == twins.slow.read([(begin.scope, begin.key)])


async def test_where_not_all_rows_change_the_rows_tell(store: SqliteStore, fast: SqliteInLoop) -> None:
    """A lost lease, a key of another owner, and beside them what went well: each gets its own answer."""
    good, bad, theirs = (reserved(store, key) for key in ("good", "bad", "theirs"))
    ends = [completion(record) for record in (good, bad)]
    store.swap([swap(bad, Event.RELEASE, Actor.OWNER)])
    mine = reservation("mine")
    begins = [reservation("theirs"), mine]
    found, times = await fast.both(begins, ends)
    assert [each and each.owner for each in rows_of(begins, found)] == [theirs.owner, mine.owner]
    moved = moves_of(ends, times)
    assert moved[0] is not None
    assert (moved[0].state, moved[0].response) == (State.COMPLETED, RESPONSE)
    assert moved[1] is None
    (again,) = await fast.swap([ends[0]])
    assert again is None, "it was moved before, and not by this"


@pytest.mark.parametrize("column", ["owner", "state"])
async def test_completion_by_a_replaced_owner_writes_nothing(
    store: SqliteStore, fast: SqliteInLoop, column: str
) -> None:
    """Fencing (I3): taken over by another owner, or no longer in progress, nothing is written."""
    done = completion(reserved(store, "k"))
    other = {"owner": "another", "state": "unknown"}[column]
    with closing(sqlite3.connect(store.path)) as own, own:
        own.execute(f"UPDATE idempotency_keys SET {column} = ?", (other,))
    before = everything(store.path)

    assert await fast.swap([done]) == [None]
    assert everything(store.path) == before


@by_thread
async def test_does_all_of_a_batch_or_nothing(store: SqliteStore, fast: SqliteInLoop, tmp_path: Path) -> None:
    done = completion(reserved(store, "old"))
    with closing(sqlite3.connect(tmp_path / "keys.db")) as other, other:
        other.execute(
            "CREATE TRIGGER refuses BEFORE INSERT ON idempotency_keys WHEN NEW.key = 'bad' "
            "BEGIN SELECT RAISE(ABORT, 'no'); END"
        )

    with pytest.raises(StoreUnavailable):
        await fast.both([reservation("good"), reservation("bad")], [done])
    assert [row.state if row else None for row in store.read([("tenant-1", "old"), ("tenant-1", "good")])] == [
        State.IN_PROGRESS,
        None,
    ]
    _, moved = await fast.both([reservation("good")], [done])
    assert moved[0] is not None, "the next batch is as good as any"


async def test_leaves_new_keys_to_the_lanes_while_the_app_has_the_file(store: SqliteStore, fast: SqliteInLoop) -> None:
    """An enlisted transaction may take as long as its handler; replays do not wait for it."""
    done = completion(reserved(store, "there"))

    assert store.gate.acquire(0, lane=False)
    known, new = await fast.reserve([reservation("there"), reservation("new")])
    assert known is not None
    assert new is None
    with pytest.raises(LostRace):
        await fast.both([reservation("new")], [done])
    store.gate.release()
    assert all(await fast.reserve([reservation("there"), reservation("new")]))


class Other:
    """Another writer, which holds the gate of this process or the file."""

    def __init__(self, store: SqliteStore, by: str) -> None:
        self._gate = store.gate if by == "gate" else None
        self._file = sqlite3.connect(store.path, isolation_level=None)

    def hold(self) -> None:
        if self._gate is not None:
            assert self._gate.acquire(0, lane=True)
        else:
            self._file.execute("BEGIN IMMEDIATE")

    def let_go(self) -> None:
        if self._gate is not None:
            self._gate.release()
        else:
            self._file.execute("ROLLBACK")
        self._file.close()


@pytest.mark.parametrize("by", ["gate", "file"])
async def test_batch_waits_for_a_short_write_of_another(
    store: SqliteStore, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more patience than in production: a busy machine may hold up the loop that lets go."""
    monkeypatch.setattr(in_loop, "LOCK_SECONDS", 4.0)
    fast, other = await ready(SqliteInLoop(store)), Other(store, by)
    await fast.reserve([reservation("warm")])
    other.hold()
    asyncio.get_running_loop().call_later(0.05, other.let_go)
    assert all(await fast.reserve([reservation("patient")]))
    fast.abandon()


@pytest.mark.parametrize("by", ["gate", "file"])
async def test_batch_goes_to_a_lane_if_another_writes_for_long(store: SqliteStore, fast: SqliteInLoop, by: str) -> None:
    other = Other(store, by)
    await fast.reserve([reservation("warm")])
    other.hold()
    began = time.monotonic()
    with pytest.raises(LostRace if by == "gate" else StoreUnavailable):
        await fast.reserve([reservation("new")])
    assert time.monotonic() - began < store.timeout / 2
    other.let_go()
    assert store.read([("tenant-1", "new")]) == [None]


@pytest.mark.parametrize("text", ["a\x00b", "\ud800"])
async def test_text_with_nul_is_refused_by_the_loop_lane(store: SqliteStore, fast: SqliteInLoop, text: str) -> None:
    """SQLite would cut the text at the NUL, and store it."""
    with pytest.raises(StoreError) as raised:
        await fast.both([reservation("good"), reservation("bad", scope=text)], [])
    assert not isinstance(raised.value, StoreUnavailable), "that would be the store's fault"
    assert everything(store.path) == []


async def test_believes_no_commit_into_a_file_that_is_gone(fast: SqliteInLoop, tmp_path: Path) -> None:
    await fast.both([reservation("before")], [])
    (tmp_path / "keys.db").rename(tmp_path / "elsewhere.db")
    with pytest.raises(StoreUnavailable, match="removed or replaced"):
        await fast.both([reservation("lost")], [])


@pytest.mark.parametrize("instead", [False, True])
async def test_opens_no_other_file_than_the_stores(
    store: SqliteStore, fast: SqliteInLoop, tmp_path: Path, instead: bool
) -> None:
    """Moved away before the loop's first look: an empty one in its place would make every key a first request, and
    delete the log of the one that comes back."""
    there = reserved(store, "there")
    with closing(SqliteStore(tmp_path / "other.db")) as other:
        other.check()
    (tmp_path / "keys.db").rename(tmp_path / "away.db")
    if instead:
        (tmp_path / "other.db").rename(tmp_path / "keys.db")

    for ask in (fast.reserve([reservation("there")]), fast.both([reservation("new")], [])):
        with pytest.raises(StoreUnavailable):
            await ask
    assert (tmp_path / "keys.db").exists() is instead
    (tmp_path / "away.db").rename(tmp_path / "keys.db")
    (again,) = await reserved_by(fast, [reservation("there")])
    assert again is not None
    assert again.owner == there.owner


@by_thread
async def test_work_behind_a_hung_disk_is_given_up_and_not_done_later(
    store: SqliteStore, fast: SqliteInLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that was given up went to the lanes and may be undone there: a late reservation would have no owner."""
    store.timeout = 0.3
    over = threading.Event()
    apply = batch.apply

    def hangs(*args: Any) -> bool:
        over.wait(10.0)
        return apply(*args)

    await fast.reserve([reservation("warm")])
    monkeypatch.setattr(batch, "apply", hangs)
    for key in ("stuck", "behind"):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="took over"):
            await fast.both([reservation(key)], [])
        assert time.monotonic() - began < 5
    monkeypatch.setattr(batch, "apply", apply)
    over.set()
    assert all(await fast.reserve([reservation("after")]))
    stuck, behind = store.read([("tenant-1", "stuck"), ("tenant-1", "behind")])
    assert stuck is not None, "it was under way, and the gate made the lanes wait for it"
    assert behind is None


@by_thread
async def test_work_given_up_before_the_file_is_not_done_later(
    store: SqliteStore, fast: SqliteInLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread had taken it, and stood still before the file: the lanes may have reserved it since, and undone it."""
    store.timeout = 0.3
    over = threading.Event()
    at_the_gate = store.at_the_gate

    def hangs(*args: Any) -> Any:
        over.wait(10.0)
        return at_the_gate(*args)

    await fast.reserve([reservation("warm")])
    monkeypatch.setattr(store, "at_the_gate", hangs)
    with pytest.raises(StoreUnavailable, match="took over"):
        await fast.both([reservation("late")], [])
    monkeypatch.setattr(store, "at_the_gate", at_the_gate)
    over.set()
    assert all(await fast.reserve([reservation("after")]))
    assert store.read([("tenant-1", "late")]) == [None]


@by_thread
async def test_a_cancelled_verb_harms_no_other(fast: SqliteInLoop) -> None:
    for number in range(20):
        asking = asyncio.create_task(fast.both([reservation(f"left-{number}")], []))
        await asyncio.sleep(0.0002 * number)
        asking.cancel()
        mine = reservation(f"stays-{number}")
        (found,) = await reserved_by(fast, [mine])
        assert found is not None
        assert found.owner == mine.owner
        assert asking.cancelled() or asking.done()


async def test_recipes_go_by_the_fast_way_too(store: SqliteStore, fast: SqliteInLoop) -> None:
    await check_recipes(store, fast)
