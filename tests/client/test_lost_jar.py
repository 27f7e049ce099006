"""A jar that is gone, emptied or not a jar: what was sent must not be sent again without a word."""

from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from oncekey.client import JarError, KeyJar
from oncekey.client.jar.table import TABLE
from tests.client.jars import client_of
from tests.client.server import Server

NEW = "If this program has sent requests before, their keys are not known here"


def pay(server: Server, url: str) -> None:
    jar = KeyJar(url)
    try:
        with client_of(server, jar) as client, client.intent("order-1") as intent:
            intent.post("/pay", json={})
    finally:
        jar.close()


def test_emptied_jar_is_refused_and_nothing_is_sent(server: Server, file: Path) -> None:
    pay(server, f"sqlite:///{file}")
    file.write_bytes(b"")
    for create in (None, True, False):
        with pytest.raises(JarError, match=r"is empty \(0 bytes\)") as raised:
            KeyJar(f"sqlite:///{file}", create=create)
        assert "put the jar back (docs/client.md, If the jar is lost)" in str(raised.value)
    assert file.stat().st_size == 0
    assert len(server.asked) == 1


def test_jar_that_is_gone_is_made_new_with_a_warning(
    server: Server, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pay(server, f"sqlite:///{file}")
    for path in file.parent.glob("intents.db*"):
        path.unlink()
    caplog.clear()
    pay(server, f"sqlite:///{file}")
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(f"made a new key jar, {file}. {NEW}")
    assert "create=False" in line


def test_jar_that_must_be_there_is_not_made(
    server: Server, url: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(JarError, match="there is no key jar at"):
        KeyJar(url, create=False)
    assert not file.exists()
    assert caplog.text == ""
    pay(server, url)
    jar = KeyJar(url, create=False)
    assert jar.finished() == {"order-1": 201}
    jar.close()


def test_new_jar_is_warned_about_once_and_not_if_it_was_asked_for(
    url: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        KeyJar(url).close()
    assert caplog.text.count(NEW) == 1
    if "sqlite" in request.node.name:
        caplog.clear()
        KeyJar(f"{url}.other", create=True).close()
        assert caplog.text == ""


@pytest.mark.parametrize("create", [None, True, False])
def test_database_of_the_app_without_the_table_is_a_new_jar(
    file: Path, create: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(sqlite3.connect(file)) as other:
        other.execute("CREATE TABLE orders (id INTEGER)")
    if create is False:
        with pytest.raises(JarError, match=f"the file has no table {TABLE}"):
            KeyJar(f"sqlite:///{file}", create=create)
    else:
        KeyJar(f"sqlite:///{file}", create=create).close()
    assert (NEW in caplog.text) is (create is None)


def test_jar_that_is_killed_while_it_is_made_leaves_no_empty_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(made: str, at: Path) -> None:
        assert not at.exists()
        with closing(sqlite3.connect(made)) as jar:
            assert jar.execute("SELECT name FROM sqlite_master WHERE name = ?", (TABLE,)).fetchone() == (TABLE,)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", killed)
    with pytest.raises(KeyboardInterrupt):
        KeyJar(f"sqlite:///{file}")
    assert list(file.parent.iterdir()) == []
    monkeypatch.undo()
    KeyJar(f"sqlite:///{file}").close()


def test_many_that_make_a_jar_at_once_share_it(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    start, wrong = threading.Barrier(8), []

    def make(number: int) -> None:
        start.wait()
        try:
            jar = KeyJar(f"sqlite:///{file}")
            jar.prepare(f"order-{number}", "POST", "https://api.example.com/pay")
            jar.close()
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    jar = KeyJar(f"sqlite:///{file}", create=False)
    assert len(jar.open_intents()) == 8
    jar.close()
    assert caplog.text.count(NEW) == 1
    assert [path.name for path in file.parent.iterdir() if path.name.startswith(".")] == []


def test_link_to_a_file_that_is_not_there_makes_that_file(file: Path, tmp_path: Path) -> None:
    file.symlink_to(tmp_path / "elsewhere.db")
    KeyJar(f"sqlite:///{file}").close()
    assert file.is_symlink()
    assert (tmp_path / "elsewhere.db").stat().st_mode & 0o777 == 0o600


def test_file_that_is_no_database_is_to_be_restored_and_not_to_be_moved(file: Path) -> None:
    file.write_bytes(os.urandom(3000))
    with pytest.raises(JarError, match="is not an SQLite database") as raised:
        KeyJar(f"sqlite:///{file}")
    assert "restore it from a backup" in str(raised.value)
    assert "Do not delete the file" in str(raised.value)
    assert "another path" not in str(raised.value)
    assert "move" not in str(raised.value)


def test_missing_folder_is_named_without_a_word_about_keys(tmp_path: Path) -> None:
    with pytest.raises(JarError, match="its folder does not exist") as raised:
        KeyJar(f"sqlite:///{tmp_path}/none/intents.db")
    assert "key jar cannot be used" in str(raised.value)
    assert "its keys" not in str(raised.value)
    assert "delete" not in str(raised.value)


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o640, False), (0o600, False)])
def test_mode_of_a_file_that_is_there_stays_and_is_warned_about_if_all_may_read_it(
    file: Path, mode: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    KeyJar(f"sqlite:///{file}", create=True).close()
    file.chmod(mode)
    KeyJar(f"sqlite:///{file}").close()
    assert file.stat().st_mode & 0o777 == mode
    assert (f"can be read by every user of this machine (mode {mode:o})" in caplog.text) is warned
