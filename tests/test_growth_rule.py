"""A new store, framework, driver or exporter is one folder or file and one registry line: nothing else in src names it.

The code is read without running it: names, imports and strings count; comments and docstrings do not, because an
example may name a store.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from oncekey.engine.transactions.adapters import ADAPTERS
from oncekey.stores.api import Outbox, Transactions
from oncekey.stores.registry import STORES, Entry, open_store
from oncekey.telemetry.registry import EXPORTERS

SRC = Path(__file__).parent.parent / "src" / "oncekey"

STORE_WORDS = "sqlite|postgres(?:ql)?|memory://|redis|dynamodb|mysql|mariadb"
DRIVER_WORDS = "sqlite3|aiosqlite|psycopg|asyncpg|sqlalchemy|pymysql|asyncmy|aiomysql|boto3"
FRAMEWORK_WORDS = "starlette|fastapi|flask|litestar|django|drf"
EXPORTER_WORDS = "opentelemetry|prometheus"
BROKER_WORDS = "aio_pika|rabbitmq|jetstream|aiokafka|confluent_kafka"
_WORD = re.compile(f"(?:{STORE_WORDS}|{DRIVER_WORDS}|{FRAMEWORK_WORDS}|{EXPORTER_WORDS}|{BROKER_WORDS})", re.IGNORECASE)

ALLOWED = {
    "stores/registry.py": "the registry of stores",
    "telemetry/registry.py": "the registry of exporters",
    "web/app_routes.py": "finds the routes of every framework; each framework's part belongs in its own file",
    "web/endpoints.py": "finds the Starlette app around a plain ASGI middleware",
    "web/asgi.py": "asks endpoints.py for it",
    "web/responses.py": "a message shows a URL as an example",
    "engine/policy_checks.py": "a message shows a URL as an example",
    "telemetry/workers.py": "knows command lines of servers, and one of them has a framework's name",
    "limits.py": "the addresses of the library `limits`, which has storages of its own",
    "demo/*": "the demo is an app: it has a database and a framework, as an app has",
}


def _texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names, imports and strings of a module; without docstrings."""
    docs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docs |= {id(each.value) for each in node.body if isinstance(each, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if id(node) not in docs:
                yield node.lineno, text
            case ast.Name(id=text) | ast.Attribute(attr=text):
                yield node.lineno, text
            case ast.alias(name=text):
                yield node.lineno, text
            case ast.ImportFrom(module=str(text)):
                yield node.lineno, text
            case ast.FunctionDef(name=text) | ast.AsyncFunctionDef(name=text) | ast.ClassDef(name=text):
                yield node.lineno, text


def _named(path: Path) -> list[tuple[int, str]]:
    return [(line, text) for line, text in _texts(ast.parse(path.read_text("utf-8"))) if _WORD.search(text)]


def _in_its_room(file: str) -> bool:
    """A store's folder, the files of a framework or exporter, adapters, a client's jar, servers of tests."""
    folders = [f"stores/{Path(entry.package.replace('.', '/')).name}/*" for entry in STORES]
    frameworks = [f"web/{word}*" for word in FRAMEWORK_WORDS.split("|")]
    exporters = [f"telemetry/{entry.name}.py" for entry in EXPORTERS]
    others = ["engine/transactions/adapters/*", "consumers/*", "testing/servers/*", "client/jar/*"]
    return any(fnmatch(file, room) for room in (*folders, *frameworks, *exporters, *others))


FILES = {str(path.relative_to(SRC)): path for path in sorted(SRC.rglob("*.py"))}


def test_code_names_stores_drivers_and_frameworks_only_in_their_rooms() -> None:
    outside = {
        f"{file}:{line}: {text[:80]}"
        for file, path in FILES.items()
        if not _in_its_room(file) and not any(fnmatch(file, each) for each in ALLOWED)
        for line, text in _named(path)
    }
    assert not outside, "move it into its room, or into a registry:\n" + "\n".join(sorted(outside))


@pytest.mark.parametrize("allowed", ALLOWED)
def test_every_exception_is_still_needed(allowed: str) -> None:
    assert any(_named(path) for file, path in FILES.items() if fnmatch(file, allowed)), "take it off the list"


def test_every_folder_of_a_store_is_in_the_registry() -> None:
    folders = {path.parent.name for path in SRC.glob("stores/*/store.py")}
    assert folders == {entry.package.rpartition(".")[2] for entry in STORES}


@pytest.mark.parametrize("entry", STORES, ids=lambda entry: entry.scheme)
def test_registry_says_which_stores_have_transactions(entry: Entry) -> None:
    store = open_store(entry.example)
    assert isinstance(store, Transactions) == isinstance(store, Outbox) == entry.transactions
    if isinstance(store, Transactions):
        assert store.dialect == entry.scheme
    store.close()


def test_every_file_of_a_driver_is_in_the_registry_of_adapters() -> None:
    folder = SRC / "engine" / "transactions" / "adapters"
    shared = {"__init__", "base", "lost", "one_message", "texts"}
    watches = {"asyncpg_watch", "mysql_watch", "psycopg_watch"}
    sqlalchemy = {"sqlalchemy_beneath", "sqlalchemy_guard", "sqlalchemy_mysql"}
    helpers = shared | watches | sqlalchemy | {"django_checks", "django_entry"}
    files = {path.stem for path in folder.glob("*.py")} - helpers
    assert files == {where.partition(":")[0] for where in ADAPTERS.values()}


def test_every_file_of_an_exporter_is_in_the_registry_of_exporters() -> None:
    shared = {"__init__", "bounds", "emitter", "exporter", "instruments", "redaction", "registry"}
    helpers = shared | {"route_warnings", "store_numbers", "workers"}
    files = {path.stem for path in (SRC / "telemetry").glob("*.py")} - helpers
    assert files == {entry.name for entry in EXPORTERS}
