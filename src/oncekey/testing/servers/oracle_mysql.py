"""A server of MySQL itself for tests. MariaDB is the one that tests use unless they are told otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from oncekey.testing.servers.binaries import find_mysql
from oncekey.testing.servers.mysql import MysqlServer, places
from oncekey.testing.servers.packages import libraries

_USER = "CREATE USER root@'127.0.0.1';\nGRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;\n"
_QUIET = ("--mysqlx=OFF", "--secure-file-priv=NULL", "--log-error-verbosity=1")

_NO_FSYNC = {"sync-binlog": "0", "innodb-flush-method": "nosync", "innodb-doublewrite": "OFF"}


class OracleMysqlServer(MysqlServer):
    """MySQL. Its packages may need a newer C library than this machine has: they bring their own, with its loader.

    It offers no TLS, so that tests can read and cut what is sent, unless ``settings`` have a ``tls-version``.
    """

    kind = "MySQL"
    _binary = "usr/sbin/mysqld"
    _small = {"innodb-redo-log-capacity": "16M", "innodb-buffer-pool-size": "64M"}  # noqa: RUF012 - never changed

    def __init__(self, *, fsync: bool = True, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(fsync=fsync, settings={"tls-version": "", **({} if fsync else _NO_FSYNC), **(settings or {})})

    def _find(self) -> Path:
        return find_mysql()

    def _installer(self, root: Path, folder: Path) -> list[str]:
        script = folder / "user.sql"
        script.write_text(_USER)
        return [
            *(*self._program(root), *places(root), "--initialize-insecure", f"--init-file={script}", *_QUIET),
            *(f"--datadir={folder}/data", f"--tmpdir={folder}"),
        ]

    def _program(self, root: Path) -> list[str]:
        loader = next((path for folder in libraries(root) for path in folder.glob("ld-linux*.so.*")), None)
        if root == Path("/") or loader is None:
            return super()._program(root)
        return [str(loader), "--library-path", ":".join(map(str, libraries(root))), *super()._program(root)]

    def _command(self) -> list[str]:
        return [*super()._command(), *_QUIET]

    def _environment_below(self, root: Path, environment: dict[str, str]) -> dict[str, str]:
        """Its loader knows where its libraries are. Programs of this machine must not find them."""
        del root
        return environment


def chosen_mysql(**options: object) -> MysqlServer:
    """The server that ``ONCEKEY_MYSQL`` names: ``mysql``, or ``mariadb``, which is the default."""
    kind = OracleMysqlServer if os.environ.get("ONCEKEY_MYSQL") == "mysql" else MysqlServer
    return kind(**options)  # type: ignore[arg-type]  # handed on as they are
