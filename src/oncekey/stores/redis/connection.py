"""A connection that answers before its deadline or is closed, and the sentences for its errors.

redis-py opens the socket (addresses, TLS); oncekey logs in and speaks on it. So nothing is repeated behind the caller's
back, and one deadline bounds a whole exchange, however slowly a server sends its bytes.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis import exceptions
from redis.connection import Connection, SSLConnection

from oncekey.errors import OnceKeyError, StoreError, StoreUnavailable
from oncekey.stores.redis.protocol import Refusal, Replies, pack
from oncekey.stores.redis.urls import Address

Command = Sequence[bytes]

_ADVICE = {
    "ConnectionRefusedError": "start it, or correct the address",
    "gaierror": "correct the name of the host",
    "SSLError": "correct the TLS options of the URL, such as ssl_certfile=",
    "SSLEOFError": "it closed the connection; it may want a certificate of this process (ssl_certfile=)",
    "SSLCertVerificationError": "its certificate is not trusted: ssl_ca_certs= names the authority",
    "FileNotFoundError": "a file that the URL names (ssl_…, or a socket) is not there",
}
_LATE = "did not answer in time"
_OTHER_HOST = "its certificate is for another host: use a name in the URL that the certificate has"
_OTHER_TIME = "its certificate has expired, or is not valid yet"
_BY_VERIFY_CODE = {9: _OTHER_TIME, 10: _OTHER_TIME, 62: _OTHER_HOST, 64: _OTHER_HOST}
"""By OpenSSL's reason for refusing a certificate. Any other one: it is not trusted."""
_REFUSED = {
    "LOADING": "it is still reading its data",
    "BUSY": "a script of another program blocks it",
    "OOM": "its memory is full: raise maxmemory, or run `oncekey upkeep`, which deletes expired keys",
    "MISCONF": "it cannot write its snapshot to disk, and so takes no writes: look at its log",
    "READONLY": "it is a replica: point oncekey at the master, or use redis+sentinel:// or redis+cluster://",
    "NOREPLICAS": "it has fewer replicas than its min-replicas-to-write",
    "MASTERDOWN": "it is a replica that lost its master",
    "CLUSTERDOWN": "the cluster is down, or a failover is under way",
    "TRYAGAIN": "the slot of this key is being moved to another node",
    "ASK": "the slot of this key is being moved to another node",
    "MOVED": "the cluster is being rearranged",
    "CROSSSLOT": "it has become a node of a cluster: use redis+cluster:// if it has several nodes",
    "NOAUTH": "it wants a login, and the URL has none: put user and password before the host",
    "NOPASSWORD": "the URL has a password, and this server has none: take it out of the URL, or give the server one",
    "WRONGPASS": "correct the user's name or password",
    "UNBLOCKED": "the server ended the call",
    "DBINDEX": "it has no database of this number: correct the number at the end of the URL",
}
"""By the first word of the refusal. In each case the command did nothing."""
_IN_ERR = {
    "used memory > 'maxmemory'": "OOM",  # in a script, Redis 6 reports it so
    "invalid password": "WRONGPASS",  # for a user without a name
    "without any password configured": "NOPASSWORD",
    "no password is set": "NOPASSWORD",  # in the words of Redis 5
    "DB index is out of range": "DBINDEX",
}
"""What a refusal with the general code ERR says, and the code that it counts as."""


class Lost(Exception):
    """The connection failed. What was sent may have been done or not. ``args[0]`` says what happened."""


