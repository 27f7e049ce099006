"""The demo's provider: what it keeps, and what it makes of keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from oncekey.demo.provider import Ledger
from oncekey.demo.server import ledger_of

ASKED = {"customerId": "cus-1", "amountCents": 5, "currency": "EUR"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "charges.jsonl"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    with closing(Ledger(path)) as opened:
        yield opened


def test_a_key_that_is_honoured_is_one_charge(ledger: Ledger) -> None:
    """The first one again; another key is another charge, and no key always is."""
    first, second = (ledger.charge(ASKED, "k-1", honours=True) for _ in range(2))
    assert first == second == {**ASKED, "id": first["id"], "downstreamKey": "k-1"}
    ledger.charge(ASKED, "k-2", honours=True)
    ledger.charge(ASKED, None, honours=True)
    ledger.charge(ASKED, None, honours=True)
    assert [charge["downstreamKey"] for charge in ledger.charges()] == ["k-1", "k-2", None, None]


def test_a_key_that_is_not_honoured_is_a_charge_each_time(ledger: Ledger) -> None:
    first, second = (ledger.charge(ASKED, "k-1", honours=False) for _ in range(2))
    assert first["id"] != second["id"]
    assert len(ledger.charges()) == 2


def test_charge_is_in_the_ledger_of_the_next_process(ledger: Ledger, path: Path) -> None:
    """It is in the file when it is answered, and in the next process."""
    charge = ledger.charge(ASKED, "k-1", honours=True)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [charge]
    with closing(Ledger(path)) as again:
        assert again.charges() == [charge]
        assert again.charge(ASKED, "k-1", honours=True) == charge


def test_a_line_that_was_cut_never_happened(ledger: Ledger, path: Path) -> None:
    """Killed while it wrote: it was not reported, and the next line starts a line."""
    charge = ledger.charge(ASKED, "k-1", honours=True)
    with path.open("a") as file:
        file.write('{"id": "ch_')
    with closing(Ledger(path)) as again:
        assert again.charges() == [charge]
        other = again.charge(ASKED, "k-2", honours=True)
    with closing(Ledger(path)) as once_more:
        assert once_more.charges() == [charge, other]


def test_every_database_has_a_ledger_of_its_own() -> None:
    """Beside a file; for a server, by where and what it is, and without its password."""
    assert ledger_of("sqlite:///some/demo.db") == Path("some/demo.provider.jsonl")
    one, two = ledger_of("postgresql://me:secret@host:1/a"), ledger_of("postgresql://me:secret@host:2/a")
    assert one != two
    assert one == ledger_of("postgresql://me:other@host:1/a")
    assert "secret" not in str(one)
