"""The walk of a request through our modules: what is counted, and that it does not grow unnoticed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks import walk

MODULES, SWITCHES = 18, 60
"""The aim for a first POST, which docs/design.md has with the figures."""


async def test_first_post_stays_within_its_modules_and_switches(tmp_path: Path) -> None:
    found = (await walk.walks(tmp_path, "memory://"))["first POST"]
    modules = {module for _, module in found}
    assert {"web/asgi", "web/asgi_call", "engine/operation", "stores/memory/store"} <= modules
    assert (len(modules) <= MODULES, walk.switches(found).total() <= SWITCHES) == (True, True), (
        f"{len(modules)} modules, {walk.switches(found).total()} switches: see python -m benchmarks.walk --switches"
    )


def test_switches_are_calls_between_two_modules_of_ours() -> None:
    calls: Counter[walk.Switch] = Counter({(None, "a"): 3, ("a", "a"): 2, ("a", "b"): 4})
    assert walk.switches(calls) == Counter({("a", "b"): 4})


def test_command_prints_every_kind_of_walk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["walk", "--switches"])
    walk.main()
    out = capsys.readouterr().out
    for row in ("| first POST | memory |", "| replay | sqlite |", "| its job | sqlite |", "web/asgi → "):
        assert row in out
