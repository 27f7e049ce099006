"""Under which header, and in which spelling, the key of an intent is sent: the same for every try, by any process."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import requests

from oncekey.client import AsyncClient, Budget, Client, Ended, JarError, KeyJar
from oncekey.client.jar.table import TABLE
from oncekey.client.requests import IdempotentAdapter
from oncekey.errors import ConfigurationError
from tests.cli.key_table import Run, runner
from tests.client.jars import OK, client_of
from tests.client.server import Asked, Reply, Server, problem, serving
from tests.stores import mysql

PAYPAL = "PayPal-Request-Id"


class OtherApi(Server):
    """Runs a request once for each value of its own header, and each time if the header is missing.

    ``"K"`` and ``K`` are two keys to it. It cuts the connection after an effect, so the client cannot know of it.
    """

    def __init__(self, header: str) -> None:
        super().__init__()
        self.header = header.lower()
        self.effects: list[str | None] = []

    def answer(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        key = asked.headers.get(self.header)
        if key is not None and key in self.effects:
            return OK
        self.effects.append(key)
        return Reply(cut="before")


FORMS: list[Any] = [
    pytest.param({"header": PAYPAL}, id="header"),
    pytest.param({"spelling": "quoted"}, id="spelling"),
    pytest.param({"header": PAYPAL, "spelling": "quoted"}, id="both"),
]


def cut_off(client: Client) -> str:
    """Send an intent whose answer does not come. Returns its key."""
    with client.intent("order-1") as intent, pytest.raises(httpx.TransportError):
        intent.post("/pay", json={"amount": 5})
    return intent.key


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    return runner("", monkeypatch, capsys)


@pytest.mark.parametrize("form", FORMS)
def test_resume_by_a_client_with_other_settings_has_no_second_effect(jar: KeyJar, form: dict[str, Any]) -> None:
    with serving(OtherApi(form.get("header", "Idempotency-Key"))) as api:
        with client_of(api, jar, **form) as client:
            key = cut_off(client)
        with client_of(api, jar) as client:
            (outcome,) = client.resume()
    assert (outcome.ended, len(api.asked)) == (Ended.ANSWERED, 2)
    assert api.effects == [f'"{key}"' if "spelling" in form else key]
    if "header" in form:
        assert [asked.key for asked in api.asked] == [None, None]


@pytest.mark.parametrize("form", FORMS)
def test_command_resume_has_no_second_effect(run: Run, file: Path, form: dict[str, Any]) -> None:
    jar = f"sqlite:///{file}"
    with serving(OtherApi(form.get("header", "Idempotency-Key"))) as api:
        with Client(api.url, jar=jar, budget=Budget(tries=1), **form) as client:
            cut_off(client)
        assert run("client", "resume", "--jar", jar, "--to", api.url)[:2] == (0, "order-1  answered 201\n1 answered\n")
    assert (len(api.effects), len(api.asked)) == (1, 2)


def test_resume_after_a_kill_has_no_second_effect(run: Run, file: Path) -> None:
    running: list[subprocess.Popen[bytes]] = []

    class Killing(OtherApi):
        def answer(self, asked: Asked) -> Reply:
            reply = super().answer(asked)
            if len(self.asked) == 1:
                running[0].kill()
                running[0].wait()
            return reply

    with serving(Killing(PAYPAL)) as api:
        program = textwrap.dedent(f"""
            from oncekey.client import Client
            client = Client({api.url!r}, jar="sqlite:///{file}", header={PAYPAL!r}, spelling="quoted")
            input()
            with client.intent("order-1") as intent:
                intent.post("/pay", json={{}})
        """)
        running.append(subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE))
        assert running[0].stdin is not None
        with running[0].stdin as told:
            told.write(b"go\n")
        assert running[0].wait(60) == -signal.SIGKILL
        assert run("client", "resume", "--jar", f"sqlite:///{file}", "--to", api.url)[0] == 0
    assert (len(api.effects), len(api.asked)) == (1, 2)


async def test_async_client_resumes_in_the_form_of_the_first_try(file: Path) -> None:
    with serving(OtherApi(PAYPAL)) as api:
        jar = KeyJar(f"sqlite:///{file}")
        with client_of(api, jar, header=PAYPAL, spelling="quoted") as client:
            cut_off(client)
        async with AsyncClient(api.url, jar=jar) as other:
            (outcome,) = await other.resume()
        jar.close()
    assert (outcome.ended, len(api.effects)) == (Ended.ANSWERED, 1)


def test_other_library_sends_an_intent_in_the_form_of_the_first_try(file: Path) -> None:
    with serving(OtherApi(PAYPAL)) as api, requests.Session() as session:
        jar = KeyJar(f"sqlite:///{file}")
        with client_of(api, jar, header=PAYPAL) as client:
            cut_off(client)
        session.mount("http://", IdempotentAdapter(budget=Budget(tries=1)))
        with jar.intent("order-1"):
            assert session.post(f"{api.url}/pay", json={"amount": 5}).status_code == 201
        jar.close()
    assert len(api.effects) == 1


def test_form_is_on_disk_before_the_first_byte_is_sent(server: Server, jar: KeyJar, url: str) -> None:
    seen = []

    def answer(asked: Asked) -> Reply:
        beside = KeyJar(url)
        row = beside.read("order-1")
        beside.close()
        assert row is not None
        seen.append((row.key_header, row.spelling))
        return OK

    server.answer = answer  # type: ignore[method-assign]
    jar.prepare("order-1", "POST", f"{server.url}/pay", json={})
    with client_of(server, jar, header=PAYPAL, spelling="quoted") as client:
        client.resume()
    assert seen == [(PAYPAL, "quoted")]


def test_spelling_that_the_server_asked_for_is_kept_with_the_intent(server: Server, jar: KeyJar) -> None:
    server.replies = [problem(400, "key-malformed"), Reply(503), OK]
    with client_of(server, jar) as client, client.intent("order-1") as intent:
        intent.post("/pay", json={})
    row = jar.read("order-1")
    assert row is not None
    assert row.spelling == "quoted"
    with client_of(server, jar) as client:
        client.resume()
    assert server.keys == [intent.key, f'"{intent.key}"', f'"{intent.key}"']


def test_prepared_intent_is_sent_in_the_form_that_it_was_prepared_with(jar: KeyJar, url: str, file: Path) -> None:
    with serving(OtherApi(PAYPAL)) as api:
        if url.startswith("sqlite"):
            connection: Any = sqlite3.connect(file)
        else:
            connection = psycopg.connect(url) if url.startswith("postgres") else mysql.connect(url)
        with closing(connection):
            form: dict[str, Any] = {"key_header": PAYPAL, "spelling": "quoted"}
            key = jar.prepare("order-1", "POST", f"{api.url}/pay", json={}, on=connection, **form)
            connection.commit()
        for _ in range(2):
            with client_of(api, jar) as client:
                client.resume()
    assert (api.effects, len(api.asked)) == ([f'"{key}"'], 2)


def test_prepared_intent_without_a_form_takes_that_of_the_client_that_sends_it_first(jar: KeyJar) -> None:
    with serving(OtherApi(PAYPAL)) as api:
        jar.prepare("order-1", "POST", f"{api.url}/pay", json={})
        for form in ({"header": PAYPAL}, {}):
            with client_of(api, jar, **form) as client:
                client.resume()
    assert (len(api.effects), len(api.asked)) == (1, 2)


@pytest.mark.parametrize("command", ["send", "resume"])
def test_options_of_the_commands_name_header_and_spelling(run: Run, tmp_path: Path, command: str) -> None:
    jar = "sqlite:///requests.ndjson.jar"
    with serving(OtherApi(PAYPAL)) as api:
        (tmp_path / "requests.ndjson").write_text('{"intent": "order-1", "path": "/pay"}\n')
        first: tuple[str, ...] = ("send", "requests.ndjson", "--to", api.url)
        if command == "resume":
            opened = KeyJar(jar, create=True)
            opened.prepare("order-1", "POST", f"{api.url}/pay")
            opened.close()
            first = ("client", "resume", "--jar", jar, "--to", api.url)
        assert run(*first, "--tries", "1", "--key-header", PAYPAL, "--spelling", "quoted")[0] == 1
        assert run("send", "requests.ndjson", "--to", api.url)[0] == 0
    (key,) = api.effects
    assert key is not None
    assert key.startswith('"')
    assert len(api.asked) == 2


def test_header_that_has_the_key_cannot_be_given_a_value(run: Run, server: Server) -> None:
    Path("requests.ndjson").write_text('{"path": "/pay"}\n')
    ask = ("send", "requests.ndjson", "--to", server.url, "--key-header", PAYPAL, "--header", "paypal-request-id: x")
    code, _, error = run(*ask)
    assert (code, "a key of its own" in error, server.asked) == (2, True, [])


def test_header_that_is_no_name_is_refused(file: Path) -> None:
    for header in ("", "Two Words", "Key:"):
        with pytest.raises(ConfigurationError, match="no name of a header"):
            Client("https://api.example.com", header=header)
    jar = KeyJar(f"sqlite:///{file}", create=True)
    wrong: list[dict[str, Any]] = [{"key_header": "Two Words"}, {"spelling": "single"}]
    for form in wrong:
        with pytest.raises(ConfigurationError):
            jar.prepare("order-1", "POST", "https://api.example.com/pay", **form)
    assert jar.open_intents() == []
    jar.close()


def test_jar_of_an_earlier_version_is_refused_and_its_columns_are_named(url: str, file: Path) -> None:
    KeyJar(url, create=True).close()
    for column in ("key_header", "spelling"):
        text = f"ALTER TABLE {TABLE} DROP COLUMN {column}"
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(file)) as other:
                other.execute(text)
        elif url.startswith("postgres"):
            with psycopg.connect(url) as database:
                database.execute(text.encode())
        else:
            mysql.run(url, text)
    with pytest.raises(JarError, match=r"it has no key_header, spelling\. Nothing is sent"):
        KeyJar(url)
