"""A MariaDB server for tests."""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import signal
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from oncekey.testing.servers.binaries import find_mariadb
from oncekey.testing.servers.folders import Folder, open_to_others, unprivileged_user
from oncekey.testing.servers.packages import libraries
from oncekey.testing.servers.processes import HOST, ServerFailed
from oncekey.testing.servers.server import Server

_SMALL = {"innodb-log-file-size": "16M", "innodb-buffer-pool-size": "64M"}


class MysqlServer(Server):
    """A MariaDB server. It is as durable as one in production, unless ``fsync=False``.

    ``settings`` go on the command line (``{"max-connections": "20"}``). It needs PyMySQL to be set up.
    """

    kind = "MariaDB"
    _stop_signal = signal.SIGTERM
    _binary = "usr/sbin/mariadbd"
    _small: Mapping[str, str] = _SMALL

    def __init__(self, *, fsync: bool = True, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._root: Path | None = None
        self._settings = {
            **self._small,
            "bind-address": HOST,
            "max-connections": "200",
            "innodb-flush-log-at-trx-commit": "1" if fsync else "2",
            "innodb-fast-shutdown": "2",
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return self.url_of("mysql")

    def url_of(self, name: str) -> str:
        """The address of one database, whether it exists or not."""
        return f"mysql://root@{HOST}:{self.port}/{name}"

    def database(self, name: str) -> str:
        """Create a new database and return its address. A database of that name is dropped first."""
        self.drop_database(name)
        self.execute(f"CREATE DATABASE `{name}`")
        return self.url_of(name)

    def drop_database(self, name: str) -> None:
        """Drop a database. Its other clients are disconnected first: one with an open transaction would block it."""
        mine = f"SELECT id FROM information_schema.processlist WHERE db = '{name}'"  # noqa: S608 - our own name
        for (number,) in self.execute(mine):
            self.execute(f"KILL {number}", ignore=1094)  # 1094: it has gone by itself
        self.execute(f"DROP DATABASE IF EXISTS `{name}`")

    def execute(
        self, sql: str, *, database: str | None = None, timeout: float = 30.0, ignore: int | None = None
    ) -> list[tuple[Any, ...]]:
        """Run one statement over a connection of its own, and return its rows."""
        import pymysql

        limits: dict[str, Any] = {"connect_timeout": timeout, "read_timeout": timeout, "write_timeout": timeout}
        try:
            with (
                closing(
                    pymysql.connect(
                        host=HOST,
                        port=self.port,
                        user="root",
                        database=database,
                        autocommit=True,
                        ssl_disabled=True,
                        **limits,
                    )
                ) as connection,
                connection.cursor() as cursor,
            ):
                cursor.execute(sql)
                return list(cursor.fetchall())
        except pymysql.Error as error:
            if error.args[0] == ignore:
                return []
            raise ServerFailed(f"{self.kind}: {error.args[-1]} ({error.args[0]})") from error

    def _prepare(self) -> None:
        self._root = self._find()
        self._user = _user_for(self._root / self._binary)
        self._folder = Folder("mysql", self._user)
        self._lay_out_data()

    def _find(self) -> Path:
        return find_mariadb()

    def _lay_out_data(self) -> None:
        shutil.copytree(self._empty_data(), self._data, copy_function=shutil.copy)
        if self._user is not None:
            for path in (self._data, *self._data.rglob("*")):
                os.chown(path, self._user.pw_uid, self._user.pw_gid)

    def _empty_data(self) -> Path:
        """A data folder without databases. It takes seconds to make, so it is made once per process, and copied."""
        root = cast("Path", self._root)
        if root not in _data_folders:
            made = Folder("mysql-data", self._user)
            atexit.register(_remove_from, os.getpid(), made)
            own = ["--user=root"] if self._user is None and os.getuid() == 0 else []
            small = [f"--{name}={value}" for name, value in self._small.items()]
            done = self._run_to_end(
                [*self._installer(root, made.path), *own, *small],
                cwd=made.path,
                environment=self._environment_below(root, {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"}),
            )
            if done.returncode != 0:
                said = (done.stderr or done.stdout).decode(errors="replace")
                raise ServerFailed(f"{self.kind} could not make its data folder: {said}")
            _data_folders[root] = made.path / "data"
        return _data_folders[root]

    def _installer(self, root: Path, folder: Path) -> list[str]:
        """The command that makes ``folder/data``, with a user root who needs no password."""
        return [
            *(str(root / "usr/bin/mariadb-install-db"), "--no-defaults", f"--basedir={root}/usr"),
            *(f"--datadir={folder}/data", "--auth-root-authentication-method=normal", "--skip-test-db"),
            *("--skip-name-resolve", f"--tmpdir={folder}"),
        ]

    def _program(self, root: Path) -> list[str]:
        return [str(root / self._binary)]

    @property
    def _data(self) -> Path:
        return self._home / "data"

    def _command(self) -> list[str]:
        root = cast("Path", self._root)
        settings = [f"--{name}={value}" for name, value in self._settings.items()]
        return [
            *(*self._program(root), *places(root), f"--datadir={self._data}", f"--port={self.port}"),
            *(f"--socket={self._home}/socket", f"--pid-file={self._home}/pid", "--skip-name-resolve"),
            f"--tmpdir={self._home}",  # a server that starts deletes the temporary tables that it finds there
            *(["--user=root"] if self._user is None and os.getuid() == 0 else []),
            *settings,
        ]

    def _environment(self) -> dict[str, str]:
        return self._environment_below(cast("Path", self._root), super()._environment())

    def _environment_below(self, root: Path, environment: dict[str, str]) -> dict[str, str]:
        """With the libraries and programs of an unpacked package."""
        if root == Path("/"):
            return environment
        paths = [*map(str, libraries(root)), environment.get("LD_LIBRARY_PATH", "")]
        binaries = f"{root}/usr/bin:{root}/usr/sbin:{environment.get('PATH', '')}"  # scripts of the server call others
        return environment | {"LD_LIBRARY_PATH": ":".join(path for path in paths if path), "PATH": binaries}

    def _answers(self) -> bool:
        try:
            self.execute("SELECT 1", timeout=2.0)
        except (OSError, ServerFailed):
            return False
        return True


def _user_for(binary: Path) -> pwd.struct_passwd | None:
    """An unprivileged user, as in production. None: the current user, if no other can reach the binaries."""
    return unprivileged_user() if open_to_others(binary) else None


def places(root: Path) -> list[str]:
    """Options: where the server finds its parts."""
    plugins = next(
        (str(path) for path in (root / "usr/lib/mysql/plugin", root / "usr/lib64/mysql/plugin") if path.is_dir()), ""
    )
    return [
        "--no-defaults",
        f"--basedir={root}/usr",
        *([f"--plugin-dir={plugins}"] if plugins else []),
        f"--lc-messages-dir={root}/usr/share/mysql",
    ]


_data_folders: dict[Path, Path] = {}


def _remove_from(pid: int, made: Folder) -> None:
    if pid == os.getpid():  # not in a forked child
        made.remove()