class Link:
    """One connection to one server. Any failure closes it: a late answer must not be read as the next one's."""

    def __init__(self, sock: socket.socket, address: Address) -> None:
        self.address = address
        self.checked_at = -1
        """``ServerWatch.refusals`` when the server was found good."""
        self._sock = sock
        self._replies = Replies()
        self._pid = os.getpid()

    def ask(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """The replies, in order. A refusal is among them as an exception, and is not raised."""
        self.send(commands, deadline)
        return self.receive(len(commands), deadline)

    def send(self, commands: Sequence[Command], deadline: float) -> None:
        try:
            self._sock.settimeout(_left(deadline))
            self._sock.sendall(pack(commands))
        except (OSError, ValueError) as error:
            raise self._fail(error) from error
        except BaseException:
            self.close()
            raise

    def receive(self, count: int, deadline: float) -> list[Any]:
        try:
            while (replies := self._replies.take(count)) is None:
                self._sock.settimeout(_left(deadline))
                data = self._sock.recv(65536)
                if not data:
                    raise ConnectionResetError
                self._replies.feed(data)
        except (OSError, ValueError) as error:
            raise self._fail(error) from error
        except BaseException:
            self.close()
            raise
        return replies

    def _fail(self, error: Exception) -> Lost:
        self.close()
        return Lost(described(error))

    def close(self) -> None:
        """Close it, from any thread: a thread that waits on it gets an error. A forked child closes its copy only."""
        if self._pid == os.getpid():
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._sock.close()

    @property
    def socket(self) -> socket.socket:
        """For an event loop, which then reads and writes in place of this class."""
        return self._sock

    @property
    def closed(self) -> bool:
        return self._sock.fileno() < 0


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def connect(address: Address, options: dict[str, Any], deadline: float) -> Link:
    """Open a connection and log in. Raises Lost, or a Refusal of the log-in."""
    given = dict(options)
    kind = given.pop("connection_class", Connection)
    user, password, database = (given.pop(name, None) for name in ("username", "password", "db"))
    if "path" not in given:  # a path is a socket in the file system
        given |= {"host": address[0], "port": address[1]}
    try:
        patience = _left(deadline)
        opened = kind(
            **given,
            socket_timeout=patience,
            socket_connect_timeout=patience,
            redis_connect_func=lambda connection: None,  # the log-in is below, under the same deadline
        )
        opened.connect()
    except (OSError, exceptions.RedisError) as error:
        words = described(error)
        if words == _LATE and issubclass(kind, SSLConnection):
            words += "; if this port speaks no TLS, use redis:// in place of rediss://"
        raise Lost(words) from error
    except Exception as error:  # redis-py makes the TLS context here, and looks at its options only then
        raise Lost(f"is unavailable ({type(error).__name__}): correct the options of the URL") from error
    sock, opened._sock = opened._sock, None  # from here on the socket is the Link's
    link = Link(sock, address)
    hello: list[Command] = []
    if password:
        hello.append([b"AUTH", *([user.encode()] if user else []), password.encode()])
    if database:
        hello.append([b"SELECT", b"%d" % database])
    refusals = [reply for reply in link.ask(hello, deadline) if isinstance(reply, Refusal)]
    if refusals:
        link.close()
        raise refusals[0]
    return link


def described(error: BaseException) -> str:
    """What happened, without the driver's text."""
    cause = error
    while not isinstance(cause, OSError) and (cause.__cause__ or cause.__context__) is not None:
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]  # not None, one line above
    if isinstance(cause, TimeoutError | exceptions.TimeoutError):
        return _LATE
    kind = type(cause).__name__ if isinstance(cause, OSError | ssl.SSLError) else type(error).__name__
    advice = _ADVICE.get(kind)
    if isinstance(cause, ssl.SSLCertVerificationError):
        advice = _BY_VERIFY_CODE.get(cause.verify_code, advice)
    return f"is unavailable ({kind})" + (f": {advice}" if advice else "")


def explain(refusal: Refusal, where: str) -> OnceKeyError:
    """oncekey's error for a refusal. It never quotes the server's text, which may have keys in it."""
    code = refusal.code
    if code == "ERR":
        code = next((known for words, known in _IN_ERR.items() if words in refusal.rest), code)
    if code in _REFUSED:
        return StoreUnavailable(f"{where} refused ({code}): {_REFUSED[code]}")
    if code == "NOPERM":
        return StoreError(f"{where} refused (NOPERM): docs/stores.md says what its user must be allowed to do")
    return StoreError(f"{where} refused a command ({code}): the server's log may say why")
