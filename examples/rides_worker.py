"""Sends the receipts of ``examples/rides.py``: ``oncekey worker examples.rides_worker:worker``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from oncekey.outbox import Context, Worker

worker = Worker(os.environ.get("ONCEKEY_STORE", "sqlite:///rides.db"))
MAILBOX = Path(os.environ.get("RIDES_MAILBOX", "receipts.jsonl"))  # yours is a mail service


@worker.task()
def send_receipt(ctx: Context, ride: dict[str, Any]) -> None:
    """Runs at least once, with the same key in every attempt. A provider that honours the key sends one mail."""
    mail = {"key": ctx.downstream_key, "to": ride["to"], "text": f"Ride {ride['ride']}: {ride['cents']} cents."}
    sent = MAILBOX.read_text().splitlines() if MAILBOX.exists() else []
    if not any(json.loads(line)["key"] == mail["key"] for line in sent):
        with MAILBOX.open("a") as file:
            file.write(json.dumps(mail) + "\n")
    ctx.record(mail["key"])
