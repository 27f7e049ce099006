"""The command line as a user meets it: output, exit codes, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

import oncekey
from oncekey.cli import main
from oncekey.cli.options import named
from oncekey.stores.registry import open_store

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``oncekey`` with these arguments: exit code, standard output, standard error."""
    monkeypatch.delenv("ONCEKEY_STORE", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["oncekey", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return (code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


def test_migrate_names_the_migrations_that_ran(run: Run, postgres_url: str) -> None:
    """The first run names the migrations that ran, the second has nothing to do; the store is then as it should be."""
    first = run("migrate", "--store", postgres_url)
    assert (first[0], first[2]) == (0, "")
    assert ": ran 0001_keys" in first[1]
    assert run("migrate", "--store", postgres_url)[:2] == (0, f"{named(postgres_url)}: up to date\n")
    store = open_store(postgres_url)
    store.check()
    store.disconnect()


def test_migrate_with_json_prints_one_document(run: Run, postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """--json prints one document, and the store may come from the environment."""
    monkeypatch.setenv("ONCEKEY_STORE", postgres_url)
    code, out, _ = run("migrate", "--json")
    said = json.loads(out)
    assert (code, said["store"], said["ran"][0]) == (0, named(postgres_url), "0001_keys")
    assert json.loads(run("migrate", "--json")[1])["ran"] == []


def test_a_schema_from_the_future(run: Run, postgres_url: str) -> None:
    """Tables that are newer than this version are an error in one sentence that says what to do."""
    run("migrate", "--store", postgres_url)
    with psycopg.connect(postgres_url) as connection:
        connection.execute("INSERT INTO oncekey_schema (number, name) VALUES (9999, 'later')")
    code, out, error = run("migrate", "--store", postgres_url)
    assert (code, out, error.count("\n")) == (1, "", 1)
    assert "upgrade the oncekey package" in error


def test_migrate_creates_a_sqlite_file_with_its_tables(run: Run, tmp_path: Path) -> None:
    """A SQLite file is made, with its tables."""
    url = f"sqlite:///{tmp_path}/keys.db"
    code, out, _ = run("migrate", "--store", url)
    assert code == 0
    assert out.startswith(url)
    assert (tmp_path / "keys.db").exists()
    assert run("migrate", "--store", url)[1] == f"{url}: up to date\n"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://ann:s3cret@127.0.0.1:1/app", "unavailable"),
        ("redis-but-not://x", "no store is known"),
        ("nonsense", "no store is known"),
        ("sqlite:////nowhere/at/all/keys.db", "folder does not exist"),
        ("sqlite://", "names no file"),
        ("", "--store URL or ONCEKEY_STORE"),
    ],
)
def test_errors_are_one_sentence(run: Run, url: str, words: str) -> None:
    """What goes wrong is one line on stderr, with exit code 1, no traceback and no password."""
    code, out, error = run("migrate", "--store", url)
    assert (code, out) == (1, "")
    assert error.startswith("oncekey: ")
    assert error.count("\n") == 1
    assert words in error
    assert "s3cret" not in error


def test_an_unknown_command_is_a_usage_error(run: Run) -> None:
    """Exit code 2, as everywhere."""
    assert run("no-such-thing")[0] == 2


def test_version_is_the_same_by_command_and_by_module(tmp_path: Path) -> None:
    """``oncekey --version`` and ``python -m oncekey --version`` are the same program."""
    script = Path(sys.executable).with_name("oncekey")
    programs = [[sys.executable, "-m", "oncekey"]] + ([[str(script)]] if script.exists() else [])
    for program in programs:
        done = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True, cwd=tmp_path)
        assert done.stdout == f"oncekey {oncekey.__version__}\n"


def test_help_has_every_command_and_its_store(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Help is shown without arguments; a command names the option and the variable of its store."""
    monkeypatch.setenv("COLUMNS", "200")
    assert "migrate" in run()[1]
    said = run("migrate", "--help")[1]
    assert "--store" in said
    assert "ONCEKEY_STORE" in said


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:p@ss@db:5432/app?password=x", "postgresql://ann@db:5432/app"),
        ("postgresql:///app?host=/run/pg", "postgresql:///app"),
        ("sqlite:///keys.db", "sqlite:///keys.db"),
        ("memory://", "memory://"),
    ],
)
def test_shown_url_has_no_password(url: str, shown: str) -> None:
    """Never a password, wherever it stands in the URL."""
    assert named(url) == shown


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""
EXTRAS = {
    *("boto3", "click", "cryptography", "django", "fastapi", "flask", "greenlet", "httpx", "limits", "litestar"),
    *("msgspec", "opentelemetry", "prometheus_client", "psycopg", "pydantic", "pymysql", "redis", "rich"),
    *("sqlalchemy", "starlette", "typer", "uvicorn", "werkzeug"),
}


def without_extras(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    program = BLOCKED.format(names=EXTRAS) + code
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path, env=environment
    )


def test_asgi_app_on_sqlite_needs_no_extra(tmp_path: Path) -> None:
    """The package, its ASGI middleware and an app on SQLite work with nothing but the three fixed dependencies."""
    done = without_extras(
        """
import asyncio
import oncekey, oncekey.web.asgi, oncekey.web.openapi, oncekey.cli
from oncekey import OnceKey, SINGLE_TENANT

async def hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})

async def ask(app):
    sent = []
    async def receive():
        return {"type": "http.request", "body": b"{}"}
    async def send(message):
        sent.append(message)
    scope = {"type": "http", "method": "POST", "path": "/x", "headers": [(b"idempotency-key", b"k")]}
    await app(scope, receive, send)
    return dict(sent[0]["headers"]).get(b"idempotency-replayed"), sent[1]["body"]

async def twice(app):
    return [await ask(app), await ask(app)]

with OnceKey("sqlite:///keys.db", scope=SINGLE_TENANT) as once:
    print(asyncio.run(twice(oncekey.web.asgi.IdempotencyMiddleware(hello, once, upkeep=False))))
""",
        tmp_path,
    )
    assert done.stdout == "[(None, b'hello'), (b'true', b'hello')]\n"
    # The one warning that an app of no framework gets, on the handler that logging itself provides.
    assert done.stderr.startswith("POST /x was answered by an app whose endpoints oncekey cannot see.")
    assert done.stderr.count("\n") == 1


def test_a_missing_driver_is_named(tmp_path: Path) -> None:
    """A PostgreSQL URL without psycopg says what to install."""
    done = without_extras("import oncekey; oncekey.OnceKey('postgresql://x/y', scope=oncekey.SINGLE_TENANT)", tmp_path)
    assert "pip install 'oncekey[postgres]'" in done.stderr


def test_the_command_line_without_its_packages(tmp_path: Path) -> None:
    """One sentence that says what to install, and exit code 2."""
    done = without_extras("from oncekey.cli import main; main()", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "oncekey: the command line needs a few packages more: pip install 'oncekey[cli]'\n"
