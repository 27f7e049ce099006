"""Every command of ``oncekey``, over a store and a jar with planted secrets."""

from __future__ import annotations

import json
import os
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.encryption import Keyring
from oncekey.outbox import Worker
from tests.security.planted import MARK, Witness, as_json, secret, shown
from tests.security.planted_app import TENANT
from tests.security.planted_requests import KEYS, new

NOT_RUN: dict[str, str] = {}
"""Commands that the full run leaves out, each with its reason."""
FORMS: tuple[tuple[str, ...], ...] = ((), ("--json",))
BY = ("--yes", "--who", shown("operator"), "--why", shown("reason"))
LOG = ("--log-level", "debug")
LOGS: tuple[tuple[str, ...], ...] = (LOG, (*LOG, "--log-format", "json", "--json"))
MASTER = secret("master-key").encode()[:32].ljust(32, b"x")


def read(witness: Witness, url: str) -> None:
    """Commands that change nothing, and ``migrate``, which has nothing to do."""
    at = ("--store", url, "--scope", TENANT)
    for form in FORMS:
        witness.run("doctor", "--store", url, *form, code=None)
        witness.run("migrate", "--store", url, *form)
        witness.run("keys", "list", "--store", url, *form)
        witness.run("dead-letters", "list", "--store", url, *form)
        witness.run("upkeep", "--store", url, "--once", "--dry-run", *LOG, *form)
        for key in KEYS.values():
            witness.run("keys", "show", key, *at, *form)
        witness.run("keys", "show", f"{secret('key')}-nowhere", *at, *form, code=1)
        for letter in dead_letters(witness, url):
            witness.run("dead-letters", "show", letter, "--store", url, *form)


def dead_letters(witness: Witness, url: str) -> list[str]:
    found = as_json(witness.run("dead-letters", "list", "--store", url, "--json"))
    return [letter["id"] for letter in found["jobs"]]


def change(witness: Witness, url: str) -> None:
    """What an operator changes, and what is refused."""
    at = ("--store", url, "--scope", TENANT)
    response = ("--status", "201", "--body", f'{{"card": "{secret("resolved")}"}}', "--header", f"location:{MARK}")
    witness.run("keys", "resolve", KEYS["plain"], *at, "--confirm", *response, *BY)
    witness.run("keys", "resolve", KEYS["effect"], *at, "--happened", "ship", "--result", f'"{MARK}"', *BY)
    witness.run("keys", "resolve", KEYS["ok"], *at, "--refute", *BY, code=1)
    witness.run("keys", "forget", KEYS["large"], *at, *BY)
    witness.run("keys", "show", KEYS["plain"], *at)
    first, second = dead_letters(witness, url)
    for letter, form in ((first, ()), (second, ("--json",))):
        witness.run("dead-letters", "retry", letter, "--store", url, *BY, *form)
    witness.run("dead-letters", "retry", first, "--store", url, *BY, code=1)
    witness.run("dead-letters", "retry", KEYS["unknown"], *at, *BY)
    witness.run("dead-letters", "retry", KEYS["ok"], *at, *BY, code=1)


def work(witness: Witness, url: str, once: OnceKey, worker: Worker) -> None:
    """``worker`` runs the retried jobs, which fail again. ``upkeep`` asks resolvers and resumes, which fail too."""
    shop: Any = ModuleType("planted_shop")
    shop.once, shop.worker = once, worker
    with patch.dict(sys.modules, {"planted_shop": shop}):
        for form in LOGS:
            witness.run("worker", "planted_shop:worker", "--drain", *form)
            witness.run("upkeep", "planted_shop:once", "--once", *form)
            witness.run("upkeep", "--store", url, "--once", *form)
        witness.run("routes", "planted_shop:once", code=1)
    first, *others = dead_letters(witness, url)
    for code in (0, 1):
        witness.run("dead-letters", "discard", first, "--store", url, *BY, code=code)
    witness.run("dead-letters", "discard", KEYS["ok"], "--store", url, "--scope", TENANT, *BY, code=1)
    assert others, "the other one is left, for the commands that follow"


