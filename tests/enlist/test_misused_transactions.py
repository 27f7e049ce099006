"""A transaction that cannot end together with the key is refused: not open, not ours to commit, or begun before."""

from __future__ import annotations

import sqlite3

import aiosqlite
import asyncpg
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from oncekey.engine.operation import Operation
from tests.enlist.refusals import INSERT, create_engine, refused
from tests.enlist.shop import Shop, SqlAlchemy

pytestmark = pytest.mark.usefixtures("dispose_of_engines")


async def test_enlist_of_a_two_phase_session_is_refused(postgres_shop: Shop) -> None:
    engine = create_engine(SqlAlchemy(postgres_shop).url())

    async def attempt(op: Operation) -> None:
        with Session(engine, twophase=True) as session:
            await op.enlist(session)

    async with refused(postgres_shop, attempt, "two-phase"):
        engine.dispose()
        await postgres_shop.apis[0].close()


async def test_a_connection_that_is_not_open(postgres_shop: Shop) -> None:
    engine = create_async_engine(SqlAlchemy(postgres_shop).url(), poolclass=NullPool)
    async with refused(postgres_shop, lambda op: op.enlist(engine.connect()), "is not open"):
        await postgres_shop.apis[0].close()


# ---------------------------------------------------------------- not ours to commit


@pytest.mark.parametrize("driver", ["psycopg", "psycopg-async", "sqlalchemy", "sqlalchemy-async"])
async def test_enlist_in_autocommit_mode_is_refused(postgres_shop: Shop, driver: str) -> None:
    url = postgres_shop.url

    async def attempt(op: Operation) -> None:
        if driver == "psycopg":
            with psycopg.connect(url, autocommit=True) as plain:
                await op.enlist(plain)
        elif driver == "psycopg-async":
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
                await op.enlist(connection)
        elif driver == "sqlalchemy":
            engine = create_engine(SqlAlchemy(postgres_shop).url(), isolation_level="AUTOCOMMIT")
            with Session(engine) as session:
                await op.enlist(session)
        else:
            later = create_async_engine(SqlAlchemy(postgres_shop).url(), poolclass=NullPool)
            async with later.connect() as raw:
                await raw.execution_options(isolation_level="AUTOCOMMIT")
                await op.enlist(raw)

    async with refused(postgres_shop, attempt, "autocommit"):
        await postgres_shop.apis[0].close()


@pytest.mark.parametrize("driver", ["psycopg", "psycopg-async", "asyncpg", "session", "connection", "async-session"])
async def test_inside_a_block_that_commits_by_itself(postgres_shop: Shop, driver: str) -> None:
    url, sync_url = postgres_shop.url, SqlAlchemy(postgres_shop).url()

    async def attempt(op: Operation) -> None:
        match driver:
            case "psycopg":
                with psycopg.connect(url) as plain, plain.transaction():
                    await op.enlist(plain)
            case "psycopg-async":
                async with await psycopg.AsyncConnection.connect(url) as connection, connection.transaction():
                    await op.enlist(connection)
            case "asyncpg":
                raw = await asyncpg.connect(url)
                try:
                    async with raw.transaction():
                        await op.enlist(raw)
                finally:
                    await raw.close()
            case "session":
                with Session(create_engine(sync_url)) as session, session.begin():
                    await op.enlist(session)
            case "connection":
                with create_engine(sync_url).begin() as held:
                    await op.enlist(held)
            case _:
                async with AsyncSession(create_async_engine(sync_url, poolclass=NullPool)) as later, later.begin():
                    await op.enlist(later)

    async with refused(postgres_shop, attempt, "commit='caller'"):
        await postgres_shop.apis[0].close()


async def test_enlist_inside_a_savepoint_is_refused(shop: Shop) -> None:
    engine = create_engine(SqlAlchemy(shop).url())

    async def attempt(op: Operation) -> None:
        with Session(engine) as session, session.begin_nested():
            await op.enlist(session)

    async with refused(shop, attempt, "before begin_nested()"):
        engine.dispose()


async def test_a_session_that_joins_an_outer_transaction(postgres_shop: Shop) -> None:
    engine = create_engine(SqlAlchemy(postgres_shop).url())

    async def attempt(op: Operation) -> None:
        with engine.connect() as outer, outer.begin(), Session(outer) as session:
            await op.enlist(session)

    async with refused(postgres_shop, attempt, "enlist that connection itself"):
        engine.dispose()
        await postgres_shop.apis[0].close()


# ---------------------------------------------------------------- begun before


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_snapshot_older_than_the_request(postgres_shop: Shop, level: str) -> None:
    engine = create_engine(SqlAlchemy(postgres_shop).url(), isolation_level=level)
    session = Session(engine)
    session.execute(sa.text("SELECT 1"))
    async with refused(postgres_shop, lambda op: op.enlist(session), "its snapshot is older than the request"):
        session.close()
        engine.dispose()
        await postgres_shop.apis[0].close()


@pytest.mark.parametrize("driver", ["sqlite3", "aiosqlite", "sqlalchemy"])
async def test_sqlite_that_has_written_already(sqlite_shop: Shop, driver: str) -> None:
    async def attempt(op: Operation) -> None:
        if driver == "sqlite3":
            plain = sqlite3.connect(sqlite_shop.path)
            try:
                plain.execute(INSERT)
                await op.enlist(plain)
            finally:
                plain.close()
        elif driver == "aiosqlite":
            async with aiosqlite.connect(sqlite_shop.path) as connection:
                await connection.execute(INSERT)
                await op.enlist(connection)
        else:
            engine = create_engine(sqlite_shop.url)
            with Session(engine) as session:
                session.execute(sa.text(INSERT))
                await op.enlist(session)

    async with refused(sqlite_shop, attempt, "before its first statement"):
        await sqlite_shop.apis[0].close()


async def test_enlist_of_a_failed_transaction_is_refused(postgres_shop: Shop) -> None:
    async def attempt(op: Operation) -> None:
        with psycopg.connect(postgres_shop.url) as connection:
            with pytest.raises(psycopg.Error):
                connection.execute("SELECT nothing")
            await op.enlist(connection)

    async with refused(postgres_shop, attempt, "is in a failed transaction"):
        await postgres_shop.apis[0].close()


async def test_sqlalchemy_that_cannot_tell_autocommit_is_refused(
    postgres_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.0.43 an engine in autocommit mode looks like any other."""
    monkeypatch.setattr(sa, "__version__", "2.0.42")
    engine = create_engine(SqlAlchemy(postgres_shop).url())

    async def attempt(op: Operation) -> None:
        with Session(engine) as session:
            await op.enlist(session)

    async with refused(postgres_shop, attempt, "2.0.43 or newer"):
        pass
    engine.dispose()
