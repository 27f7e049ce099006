"""Reads a store's URL: where the servers are, how to log in, and oncekey's own options.

===============================================  =================================================================
``redis://user:password@host:6379/0``            one server; ``rediss://`` with TLS
``redis+cluster://host:7000,host:7001``          Redis Cluster, by any of its nodes
``redis+sentinel://host:26379,host:26380/name``  the master of that name; ``/name/0`` chooses a database
===============================================  =================================================================

oncekey's options after ``?`` are ``epoch``, ``replicas``, ``replicas_timeout``, ``timeout``, ``prefix``,
``sentinel_username`` and ``sentinel_password`` (docs/stores.md); all others go to redis-py, such as ``ssl_ca_certs``.
The URL is checked as a whole here: redis-py would look at its options in the middle of a request.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, unquote, urlencode

from redis.connection import AbstractConnection, Connection, SSLConnection, parse_url

from oncekey.errors import ConfigurationError
from oncekey.stores.url_files import require_files

Address = tuple[str, int]
Kind = Literal["server", "cluster", "sentinel"]

_KINDS: dict[str, tuple[Kind, str]] = {
    "redis": ("server", "redis"),
    "rediss": ("server", "rediss"),
    "redis+cluster": ("cluster", "redis"),
    "rediss+cluster": ("cluster", "rediss"),
    "redis+sentinel": ("sentinel", "redis"),
    "rediss+sentinel": ("sentinel", "rediss"),
}
_PORTS = {"server": 6379, "cluster": 6379, "sentinel": 26379}
_LABELS: dict[Kind, str] = {"server": "Redis", "cluster": "Redis Cluster", "sentinel": "Redis (by Sentinel)"}
_SENTINEL = ("sentinel_username", "sentinel_password")
_NUMBERS = {"replicas": 0.0, "replicas_timeout": 1.0, "timeout": 5.0}
"""The defaults. With a shorter ``timeout``, ``replicas_timeout`` is half of it."""
_OWN = {*_NUMBERS, *_SENTINEL, "epoch", "prefix"}
SET_HERE = frozenset({"retry", "socket_connect_timeout", "socket_timeout"})
"""Options of redis-py that oncekey sets itself, also for a cache: ``timeout`` bounds every wait."""
FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_IGNORED = frozenset(
    {
        *(
            "client_name",
            "decode_responses",
            "encoding",
            "encoding_errors",
            "health_check_interval",
            "legacy_responses",
        ),
        *("lib_name", "lib_version", "max_connections", "protocol", "retry_on_error", "retry_on_timeout"),
        "socket_read_size",
    }
)
"""About redis-py's pools, log-in and replies. Here redis-py only opens the socket."""

_log = logging.getLogger("oncekey")


@dataclass(frozen=True)
class Settings:
    kind: Kind
    hosts: tuple[Address, ...]
    """The server, some nodes of the cluster, or the sentinels."""
    options: dict[str, Any] = field(repr=False)
    """What redis-py's connections take: user, password, database, TLS."""
    sentinel_login: dict[str, Any] = field(repr=False)
    name: str
    """The master's name, for Sentinel."""
    prefix: str
    epoch: str | None
    replicas: int
    replicas_timeout: float
    timeout: float

    @property
    def where(self) -> str:
        """The name of the store in messages; never the password."""
        hosts = ", ".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{_LABELS[self.kind]} at {hosts}"


def read(url: str) -> Settings:
    scheme, _, rest = url.partition("://")
    kind, plain = _KINDS[scheme]
    place, _, query = rest.partition("?")
    login, at, hosts = place.rpartition("@")
    hosts, _, path = hosts.partition("/")
    given = parse_qsl(query, keep_blank_values=True)
    own = {name: value for name, value in given if name in _OWN}
    others = [(name, value) for name, value in given if name not in own]
    name, database = _database(kind, path)
    _check_names({each for each, _ in others}, plain)
    ignored = sorted({each for each, _ in others if each in _IGNORED})
    others = [(each, value) for each, value in others if each not in _IGNORED]
    try:
        addresses = tuple(_address(host, _PORTS[kind]) for host in hosts.split(",") if host)
        host, port = addresses[0] if addresses else ("localhost", _PORTS[kind])
        shown = f"[{host}]" if ":" in host else host
        options: dict[str, Any] = parse_url(  # type: ignore[no-untyped-call]
            f"{plain}://{login}{at}{shown}:{port}/{quote(database)}?{urlencode(others)}"
        )
    except ValueError:
        raise ConfigurationError(
            "the Redis URL cannot be read: use redis://user:password@host:6379/0, redis+cluster://host:7000,host:7001 "
            "or redis+sentinel://host:26379/master; options after '?' are oncekey's (docs/stores.md) and redis-py's"
        ) from None
    for each in ("host", "port"):
        options.pop(each, None)
    require_files(options, FILES)
    _try_options(options, [each for each, _ in others])
    if ignored:
        _log.warning(
            "the Redis URL has options of redis-py's clients, which have no effect on oncekey's connections: %s",
            ", ".join(ignored),
        )
    prefix = own.get("prefix", "oncekey")
    if {"{", "}"} & set(prefix):
        raise ConfigurationError("prefix= takes no braces: Redis Cluster chooses the node of a key by what is in them")
    return Settings(
        kind=kind,
        hosts=addresses or ((host, port),),
        options=options,
        sentinel_login={each.removeprefix("sentinel_"): own.get(each) for each in _SENTINEL},
        name=name,
        prefix=prefix,
        epoch=own.get("epoch") or None,
        **_checked(_numbers(own)),
    )


