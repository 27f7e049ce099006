"""Pay each order of a shop once at a payments API, however often this program is killed.

    oncekey demo &                                         # a payments API to try it with: it prints its address
    python -m examples.client_resume http://127.0.0.1:8000 shop.db
    python -m examples.client_resume http://127.0.0.1:8000 shop.db          # nothing left to pay

Kill it wherever you like and start it again. The order and the intent to pay it are written in one transaction. The
key is on disk before the first byte is sent, so the next run asks about the same payment and does not make a second.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing

from oncekey.client import Client, Ended, IntentExpired, KeyJar


def take_order(db: sqlite3.Connection, jar: KeyJar, api: str, cents: int) -> None:
    """Write our own row and the intent for the other API in one transaction."""
    with db:
        order = db.execute("INSERT INTO orders (cents) VALUES (?)", (cents,)).lastrowid
        body = {"amountCents": cents, "reference": f"order-{order}"}
        jar.prepare(f"order-{order}", "POST", f"{api}/payments", json=body, on=db)


def pay(db: sqlite3.Connection, client: Client) -> int:
    """Send every intent without an answer, and store the answers. Returns how many orders are still open."""
    try:
        outcomes = client.resume()
    except IntentExpired as error:
        print(f"look these up at the payments API: {', '.join(error.names)}")
        outcomes = error.outcomes  # the others were sent, and have their answers
    for outcome in outcomes:
        print(f"{outcome.name}: {outcome.ended} {outcome.status or outcome.note}")
    for name, status in client.jar.finished().items():
        with db:
            state = "paid" if status < 300 else "refused"
            db.execute("UPDATE orders SET state = ? WHERE id = ?", (state, int(name.removeprefix("order-"))))
    return sum(outcome.ended is not Ended.ANSWERED for outcome in outcomes)


def main(api: str, file: str) -> int:
    jar = KeyJar(f"sqlite:///{file}")
    # The jar keeps no credentials, so every run passes them here.
    headers = {"Authorization": os.environ.get("API_AUTHORIZATION", "Bearer demo")}
    with closing(sqlite3.connect(file)) as db, Client(api, jar=jar, headers=headers) as client:
        db.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, cents INTEGER, state TEXT)")
        if not db.execute("SELECT 1 FROM orders").fetchone():
            for cents in (500, 700, 900):
                take_order(db, jar, api, cents)
        left = pay(db, client)
    jar.close()
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
