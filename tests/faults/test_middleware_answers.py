"""Answers in the handler's place that were bugs once, and that the campaign notices where a guard is taken away."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from oncekey.core.judgment import Judgment
from oncekey.core.states import Event
from oncekey.web import endings, flask
from tests.faults import middleware_answers
from tests.faults.campaign import Run
from tests.faults.middleware_answers_handlers import EFFECTS, FRAMEWORKS, Case

BUGS = {
    "an effect that begins while the request is answered": Case(
        "starlette", "BaseHTTPMiddleware", "retry once", 201, "phased", "before"
    ),
    "an environ of the middleware's own making": Case(
        "flask", "copied scope", "timeout, detached", 400, "external", "after"
    ),
    "a 429 for an exception of any kind": Case("fastapi", "plain", "catch-all", 429, "external", "after"),
    "a 429 for a handler that was cancelled": Case(
        "starlette", "copied scope", "timeout, cancelled", 429, "external", "after"
    ),
    "a redirect for an exception that Flask let pass": Case("flask", "plain", "catch-all", 303, "external", "after"),
    "a success for a transaction that is open": Case(
        "litestar", "plain", "timeout, detached", 200, "transactional", "after"
    ),
}


def violations(folder: Path, case: Case) -> list[str]:
    run = Run("sqlite", 1, 1, folder)
    with patch.object(middleware_answers, "cases", lambda: iter([case])):
        middleware_answers.middleware_answers(run)
    assert run.hits == 1
    return run.violations


@pytest.mark.parametrize("case", BUGS.values(), ids=BUGS)
def test_answer_in_place_that_was_a_bug_keeps_the_promises(case: Case, tmp_path: Path) -> None:
    assert violations(tmp_path, case) == []


def test_unseen_call_of_a_flask_view_is_noticed(tmp_path: Path) -> None:
    with patch.object(flask, "shell_of", lambda environ: environ.get("oncekey.exchange")):
        (found,) = violations(tmp_path, BUGS["an environ of the middleware's own making"])
    assert found.startswith("I1: 2 charges")


def test_success_without_its_charge_is_noticed(tmp_path: Path) -> None:
    """As if every answer under 400 was the handler's own."""
    case = Case("fastapi", "plain", "catch-all", 200, "external", "before")
    with patch.object(endings, "judge", lambda *_, **__: Judgment(Event.COMPLETE, commits=True)):
        (found,) = violations(tmp_path, case)
    assert found.startswith("I1: a success is stored without what it speaks of")


def test_answer_that_is_not_stored_is_noticed(tmp_path: Path) -> None:
    case = Case("starlette", "plain", "catch-all", 200, "external", "after")
    with patch.object(endings, "judge", lambda *_, **__: Judgment(Event.DOUBT)):
        found = violations(tmp_path, case)
    assert any(what.startswith("I2: a client was told (200") for what in found)


def test_every_framework_shape_and_declaration_has_its_cases() -> None:
    cases = list(middleware_answers.cases())
    assert len(cases) == len(set(cases)) == middleware_answers.EVERYTHING
    assert {case.framework for case in cases} == set(FRAMEWORKS)
    assert {case.effects for case in cases} == set(EFFECTS)
    assert {case.shape for case in cases if case.framework == "litestar"} == {case.shape for case in cases}
