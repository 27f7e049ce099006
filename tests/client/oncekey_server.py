"""An API protected by oncekey: an order is written in the enlisted transaction, so each key has one order."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.web.fastapi import protect

_FOLDER = Path(os.environ["CLIENT_TEST_FOLDER"])
_FILE = _FOLDER / "shop.db"

app = FastAPI()
once = OnceKey(f"sqlite:///{_FILE}", scope=SINGLE_TENANT, policy=Policy(effects="transactional"))
protect(app, once)

with sqlite3.connect(_FILE) as _file:
    _file.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, name TEXT)")


@app.post("/orders", status_code=201)
async def order(body: dict[str, Any]) -> dict[str, Any]:
    file = sqlite3.connect(_FILE, check_same_thread=False, timeout=10)
    await current().enlist(file)
    cursor = file.execute("INSERT INTO orders (name) VALUES (?)", (body["name"],))
    return {"id": cursor.lastrowid, "name": body["name"]}


def effects(folder: Path) -> list[str]:
    with sqlite3.connect(folder / "shop.db") as file:
        return [name for (name,) in file.execute("SELECT name FROM orders")]
