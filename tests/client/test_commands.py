"""``oncekey client`` and ``oncekey send``, as an operator runs them."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from oncekey.client import Client, KeyJar
from oncekey.client.bulk import read_lines
from oncekey.client.calls import Request
from oncekey.client.spelling import KeyForm
from tests.cli.key_table import Run, runner
from tests.client.server import Asked, Reply, Server, problem, serving

OK = Reply(201, b'{"id": 1}', (("Content-Type", "application/json"),))
FORM = KeyForm("Idempotency-Key", "bare")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    return runner("", monkeypatch, capsys)


@pytest.fixture
def jar(tmp_path: Path) -> Iterator[KeyJar]:
    opened = KeyJar(f"sqlite:///{tmp_path}/jar.db")
    yield opened
    opened.close()


JAR = ("--jar", "sqlite:///jar.db")


def test_list_shows_open_intents_with_masked_keys(run: Run, server: Server, jar: KeyJar) -> None:
    key = jar.prepare("order-1", "POST", f"{server.url}/pay", json={"card": "4242"})
    code, out, _ = run("client", "list", *JAR)
    assert code == 0
    assert "order-1" in out
    assert key not in out
    assert "4242" not in out
    assert key in run("client", "list", *JAR, "--reveal")[1]
    (listed,) = json.loads(run("client", "list", *JAR, "--json")[1])
    assert (listed["intent"], listed["masked"], listed["first_sent_at"]) == ("order-1", True, None)


def test_resume_finishes_what_is_open_and_says_what_is_not(run: Run, server: Server, jar: KeyJar) -> None:
    for name in ("a", "b", "c"):
        jar.prepare(name, "POST", f"{server.url}/pay", json={"name": name})
    server.replies = [OK, problem(409, "outcome-unknown"), Reply(401)]
    code, out, error = run("client", "resume", *JAR, "--to", server.url)
    assert (code, error) == (1, "")
    lines = out.splitlines()
    assert lines[0] == "a  answered 201"
    assert lines[1].startswith("b  unsettled: the server's operator must settle it, reference 550e~0f1e2d3c")
    assert lines[2] == "c  open 401: the server answered 401, so correct the credentials first"
    assert lines[3] == "1 answered, 1 open, 1 unsettled"
    server.replies = [OK]
    assert run("client", "resume", *JAR, "--to", server.url)[0] == 0
    assert run("client", "resume", *JAR, "--to", server.url)[1] == "no open intents\n"


def test_expired_intent_is_sent_only_with_again(run: Run, server: Server, tmp_path: Path) -> None:
    old = KeyJar(f"sqlite:///{tmp_path}/jar.db", clock=lambda: 1_000_000.0)
    with old.intent("order-1") as intent:
        intent.begin(Request("POST", f"{server.url}/pay", (), b"{}"), FORM)
    old.close()
    code, out, error = run("client", "resume", *JAR, "--to", server.url)
    assert code == 1
    assert "order-1  expired" in out
    assert "--again" in error
    assert server.asked == []
    assert ", over" in run("client", "list", *JAR)[1]
    code, out, _ = run("client", "resume", *JAR, "--to", server.url, "--again", "--json")
    assert (code, json.loads(out)["counts"]["answered"]) == (0, 1)


def sent_intent(tmp_path: Path, server: Server, ago: float, **options: Any) -> None:
    """An intent that was sent so many seconds ago and has no answer."""
    jar = KeyJar(f"sqlite:///{tmp_path}/jar.db", clock=lambda: time.time() - ago, **options)
    with jar.intent("order-1") as intent:
        intent.begin(Request("POST", f"{server.url}/pay", (), b"{}"), FORM)
    jar.close()


def test_list_says_that_a_lifetime_is_assumed(run: Run, server: Server, tmp_path: Path) -> None:
    sent_intent(tmp_path, server, 7200)
    (line,) = run("client", "list", *JAR)[1].splitlines()[1:]
    assert "Z, assumed" in line
    assert ", over" not in line
    assert "Z, assumed, over" in run("client", "list", *JAR, "--key-lifetime", "1h")[1]
    (listed,) = json.loads(run("client", "list", *JAR, "--json")[1])
    assert listed["kept_until_is_assumed"] is True
    told = KeyJar(f"sqlite:///{tmp_path}/jar.db")
    told.find("order-1").left_open("503", time.time() + 60, None)
    told.close()
    assert "assumed" not in run("client", "list", *JAR)[1]
    (listed,) = json.loads(run("client", "list", *JAR, "--json")[1])
    assert listed["kept_until_is_assumed"] is False


def test_resume_goes_by_the_key_lifetime_of_the_option_or_of_the_intent(
    run: Run, server: Server, tmp_path: Path
) -> None:
    sent_intent(tmp_path, server, 7200, key_lifetime=timedelta(hours=1))
    ask = ("client", "resume", *JAR, "--to", server.url)
    assert "order-1  expired" in run(*ask)[1]
    assert "order-1  expired" in run(*ask, "--key-lifetime", "30m")[1]
    assert server.asked == []
    assert run(*ask, "--key-lifetime", "3h")[:2] == (0, "order-1  answered 201\n1 answered\n")


def test_credentials_come_from_an_environment_variable(
    run: Run, server: Server, jar: KeyJar, monkeypatch: pytest.MonkeyPatch
) -> None:
    jar.prepare("order-1", "POST", f"{server.url}/pay")
    ask = (
        "client",
        "resume",
        *JAR,
        "--to",
        server.url,
        "--header-from",
        "Authorization=API_AUTH",
        "--header",
        "X-A: b",
    )
    code, _, error = run(*ask)
    assert (code, "API_AUTH is not set" in error) == (1, True)
    monkeypatch.setenv("API_AUTH", "Bearer t")
    assert run(*ask)[0] == 0
    assert (server.asked[0].headers["authorization"], server.asked[0].headers["x-a"]) == ("Bearer t", "b")


def test_forget_deletes_one_intent_or_old_answers(run: Run, server: Server, jar: KeyJar) -> None:
    jar.prepare("order-1", "POST", f"{server.url}/pay")
    assert run("client", "forget", *JAR, "order-1", "--yes") == (0, "order-1 is forgotten\n", "")
    assert run("client", "forget", *JAR, "order-1", "--yes")[0] == 1
    assert run("client", "forget", *JAR)[0] == 2
    assert run("client", "forget", *JAR, "--finished", "30")[:2] == (0, "0 forgotten\n")


def test_forget_asks_before_it_deletes_an_intent(run: Run, server: Server, jar: KeyJar) -> None:
    jar.prepare("new", "POST", f"{server.url}/pay")
    with jar.intent("sent") as intent:
        intent.begin(Request("POST", f"{server.url}/pay", (), b"{}"), FORM)
    with Client(server.url, jar=jar) as client, client.intent("answered") as answered:
        answered.post("/pay")
    words = {"new": "is OPEN, and was never sent", "sent": "may have happened", "answered": "was answered 201"}
    for name, state in words.items():
        code, out, error = run("client", "forget", *JAR, name)
        assert (code, out) == (1, "")
        assert "there was no answer; --yes asks nothing" in error
        code, out, error = run("client", "forget", *JAR, name, said="n\n")
        assert (code, out) == (1, "")
        assert state in error
        assert "RUNS the operation again" in error
        assert jar.read(name) is not None
        assert run("client", "forget", *JAR, name, said="y\n")[:2] == (0, f"{name} is forgotten\n")
        assert jar.read(name) is None


def test_forget_asks_before_it_deletes_old_answers(run: Run, server: Server, tmp_path: Path) -> None:
    old = KeyJar(f"sqlite:///{tmp_path}/jar.db", clock=lambda: time.time() - 40 * 86_400, create=True)
    with Client(server.url, jar=old) as client:
        for name in ("order-1", "order-2"):
            with client.intent(name) as intent:
                intent.post("/pay", json={})
    ask = ("client", "forget", *JAR, "--finished", "30")
    code, out, error = run(*ask)
    assert (code, out) == (1, "")
    assert "there was no answer; --yes asks nothing" in error
    code, out, error = run(*ask, said="n\n")
    assert (code, out) == (1, "")
    assert "2 intents that were answered more than 30 days ago" in error
    assert "RUNS the operation again" in error
    assert old.finished() == {"order-1": 201, "order-2": 201}
    assert run(*ask, said="y\n")[:2] == (0, "2 forgotten\n")
    with Client(server.url, jar=old) as client, client.intent("order-1") as intent:
        intent.post("/pay", json={})
    assert run(*ask, "--yes") == (0, "1 forgotten\n", "")
    assert run(*ask) == (0, "0 forgotten\n", "")
    old.close()


# -- send ------------------------------------------------------------------------------------------------------------


def requests_file(count: int) -> Path:
    path = Path("requests.ndjson")
    lines = [{"intent": f"order-{number}", "path": "/pay", "json": {"number": number}} for number in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_lines_are_sent_once_however_often_the_command_runs(run: Run, server: Server) -> None:
    requests_file(20)
    ask = ("send", "requests.ndjson", "--to", f"{server.url}/v1")
    assert run(*ask)[:2] == (0, "20 lines: 20 done\n")
    assert run(*ask)[:2] == (0, "20 lines: 20 done (20 answered by an earlier run)\n")
    assert len(server.asked) == len(set(server.keys)) == 20
    assert {asked.path for asked in server.asked} == {"/v1/pay"}


def test_line_that_changed_after_it_was_sent_is_refused(run: Run, server: Server) -> None:
    path = requests_file(2)
    run("send", "requests.ndjson", "--to", server.url)
    path.write_text(path.read_text().replace('"number": 1', '"number": 7'))
    code, out, _ = run("send", "requests.ndjson", "--to", server.url)
    assert (code, len(server.asked)) == (1, 2)
    assert "order-1  changed: intent 'order-1' stands for another request" in out
    assert "`oncekey client forget`" in out
    assert "1 changed" in out


def test_file_without_names_whose_lines_moved_is_not_sent_at_all(run: Run, server: Server) -> None:
    """A line that was sent would stand under a number that is new, and run again."""
    path = Path("bodies.ndjson")
    path.write_text('{"n": 1}\n{"n": 2}\n')
    ask = ("send", str(path), "--bodies", "--to", server.url)
    assert run(*ask)[0] == 0
    path.write_text('{"n": 0}\n{"n": 1}\n{"n": 2}\n')
    code, _, error = run(*ask)
    assert (code != 0, len(server.asked)) == (True, 2)
    assert "bodies.ndjson:1: another request was sent as line 1" in error
    path.write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    assert run(*ask)[:2] == (0, "3 lines: 3 done (2 answered by an earlier run)\n")


@pytest.mark.parametrize("command", ["list", "resume", "forget"])
def test_jar_that_is_not_there_is_no_empty_jar(run: Run, server: Server, command: str, tmp_path: Path) -> None:
    more = {"list": (), "resume": ("--to", server.url), "forget": ("order-1",)}[command]
    code, out, error = run("client", command, "--jar", "sqlite:///jra.db", *more)
    assert (code != 0, out) == (True, "")
    assert "there is no key jar at" in error
    assert not (tmp_path / "jra.db").exists()


def test_summary_counts_refused_and_open_lines(run: Run, server: Server) -> None:
    requests_file(4)
    server.replies = [OK, Reply(422), Reply(520), problem(409, "outcome-unknown")]
    code, out, _ = run("send", "requests.ndjson", "--to", server.url, "--at-once", "1", "--json")
    summary = json.loads(out)
    assert code == 1
    assert [summary[name] for name in ("lines", "ok", "refused", "open", "unsettled")] == [4, 1, 1, 1, 1]
    assert [each["intent"] for each in summary["troubles"]] == ["order-1", "order-2", "order-3"]


@pytest.mark.frameworks
def test_progress_is_shown_on_a_terminal_and_the_summary_after_it(run: Run, server: Server, tmp_path: Path) -> None:
    requests_file(30)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "oncekey", "send", "requests.ndjson", "--to", server.url]
    environ = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(command, cwd=tmp_path, stderr=theirs, stdout=subprocess.PIPE, env=environ) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the end of a terminal
            while chunk := os.read(ours, 65536):
                shown += chunk
        assert process.stdout is not None
        assert process.stdout.read() == b"30 lines: 30 done\n"
    os.close(ours)
    assert b"sending" in shown
    assert b"30/30" in shown


def test_bodies_are_sent_as_they_stand(run: Run, server: Server) -> None:
    Path("bodies.ndjson").write_text('{"b": 1,  "a": 2}\n\n[1]\n')
    assert run("send", "bodies.ndjson", "--to", f"{server.url}/pay", "--bodies", "--at-once", "1")[0] == 0
    assert [(asked.path, asked.body) for asked in server.asked] == [("/pay", b'{"b": 1,  "a": 2}'), ("/pay", b"[1]")]
    assert Path("bodies.ndjson.jar").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"requests.ndjson:2: not JSON"),
        ('{"amount": 5}', "unknown amount; .* say --bodies"),
        ("[1]", "a JSON object"),
        ('{"intent": ""}', "intent is a name"),
        ('{"method": "GET"}', "method is one of DELETE, PATCH, POST, PUT"),
        ('{"json": 1, "text": ""}', "not both"),
        ('{"headers": ["a"]}', "headers is an object"),
        ('{"path": "https://evil.example.com/pay"}', "path is a path at"),
        ('{"path": 7}', "path is a path at"),
        ('{"intent": "first"}', "an earlier line has the intent 'first'"),
    ],
)
def test_file_with_a_bad_line_is_not_sent_at_all(run: Run, server: Server, line: str, words: str) -> None:
    Path("requests.ndjson").write_text(f'{{"intent": "first"}}\n{line}\n')
    code, _, error = run("send", "requests.ndjson", "--to", server.url)
    assert code == 1
    assert re.search(words, error), error
    assert server.asked == []


def test_file_or_address_that_is_wrong_is_named(run: Run, server: Server) -> None:
    assert "cannot be read" in run("send", "none.ndjson", "--to", server.url)[2]
    requests_file(1)
    assert "api.example.com" in run("send", "requests.ndjson", "--to", "localhost:8000")[2]
    code, _, error = run("send", "requests.ndjson", "--to", server.url, "--header", "Idempotency-Key: x")
    assert (code, "which the jar keeps" in error) == (2, True)


def test_jar_that_cannot_be_written_sends_nothing(run: Run, server: Server) -> None:
    requests_file(3)
    Path("requests.ndjson.jar").write_bytes(b"this is no database, but it is long enough to be looked at" * 100)
    code, _, error = run("send", "requests.ndjson", "--to", server.url)
    assert (code, "nothing is sent" in error) == (1, True)
    assert server.asked == []


def test_send_says_what_to_do_about_an_expired_line(run: Run, server: Server, tmp_path: Path) -> None:
    requests_file(1)
    old = KeyJar(f"sqlite:///{tmp_path}/requests.ndjson.jar", clock=lambda: 1_000_000.0)
    (line,) = read_lines(Path("requests.ndjson"), server.url)
    with old.intent(line.name) as intent:
        intent.begin(Request(line.method, line.url, line.headers, line.body), FORM)
    old.close()
    code, out, _ = run("send", "requests.ndjson", "--to", server.url)
    assert (code, server.asked) == (1, [])
    assert "1 expired" in out
    assert "`oncekey client resume --again` sends those that did not" in out


def test_list_notes_the_status_that_was_refused(run: Run, server: Server, jar: KeyJar) -> None:
    server.replies[:] = [Reply(401)]
    requests_file(1)
    run("send", "requests.ndjson", "--to", server.url, *JAR)
    out = run("client", "list", *JAR)[1]
    assert "401" in out
    assert "403" not in out


@pytest.mark.parametrize(("status", "first"), [(401, True), (403, True), (503, False)])
def test_send_says_to_correct_the_credentials_before_it_is_run_again(
    run: Run, server: Server, status: int, first: bool
) -> None:
    server.replies[:] = [Reply(status)]
    requests_file(1)
    code, out, _ = run("send", "requests.ndjson", "--to", server.url, "--tries", "1")
    again = "run the same command again to go on with what is open"
    correct = "correct the credentials (--header-from); then "
    assert (code, out.splitlines()[-1]) == (1, f"{correct if first else ''}{again}")


def test_stopped_send_prints_what_is_done_and_how_to_go_on(tmp_path: Path, run: Run) -> None:
    """Ctrl-C: requests that are on their way end first."""
    running: list[subprocess.Popen[str]] = []

    class Stopping(Server):
        def answer(self, asked: Asked) -> Reply:
            if len(self.asked) == 5:
                running[0].send_signal(signal.SIGINT)
            return super().answer(asked)

    requests_file(400)
    with serving(Stopping(OK)) as server:
        command = [sys.executable, "-m", "oncekey", "send", "requests.ndjson", "--to", server.url, "--at-once", "1"]
        running.append(subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True))
        out, _ = running[0].communicate(timeout=60)
        assert running[0].returncode == 130
        assert re.match(r"400 lines: \d+ done\nstopped: run the same command again to go on", out)
        assert run("send", "requests.ndjson", "--to", server.url)[0] == 0
    assert len({asked.body for asked in server.asked}) == len(set(server.keys)) == 400


@pytest.mark.frameworks
def test_killed_send_goes_on_where_it_was(run: Run, tmp_path: Path) -> None:
    """Killed when half of the requests have arrived: run again, all are done, each under one key."""
    running: list[subprocess.Popen[bytes]] = []

    class Counting(Server):
        def answer(self, asked: Asked) -> Reply:
            reply = super().answer(asked)
            if len(self.asked) == 20:  # before it is answered: the command cannot end first
                running[0].kill()
                running[0].wait()
            return reply

    requests_file(40)
    with serving(Counting(OK)) as server:
        command = [sys.executable, "-m", "oncekey", "send", "requests.ndjson", "--to", server.url]
        running.append(subprocess.Popen(command, cwd=tmp_path))
        assert running[0].wait(60) == -signal.SIGKILL
        code, out, _ = run("send", "requests.ndjson", "--to", server.url)
    assert code == 0
    assert re.fullmatch(r"40 lines: 40 done \(\d+ answered by an earlier run\)\n", out)
    by_body: dict[bytes, set[str | None]] = {}
    for asked in server.asked:
        by_body.setdefault(asked.body, set()).add(asked.key)
    assert len(by_body) == 40
    assert all(len(keys) == 1 for keys in by_body.values())
