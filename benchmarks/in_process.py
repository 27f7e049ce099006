"""Requests in one process, without sockets: the app of ``apps.py`` behind uvicorn's own protocol, on uvloop.

Requests go in groups of ``AT_ONCE``, and the next group starts when the last request of this one is answered. So the
batches of the store do not depend on how fast the database is, and two runs take the same instructions.

Replays go round 1,000 keys, each with a ``Location`` of its own as real ones have: with a few keys, whatever remembers
responses would look better than it is. ``fractions`` is no request: it is the fingerprint of one MiB of ``1.0,``, which
once took half a second, beside ``parsing``, what the standard library takes to read it.

``first+prometheus`` is ``first`` with that option of OnceKey (``OPTIONS``).
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette

from benchmarks import apps, by_hand, load, peers

if TYPE_CHECKING:
    from oncekey import OnceKey

REQUESTS = ("bare", "replay", "first")
INSERTS = ("insert-bare", "insert-enlisted", "insert-by-hand", "insert-by-hand-held")
"""The handler inserts a row on PostgreSQL: alone, in the transaction that completes the key, and as people write it."""
DOCUMENTS = ("parsing", "fractions")


def _encryption() -> dict[str, Any]:
    from oncekey.encryption import Keyring

    return {"encryption": Keyring({1: bytes(range(32))})}


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "prometheus": lambda: {"telemetry": "prometheus"},
    "otel": lambda: {"telemetry": "otel"},
    "encryption": _encryption,
    "cache": lambda: apps.cache_options(os.environ[apps.CACHE]),
}
"""Options of OnceKey that cost something, by the word for them in the name of a mode."""
WITH_OPTIONS = tuple(f"{mode}+{option}" for option in OPTIONS for mode in ("replay", "first"))
PEERS = ("replay+idemkit", "first+idemkit")
"""The same requests behind a peer, on Redis."""
MODES = (*REQUESTS, *WITH_OPTIONS, *PEERS, *INSERTS, *DOCUMENTS)
AT_ONCE = 32
KEYS = 1_000
WARM = 8 * AT_ONCE
"""Requests after which Python has specialised its code."""
BODY = load.BODY.encode()
REQUEST = (
    b"POST /payments HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAuthorization: Bearer tenant-a\r\n"
    b"Content-Type: application/json\r\nContent-Length: " + b"%d" % len(BODY) + b"\r\n%s\r\n"
)

Step = Callable[[], object]


def place_of(mode: str, store: str) -> str:
    """The database of a mode (``places.py``): what people write by hand has a table of its own."""
    if mode in PEERS:
        return f"{store}-{mode.partition('+')[2]}"
    return f"postgres-asyncpg-{mode.removeprefix('insert-')}" if mode.startswith("insert-by-hand") else store


def _nothing() -> None:
    pass


def serve(
    mode: str,
    number: int,
    url: str,
    *,
    ready: Step = _nothing,
    begin: Step = _nothing,
    end: Step = _nothing,
    at_once: int = AT_ONCE,
) -> None:
    """Answer so many requests of this mode, or read so many documents, between ``begin`` and ``end``.

    ``ready`` is called when everything is imported, before the first request.
    """
    if mode in DOCUMENTS:
        _read(mode, 1)
        begin()
        _read(mode, number)
        end()
        return
    import uvloop

    uvloop.run(_serve(mode, number, url, ready, begin, end, at_once))


def _read(mode: str, number: int) -> None:
    from oncekey.core.fingerprint import fingerprint

    body = b"[" + b"1.0," * (2**18 - 1) + b"1]"
    for _ in range(number):
        if mode == "parsing":
            json.loads(body)
        else:
            fingerprint(method="POST", path="/payments", query=b"", content_type="application/json", body=body)


async def _serve(mode: str, number: int, url: str, ready: Step, begin: Step, end: Step, at_once: int) -> None:
    from uvicorn.config import Config

    from oncekey.web import tuning

    mode, _, option = mode.partition("+")
    if option in peers.GUARDS:
        app, once = peers.GUARDS[option](apps.starlette_app(), url), None
    else:
        app, once = _app(mode, url, OPTIONS.get(option, dict)())
    config = Config(app, access_log=False, log_level="warning")
    config.load()
    run = uuid.uuid4().hex[:24]
    keys = [f"{run}{n:012x}".encode() for n in range(KEYS + number)]
    clients = [_Client(config, mode) for _ in range(at_once)]
    ready()
    await _load(clients, iter(keys[: KEYS if mode in ("first", "replay") else WARM]))
    if mode == "replay":  # until now they were first requests
        await _load(clients, iter(keys[:KEYS]))
    tuning.settle()
    chosen = islice(cycle(keys[:KEYS]), number) if mode == "replay" else iter(keys[KEYS:])
    begin()
    await _load(clients, chosen)
    end()
    for client in clients:
        client.close()
    if once is not None:
        await once.aclose()


def _app(mode: str, url: str, options: dict[str, Any]) -> tuple[Starlette, OnceKey | None]:
    """The app of this mode, and what protects it. ``options``: further ones of OnceKey."""
    from oncekey import SINGLE_TENANT, OnceKey, Policy
    from oncekey.web.asgi import IdempotencyMiddleware

    if mode.startswith("insert-by-hand"):
        return by_hand.app(f"asyncpg-{mode.removeprefix('insert-')}", url, apps.Executions(), inserts=True), None
    enlists = mode == "insert-enlisted"
    app = apps.inserting_app(url, enlists=enlists) if mode in INSERTS else apps.starlette_app()
    if mode in ("bare", "insert-bare"):
        return app, None
    policy = Policy(effects="transactional") if enlists else None
    once = OnceKey(url, scope=SINGLE_TENANT, policy=policy, migrate=True, **options)
    app.add_middleware(IdempotencyMiddleware, once=once)
    return app, once


async def _load(clients: list[_Client], keys: Iterator[bytes]) -> None:
    while group := [client.send(key) for client, key in zip(clients, keys, strict=False)]:
        for client, answered in zip(clients, group, strict=False):
            await answered
            client.check()


class _Client:
    """One connection."""

    def __init__(self, config: Any, mode: str) -> None:
        from uvicorn.server import ServerState

        self._loop = asyncio.get_running_loop()
        self._protocol, self._wire = _protocol()(config, ServerState(), {}), _Wire()
        self._protocol.connection_made(self._wire)
        self._keyed = mode != "bare"
        self._head = REQUEST % (b'Idempotency-Key: "%s"\r\n' if self._keyed else b"")

    def send(self, key: bytes) -> asyncio.Future[None]:
        answered: asyncio.Future[None] = self._loop.create_future()
        self._protocol.answered = answered
        self._protocol.data_received((self._head % key if self._keyed else self._head) + BODY)
        return answered

    def check(self) -> None:
        answer = b"".join(self._wire.sent)
        self._wire.sent.clear()
        if not answer.startswith(b"HTTP/1.1 201 "):
            raise RuntimeError(f"not the answer that was asked for: {answer[:500]!r}")

    def close(self) -> None:
        self._protocol.connection_lost(None)


@cache
def _protocol() -> Any:
    """One class for all connections, as in a server: Python is quicker where it meets the same one again."""
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class Protocol(HttpToolsProtocol):
        answered: asyncio.Future[None]

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.answered.set_result(None)

    return Protocol


class _Wire(asyncio.Transport):
    """A connection without a network: keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5000), "sockname": ("127.0.0.1", 8000)})
        self.sent: list[bytes] = []

    def write(self, data: Any) -> None:
        self.sent.append(data)

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def close(self) -> None: ...
