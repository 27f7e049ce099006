"""A jar that cannot be used: nothing is sent without it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncekey.client import JarError, KeyJar
from oncekey.client.jar.table import TABLE
from oncekey.errors import ConfigurationError
from tests.client.jars import OK, client_of
from tests.client.server import Reply, Server


def test_locked_jar_sends_nothing_and_says_so(server: Server, file: Path) -> None:
    jar = KeyJar(f"sqlite:///{file}", timeout=0.2)
    with client_of(server, jar) as client, closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JarError, match="locked by another writer"), client.intent("order-1") as intent:
            intent.post("/pay", json={})
        assert server.asked == []
        other.execute("ROLLBACK")
        with client.intent("order-1") as intent:
            assert intent.post("/pay", json={}).status_code == 201
    jar.close()


def test_damaged_jar_sends_nothing_and_says_so(server: Server, file: Path) -> None:
    KeyJar(f"sqlite:///{file}").close()
    file.write_bytes(b"SQLite format 3\0" + os.urandom(8000))
    with pytest.raises(JarError, match=r"damaged|not an SQLite database") as raised:
        client_of(server, KeyJar(f"sqlite:///{file}"))
    assert "Do not delete" in str(raised.value)
    assert server.asked == []


def test_jar_that_is_removed_while_in_use_sends_nothing(server: Server, file: Path) -> None:
    jar = KeyJar(f"sqlite:///{file}")
    with client_of(server, jar) as client:
        for path in file.parent.glob("intents.db*"):
            path.unlink()
        with (
            pytest.raises(JarError, match="With a new file, what was sent before is sent again"),
            client.intent("order-1") as intent,
        ):
            intent.post("/pay", json={})
    jar.close()
    assert server.asked == []


def test_full_disk_sends_nothing_and_says_so(server: Server, file: Path) -> None:
    """A limit on the size of files stands for the disk: the same error reaches SQLite."""
    program = textwrap.dedent(f"""
        import resource, signal
        from oncekey.client import Client, JarError
        client = Client({server.url!r}, jar="sqlite:///{file}")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, resource.RLIM_INFINITY))
        try:
            with client.intent("order-1") as intent:
                intent.post("/pay", content=b"x" * 200_000)
        except JarError as error:
            print("refused:", error)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout.startswith("refused: the key jar cannot be used"), done.stderr
    assert server.asked == []


def test_jar_that_fails_after_the_answer_does_not_hide_the_answer(
    server: Server, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jar = KeyJar(f"sqlite:///{file}", timeout=0.2)
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)

    def answer(asked: Any) -> Reply:
        other.execute("BEGIN IMMEDIATE")
        return OK

    server.answer = answer  # type: ignore[method-assign]
    with client_of(server, jar) as client, client.intent("order-1") as intent:
        assert intent.post("/pay", json={}).status_code == 201
    other.execute("ROLLBACK")
    other.close()
    assert "it stays open" in caplog.text
    assert [row.name for row in jar.open_intents()] == ["order-1"]
    jar.close()


def test_file_with_another_table_of_that_name_is_refused(file: Path) -> None:
    with closing(sqlite3.connect(file)) as other:
        other.execute(f"CREATE TABLE {TABLE} (name TEXT)")
    with pytest.raises(JarError):
        KeyJar(f"sqlite:///{file}").read("order-1")


def test_database_that_does_not_answer_sends_nothing() -> None:
    for url in ("postgresql://127.0.0.1:1/none?connect_timeout=2", "mysql://ann:s3cret@127.0.0.1:1/none"):
        with pytest.raises(JarError, match="nothing is sent") as raised:
            KeyJar(url)
        assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("url", ["memory://", "intents.db", "oracle://localhost/x", "sqlite://", "sqlite:///:memory:"])
def test_url_that_is_no_jar_is_refused_with_what_is(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"sqlite:///intents\.db"):
        KeyJar(url)


def test_new_jar_at_a_relative_path_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that is restarted in another folder makes another jar, and does not see what was sent."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, warned in ((first, True), (first, False), (second, True)):
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        caplog.clear()
        KeyJar("sqlite:///intents%201.db").close()
        assert ("has another jar" in caplog.text) is warned
        assert not warned or f"sqlite:///{folder}/intents%201.db" in caplog.text
    caplog.clear()
    KeyJar(f"sqlite:///{tmp_path}/third.db").close()
    assert "has another jar" not in caplog.text
