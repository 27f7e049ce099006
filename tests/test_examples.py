"""The examples, run as their first lines say, and killed where it matters."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from stripe import WebhookSignature

from oncekey.demo.provider import Charge, Ledger, make_server
from oncekey.stores.registry import open_store

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parent.parent
PATIENCE_SECONDS = 45.0


@contextmanager
def served(app: str, environ: dict[str, str], listener: socket.socket) -> Iterator[subprocess.Popen[bytes]]:
    """An example in a uvicorn of its own, on a port that the test holds: an early client waits."""
    command = [sys.executable, "-m", "uvicorn", app, "--fd", str(listener.fileno()), "--log-level", "warning"]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environ, pass_fds=[listener.fileno()])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


@contextmanager
def provider(folder: Path, charged: Callable[[Charge], None]) -> Iterator[tuple[str, Ledger]]:
    """A provider that honours keys, and tells the test of every charge before it tells the app."""
    ledger = Ledger(folder / "charges.jsonl")
    server = make_server(socket.create_server(("127.0.0.1", 0)), ledger, honours=True, charged=charged)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", ledger
    finally:
        server.shutdown()
        server.server_close()
        ledger.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as opened:
        yield opened


def client_to(listener: socket.socket) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=PATIENCE_SECONDS)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.faults)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'app.db'}"
    url: str = request.getfixturevalue("postgres_url")
    opened = open_store(url)
    opened.migrate()
    opened.disconnect()
    return url


def test_fastapi_payments_example_charges_once(store: str, listener: socket.socket) -> None:
    """One payment for two requests, 401 without authentication, and a corrected body may keep its key."""
    key = {"X-API-Key": "ann-secret", "Idempotency-Key": "order-1001"}
    with served("examples.fastapi_payments:app", {"ONCEKEY_STORE": store}, listener), client_to(listener) as http:
        assert http.post("/payments", headers=key, json={"amount": -1}).status_code == 422
        first, second = (http.post("/payments", headers=key, json={"amount": 500}) for _ in range(2))
        assert (first.status_code, first.content) == (201, second.content)
        assert second.headers["idempotency-replayed"] == "true"
        assert http.post("/payments", headers=key, json={"amount": 501}).status_code == 422
        assert http.post("/payments", headers=key | {"X-API-Key": "eve"}, json={"amount": 500}).status_code == 401


def test_webhooks_example_books_an_event_once(listener: socket.socket, tmp_path: Path) -> None:
    """Two deliveries of one event, each with its own signature; one with the secret that is replaced; a forged one."""
    environ = {"STRIPE_WEBHOOK_SECRET": "whsec_new,whsec_old", "WEBHOOKS_DATABASE": str(tmp_path / "webhooks.db")}
    invoice = {"id": "in_1", "amount_paid": 2000}
    with served("examples.webhooks_stripe:app", environ, listener), client_to(listener) as http:

        def deliver(secret: str, at: float, pending: int) -> httpx.Response:
            event = {"id": "evt_1", "type": "invoice.paid", "pending_webhooks": pending, "data": {"object": invoice}}
            body = json.dumps(event)
            signature = WebhookSignature.generate_signature_header(body, secret, int(at))
            headers = {"Stripe-Signature": signature, "Content-Type": "application/json"}
            return http.post("/stripe", content=body, headers=headers)

        now = time.time()
        answers = [deliver("whsec_bad", now, 2), deliver("whsec_new", now - 900, 2), deliver("whsec_old", now, 2)]
        answers.append(deliver("whsec_new", now, 1))
        assert [answer.status_code for answer in answers] == [401, 401, 200, 200]
        assert answers[3].headers["idempotency-replayed"] == "true"
        assert http.get("/bookings").json() == [{"event": "evt_1", "invoice": "in_1", "cents": 2000}]


@pytest.mark.timeout(150)
def test_rides_example_survives_a_kill_after_the_charge(store: str, listener: socket.socket, tmp_path: Path) -> None:
    """The server is killed after the first charge: one ride, one charge, one receipt, and the same answer for ever.

    It is killed after the third charge as well, and that client does not come back: upkeep ends its ride.
    """
    running: list[subprocess.Popen[bytes]] = []

    def kill(charge: Charge) -> None:
        if (charge["amountCents"], len(running)) in ((2000, 1), (3000, 2)):
            running[-1].send_signal(signal.SIGKILL)
            running[-1].wait()

    mailbox = tmp_path / "receipts.jsonl"
    ride = {"from": "Cape Canaveral", "to": "the Moon", "cents": 2000}
    key = {"X-User": "ada", "Idempotency-Key": "ride-1"}
    with provider(tmp_path, kill) as (url, ledger):
        environ = {"ONCEKEY_STORE": store, "RIDES_PROVIDER": url, "RIDES_MAILBOX": str(mailbox)}
        with served("examples.rides:app", environ, listener) as process, client_to(listener) as http:
            running.append(process)
            with pytest.raises(httpx.TransportError):
                http.post("/rides", headers=key, json=ride)
        assert len(ledger.charges()) == 1
        _lease_is_over(store)
        with served("examples.rides:app", environ, listener) as process, client_to(listener) as http:
            running.append(process)
            first, second = (http.post("/rides", headers=key, json=ride) for _ in range(2))
            assert (first.status_code, first.content) == (201, second.content)
            (charge,) = ledger.charges()
            booked = http.get(first.headers["location"]).json()
            assert booked == {**ride, "id": first.json()["id"], "charge": charge["id"]}
            other = http.post("/rides", headers=key | {"Idempotency-Key": "ride-2"}, json=ride | {"cents": 100})
            assert other.json()["id"] == booked["id"] + 1, "the first request has left another row"
            with pytest.raises(httpx.TransportError):
                http.post("/rides", headers=key | {"Idempotency-Key": "ride-3"}, json=ride | {"cents": 3000})
        upkeep = [sys.executable, "-m", "oncekey", "upkeep", "examples.rides:once", "--once", "--json"]
        for completed in (0, 1):  # the sweeper frees the key; when its client had its time, it is resumed
            _lease_is_over(store)
            ended = subprocess.run(upkeep, cwd=ROOT, env=os.environ | environ, capture_output=True, check=True)
            assert json.loads(ended.stdout)["done"]["resume"]["completed"] == completed
        with served("examples.rides:app", environ, listener), client_to(listener) as http:
            third = http.post("/rides", headers=key | {"Idempotency-Key": "ride-3"}, json=ride | {"cents": 3000})
            assert (third.status_code, third.headers["idempotency-replayed"]) == (201, "true")
            assert http.get(third.headers["location"]).json()["charge"] == third.json()["charge"]
        assert [charge["amountCents"] for charge in ledger.charges()] == [2000, 100, 3000]
        command = [sys.executable, "-m", "oncekey", "worker", "examples.rides_worker:worker", "--drain", "--json"]
        for done in (3, 0):
            ended = subprocess.run(command, cwd=ROOT, env=os.environ | environ, capture_output=True, check=True)
            assert json.loads(ended.stdout)["done"] == done
    mails = [json.loads(line) for line in mailbox.read_text().splitlines()]
    assert sorted(mail["text"] for mail in mails) == [
        "Ride 1: 2000 cents.",
        "Ride 2: 100 cents.",
        "Ride 3: 3000 cents.",
    ]


def _lease_is_over(store: str) -> None:
    """Let a minute pass for all keys: the lease of the killed server runs out."""
    if store.startswith("sqlite"):
        with closing(sqlite3.connect(store.removeprefix("sqlite:///"), timeout=10)) as file, file:
            file.execute("UPDATE idempotency_keys SET lease_until = lease_until - 61, reconcile_at = reconcile_at - 61")
    else:
        with psycopg.connect(store) as database:
            earlier = ", ".join(f"{name} = {name} - interval '61 seconds'" for name in ("lease_until", "reconcile_at"))
            database.execute(f"UPDATE idempotency_keys SET {earlier}".encode())


def test_the_provider_of_the_demo_runs_alone(tmp_path: Path, listener: socket.socket) -> None:
    """As the first lines of the example start it."""
    port = listener.getsockname()[1]
    listener.close()
    command = [sys.executable, "-m", "oncekey.demo.provider", f"127.0.0.1:{port}", str(tmp_path / "charges.jsonl")]
    process = subprocess.Popen(command)
    try:
        charged = _until_up(port, process)
        assert charged["downstreamKey"] == "k-1"
        again = _charge(port)
        assert again == charged
    finally:
        process.terminate()
        process.wait(PATIENCE_SECONDS)


def _until_up(port: int, process: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        assert process.poll() is None
        assert time.monotonic() < deadline
        try:
            return _charge(port)
        except httpx.TransportError:
            time.sleep(0.05)


def _charge(port: int) -> Any:
    asked = {"customerId": "ada", "amountCents": 5, "currency": "EUR"}
    return httpx.post(f"http://127.0.0.1:{port}/charges", headers={"Idempotency-Key": "k-1"}, json=asked).json()
