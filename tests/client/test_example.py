"""``examples/client_resume.py``, killed while its first payment is on the way."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.client.server import Asked, Reply, Server, serving

ROOT = Path(__file__).parents[2]


@pytest.mark.frameworks
def test_orders_are_paid_once_though_the_program_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "shop.db"
    running: list[subprocess.Popen[bytes]] = []

    class Payments(Server):
        """Does the payment, and kills the client that asked for the first one before it can answer."""

        def __init__(self) -> None:
            super().__init__(Reply(201))
            self.paid: dict[str | None, bytes] = {}

        def answer(self, asked: Asked) -> Reply:
            self.asked.append(asked)
            self.paid.setdefault(asked.key, asked.body)
            if len(self.asked) == 1:
                running[0].kill()
                running[0].wait()
            return Reply(201, self.paid[asked.key])

    with serving(Payments()) as server:
        command = [sys.executable, "-m", "examples.client_resume", server.url, str(file)]
        environ = os.environ | {"API_AUTHORIZATION": "Bearer s3cret"}
        codes = []
        for _ in range(3):
            running.append(subprocess.Popen(command, cwd=ROOT, env=environ))
            codes.append(running[-1].wait(60))
    assert codes == [-9, 0, 0]
    assert [json.loads(body)["amountCents"] for body in server.paid.values()] == [500, 700, 900]
    assert len(server.asked) == 4
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT cents, state FROM orders").fetchall() == [(500, "paid"), (700, "paid"), (900, "paid")]
    assert b"s3cret" not in file.read_bytes()
