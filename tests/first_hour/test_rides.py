"""The first hour with a phased app: a provider that does not answer, a kill in the middle, and one charge."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.first_hour.newcomer import Terminal, kill

BODY = {"target": "airport"}


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path, "rides", "sqlite:///rides.db")


def rides(terminal: Terminal) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(terminal.folder / "rides.db")) as connection:
        return connection.execute("SELECT id, charge, receipt FROM rides").fetchall()


def test_effect_that_happened_is_settled_and_the_later_phases_run(terminal: Terminal) -> None:
    """The verdict of the resolver records the charge; the retry goes on after it, and charges nothing."""
    (terminal.folder / "fail").touch()
    with terminal.server():
        assert terminal.post("/rides", "ride-0001", BODY).status_code == 500
        refused = terminal.post("/rides", "ride-0001", BODY)
        assert refused.status_code == 409
        assert "effect 'charged'" in terminal.log
        assert "--happened charged" in terminal.log
        assert rides(terminal) == [(1, None, None)]
        (terminal.folder / "fail").unlink()
        (terminal.folder / "provider-is-up").touch()
        answer = terminal.until(lambda: _not_409(terminal, "ride-0001"), "the resolver did not settle it")
    assert (answer.status_code, answer.json()) == (201, {"ride": 1, "charge": "charge-1"})
    assert rides(terminal) == [(1, "charge-1", "sent")]
    assert terminal.lines("charges.txt") == ["charge-1"]


def _not_409(terminal: Terminal, key: str) -> httpx.Response | None:
    answer = terminal.post("/rides", key, BODY)
    return answer if answer.status_code != 409 else None


def test_operator_settles_an_effect_by_the_command_of_the_log(terminal: Terminal) -> None:
    (terminal.folder / "fail").touch()
    with terminal.server():
        assert terminal.post("/rides", "ride-0002", BODY).status_code == 500
        happened = terminal.command_in_log("keys resolve")
        happened[happened.index("JSON")] = '{"id": "charge-1"}'
        code, said = terminal.oncekey(*happened, "--yes")
        assert code == 0, said
        (terminal.folder / "fail").unlink()
        answer = terminal.post("/rides", "ride-0002", BODY)
    assert (answer.status_code, answer.json()) == (201, {"ride": 1, "charge": "charge-1"})
    assert rides(terminal) == [(1, "charge-1", "sent")]
    assert terminal.lines("charges.txt") == ["charge-1"]


def test_confirm_of_a_key_with_an_effect_in_doubt_needs_final(terminal: Terminal) -> None:
    (terminal.folder / "fail").touch()
    with terminal.server():
        assert terminal.post("/rides", "ride-0003", BODY).status_code == 500
        reference = terminal.post("/rides", "ride-0003", BODY).json()["reference"]
        confirm = ["keys", "resolve", reference, "--confirm", "--status", "402", "--yes", "--why", "declined"]
        code, said = terminal.oncekey(*confirm)
        assert code == 1
        assert "--final" in said
        code, said = terminal.oncekey(*confirm, "--final")
        assert code == 0, said
        assert terminal.post("/rides", "ride-0003", BODY).status_code == 402


def test_kill_inside_the_charge_leaves_one_charge_and_a_way_out(terminal: Terminal) -> None:
    (terminal.folder / "hang").touch()
    with (
        terminal.server() as process,
        terminal.under_way("/rides", "ride-0004", BODY, begun=lambda: terminal.lines("charges.txt")),
    ):
        kill(process)
    (terminal.folder / "hang").unlink()
    with closing(sqlite3.connect(terminal.folder / "rides.db")) as connection, connection:
        connection.execute("UPDATE idempotency_keys SET lease_until = lease_until - 60")  # a minute later
    (terminal.folder / "provider-is-up").touch()
    with terminal.server():
        answer = terminal.until(lambda: _not_409(terminal, "ride-0004"), "the key stays unknown")
    assert (answer.status_code, answer.json()) == (201, {"ride": 1, "charge": "charge-1"})
    assert rides(terminal) == [(1, "charge-1", "sent")]
    assert terminal.lines("charges.txt") == ["charge-1"]
