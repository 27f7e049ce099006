"""A plain API without oncekey that keeps a table of keys of its own, in SQLite: one effect for each key.

``python -m tests.client.key_server FOLDER``. It answers 409 with Retry-After while the first request of a key runs.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
from pathlib import Path

from tests.client.server import Asked, Reply, serving


class KeyTable:
    def __init__(self, folder: Path) -> None:
        self.port = 0
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self._file = sqlite3.connect(folder / "plain.db", check_same_thread=False, isolation_level=None)
        self._file.execute("CREATE TABLE IF NOT EXISTS effects (key TEXT, name TEXT, id INTEGER PRIMARY KEY)")

    def answer(self, asked: Asked) -> Reply:
        key = asked.key
        if key is None:
            return Reply(400, b"no key")
        name = json.loads(asked.body)["name"]
        with self._lock:
            if key in self._running:
                return Reply(409, b"busy", (("Retry-After", "0"),))
            self._running.add(key)
        try:
            with self._lock:
                found = self._file.execute("SELECT id, name FROM effects WHERE key = ?", (key,)).fetchone()
                if found is not None and found[1] != name:
                    return Reply(422, b"another request")
                if found is None:
                    cursor = self._file.execute("INSERT INTO effects (key, name) VALUES (?, ?)", (key, name))
                    found = (cursor.lastrowid,)
            return Reply(201, json.dumps({"id": found[0], "name": name}).encode())
        finally:
            with self._lock:
                self._running.discard(key)


def effects(folder: Path) -> list[str]:
    with sqlite3.connect(folder / "plain.db") as file:
        return [name for (name,) in file.execute("SELECT name FROM effects")]


if __name__ == "__main__":
    with serving(KeyTable(Path(sys.argv[1]))) as running:
        print(running.port, flush=True)
        sys.stdin.read()
