"""What can be wrong with the file under an SQLite store: each in one clear sentence, never a raw sqlite3 error."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncekey.core.record import Reservation
from oncekey.core.states import Effects
from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.stores.registry import open_store
from oncekey.stores.sqlite import SqliteStore, connections
from oncekey.testing.company import Child


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    with closing(SqliteStore(path, timeout=0.5)) as store:
        yield store


def reserve(store: SqliteStore, key: str = "key-1", operation: str = "POST /") -> None:
    store.reserve([Reservation("tenant", key, operation, b"f" * 32, 1, Effects.EXTERNAL, key, 60.0, 3600.0)])


def there(path: Path, key: str = "key-1") -> bool:
    with closing(SqliteStore(path)) as fresh:
        return fresh.read([("tenant", key)]) != [None]


def test_missing_folder_is_not_created(tmp_path: Path) -> None:
    """The folder is not made: a typing error must not become a second, empty store."""
    with closing(SqliteStore(tmp_path / "no" / "keys.db")) as store:
        with pytest.raises(StoreUnavailable, match="its folder does not exist"):
            store.check()
        (tmp_path / "no").mkdir()
        store.check()


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    """A path that is a folder cannot be opened."""
    with closing(SqliteStore(tmp_path)) as store, pytest.raises(StoreUnavailable, match="cannot be opened"):
        store.check()


def test_a_file_that_is_no_database(path: Path) -> None:
    """A file of another program is named as such, and left as it was."""
    path.write_text("dear diary, " * 100)
    with closing(SqliteStore(path)) as store, pytest.raises(StoreUnavailable, match="is not an SQLite database"):
        reserve(store)
    assert path.read_text() == "dear diary, " * 100


def test_a_database_that_is_damaged(store: SqliteStore, path: Path) -> None:
    """Pages of rubbish behind a good header are reported as damage."""
    for number in range(300):
        reserve(store, f"key-{number}", "x" * 500)
    store.close()
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(StoreUnavailable, match="is damaged"):
        reserve(store)


def test_a_file_that_may_not_be_written() -> None:
    """A process without the right to write says so (in a child that gives up being root, if it is)."""
    folder = Path(tempfile.mkdtemp())
    try:
        path = folder / "keys.db"
        with closing(SqliteStore(path)) as store:
            store.migrate()
        path.chmod(0o444)
        folder.chmod(0o555)

        def attempt() -> str:
            if os.geteuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            with closing(SqliteStore(path)) as store:
                try:
                    reserve(store)
                except StoreUnavailable as error:
                    return str(error)
            return "it could be written"

        assert "cannot be" in Child(attempt).result()
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_a_disk_that_is_full(store: SqliteStore) -> None:
    """No room for a row is a sentence, nothing half-written, and over as soon as there is room."""
    store.migrate()
    with store.connections.use() as connection:
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StoreUnavailable, match="cannot grow: the disk is full"):
        reserve(store, operation="x" * 100_000)
    assert store.read([("tenant", "key-1")]) == [None]
    reserve(store, operation="x" * 100_000)
    assert store.read([("tenant", "key-1")]) != [None]


def test_a_file_system_without_write_ahead_logging(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where WAL cannot be had the store refuses to start: its promises hang on it."""

    class NoWal(sqlite3.Connection):
        def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
            return super().execute(sql.replace("journal_mode = WAL", "journal_mode = DELETE"), *parameters)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **k, factory=NoWal))
    with closing(SqliteStore(path)) as store, pytest.raises(ConfigurationError, match="it says 'delete'"):
        store.check()


# the file goes away


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_vanished_is_never_begun_anew(store: SqliteStore, path: Path, replaced: bool) -> None:
    """An empty file would make every key a first request (hazard 12): refused until the file is back."""
    reserve(store)
    moved = path.with_suffix(".moved")
    path.rename(moved)
    if replaced:
        path.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="removed or replaced while in use"):
            reserve(store, "key-2")
        with pytest.raises(StoreUnavailable, match="removed or replaced while in use"):
            store.read([("tenant", "key-1")])
    assert path.exists() == replaced
    moved.replace(path)
    reserve(store, "key-3")
    assert store.read([("tenant", "key-1")]) != [None]


