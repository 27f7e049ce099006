"""What becomes of a key, by what was seen of its endpoint: every row of the table, in every framework.

The same key is sent three times to an endpoint that does one thing. After the first send the state of the key is
compared with the table; after the third, how often the endpoint ran, what the client saw, and what is committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.enlist.shop import Shop
from tests.web.verdicts.apps import app_of, is_async
from tests.web.verdicts.case_runner import CaseRunner, MakeBench, is_replay
from tests.web.verdicts.cases import CASES, Case, Verdict

CORE = ("starlette", "flask", "asgi", "wsgi")
"""Run by `make test`; the other frameworks by `make frameworks`."""


def every_case() -> Iterator[Any]:
    for case in CASES:
        for framework in case.where:
            for effects in case.effects:
                name = f"{case.name} | {framework} | {effects}"
                marks = () if framework in CORE else pytest.mark.frameworks
                yield pytest.param(case, framework, effects, id=name, marks=marks)


def on_postgres() -> Iterator[Any]:
    for case in CASES:
        if case.postgres and "transactional" in case.effects:
            for framework in case.where:
                if framework in ("starlette", "flask", "asgi", "fastapi"):
                    marks = () if framework in CORE else pytest.mark.frameworks
                    yield pytest.param(case, framework, id=f"{case.name} | {framework}", marks=marks)


@pytest.mark.parametrize(("case", "framework", "effects"), list(every_case()))
async def test_three_sends_of_one_key_follow_the_table(
    case: Case, framework: str, effects: str, sqlite_shop: Shop, make_runner: MakeBench
) -> None:
    await three_sends(make_runner(case, effects, sqlite_shop if effects == "transactional" else None), framework)


@pytest.mark.parametrize(("case", "framework"), list(on_postgres()))
async def test_three_sends_of_one_key_follow_the_table_on_postgres(
    case: Case, framework: str, ready_url: str, make_runner: MakeBench
) -> None:
    await three_sends(make_runner(case, "transactional", Shop(ready_url)), framework)


async def three_sends(runner: CaseRunner, framework: str) -> None:
    case = runner.case
    verdict: Verdict = getattr(case.row, runner.effects)
    app, asgi = app_of(framework, runner), is_async(framework)

    first = await runner.send(app, asgi)
    state = await runner.state()
    answers = [first, await runner.send(app, asgi), await runner.send(app, asgi)]

    saw = [each.status_code for each in answers]
    said = f"saw {saw}, state {state}, runs {runner.runs}, rows {runner.rows}, charges {runner.charges}"
    assert state == verdict.state, said
    assert first.status_code in (verdict.seen or {case.status}), said
    assert not is_replay(first), said
    for later in answers[1:]:
        if verdict.again == "replay":
            assert is_replay(later), said
            assert (later.status_code, later.content) == (first.status_code, first.content), said
        elif verdict.again == "unknown":
            assert later.status_code == 409, said
            assert "unknown" in later.text, said
        else:
            assert not is_replay(later), said
            assert later.status_code in (verdict.seen or {case.status}), said
    runs = 0 if not case.enters else case.runs_at_first if verdict.again != "run" else 3
    assert runner.runs == runs, said
    enlisted = runner.effects == "transactional" and case.enters
    assert runner.rows == int(enlisted and verdict.committed), said
    if runner.effects == "phased":
        assert runner.charges == min(runner.runs, 1), said  # a later attempt keeps the steps that are done
