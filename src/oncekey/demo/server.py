"""Runs the demo: a parent that opens the ports, and children that serve them and may be killed.

The parent opens the listening sockets once. So a client that retries while the app restarts waits, and is not refused.
If the provider was killed, the app waits for it in the same way.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import uvicorn

from oncekey.demo.book import Book
from oncekey.demo.family import Family, Member, follow_parent
from oncekey.demo.provider import Provider
from oncekey.errors import ConfigurationError
from oncekey.stores.api import Epochs
from oncekey.stores.registry import find, open_store
from oncekey.telemetry.registry import named

_CURL = """\
  curl -i http://127.0.0.1:{port}/payments -H 'Authorization: Bearer tenant-a' -H 'Idempotency-Key: {first}' \\
       -H 'Content-Type: application/json' -d '{{"customerId":"cus-1","amountCents":1200,"currency":"EUR"}}'
  curl -i 'http://127.0.0.1:{port}/payments?simulate=crash' -H 'Authorization: Bearer tenant-a' \\
       -H 'Idempotency-Key: {crash}' -H 'Content-Type: application/json' \\
       -d '{{"customerId":"cus-1","amountCents":900,"currency":"EUR"}}'
"""
_NOW = "  curl http://127.0.0.1:{port}/provider/charges"
_LATER = "  curl -i http://127.0.0.1:{port}/idempotency/{crash} -H 'Authorization: Bearer tenant-a'"
_WORDS = {
    (False, True): "send the first one twice, and the second one again after the crash: it resumes",
    (
        False,
        False,
    ): "send the first one twice, and the second one again after the crash: unknown, until upkeep asks the ledger",
    (True, True): "the first two answer 202; send them again, or ask the third, until the worker is done",
    (True, False): "the first two answer 202; ask the third: it becomes unknown, until upkeep asks the ledger",
}


def run(
    store: str,
    port: int,
    *,
    background: bool = False,
    honours: bool = True,
    ledger: Path | None = None,
    metrics: bool = False,
    ttl: float = 86_400.0,
    host: str = "127.0.0.1",
) -> int:
    """Serve until interrupted; restart every child that is killed."""
    with _metrics_folder() if metrics else nullcontext():
        return _run(store, port, background, honours, ledger, metrics, ttl, host)


def _run(
    store: str,
    port: int,
    background: bool,
    honours: bool,
    ledger: Path | None,
    metrics: bool,
    ttl: float,
    host: str,
) -> int:
    listener, bank = _listen(host, port), _listen(host, 0)
    port = listener.getsockname()[1]
    ledger = ledger or ledger_of(store)
    book = book_of(store, ledger)
    _prepare(store, book)
    print(f"oncekey demo: a payments API on http://{host}:{port}, docs on http://{host}:{port}/docs")
    if book == store:
        print(f"keys and payments are kept in {_where(store)}")
    else:
        print(f"keys are kept in {_where(store)}, payments in {_where(book)}")
    if metrics:
        print(f"metrics are on http://{host}:{port}/metrics")
    print(f"the provider keeps its ledger in {ledger.resolve()}, and {_habit(honours)} idempotency keys")
    print(f"try these; {_WORDS[background, honours]}, and nothing is ever charged twice:")
    start = secrets.token_hex(3)  # new keys at each start: the keys of an earlier start are already used
    keys = {"first": f"first-{start}", "crash": f"crash-{start}"}
    print((_CURL + (_LATER if background else _NOW)).format(port=port, **keys), flush=True)
    provider = [f"http://{host}:{bank.getsockname()[1]}", "yes" if honours else "no"]
    watched = "metrics" if metrics else "quiet"
    app = [str(listener.fileno()), store, book, *provider, "background" if background else "now", watched, str(ttl)]
    members = [
        Member(
            "provider", "oncekey.demo.provider", [str(bank.fileno()), str(ledger), provider[1]], fds=[bank.fileno()]
        ),
        Member("app", "oncekey.demo.server", app, fds=[listener.fileno()]),
    ]
    if background:
        members.append(Member("worker", "oncekey.demo.settle", [store, *provider, watched]))
    return Family(members).run()


@contextmanager
def _metrics_folder() -> Iterator[None]:
    """A folder in which all processes keep their metrics, also those that are killed."""
    with TemporaryDirectory(prefix="oncekey-demo-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # before the import below, and for the children
        named("prometheus")  # ConfigurationError says what to install
        yield


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=512)
    except OSError as error:
        raise ConfigurationError(f"port {port} cannot be opened ({error.strerror}): try another with --port") from error


def _prepare(store: str, book: str) -> None:
    """Create the tables before the children start: app or worker may be the first to use them."""
    opened = open_store(store)
    try:
        if isinstance(opened, Epochs):
            opened.init()
        opened.migrate()
        opened.disconnect()
        Book(book).create_tables()
    finally:
        opened.close()


def ledger_of(store: str) -> Path:
    """The file of the provider's ledger: beside a SQLite file, or in this folder under a name made from the URL."""
    if store.startswith("sqlite:///"):
        return Path(store.removeprefix("sqlite:///")).with_suffix(".provider.jsonl")
    parts = urlsplit(store)
    place = hashlib.sha256(f"{parts.netloc.rpartition('@')[2]}{parts.path}".encode()).hexdigest()[:8]
    return Path(f"oncekey-demo-{place}.provider.jsonl")


def book_of(store: str, ledger: Path) -> str:
    """The database of the payments: the store's own, or a SQLite file beside the ledger."""
    entry = find(store)
    return store if entry is None or entry.transactions else f"sqlite:///{ledger.with_suffix('.payments.db')}"


def _habit(honours: bool) -> str:
    return "honours" if honours else "does not honour"


def _where(store: str) -> str:
    if store.startswith("sqlite:///"):
        return f"the file {Path(store.removeprefix('sqlite:///')).resolve()}"
    parts = urlsplit(store)
    return f"the database {parts.path.lstrip('/')} at {parts.netloc.rpartition('@')[2] or 'localhost'}"


def serve(fd: str, store: str, book: str, provider: str, honours: str, mode: str, watched: str, ttl: str) -> None:
    """The child: serve the inherited socket."""
    from oncekey.demo.app import make_app

    follow_parent()
    app = make_app(
        store,
        Provider(provider, honours=honours == "yes"),
        payments=book,
        background=mode == "background",
        metrics=watched == "metrics",
        ttl=float(ttl),
    )
    with socket.socket(fileno=int(fd)) as listener:
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    serve(*sys.argv[1:])
