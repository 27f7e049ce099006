"""What the verbs of an operation return has the type that the function returns: mypy --strict says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SNIPPET = """\
from oncekey import current


async def fetch(amount: int) -> dict[str, int]:
    return {"amount": amount}


def count() -> int:
    return 1


def charge_id(charge: dict[str, int]) -> str:
    return str(charge["amount"])


def length(text: str) -> str:
    return text


async def handler(db: object) -> None:
    op = current()
    fine_1: dict[str, int] = await op.phase("a", fetch, 1, on=db)
    fine_2: int = await op.phase("b", count, on=db)
    fine_3: dict[str, int] = await op.effect("c", fetch, 1, repeatable=True, provider_id=charge_id)
    fine_4: int = await op.effect("d", count, repeatable=False)
    fine_5: int = op.blocking.phase("e", count, on=db)
    fine_6: int = op.blocking.effect("f", count, repeatable=True)
    fine_7: int = await op.effect("g", lambda: 1, repeatable=True)
    wrong_1: str = await op.phase("a", fetch, 1, on=db)
    wrong_2: str = await op.phase("b", count, on=db)
    wrong_3: str = await op.effect("c", fetch, 1, repeatable=True)
    wrong_4: str = await op.effect("d", count, repeatable=False)
    wrong_5: str = op.blocking.phase("e", count, on=db)
    wrong_6: str = op.blocking.effect("f", count, repeatable=True)
    wrong_7 = await op.effect("g", fetch, 1, repeatable=True, provider_id=length)
"""


@pytest.mark.timeout(240)
def test_wrong_annotation_of_a_step_fails_mypy_strict(tmp_path: Path) -> None:
    file = tmp_path / "handler.py"
    file.write_text(SNIPPET)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull, "--no-error-summary"]
    command += ["--follow-imports", "silent", "--cache-dir", str(tmp_path / "cache"), str(file)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(root / "src")},
        check=False,
    )
    lines = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    wrong = {number for number, line in enumerate(SNIPPET.splitlines(), start=1) if "wrong_" in line}
    assert lines == wrong, done.stdout + done.stderr