def print_out(witness: Witness, app: Any, folder: Path) -> None:
    """Commands without a store. ``demo`` ends at once: its store cannot be shared."""
    shop: Any = ModuleType("planted_app")
    shop.app = app
    rows = "id,amount,currency,state,card\npay-1,{amount},EUR,done,{card}\n"
    for name, amount in (("ours.csv", 5), ("theirs.csv", 6)):
        (folder / name).write_text(rows.format(amount=amount, card=secret("card")))
    ledgers = (str(folder / "ours.csv"), str(folder / "theirs.csv"))
    with patch.dict(sys.modules, {"planted_app": shop}):
        for form in FORMS:
            assert "/ok" in witness.run("routes", "planted_app:app", *form, code=None)
            assert "pay-1" in witness.run("ledger", "compare", *ledgers, *form, code=1)
    witness.run("metrics", "rules")
    witness.run("metrics", "dashboard")
    witness.run("keys", "new-key")
    witness.run("demo", "--store", f"memory://ann:{secret('password')}@host", code=1)


# -- the client --------------------------------------------------------------------------------------------------------


class _Provider(BaseHTTPRequestHandler):
    """Answers as the path says: with a status, or not at all."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        status = self.path.removeprefix("/payments/").partition("?")[0]
        if status == "none":
            self.close_connection = True
            return
        body = json.dumps({"detail": secret("answer"), "type": f"https://api.test/{MARK}"}).encode()
        self.send_response(int(status), MARK)
        self.send_header("X-Secret", secret("header"))
        self.send_header("Set-Cookie", f"session={secret('set-cookie')}")
        self.send_header("Content-Type", "application/problem+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not on standard error, which is a command's."""


@contextmanager
def provider() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Provider)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def client(witness: Witness, folder: Path) -> None:
    """A file is sent: some are answered, some refused, some stay open. Then the jar is listed, resumed and emptied."""
    lines = [
        {
            "intent": f"order-{status}",
            "path": f"/payments/{status}?token={secret('query')}",
            "json": {"card": secret("body")},
            "headers": {"X-Secret": secret("header")},
        }
        for status in ("201", "422", "401", "500", "none")
    ]
    file, jar = folder / "orders.jsonl", f"sqlite:///{folder}/orders.jar"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    tries = ("--tries", "1", "--jar", jar, "--header-from", "Authorization=PLANTED_TOKEN")
    with provider() as host, patch.dict(os.environ, {"PLANTED_TOKEN": f"Bearer {secret('authorization')}"}):
        to = ("--to", f"http://ann:{secret('password')}@{host}", *tries)
        for form in FORMS:
            witness.run("send", str(file), *to, "--answers", str(folder / "answers.jsonl"), *form, code=1)
            witness.run("client", "list", "--jar", jar, *form)
            witness.run("client", "resume", *to, *form, code=1)
        changed = folder / "changed.jsonl"
        changed.write_text(file.read_text().replace(secret("body"), secret("another")))
        witness.run("send", str(changed), *to, code=1)
    witness.run("client", "resume", *to, code=1)  # nobody listens there any more
    changed.write_text(f'{{"json": {MARK}}}\n')
    witness.run("send", str(changed), *to, code=1)
    witness.run("client", "forget", "order-500", "--jar", jar, "--yes")
    witness.run("client", "forget", "order-500", "--jar", jar, "--yes", code=1)
    witness.run("client", "forget", "--finished", "0", "--jar", jar, "--yes")
    assert "order-none" in witness.run("client", "list", "--jar", jar)


# -- the keyring -------------------------------------------------------------------------------------------------------


def replace_key(witness: Witness, url: str) -> None:
    """With a keyring, all values are written again under another key, after the app has used it. Without one, the
    command says so."""
    if "ONCEKEY_KEYS" not in os.environ:
        for form in FORMS:
            witness.run("keys", "re-encrypt", "--store", url, "--dry-run", *form, code=1)
        return
    os.environ["ONCEKEY_KEYS"] = f"2:{b64encode(MASTER[::-1]).decode()},{os.environ['ONCEKEY_KEYS']}"
    for form in FORMS:
        witness.run("keys", "re-encrypt", "--store", url, "--dry-run", *form, code=1)
    witness.run("keys", "re-encrypt", "--store", url, *BY, code=None)
    with OnceKey(url, scope=SINGLE_TENANT, encryption=Keyring.from_env()) as renewed:
        renewed.function("renew", key="key")(lambda key: secret("result"))(new("renewed"))
    witness.run("keys", "re-encrypt", "--store", url, *BY)
    witness.run("keys", "show", KEYS["ok"], "--store", url, "--scope", TENANT)
