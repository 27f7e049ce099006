"""A key becomes unknown: the log says once per route what happened and which command settles it; the client's answer
speaks to the client, and has the reference by which support finds the key."""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, OutcomeUnknown, Policy, current
from oncekey.core.problems import PROFILES, ProfileName
from oncekey.core.states import State
from oncekey.errors import LeaseLost
from oncekey.telemetry.redaction import redact
from oncekey.testing.http.base import MakeStack
from oncekey.web.fastapi import protect
from tests.cli.key_table import runner
from tests.web.frameworks import STACKS

KEY = "order-2026-11-17"
SETTLES = re.compile(r"`(oncekey keys resolve .*?)`")

Handler = Callable[[], Any]


def _once(folder: Path, policy: Policy, profile: ProfileName = "ietf", **settings: Any) -> OnceKey:
    settings = {"scope": SINGLE_TENANT} | settings
    return OnceKey(f"sqlite:///{folder / 'keys.db'}", policy=policy, profile=profile, **settings)


async def _posted(once: OnceKey, handler: Handler, *keys: str) -> list[httpx.Response]:
    app = FastAPI()
    app.post("/payments")(handler)
    protect(app, once)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        return [await client.post("/payments", headers={"Idempotency-Key": key}) for key in keys or (KEY,)]


