"""Version 0.1.0, built from git, and the version of this tree on one database: side by side, upgraded, rolled back."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import psycopg
import pytest

from oncekey.errors import SchemaError
from oncekey.stores.registry import open_store
from oncekey.stores.sql import queries
from tests.stores.versions import ADDED, ADDITIVE, Version

pytestmark = pytest.mark.stores

ROOT = Path(__file__).parents[2]
FIRST = "4ef298bb1b554a48140be90510dee6db57d4edde"
"""The commit of version 0.1.0."""


@pytest.fixture(scope="session")
def first_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel of version 0.1.0 is installed."""
    folder = tmp_path_factory.mktemp("oncekey-0.1.0")
    git = shutil.which("git")
    there = [git or "git", "-C", str(ROOT), "cat-file", "-e", FIRST]
    if git is None or subprocess.run(there, check=False, capture_output=True).returncode:
        pytest.skip(f"no git history with {FIRST} here, so version 0.1.0 cannot be built")
    with (folder / "tree.tar").open("wb") as tree:
        subprocess.run([git, "-C", ROOT, "archive", FIRST, "src", "pyproject.toml", "README.md", "LICENSE"],
                       stdout=tree, check=True)  # fmt: skip
    with tarfile.open(folder / "tree.tar") as tree:
        tree.extractall(folder / "tree", filter="data")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    build = ["wheel", *offline, "--no-build-isolation", "-w", str(folder), str(folder / "tree")]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = folder.glob("oncekey-0.1.0-*.whl")
    subprocess.run([*pip, "install", *offline, "--target", str(folder / "site"), str(wheel)], check=True)
    return folder / "site"


class Start(Protocol):
    def __call__(self, url: str, migration: str | None = None) -> Version: ...


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def old(first_version: Path, processes: ExitStack) -> Start:
    """Starts a process of version 0.1.0."""
    return lambda url, migration=None: processes.enter_context(Version(first_version, url, migration))


@pytest.fixture
def new(processes: ExitStack) -> Start:
    """Starts a process of this tree."""
    return lambda url, migration=None: processes.enter_context(Version(ROOT / "src", url, migration))


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'keys.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


def execute(url: str, sql: str) -> None:
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as own:
            own.execute(sql)
        own.close()
    else:
        with psycopg.connect(url, autocommit=True) as server:
            server.execute(sql.encode())


def let_leases_end(url: str) -> None:
    past = "0" if url.startswith("sqlite") else "now() - interval '1 second'"
    execute(url, f"UPDATE idempotency_keys SET lease_until = {past}")


def test_upgrade_under_a_running_old_version_and_rollback_keep_every_key(url: str, old: Start, new: Start) -> None:
    """A rolling deploy: 0.1.0 runs, the tables are migrated, the new version comes, the old one goes on, and is there
    again after a rollback. The new one replays what the old has stored. The old one cannot compare with what the new
    has stored, by a fingerprint that it does not know: it says 409, and runs nothing."""
    first = old(url)
    first.ask("migrate")
    by_old = first.post("by-old")
    first.ask("hold", key="held-by-old")

    second = new(url, ADDITIVE)
    assert second.ask("migrate")[-1].endswith("_more")
    second.ask("start")
    assert second.post("by-old") == (201, by_old[1], True)
    assert second.post("held-by-old")[0] == 409, "the old one holds the lease"
    by_new = second.post("by-new")
    assert (by_old[0], by_new[0]) == (201, 201)

    held = first.ask("release")
    assert held[0] == 201
    assert second.post("held-by-old") == (201, held[1], True)
    for _ in range(3):  # prepared statements meet the changed table
        assert first.post("by-new")[0] == 409
        assert first.post("by-old") == (201, by_old[1], True)
    first.ask("reconnect")  # every new connection looks at the tables
    assert first.post("by-old-later")[0] == 201
    assert second.post("by-old-later")[2]

    rolled_back = old(url)
    rolled_back.ask("start")
    rolled_back.ask("migrate")
    for key in ("by-old", "by-old-later"):
        assert rolled_back.post(key)[2]
    assert rolled_back.post("by-new")[0] == 409
    assert second.post("by-new") == (201, by_new[1], True)


