"""Reads the URL: one database, at one host or several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from oncekey.errors import ConfigurationError

_PORT = 3306
_TEXTS = ("ssl_ca", "ssl_cert", "ssl_key", "unix_socket")
_FLAGS = ("ssl_verify_cert", "ssl_verify_identity")
_IGNORED = ("charset", "use_unicode", "autocommit", "local_infile")
"""Options of SQLAlchemy's URLs that say how the app's own connections work, and nothing about where the database is."""
_WORDS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class Address:
    hosts: tuple[tuple[str, int], ...]
    """Tried in this order. Nodes of one Galera cluster: a server and its replica are not the same database."""
    user: str | None
    password: str
    database: str
    options: tuple[tuple[str, Any], ...]

    @property
    def where(self) -> str:
        """The name of the store in messages: hosts and database, never the password."""
        hosts = ",".join(host if port == _PORT else f"{host}:{port}" for host, port in self.hosts)
        return f"MySQL database {self.database} at {hosts}"


def parse(url: str) -> Address:
    parts = urlsplit(url)
    login, _, places = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    database = unquote(parts.path.removeprefix("/"))
    try:
        hosts = tuple(_place(place) for place in places.split(","))
    except ValueError:
        raise _unreadable() from None
    if not database or not parts.netloc:
        raise _unreadable()
    options = tuple(option for name, value in parse_qsl(parts.query) for option in _option(name, value))
    return Address(hosts, unquote(user) or None, unquote(password), database, options)


def _place(place: str) -> tuple[str, int]:
    if place.startswith("["):  # IPv6
        host, _, port = place[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = place.partition(":")
    return unquote(host) or "localhost", int(port) if port else _PORT


def _option(name: str, value: str) -> list[tuple[str, Any]]:
    if name in _IGNORED:
        return []
    if name in _TEXTS:
        return [(name, value)]
    if name in _FLAGS and value.lower() in _WORDS:
        return [(name, _WORDS[value.lower()])]
    known = ", ".join((*_TEXTS, *_FLAGS))
    raise ConfigurationError(f"the MySQL URL has an option that oncekey does not know or cannot read: it takes {known}")


def _unreadable() -> ConfigurationError:
    return ConfigurationError(
        "the MySQL URL cannot be read: use mysql://user@host/database, or mysql://user@one,two,three/database for the "
        "nodes of a Galera cluster"
    )
