"""The programs of docs/functions.md, run as they stand there."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oncekey import KeyReused
from oncekey.functions.function import OPTIONS

PAGE = Path(__file__).parents[2] / "docs" / "functions.md"


class Provider:
    def __init__(self) -> None:
        self.charged: list[tuple[int, str]] = []

    def charge(self, cents: int, *, key: str) -> dict[str, Any]:
        self.charged.append((cents, key))
        return {"id": len(self.charged)}


@pytest.fixture
def page() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def test_functions_of_the_page_run_once(page: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    provider = Provider()
    names: dict[str, Any] = {"provider": provider}
    for block in page[:3]:
        exec(block, names)
    try:
        assert provider.charged == [(500, "order-42")]
        parcel = SimpleNamespace(number=7, address="Paris")
        assert names["ship"](parcel, object()) == names["ship"](parcel, object()) == "shipped to Paris"
        parcel.address = "Rome"
        with pytest.raises(KeyReused):
            names["ship"](parcel, object())
        with closing(sqlite3.connect("shop.db")) as db:
            db.execute("CREATE TABLE payments (order_id text, cents integer)")
        assert names["task"]("order-1", 5) == names["task"]("order-1", 5) == {"paid": 5}
        with closing(sqlite3.connect("shop.db")) as db:
            assert db.execute("SELECT * FROM payments").fetchall() == [("order-1", 5)]
    finally:
        names["once"].close()


def test_page_names_every_option() -> None:
    text = PAGE.read_text("utf-8")
    assert [option for option in OPTIONS if f"`{option}" not in text] == []