def sets_itself(names: Iterable[str], ours: frozenset[str]) -> str | None:
    """The sentence for options that oncekey sets itself; None: there is none of them."""
    found = sorted(ours.intersection(names))
    return f"oncekey sets {', '.join(found)} itself: leave it out of the URL" if found else None


def _check_names(names: set[str], scheme: str) -> None:
    if sentence := sets_itself(names, SET_HERE):
        raise ConfigurationError(f"{sentence}. timeout= bounds every call")
    if unknown := sorted(names - _known_options() - _IGNORED):
        raise ConfigurationError(
            f"the Redis URL has an option that neither oncekey nor redis-py knows: {', '.join(unknown)}; "
            "docs/stores.md lists oncekey's"
        )
    if scheme == "redis" and (tls := sorted(each for each in names if each.startswith("ssl_"))):
        raise ConfigurationError(f"the Redis URL has {', '.join(tls)}, and TLS begins with rediss in place of redis")


def _try_options(options: dict[str, Any], names: list[str]) -> None:
    """Make a connection of redis-py, without connecting."""
    given = dict(options)
    kind = given.pop("connection_class", Connection)
    try:
        kind(**given)
    except Exception as error:  # noqa: BLE001 - whatever redis-py makes of such an option, the app must not start
        raise ConfigurationError(
            f"the Redis URL has an option that redis-py cannot use ({type(error).__name__}): correct one of "
            f"{', '.join(names) or 'user, password and database'}"
        ) from None


def _numbers(own: dict[str, str]) -> dict[str, float]:
    numbers = {}
    for name, default in _NUMBERS.items():
        try:
            numbers[name] = float(own.get(name, default))
        except ValueError:
            raise ConfigurationError(f"the Redis URL: {name}= takes a number") from None
    if "replicas_timeout" not in own and numbers["timeout"] > 0:
        numbers["replicas_timeout"] = min(numbers["replicas_timeout"], numbers["timeout"] / 2)
    return numbers


def _known_options() -> set[str]:
    """The options of redis-py's connections."""
    kinds = (AbstractConnection, Connection, SSLConnection)
    return {name for kind in kinds for name in inspect.signature(kind.__init__).parameters}


def _database(kind: Kind, path: str) -> tuple[str, str]:
    """The master's name and the number of the database."""
    first, _, second = (unquote(part) for part in path.partition("/"))
    if kind == "sentinel":
        if not first:
            raise ConfigurationError("redis+sentinel:// needs the master's name: redis+sentinel://host:26379/mymaster")
        return first, second or "0"
    if kind == "cluster" and first not in ("", "0"):
        raise ConfigurationError("redis+cluster:// takes no database: Redis Cluster has only number 0")
    if not (first or "0").isdigit():
        raise ConfigurationError(
            "redis://host/…: after the slash stands the number of a database, as in redis://host/0"
        )
    return "", first or "0"


def _address(host: str, port: int) -> Address:
    name, colon, number = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, number = host, str(port)
    return unquote(name).strip("[]"), int(number)


def _checked(numbers: dict[str, float]) -> dict[str, Any]:
    replicas, patience, timeout = numbers["replicas"], numbers["replicas_timeout"], numbers["timeout"]
    if replicas != int(replicas) or replicas < 0:
        raise ConfigurationError("replicas= takes how many replicas must confirm a write: 0, 1, 2 …")
    if not (math.isfinite(timeout) and timeout > 0):
        raise ConfigurationError("timeout= takes the seconds that bound a call, more than 0")
    if not 0 < patience < timeout:
        raise ConfigurationError(
            f"replicas_timeout= takes seconds, more than 0 and less than timeout= ({timeout:g}), which bounds a call"
        )
    return {"replicas": int(replicas), "replicas_timeout": patience, "timeout": timeout}
