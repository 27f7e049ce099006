"""The first hour with a payments app: each mistake of a newcomer, and what the newcomer sees."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.first_hour.newcomer import Terminal, kill

STORE = "sqlite:///shop.db"


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path, "payments", STORE)


@pytest.fixture
def served(terminal: Terminal) -> Iterator[Terminal]:
    with terminal.server():
        yield terminal


def test_quick_start_charges_once(served: Terminal) -> None:
    first, second = (served.post("/payments", "key-0001", {"amount": 5}) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 201)
    assert second.content == first.content
    assert second.headers["idempotency-replayed"] == "true"
    assert served.lines("charges.txt") == ["5.0"]


def test_exception_in_a_default_route_leads_from_the_log_to_a_settled_key(served: Terminal) -> None:
    """500, then 409 with a reference for support. The log has the traceback, and the command that settles the key."""
    first = served.post("/declined", "key-0002")
    second = served.post("/declined", "key-0002")
    assert (first.status_code, second.status_code) == (500, 409)
    said = second.json()
    assert "effects" not in second.text, "the client is told about settings"
    assert "Policy" not in second.text
    (warning,) = [line for line in served.log.splitlines() if "left a key whose outcome is unknown" in line]
    assert "POST /declined" in warning
    assert "'transactional', 'phased' or 'repeatable'" in warning
    assert "ValueError: the provider's answer has no id" in served.log
    assert "Traceback" in served.log

    code, shown = served.oncekey("keys", "show", said["reference"])
    assert (code, "unknown" in shown) == (0, True), shown

    confirm = served.command_in_log("keys resolve")
    confirm[confirm.index("JSON")] = '{"charged": 1.0}'
    code, answer = served.oncekey(*confirm, "--yes")
    assert code == 0, answer
    third = served.post("/declined", "key-0002")
    assert (third.status_code, third.json()) == (201, {"charged": 1.0})
    assert served.lines("charges.txt") == ["1.0"]


def test_refute_does_not_wait_for_the_lease_of_an_owner_that_raised(served: Terminal) -> None:
    """The quarantine is the route's. ``--quarantine 0s`` cuts it short, with a reason, and the audit says so."""
    assert served.post("/declined", "key-0003").status_code == 500
    reference = served.post("/declined", "key-0003").json()["reference"]
    refute = ["keys", "resolve", reference, "--refute", "--yes", "--why", "they never got it"]
    code, said = served.oncekey(*refute)
    assert (code, "5 min" in said or "another 29" in said or "another 30" in said) == (1, True), said
    code, said = served.oncekey(*refute, "--quarantine", "0s")
    assert code == 0, said
    code, shown = served.oncekey("keys", "show", reference)
    assert "quarantine" in shown
    assert served.post("/declined", "key-0003").status_code == 500
    assert len(served.lines("charges.txt")) == 2  # refuted means: it runs again


def test_forgotten_await_of_enqueue_fails_the_request(served: Terminal) -> None:
    answer = served.post("/orders", "key-0004")
    assert answer.status_code == 500
    assert "op.enqueue(…) was not awaited" in served.log


def test_nan_in_a_body_is_the_clients_mistake(served: Terminal) -> None:
    headers = {"Idempotency-Key": "key-0005", "Content-Type": "application/json"}
    answer = served.http.post("/payments", content=b'{"amount": NaN}', headers=headers)
    assert answer.status_code in (422, 500)  # FastAPI's own answer; the key stays unused
    assert served.post("/payments", "key-0005", {"amount": 2}).status_code == 201


def test_after_a_kill_retry_after_is_the_rest_of_the_lease(terminal: Terminal) -> None:
    with (
        terminal.server() as process,
        terminal.under_way("/slow", "key-0006", begun=lambda: terminal.lines("charges.txt")),
    ):
        assert terminal.post("/slow", "key-0006").headers["retry-after"] == "1"
        kill(process)
    with terminal.server():
        answer = terminal.until(lambda: _overdue(terminal), "no Retry-After of an overdue lease was seen")
        assert 1 < int(answer) <= 12
    assert len(terminal.lines("charges.txt")) == 1


def _overdue(terminal: Terminal) -> str | None:
    answer = terminal.post("/slow", "key-0006")
    assert answer.status_code == 409
    seconds = str(answer.headers["retry-after"])
    return seconds if seconds != "1" else None


def test_upkeep_runs_by_itself_on_an_embedded_store(served: Terminal) -> None:
    """Without a resolver the log says so, by itself: no `oncekey upkeep` was started."""
    assert served.post("/declined", "key-0007").status_code == 500
    served.until(lambda: "no resolver is registered for POST /declined" in served.log, "upkeep says nothing")
    _, said = served.oncekey("doctor")
    assert "POST /declined" in said
    assert "resolver" in said


def test_unknown_key_without_a_resolver_becomes_a_dead_letter(terminal: Terminal) -> None:
    with terminal.server():
        assert terminal.post("/declined", "key-0008").status_code == 500
    # The app's own upkeep may have tried once: ask now, and begin again.
    code, said = terminal.oncekey(
        "dead-letters", "retry", "key-0008", "--scope", "single-tenant", "--yes", "--why", "now"
    )
    assert code == 0, said
    (terminal.folder / "settle.py").write_text(
        "import time\n"
        "from payments import once\n"
        "from oncekey.upkeep import Reconciler\n"
        "for _ in range(4):\n"
        "    Reconciler(once, max_tries=2, backoff=0.01).run()\n"
        "    time.sleep(0.2)\n"
    )
    subprocess.run([sys.executable, "settle.py"], cwd=terminal.folder, check=True, timeout=60)
    code, said = terminal.oncekey("dead-letters", "list", "--json")
    assert code == 0
    assert "POST /declined" in json.dumps(json.loads(said)), said


def test_doctor_on_a_missing_file_exits_2(terminal: Terminal) -> None:
    code, said = terminal.oncekey("doctor", "--store", "sqlite:///nowhere/none.db")
    assert code == 2, said


def test_help_of_policy_has_the_reasons(terminal: Terminal) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import oncekey; help(oncekey.Policy)"], capture_output=True, text=True, check=True
    )
    assert "24 hours is what Stripe publishes" in done.stdout
