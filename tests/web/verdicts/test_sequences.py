"""What the table says of more than one send: later attempts, second tries, log lines, and verbs before the endpoint."""

from __future__ import annotations

import logging
import uuid
from typing import Annotated, Any

import pytest
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy.orm import Session, sessionmaker

from oncekey.core.states import State
from oncekey.web.fastapi import CurrentOperation, enlisted_session, protect
from tests.enlist.shop import Shop
from tests.web.verdicts.apps import app_of, is_async
from tests.web.verdicts.asgi_apps import Payment, ended
from tests.web.verdicts.case_runner import CaseRunner, MakeBench, is_replay
from tests.web.verdicts.cases import GATED, NOT_PROCESSED, NOT_WRAPPED, OURS, SUCCESS, TRIED_TWICE, WRAPPED, Case

EFFECTS = ("external", "transactional", "phased", "repeatable")
PAID = Case("returned 201", "return 201", SUCCESS, 201)


def keeping(effects: str, shop: Shop) -> Shop | None:
    return shop if effects == "transactional" else None


def warnings(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    """The lines on our logger that have all these words."""
    lines = [record.getMessage() for record in caplog.records if record.name == "oncekey"]
    return [line for line in lines if all(word in line for word in words)]


# ---------------------------------------------------------------- later attempts


@pytest.mark.parametrize("effects", EFFECTS)
@pytest.mark.parametrize("refusal", [401, 429])
@pytest.mark.parametrize("framework", GATED)
async def test_refusal_before_endpoint_on_later_attempt_leaves_key_as_it_was(
    framework: str, refusal: int, effects: str, sqlite_shop: Shop, make_runner: MakeBench
) -> None:
    case = Case("not processed at first", "return 429", NOT_PROCESSED, 429)
    runner: CaseRunner = make_runner(case, effects, keeping(effects, sqlite_shop))
    app, asgi = app_of(framework, runner), is_async(framework)
    assert (await runner.send(app, asgi)).status_code == 429
    before = runner.record()
    assert before is not None

    runner.gate = refusal
    assert (await runner.send(app, asgi)).status_code == refusal
    after = runner.record()
    assert after is not None, "the key's history was erased"
    assert (after.state, after.recovery_point) == (State.FAILED_RETRYABLE, before.recovery_point)
    assert (runner.runs, runner.rows) == (1, 0)

    runner.gate, runner.does = None, "return 201"
    paid = await runner.send(app, asgi)
    again = await runner.send(app, asgi)
    assert (paid.status_code, again.status_code, is_replay(paid), is_replay(again)) == (201, 201, False, True)
    assert (await runner.state(), runner.runs) == (State.COMPLETED, 2)
    assert runner.rows == int(effects == "transactional")
    if effects == "phased":
        assert runner.charges == 1, "the step of the first attempt was lost"


@pytest.mark.parametrize("framework", WRAPPED)
async def test_refusal_on_first_attempt_leaves_key_to_another_request(framework: str, make_runner: MakeBench) -> None:
    """The key is unused: the corrected request has another body, and may come under the same key."""
    runner: CaseRunner = make_runner(Case("refused", "return 201", SUCCESS, 201, around="answer 403"), "external")
    assert (await runner.send(app_of(framework, runner), is_async(framework))).status_code == 403
    other: CaseRunner = make_runner(PAID, "external", once=runner.once)
    other.key, other.body = runner.key, b'{"amount": 999}'
    assert (await other.send(app_of(framework, other), is_async(framework))).status_code == 201


# ---------------------------------------------------------------- entered twice


@pytest.mark.parametrize("effects", ["transactional", "phased"])
@pytest.mark.parametrize("framework", TRIED_TWICE.where)
async def test_second_try_inside_of_us_never_stores_success_without_its_work(
    framework: str, effects: str, sqlite_shop: Shop, make_runner: MakeBench
) -> None:
    """Whether the second try may enlist or take a step again is ours to say. A 201 has its one row, or its one effect,
    and no other answer has a row."""
    runner: CaseRunner = make_runner(TRIED_TWICE, effects, keeping(effects, sqlite_shop))
    app, asgi = app_of(framework, runner), is_async(framework)
    paid = False
    for _ in range(3):
        answer = await runner.send(app, asgi)
        paid = paid or answer.status_code < 400
        said = f"saw {answer.status_code}, state {await runner.state()}, runs {runner.runs}"
        assert await runner.state() == (State.COMPLETED if paid else State.FAILED_RETRYABLE), said
        if effects == "transactional":
            assert runner.rows == int(paid), said
        else:
            assert runner.charges == 1, said
    assert paid, "the key is stuck"


async def test_second_try_under_flask_is_answered_by_us(make_runner: MakeBench) -> None:
    """Flask's first answer is stored inside of the framework. A success that follows is not stored, and not sent."""
    case = Case("entered twice", "crash at first", SUCCESS, 201, around="retry once")
    runner: CaseRunner = make_runner(case, "external")
    app = app_of("flask", runner)
    assert [(await runner.send(app, False)).status_code for _ in range(2)] == [409, 409]
    assert await runner.state() == State.UNKNOWN


# ---------------------------------------------------------------- what is told


@pytest.mark.parametrize("framework", NOT_WRAPPED)
async def test_unwrapped_route_is_warned_about_once(
    framework: str, make_runner: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "oncekey")
    runner: CaseRunner = make_runner(PAID, "external")
    app, asgi = app_of(framework, runner), is_async(framework)
    for _ in range(3):
        assert (await runner.send(app, asgi, key=uuid.uuid4().hex)).status_code == 201
    route = (
        f"{runner.prefix}/{{path}}" if framework == "mounted" else f"{runner.prefix}/payments"
    )  # as oncekey reads it
    assert len(warnings(caplog, f"POST {route} was answered by")) == 1, caplog.text


@pytest.mark.parametrize("framework", WRAPPED)
async def test_wrapped_route_is_not_warned_about(
    framework: str, make_runner: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "oncekey")
    runner: CaseRunner = make_runner(PAID, "external")
    assert (await runner.send(app_of(framework, runner), is_async(framework))).status_code == 201
    assert warnings(caplog, "POST /payments") == []


@pytest.mark.parametrize("framework", WRAPPED)
async def test_success_given_by_middleware_is_warned_about_once(
    framework: str, make_runner: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "oncekey")
    runner: CaseRunner = make_runner(Case("by itself", "return 201", SUCCESS, 200, around="answer 200"), "external")
    app, asgi = app_of(framework, runner), is_async(framework)
    for _ in range(3):
        assert (await runner.send(app, asgi, key=uuid.uuid4().hex)).status_code == 200
    assert len(warnings(caplog, "POST /payments")) == 1, caplog.text


@pytest.mark.parametrize("framework", WRAPPED)
async def test_success_over_an_unrepeatable_effect_that_failed_is_a_warning(
    framework: str, make_runner: MakeBench, caplog: pytest.LogCaptureFixture
) -> None:
    """The handler took the risk. Each such key is completed and told, so that an operator can look for its effect."""
    caplog.set_level(logging.WARNING, "oncekey")
    runner: CaseRunner = make_runner(Case("swallowed", "return 200", SUCCESS, 200, work="failed effect"), "phased")
    app, asgi = app_of(framework, runner), is_async(framework)
    assert (await runner.send(app, asgi, key="first-key")).status_code == 200
    runner.key = "other-key"
    assert (await runner.send(app, asgi)).status_code == 200
    assert await runner.state() == State.COMPLETED
    told = [record for record in caplog.records if record.name == "oncekey" and record.levelno == logging.WARNING]
    assert len(told) == 2, caplog.text
    assert told[0].getMessage() != told[1].getMessage(), "it does not tell which key"


# ---------------------------------------------------------------- verbs before the endpoint


def app_with_session(runner: CaseRunner, shop: Shop, *, refuses: bool = False) -> Any:
    """The ordinary FastAPI app: a dependency gives an enlisted session, and ends after the response."""
    app = FastAPI(openapi_url=None)
    protect(app, runner.once)
    assert runner.engine is not None
    given = Annotated[Session, Depends(enlisted_session(sessionmaker(runner.engine)))]

    def check(session: given) -> None:
        if refuses:
            raise HTTPException(403)

    def pay(payment: Payment, session: given, operation: CurrentOperation) -> Any:
        runner.runs += 1
        runner._pay(session, operation.key)
        return ended(runner)

    pay.__annotations__ |= {"session": given, "payment": Payment, "operation": CurrentOperation}
    check.__annotations__ |= {"session": given}
    app.post("/payments", status_code=201, dependencies=[Depends(check)], response_model=None)(pay)
    return app


@pytest.mark.parametrize(
    ("does", "state", "rows"),
    [
        ("return 201", "completed", 1),
        ("return 402", "failed", 1),
        ("raise 402", "failed", 0),
        ("return 429", "failed_retryable", 0),
        ("return 500", "failed_retryable", 0),
        ("crash", "failed_retryable", 0),
    ],
)
async def test_session_of_a_dependency_follows_the_endpoint(
    does: str, state: str, rows: int, sqlite_shop: Shop, make_runner: MakeBench
) -> None:
    runner: CaseRunner = make_runner(Case(does, does, SUCCESS, 201), "transactional", sqlite_shop)
    app = app_with_session(runner, sqlite_shop)
    first = await runner.send(app, True)
    said = f"saw {first.status_code}"
    assert (await runner.state(), runner.rows) == (state, rows), said
    assert is_replay(await runner.send(app, True)) == (state in ("completed", "failed"))
    assert runner.rows == rows


async def test_redirect_raised_through_a_session_dependency_is_no_success(
    sqlite_shop: Shop, make_runner: MakeBench
) -> None:
    """The dependency ends before the response is made, and takes the transaction with it. Where it stays open until
    the response (the issue allows both), the redirect is stored with its row."""
    runner: CaseRunner = make_runner(Case("redirect", "raise 303", SUCCESS, 303), "transactional", sqlite_shop)
    answer = await runner.send(app_with_session(runner, sqlite_shop), True)
    outcome = (answer.status_code, await runner.state(), runner.rows)
    assert outcome == (303, "completed", 1) or (answer.status_code in OURS and outcome[1:] == ("failed_retryable", 0))


@pytest.mark.parametrize("how", ["refused by a dependency", "validation 422"])
async def test_refusal_after_a_dependency_enlisted_keeps_no_rows(
    how: str, sqlite_shop: Shop, make_runner: MakeBench
) -> None:
    """The operation may count as begun, since a dependency used a verb. A careful user expects that nothing is
    committed and that the endpoint was not run; whether the refusal replays is open."""
    body = "invalid" if how == "validation 422" else "ok"
    runner: CaseRunner = make_runner(Case(how, "return 201", SUCCESS, 201, body=body), "transactional", sqlite_shop)
    app = app_with_session(runner, sqlite_shop, refuses=how != "validation 422")
    expected = 422 if how == "validation 422" else 403
    assert [(await runner.send(app, True)).status_code for _ in range(2)] == [expected, expected]
    assert await runner.state() in (None, "failed", "failed_retryable")
    assert (runner.runs, runner.rows) == (0, 0)