def test_each_version_finishes_keys_of_the_other(url: str, old: Start, new: Start) -> None:
    """Attempts that failed or whose lease ran out: both sweep, and the new version retries and takes over for both."""
    first, second = old(url), new(url, ADDITIVE)
    first.ask("migrate")
    second.ask("migrate")
    assert first.post("failed", how="fail")[0] == 500
    done = second.post("failed")
    assert (done[0], first.post("failed")) == (201, (201, done[1], True))
    assert second.post("failed-in-new", how="fail")[0] == 500
    assert first.post("failed-in-new")[0] == 409, "it cannot tell whether this is the same request"
    assert second.post("failed-in-new")[0] == 201
    execute(url, "DELETE FROM idempotency_keys")

    first.ask("hold", key="left-by-old")
    second.ask("hold", key="left-by-new")
    let_leases_end(url)
    assert first.ask("sweep") == 2
    assert first.post("left-by-new")[0] == 409
    taken = [second.post("left-by-old"), second.post("left-by-new")]
    assert [(status, replayed) for status, _, replayed in taken] == [(201, False)] * 2
    late = [first.ask("release"), second.ask("release")]
    assert [(status, body) for status, body, _ in late] == [(status, body) for status, body, _ in taken]


def test_two_new_versions_may_be_apart_by_an_additive_migration(url: str, new: Start) -> None:
    """The rule is this version's own, too: it goes on beside one that is newer."""
    first = new(url)
    first.ask("migrate")
    stored = first.post("a")
    second = new(url, ADDITIVE)
    second.ask("migrate")
    first.ask("reconnect")
    assert (second.post("a"), first.post("a")) == ((201, stored[1], True),) * 2
    later = new(url)
    later.ask("start")
    assert later.ask("migrate") == []
    assert later.post("a")[2]


def test_version_that_cannot_work_with_newer_tables_says_so(url: str, old: Start, new: Start) -> None:
    """A migration without the line shuts out every version that does not know it, as before."""
    newer = new(url, ADDED)
    newer.ask("migrate")
    assert newer.post("a")[0] == 201
    for other in (old(url), new(url)):
        with pytest.raises(RuntimeError, match="upgrade the oncekey package"):
            other.ask("start")
        assert other.post("b")[0] == 503


def test_migration_raises_the_oldest_version_that_can_work_with_the_tables(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0004 needs a version that knows 0003, which was additive: from then on those that do not know it are refused."""
    kept = queries.migrations

    def version(*more: str) -> None:
        def known(package: str) -> list[queries.Migration]:
            first = [each for each in kept(package) if each.number <= 2]
            return [*first, *(queries.Migration(3 + at, f"more_{at}", sql) for at, sql in enumerate(more))]

        monkeypatch.setattr(queries, "migrations", known)

    def check() -> str | None:
        store = open_store(url)
        try:
            store.check()
        except SchemaError as error:
            return str(error)
        finally:
            store.close()
        return None

    third = "-- Works with: schema 0002 and later.\nALTER TABLE idempotency_keys ADD COLUMN third TEXT;\n"
    fourth = "-- Works with: schema 0003 and later.\nALTER TABLE idempotency_keys ADD COLUMN fourth TEXT;\n"
    version(third, fourth)
    store = open_store(url)
    assert store.migrate() == ["0001_keys", "0002_steps_outbox_audit", "0003_more_0", "0004_more_1"]
    assert store.migrate() == []
    store.close()
    assert check() is None
    version(third)
    assert check() is None
    version()
    assert "schema 0003, newer than the 0002 that this version knows" in (check() or "")
