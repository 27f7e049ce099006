"""A full run with planted secrets: no log line, event, metric, span, exception, refusal, line of the audit or command
shows one.

SHOWN_ON_PURPOSE is what the design shows; docs/security.md has the same list.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import pytest
from fastapi import FastAPI

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.encryption import Keyring
from oncekey.errors import ConfigurationError, OnceKeyError
from oncekey.limits import Limits
from oncekey.outbox import Worker
from oncekey.upkeep import Upkeep
from oncekey.web.fastapi import protect
from tests.security import planted_commands
from tests.security.planted import MARK, SECRETS, Witness, every_command, listening, secret, shown
from tests.security.planted_app import TENANT, connect, make_app, make_once, make_worker, resolve_with
from tests.security.planted_commands import MASTER
from tests.security.planted_requests import KEYS, functions, headers, questions, requests

SHOWN_ON_PURPOSE = (
    "the names of tenants, operations, steps, tasks and intents",
    "a masked key",
    "a client's own key, and what the app says in `Refused`, `NotAuthenticated` and `NotAuthorized`",
    "provider ids and downstream keys",
    "the words of an operator and of a resolver, and who said them",
    "everything: keys, bodies, results, payloads, header values, errors as they were stored",  # with --reveal
)
"""planted.shown() makes the values for which the fourth and the fifth hold; check_reveal() shows the last."""


@pytest.fixture
def witness() -> Iterator[Witness]:
    with listening() as made:
        yield made


DEEP = pytest.mark.stores
"""Between them, the other two have every store and both settings."""


@pytest.fixture(
    params=[
        ("sqlite", "plain"),
        ("postgres", "encrypted"),
        pytest.param(("sqlite", "encrypted"), marks=DEEP),
        pytest.param(("postgres", "plain"), marks=DEEP),
    ],
    ids="-".join,
)
def setting(request: pytest.FixtureRequest) -> tuple[str, str]:
    store, encryption = request.param
    return store, encryption


@pytest.fixture
def url(request: pytest.FixtureRequest, setting: tuple[str, str], tmp_path: Path) -> str:
    """A store; where a server takes one, its URL has a password, which is a secret."""
    if setting[0] == "sqlite":
        return f"sqlite:///{tmp_path / 'keys.db'}"
    parts = urlsplit(request.getfixturevalue("postgres_url"))
    user, _, host = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user.partition(':')[0]}:{secret('password')}@{host}"))


def age(url: str, hours: int = 3) -> None:
    """Let time pass for every row, so that upkeep finds it due."""
    columns = ("lease_until", "reconcile_at", "created_at", "finished_at")
    past = f"- {hours * 3600}" if url.startswith("sqlite") else f"- interval '{hours} hours'"
    with closing(connect(url)) as db:
        db.execute(f"UPDATE idempotency_keys SET {', '.join(f'{name} = {name} {past}' for name in columns)}")
        db.execute(f"UPDATE idempotency_outbox SET run_at = run_at {past}")
        db.commit()


@pytest.fixture
def keyring(setting: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Keyring | None:
    """The keyring of the app and of the commands, whose keys are secrets too."""
    if setting[1] == "plain":
        return None
    monkeypatch.setenv("ONCEKEY_KEYS", f"1:{b64encode(MASTER).decode()}")
    return Keyring({1: MASTER})


def stored(url: str, tables: Sequence[str]) -> str:
    """All values of these tables, without the names of the keys."""
    with closing(connect(url)) as db:
        found = []
        for table in tables:
            cursor = db.execute(f"SELECT * FROM idempotency_{table}")
            names = [column[0] for column in cursor.description]
            found += [
                (table, name, bytes(value) if isinstance(value, memoryview) else value)
                for row in cursor.fetchall()
                for name, value in zip(names, row, strict=True)
                if name != "key"
            ]
    return str(found)


async def served(witness: Witness, once: OnceKey, app: Any, worker: Worker, url: str) -> None:
    """What the app does: requests, questions for keys, jobs and upkeep."""
    await requests(witness, app)
    await questions(witness, app)
    counts = [await worker.serve(until="drained")]
    age(url)
    counts.append(await worker.serve(until="drained"))
    assert (sum(each.failed for each in counts), sum(each.dead for each in counts)) == (1, 2)
    turns = await asyncio.to_thread(Upkeep(once).run_once)
    witness.hear("turns", repr(turns))
    assert [turn.error for turn in turns] == [None] * len(turns)
    await once.aclose()


def test_nothing_that_oncekey_says_has_a_secret(
    witness: Witness, url: str, keyring: Keyring | None, tmp_path: Path
) -> None:
    once = make_once(url, witness, encryption=keyring)
    resolve_with(once)
    app, worker = make_app(once, url), make_worker(once)
    asyncio.run(served(witness, once, app, worker, url))
    functions(witness, once)
    planted_commands.read(witness, url)
    planted_commands.change(witness, url)
    age(url)
    planted_commands.work(witness, url, once, worker)
    planted_commands.read(witness, url)
    planted_commands.print_out(witness, app, tmp_path)
    planted_commands.client(witness, tmp_path)
    planted_commands.replace_key(witness, url)
    once.close()
    witness.read_telemetry()
    witness.hear("audit", stored(url, ("audit",)))

    assert witness.commands == every_command() - planted_commands.NOT_RUN.keys(), "a new command is run, or named there"
    assert witness.places() == {
        *("log", "event", "prometheus", "otel", "span", "command", "turns", "answer", "exception", "audit")
    }
    said = "\n".join(text for _, text in witness.said)
    for line in (  # the run has reached what it was made for
        *("left a key whose outcome is unknown", "its verify function raised", "the on_event hook failed"),
        *("the resolver raised", "the resume function raised", "JobRetried", "JobDead", "got a key that looks like"),
        *("Misused", "Tombstoned", "Traceback (most recent call last)", shown("operator"), shown("reason")),
        *(shown("provider-id"), shown("resolver-reason")),
    ):
        assert line in said, line
    assert witness.found() == []
    if keyring is not None:
        for master in (MASTER, MASTER[::-1]):
            assert witness.found(b64encode(master[:24]).decode()) == []
        written = stored(url, ("keys", "steps", "outbox", "audit"))
        assert [word for word in (*SECRETS, shown("reason"), shown("resolver-reason")) if word in written] == []
    check_reveal(witness, url)


def check_reveal(witness: Witness, url: str) -> None:
    """The secrets are there: --reveal shows them."""
    shown_now = "".join(
        witness.run("keys", "show", KEYS[name], "--store", url, "--scope", TENANT, "--reveal", "--json")
        for name in ("ok", "half", "later")
    )
    for name in ("key", "answer", "location", "step", "payload"):
        assert secret(name) in shown_now, name
    assert secret("set-cookie") not in shown_now


# -- what the app is made of -------------------------------------------------------------------------------------------

DOWN = [
    f"postgresql://ann:{secret('password')}@127.0.0.1:1/shop",
    f"mysql://ann:{secret('password')}@127.0.0.1:1/shop",
    f"redis://ann:{secret('password')}@127.0.0.1:1/0",
    f"redis+cluster://ann:{secret('password')}@127.0.0.1:1",
]


async def start(app: Any) -> None:
    """Start and stop the app as a server does: the log says at the start that the store cannot be reached."""
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> dict[str, str]:
        return next(messages)

    async def send(message: dict[str, Any]) -> None:
        assert message["type"].endswith(".complete"), message

    await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, receive, send)


@pytest.mark.parametrize("down", DOWN)
async def test_password_of_a_store_that_is_down_is_not_shown(witness: Witness, down: str) -> None:
    once = OnceKey(down, scope=SINGLE_TENANT, on_event=witness.on_event, telemetry=witness.telemetry)
    app = make_plain_app(once)
    await start(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api.test") as client:
        for _ in range(7):  # until the breaker opens
            answer = await client.post("/ok", headers=headers(secret("key")), json={"card": secret("body")})
            assert answer.status_code == 503
            witness.hear("answer", answer.text)
    try:
        once.store.listing()
    except OnceKeyError as error:
        witness.hear("exception", f"{error} {error!r}")
    witness.hear("repr", f"{once!r} {once.store!r}")
    assert "not reachable at start" in str(witness.said)
    await once.aclose()
    witness.read_telemetry()
    for command in (("doctor",), ("keys", "list"), ("dead-letters", "list"), ("migrate",), ("upkeep", "--once")):
        witness.run(*command, "--store", down, code=None)
    assert witness.found() == []


@pytest.mark.parametrize(
    "wrong",
    [
        *(f"postgresql://ann:{MARK}@[::1/shop", f"mysql://ann:{MARK}@h:port/shop", f"redis://ann:{MARK}@h:port"),
        *(f"oracle://ann:{MARK}@h/shop", f"ann:{MARK}@h", f"postgresql://ann:{MARK}@h/?x=y"),
    ],
)
def test_url_that_cannot_be_read_is_not_quoted(witness: Witness, wrong: str) -> None:
    try:
        OnceKey(wrong, scope=SINGLE_TENANT).close()
    except ConfigurationError as error:
        witness.hear("exception", f"{error} {error!r}")
    witness.run("keys", "list", "--store", wrong, code=None)
    assert witness.found() == []


async def test_passwords_of_a_cache_and_of_limits_are_not_shown(witness: Witness, ready_url: str) -> None:
    down = f"redis://:{secret('password')}@127.0.0.1:1"
    once = OnceKey(
        ready_url,
        scope=SINGLE_TENANT,
        policy=Policy(limit="100/minute"),
        limits=Limits(storage=down),
        cache=down,
        cache_secret=secret("cache-secret"),
        bind_secret=secret("bind-secret-of-32-bytes"),
        on_event=witness.on_event,
    )
    app = make_plain_app(once)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api.test") as client:
        answers = [await client.post("/ok", headers=headers(secret("key")), json={}) for _ in range(2)]
    await once.aclose()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert "the storage of limits does not answer" in str(witness.said)
    assert witness.found() == []


def make_plain_app(once: OnceKey) -> Any:
    app = FastAPI()
    protect(app, once, upkeep=False)
    app.post("/ok")(lambda: {"card": secret("answer")})
    return app


def test_page_lists_what_is_shown_on_purpose() -> None:
    page = (Path(__file__).parents[2] / "docs/security.md").read_text("utf-8")
    table = page.split("**What is shown on purpose:**")[1].split("\n- ")[0]
    assert (
        tuple(line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| "))[1:]
        == SHOWN_ON_PURPOSE
    )