def test_a_file_that_vanishes_while_it_is_opened_loses_nothing(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes between the look whether it is there and the opening. An empty one made in its place takes the log of the
    real one for its own, and deletes it: what was committed last would be gone, though the file comes back."""
    moved = path.with_suffix(".moved")
    with closing(sqlite3.connect(path)) as reader:
        reserve(store)
        reader.execute("SELECT count(*) FROM idempotency_keys").fetchall()  # so that the log outlives our connections
        store.disconnect()
        connect = sqlite3.connect

        def too_late(*args: Any, **kwargs: Any) -> Any:
            path.rename(moved)
            return connect(*args, **kwargs)

        monkeypatch.setattr(sqlite3, "connect", too_late)
        with pytest.raises(StoreUnavailable):
            reserve(store, "key-2")
        monkeypatch.undo()
        assert not path.exists()
        moved.rename(path)
        assert store.read([("tenant", "key-1")]) != [None]


def test_a_file_that_is_replaced_while_it_is_opened_is_not_taken(
    store: SqliteStore, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, and another store's file is there by then: its keys are not ours."""
    reserve(store)
    store.disconnect()
    with closing(SqliteStore(tmp_path / "other.db")) as other:
        other.check()
    connect = sqlite3.connect

    def too_late(*args: Any, **kwargs: Any) -> Any:
        path.rename(path.with_suffix(".moved"))
        (tmp_path / "other.db").rename(path)
        return connect(*args, **kwargs)

    monkeypatch.setattr(sqlite3, "connect", too_late)
    with pytest.raises(StoreUnavailable, match="removed or replaced while in use"):
        store.read([("tenant", "key-1")])


def test_closing_on_purpose_allows_a_new_file(store: SqliteStore, path: Path) -> None:
    """After close() the path means whatever is there then."""
    reserve(store)
    store.close()
    path.unlink()
    assert store.read([("tenant", "key-1")]) == [None]


def test_a_log_that_was_deleted_under_a_write_is_noticed(store: SqliteStore, path: Path) -> None:
    """A commit into a deleted write-ahead log would be lost: it is not reported as done, and the next one is."""
    reserve(store)
    path.with_name("keys.db-wal").unlink()
    with pytest.raises(StoreUnavailable, match=r"write-ahead log .* was deleted"):
        reserve(store, "key-2")
    reserve(store, "key-3")
    assert there(path, "key-3")


# forks


def test_a_connection_that_could_not_be_closed_before_a_fork_is_left_alone(path: Path) -> None:
    """A thread is stuck in a verb while another forks: the child neither uses nor closes its connection."""
    with closing(SqliteStore(path, timeout=0.2)) as store:
        inside, go_on = threading.Event(), threading.Event()

        def stuck() -> None:
            with store.connections.use():
                inside.set()
                go_on.wait(10)

        thread = threading.Thread(target=stuck)
        thread.start()
        inside.wait(10)

        def work() -> list[object]:
            reserve(store, "child")
            handles = connections._INHERITED
            return [len(handles), all(handle.connection is not None for handle in handles)]

        assert Child(work).result() == [1, True]
        go_on.set()
        thread.join()
        reserve(store, "parent")
    assert there(path, "child")
    assert there(path, "parent")


def test_connection_cannot_be_opened_during_a_fork(path: Path) -> None:
    """Another thread that wants a connection at that moment waits, or the child would inherit it after all."""
    with closing(SqliteStore(path, timeout=0.05)) as store:
        store.check()
        connections._before_fork()
        try:
            with pytest.raises(StoreUnavailable, match="could not be opened within"):
                store.check()
        finally:
            connections._after_fork_in_parent()
        store.check()


def test_no_connection_is_open_at_the_moment_of_a_fork(store: SqliteStore) -> None:
    """The child finds nothing that it could use or close by mistake, and no file descriptor of the database."""
    reserve(store)

    def open_files() -> list[str]:
        links = list(Path("/proc/self/fd").iterdir())
        targets = [str(link.readlink()) for link in links if link.is_symlink()]
        return [target for target in targets if "keys.db" in target]

    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not show open files")
    assert open_files() != []
    assert Child(open_files).result() == []


def test_a_file_may_have_any_name(tmp_path: Path) -> None:
    """Percent-encoded in its URL."""
    store = open_store(f"sqlite:///{tmp_path}/a%20b%3Fc%23d.db")
    store.migrate()
    store.close()
    assert (tmp_path / "a b?c#d.db").exists()
