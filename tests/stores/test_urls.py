"""The URL that an app gives SQLAlchemy opens the same database here."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.errors import ConfigurationError
from oncekey.stores.registry import open_store, plain_url
from tests.cli.key_table import runner


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ("sqlite+aiosqlite:///app.db", "sqlite:///app.db"),
        ("sqlite+pysqlite:////var/app.db", "sqlite:////var/app.db"),
        ("postgres://u@h/d", "postgresql://u@h/d"),
        ("postgresql+psycopg://u:p%40w@h:5433/d?sslmode=require", "postgresql://u:p%40w@h:5433/d?sslmode=require"),
        ("postgresql+psycopg2:///d?host=/run/pg", "postgresql:///d?host=/run/pg"),
        ("postgres+asyncpg://u@h/d", "postgresql://u@h/d"),
        ("postgresql+asyncpg://u@h/d?ssl=verify-full&xssl=1", "postgresql://u@h/d?sslmode=verify-full&xssl=1"),
        ("mysql+asyncmy://u@h/d?charset=utf8mb4", "mysql://u@h/d?charset=utf8mb4"),
        ("mariadb+pymysql://u@h/d", "mysql://u@h/d"),
        ("memory://", "memory://"),
        ("not a url", "not a url"),
    ],
)
def test_url_of_sqlalchemy_loses_its_driver_and_nothing_else(given: str, plain: str) -> None:
    assert plain_url(given) == plain


@pytest.mark.parametrize("scheme", ["sqlite+pysqlcipher", "postgresql+pygresql", "mysql+pyodbc", "oracle"])
def test_url_of_another_kind_of_database_is_refused(scheme: str) -> None:
    """An encrypted file is no plain one, so a driver is not just cut off."""
    with pytest.raises(ConfigurationError, match=f"no store is known for a URL that starts with '{scheme[:6]}"):
        open_store(f"{scheme}://u:secret@h/d")


@pytest.mark.parametrize("driver", ["aiosqlite", "pysqlite"])
def test_sqlite_url_with_driver_opens_the_file(tmp_path: Path, driver: str) -> None:
    once = OnceKey(f"sqlite+{driver}:///{tmp_path / 'app.db'}", scope=SINGLE_TENANT, migrate=True)
    once.close()
    with closing(open_store(f"sqlite:///{tmp_path / 'app.db'}")) as store:
        assert getattr(store, "path", None) == tmp_path / "app.db"


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "psycopg2", "psycopg_async"])
def test_postgres_url_with_driver_opens_the_database(ready_url: str, driver: str) -> None:
    url = ready_url.replace("postgresql://", f"postgresql+{driver}://", 1)
    assert url != ready_url
    with closing(open_store(url)) as store:
        assert store.listing(None, None, None, None, 1) == []
        store.disconnect()


@pytest.mark.parametrize("scheme", ["postgres", "postgresql+asyncpg"])
def test_command_line_takes_the_same_urls(
    ready_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scheme: str
) -> None:
    run = runner(ready_url.replace("postgresql:", f"{scheme}:", 1), monkeypatch, capsys)
    assert run("keys", "list") == (0, "no such keys\n", "")
