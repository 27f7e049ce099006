"""docs/troubleshooting.md has every answer, every warning and every check of the source, and names real commands."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

from oncekey.cli.app import app
from oncekey.core.problems import PROFILES, Situation, problem
from oncekey.telemetry import events

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src/oncekey"
PAGE = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
ANSWERS, LOG = PAGE.split("\n## What the log says")
LOG, DOCTOR = LOG.split("\n## What `oncekey doctor` says")
SENTENCES = LOG.split("### Sentences")[1]

LOUD = frozenset({"warning", "error", "exception", "critical"})
ONLY_AN_ERROR = "%s"  # the message of an exception of ours, which says itself what to do


def _first_cells(table: str) -> list[str]:
    return [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("situation", Situation)
def test_answer_is_in_the_page_with_its_status(situation: Situation) -> None:
    (row,) = [line for line in ANSWERS.splitlines() if line.startswith(f"| `{situation}` |")]
    status = row.split("|")[2]
    if situation in (Situation.REFUSED, Situation.REFUSED_LATE):
        assert "4xx" in status
        return
    for profile in PROFILES:
        assert str(problem(profile, situation).status) in status


def test_page_lists_no_answer_that_does_not_exist() -> None:
    named = {cell.strip().strip("`") for cell in _first_cells(ANSWERS)}
    assert named == {str(situation) for situation in Situation} | {"body-not-kept"}


# -- the log -----------------------------------------------------------------------------------------------------------


def _kinds(of: type[events.Event]) -> Iterator[type[events.Event]]:
    for kind in of.__subclasses__():
        yield kind
        yield from _kinds(kind)


LOUD_EVENTS = sorted(
    (kind for kind in _kinds(events.Event) if getattr(kind, "level", 0) >= logging.WARNING),
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", LOUD_EVENTS)
def test_loud_event_is_in_the_page_with_its_level(kind: type[events.Event]) -> None:
    rows = [line for line in LOG.splitlines() if _names(line, kind)]
    assert len(rows) == 1
    assert logging.getLevelName(kind.level) in rows[0].split("|")[2]


def _names(line: str, kind: type[events.Event]) -> bool:
    return line.startswith("| ") and f"`{kind.__name__}`" in line.split("|")[1]


def _logged() -> Iterator[tuple[str, str]]:
    """Each text that the source logs at WARNING or above, with the file that has it."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        constants = {
            target.id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and (said := _message(node)):
                for text in _texts(said, constants):
                    yield path.relative_to(SOURCE).as_posix(), text


def _message(call: ast.Call) -> ast.expr | None:
    assert isinstance(call.func, ast.Attribute)
    of = call.func.value
    if call.func.attr in LOUD and isinstance(of, ast.Name) and of.id in ("_log", "LOGGER"):
        return call.args[0]
    return call.args[1] if call.func.attr in ("tell_once", "tell_paced") else None


def _texts(said: ast.expr, constants: dict[str, ast.expr]) -> Iterator[str]:
    if isinstance(said, ast.Name) and said.id in constants:
        said = constants[said.id]
    if isinstance(said, ast.Subscript) and isinstance(said.value, ast.Name):
        said = constants[said.value.id]
    if isinstance(said, ast.Dict):
        for each in said.values:
            yield from _texts(each, constants)
    elif isinstance(said, ast.Constant) and isinstance(said.value, str):
        yield said.value


@cache
def logged() -> list[tuple[str, str]]:
    return sorted({pair for pair in _logged() if pair[1] not in (ONLY_AN_ERROR, "%s %s")})


def _fragments() -> list[str]:
    return [fragment for cell in _first_cells(SENTENCES) for fragment in re.findall(r"`([^`]+)`", cell)]


def test_logged_texts_are_found() -> None:
    assert len(logged()) > 25


def test_logged_sentence_is_in_the_page() -> None:
    fragments = _fragments()
    assert [pair for pair in logged() if not any(fragment in pair[1] for fragment in fragments)] == []


def test_page_lists_no_sentence_that_is_not_logged() -> None:
    sources = [_joined(path) for path in SOURCE.rglob("*.py")]
    texts = [*(text for _, text in logged()), *sources]
    assert [fragment for fragment in _fragments() if not any(fragment in text for text in texts)] == []


def _joined(path: Path) -> str:
    """The file with string literals that stand on several lines joined."""
    return re.sub(r'"\s*\n\s*f?"', "", path.read_text("utf-8"))


# -- the doctor --------------------------------------------------------------------------------------------------------


def _checks() -> set[str]:
    found: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Diagnosis":
                assert isinstance(node.args[0], ast.Constant)
                found.add(str(node.args[0].value))
    return found


def test_every_check_of_the_doctor_is_in_the_page() -> None:
    assert {cell.strip().strip("`") for cell in _first_cells(DOCTOR)} == _checks()


# -- commands ----------------------------------------------------------------------------------------------------------


def _commands() -> set[str]:
    group = typer.main.get_command(app)
    names = set()
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        names.add(name)
        names |= {f"{name} {under}" for under in getattr(command, "commands", {})}
    return names


NAMED = sorted(set(re.findall(r"`oncekey ([a-z-]+(?: [a-z-]+)?)[^`]*`", PAGE)))


@pytest.mark.parametrize("command", NAMED)
def test_named_command_exists(command: str) -> None:
    assert command in _commands()