def _warned(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [each for each in caplog.records if "left a key whose outcome is unknown" in each.getMessage()]


async def _hangs_up() -> None:
    raise RuntimeError("the provider hung up")


@pytest.mark.parametrize(("effects", "told"), [("external", 1), ("repeatable", 0)])
async def test_unknown_key_of_a_route_is_explained_once(
    effects: str, told: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _once(tmp_path, Policy(effects=effects)) as once:  # type: ignore[arg-type]
        sent = await _posted(once, _hangs_up, "told-1", "told-2", "told-2")
    lines = [each.getMessage() for each in _warned(caplog)]
    assert len(lines) == told
    if told:
        assert sent[-1].status_code == 409
        assert "effects" not in sent[-1].json()["detail"]
        for words in ("POST /payments", "raised RuntimeError", "raise NotExecuted", "'transactional'"):
            assert words in lines[0]


async def test_warning_has_the_traceback_of_the_handler_even_if_the_app_responded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _once(tmp_path, Policy()) as once:
        app = FastAPI()
        app.post("/payments")(_hangs_up)

        @app.exception_handler(RuntimeError)
        async def answer(request: Any, error: RuntimeError) -> Any:
            from starlette.responses import PlainTextResponse

            return PlainTextResponse("sorry", 500)

        protect(app, once)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            assert (await client.post("/payments", headers={"Idempotency-Key": KEY})).text == "sorry"
    (line,) = _warned(caplog)
    assert line.exc_text is not None
    assert 'raise RuntimeError("the provider hung up")' in line.exc_text


@pytest.mark.parametrize("name", STACKS)
def test_warning_of_every_framework_has_the_traceback(
    name: str, make_stack: MakeStack, caplog: pytest.LogCaptureFixture
) -> None:
    make_stack(name).post(m="raise")
    (line,) = _warned(caplog)
    assert line.exc_text is not None
    assert 'raise RuntimeError("the handler broke")' in line.exc_text


@pytest.mark.parametrize(
    ("scope", "per", "options"),
    [
        (None, "tenant", []),
        ("acme & sons", "tenant", ["--scope", "acme & sons"]),
        ("acme", "endpoint", ["--scope", "acme", "--endpoint", "POST /payments"]),
    ],
)
async def test_command_of_the_warning_settles_this_key(
    scope: str | None,
    per: Any,
    options: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As it stands in the line; the operator writes the response and the reason."""
    settings: dict[str, Any] = {} if scope is None else {"scope": lambda _: scope}
    with _once(tmp_path, Policy(key_per=per), **settings) as once:
        await _posted(once, _hangs_up)
        (line,) = _warned(caplog)
        command = shlex.split(SETTLES.findall(line.getMessage())[0])
        assert command[3:-7] == [redact(KEY), *options]
        assert command[-7:] == ["--confirm", "--status", "201", "--body", "JSON", "--why", "TEXT"]
        command[command.index("JSON")] = '{"id": 1}'
        run = runner(f"sqlite:///{tmp_path / 'keys.db'}", monkeypatch, capsys)
        assert run(*command[1:], "--yes")[::2] == (0, "")
        (record,) = once.store.listing(State.COMPLETED)
        assert record.key == KEY


async def test_warning_of_a_phased_route_names_the_effect_and_its_verdicts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def ride() -> None:
        await current().effect("book", _booked, repeatable=False)
        await current().effect("charge", _hangs_up, repeatable=False)

    with _once(tmp_path, Policy(effects="phased")) as once:
        await _posted(once, ride)
    (line,) = _warned(caplog)
    text = line.getMessage()
    assert "effect 'charge', which may not be repeated" in text
    command = f"oncekey keys resolve '{redact(KEY)}'"
    assert SETTLES.findall(text) == [
        f"{command} --happened charge --result JSON --why TEXT",
        f"{command} --not-happened charge --why TEXT",
    ]
    assert "effects='external'" not in text
    assert line.exc_text is not None


async def test_happened_command_of_the_warning_lets_the_next_attempt_go_on(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As it stands in the line; the operator writes the result and the reason."""

    async def ride() -> Any:
        return await current().effect("charge", _hangs_up, repeatable=False)

    with _once(tmp_path, Policy(effects="phased")) as once:
        await _posted(once, ride)
        (line,) = _warned(caplog)
        command = shlex.split(SETTLES.findall(line.getMessage())[0])
        command[command.index("JSON")] = '{"id": "ch_1"}'
        run = runner(f"sqlite:///{tmp_path / 'keys.db'}", monkeypatch, capsys)
        assert run(*command[1:], "--yes")[::2] == (0, "")
        (answer,) = await _posted(once, ride)
    assert (answer.status_code, answer.json()) == (200, {"id": "ch_1"})


async def test_warning_names_the_effect_without_an_end_and_not_later_ones_that_have_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def ride() -> None:
        with suppress(RuntimeError):
            await current().effect("charge", _hangs_up, repeatable=False)
        await current().effect("book", _booked, repeatable=False)
        with suppress(NotExecuted):
            await current().effect("mail", _not_sent, repeatable=False)
        raise ValueError("enough")

    with _once(tmp_path, Policy(effects="phased")) as once:
        await _posted(once, ride)
    (line,) = _warned(caplog)
    assert "effect 'charge', which may not be repeated" in line.getMessage()


async def _booked() -> str:
    return "b-1"


async def _not_sent() -> str:
    raise NotExecuted("no such address")


@pytest.mark.parametrize("effects", ["external", "transactional", "phased"])
async def test_warning_does_not_advise_a_declaration_where_the_handler_says_unknown(
    effects: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def unsure() -> None:
        raise OutcomeUnknown("the provider did not say")

    with _once(tmp_path, Policy(effects=effects)) as once:
        await _posted(once, unsure)
    (line,) = _warned(caplog)
    assert "raise OutcomeUnknown" in line.getMessage()
    assert "declare the route" not in line.getMessage()


@pytest.mark.parametrize("profile", PROFILES)
async def test_reference_of_an_unknown_outcome_is_the_masked_key_that_keys_show_takes(
    profile: ProfileName,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with _once(tmp_path, Policy(), profile) as once:
        _, again = await _posted(once, _hangs_up, KEY, KEY)
    body = again.json()
    said = {"ietf": lambda: body, "stripe": lambda: body["error"], "governance": lambda: body["fault"]["errors"][0]}
    assert again.status_code == 409
    assert said[profile]()["reference"] == redact(KEY)
    assert KEY not in again.text
    for word in ("effects", "Policy", "oncekey", "resolve"):
        assert word not in json.dumps([said[profile]().get(name) for name in ("detail", "message", "description")])
    run = runner(f"sqlite:///{tmp_path / 'keys.db'}", monkeypatch, capsys)
    code, out, _ = run("keys", "show", redact(KEY), "--json")
    assert code == 0
    assert json.loads(out)["record"]["state"] == "unknown"


async def test_attempt_that_lost_its_key_does_not_call_it_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that wakes up past its lease: another attempt has the key, and may have completed it."""

    async def loses_the_key() -> None:
        op = current()
        op.lost = True  # as the step that finds out leaves it
        raise LeaseLost("the key went to another attempt before effect 'charge' was called")

    with _once(tmp_path, Policy()) as once:
        await _posted(once, loses_the_key)
    assert _warned(caplog) == []
