"""Reads the URL: one database, at one host or several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from oncekey.errors import ConfigurationError

_PORT = 3306
_TLS = {
    "ssl_ca": "ca",
    "ssl_capath": "capath",
    "ssl_cert": "cert",
    "ssl_key": "key",
    "ssl_key_password": "password",
    "ssl_cipher": "cipher",
}
"""Options about TLS, and their names in the dict ``ssl`` that PyMySQL takes."""
FILES = ("ssl_ca", "ssl_capath", "ssl_cert", "ssl_key")
_TEXTS = (*_TLS, "unix_socket")
_FLAGS = ("ssl_verify_cert", "ssl_verify_identity", "ssl_check_hostname", "ssl_disabled")
_IN_EVERY_URL = ("charset", "use_unicode")
"""Ignored without a word: most URLs have them, and oncekey's connections use utf8mb4 with any of them."""
_SESSION = (
    *("autocommit", "binary_prefix", "client_flag", "collation", "connect_timeout", "init_command", "local_infile"),
    *("max_allowed_packet", "program_name", "read_timeout", "sql_mode", "write_timeout"),
)
"""How the app's own connections work, and nothing about how the server is reached. oncekey's sessions have their own
settings (``connection.py``), so these are ignored with a warning."""
_SETTINGS_FILES = ("read_default_file", "read_default_group")
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class Address:
    hosts: tuple[tuple[str, int], ...]
    """Tried in this order. Nodes of one Galera cluster: a server and its replica are not the same database."""
    user: str | None
    password: str
    database: str
    options: tuple[tuple[str, Any], ...]
    ignored: tuple[str, ...] = ()
    """Options of the URL that have no effect on oncekey's connections."""

    @property
    def where(self) -> str:
        """The name of the store in messages: hosts and database, never the password."""
        if path := dict(self.options).get("unix_socket"):
            return f"MySQL database {self.database} at the socket {path}"
        hosts = ",".join(host if port == _PORT else f"{host}:{port}" for host, port in self.hosts)
        return f"MySQL database {self.database} at {hosts}"

    def driver_options(self) -> dict[str, Any]:
        """What PyMySQL takes beside host, login and database: a new dict, because PyMySQL may write into it.

        With ``ssl_ca`` and no word about verifying, the server's certificate and its host are verified. SQLAlchemy
        does that with the same URL; PyMySQL's own ``ssl_ca=`` would verify nothing.
        """
        given = dict(self.options)
        others = {name: value for name, value in given.items() if name not in _TLS and name not in _FLAGS}
        if given.get("ssl_disabled"):
            return others | {"ssl_disabled": True}
        tls = {short: given[name] for name, short in _TLS.items() if name in given}
        authority = "ca" in tls or "capath" in tls
        certificate = given.get("ssl_verify_cert")
        identity = given.get("ssl_verify_identity", given.get("ssl_check_hostname"))
        host = authority and certificate is None if identity is None else identity
        if tls or host or certificate:
            tls |= {"check_hostname": host, "verify_mode": host or (authority if certificate is None else certificate)}
        if "cert" in tls:
            tls.setdefault("password", "")  # without one, OpenSSL asks for it at the terminal
        return others | ({"ssl": tls} if tls else {})


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
    given = parse_qsl(parts.query, keep_blank_values=True)
    options = tuple((name, _value(name, value)) for name, value in given if name not in (*_IN_EVERY_URL, *_SESSION))
    names = {name for name, _ in given}
    if "ssl_key" in names and "ssl_cert" not in names:
        raise ConfigurationError("the MySQL URL has ssl_key= without ssl_cert=, the certificate of that key")
    ignored = tuple(sorted(names.intersection(_SESSION)))
    return Address(hosts, unquote(user) or None, unquote(password), database, options, ignored)


def _place(place: str) -> tuple[str, int]:
    if place.startswith("["):  # IPv6
        host, _, port = place[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = place.partition(":")
    return unquote(host) or "localhost", int(port) if port else _PORT


def _value(name: str, value: str) -> Any:
    if name in _TEXTS:
        return value
    if name in _FLAGS:
        if value.lower() not in _WORDS:
            raise ConfigurationError(f"the MySQL URL: {name}= takes true or false")
        return _WORDS[value.lower()]
    if name in _SETTINGS_FILES:
        raise ConfigurationError(
            f"the MySQL URL has {name}=, and oncekey reads no file of settings: put the login and the ssl_… options "
            "into the URL"
        )
    known = ", ".join((*_TEXTS, *_FLAGS))
    raise ConfigurationError(f"the MySQL URL has an option that oncekey does not know: {name}; it takes {known}")


def _unreadable() -> ConfigurationError:
    return ConfigurationError(
        "the MySQL URL cannot be read: use mysql://user@host/database, or mysql://user@one,two,three/database for the "
        "nodes of a Galera cluster"
    )
