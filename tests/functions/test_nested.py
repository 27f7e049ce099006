"""A protected operation inside of another one: its exceptions say nothing about the key of the operation around it.

The handler around it charges first, so a key that is given back would charge twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flask
import pytest
from fastapi import FastAPI, HTTPException
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from oncekey import (
    SINGLE_TENANT,
    InProgress,
    KeyReused,
    NotExecuted,
    OnceKey,
    OutcomeUnknown,
    Policy,
    Refused,
    current,
)
from oncekey.consumers.message import Queue
from oncekey.consumers.table import Situation
from oncekey.core.states import State
from oncekey.errors import LeaseLost
from oncekey.web import fastapi as fastapi_protection
from oncekey.web import flask as flask_protection
from tests.functions.conftest import Provider

WORDS: dict[str, Callable[[], Exception]] = {
    "NotExecuted": lambda: NotExecuted("the mail server refused the connection"),
    "Refused": lambda: Refused("no such parcel"),
    "429": lambda: HTTPException(429),
}
HEADERS = {"Idempotency-Key": "k-1"}


@pytest.fixture
def mail(memory: OnceKey) -> Callable[[str, str], None]:
    """A protected function that says that nothing happened."""

    @memory.function("mail", key="order")
    def mail(order: str, word: str) -> None:
        raise WORDS[word]()

    return mail


def state_of(once: OnceKey, operation: str | None, key: str = "k-1") -> State | None:
    record = once.store.read([(once.key_scope("single-tenant", operation), key)])[0]
    return None if record is None else record.state


def called(times: int, call: Callable[[], object]) -> list[type[BaseException] | None]:
    """What each call raised."""
    raised: list[type[BaseException] | None] = []
    for _ in range(times):
        try:
            call()
        except Exception as error:
            raised.append(type(error))
        else:
            raised.append(None)
    return raised


# -- the operation around it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("is_async", [True, False])
def test_word_of_an_inner_function_is_not_the_word_of_an_asgi_route(
    memory: OnceKey, provider: Provider, mail: Callable[[str, str], None], word: str, is_async: bool
) -> None:
    app = FastAPI()
    fastapi_protection.protect(app, memory)

    def pay() -> None:
        provider.charge("a")
        mail("a", word)

    async def pay_in_loop() -> None:
        provider.charge("a")
        await asyncio.to_thread(mail, "a", word)

    app.post("/pay")(pay_in_loop if is_async else pay)
    with TestClient(app, raise_server_exceptions=False) as client:
        statuses = [client.post("/pay", headers=HEADERS).status_code for _ in range(3)]
    assert statuses == [429 if word == "429" else 500, 409, 409]
    assert state_of(memory, None) is State.UNKNOWN
    assert provider.charged == ["a"]


def test_success_of_an_error_handler_for_an_inner_word_is_not_sent(
    memory: OnceKey, mail: Callable[[str, str], None]
) -> None:
    app = FastAPI()
    app.exception_handler(Exception)(lambda request, error: JSONResponse({"paid": True}))
    fastapi_protection.protect(app, memory)

    @app.post("/pay")
    def pay() -> None:
        mail("a", "NotExecuted")

    with TestClient(app, raise_server_exceptions=False) as client:
        assert [client.post("/pay", headers=HEADERS).status_code for _ in range(2)] == [409, 409]


@pytest.mark.parametrize("word", ["NotExecuted", "Refused"])
def test_word_of_an_inner_function_is_not_the_word_of_a_wsgi_view(
    memory: OnceKey, provider: Provider, mail: Callable[[str, str], None], word: str
) -> None:
    app = flask.Flask("shop")
    flask_protection.protect(app, memory)

    @app.post("/pay")
    def pay() -> str:
        provider.charge("a")
        mail("a", word)
        return "paid"

    client = app.test_client()
    assert [client.post("/pay", headers=HEADERS).status_code for _ in range(3)] == [500, 409, 409]
    assert provider.charged == ["a"]


@pytest.mark.parametrize("word", WORDS)
def test_word_of_an_inner_function_is_not_the_word_of_the_function_around_it(
    memory: OnceKey, provider: Provider, mail: Callable[[str, str], None], word: str
) -> None:
    @memory.function("pay", key="order")
    def pay(order: str) -> None:
        provider.charge(order)
        mail(order, word)

    raised = called(3, lambda: pay("k-1"))
    assert raised[1:] == [OutcomeUnknown, OutcomeUnknown]
    assert provider.charged == ["k-1"]


@pytest.mark.parametrize("word", WORDS)
async def test_word_of_an_inner_function_is_not_the_word_of_a_message(
    memory: OnceKey, provider: Provider, mail: Callable[[str, str], None], word: str
) -> None:
    for _ in range(3):
        message = memory.message("payments", "m-1", b"{}")
        with contextlib.suppress(Exception):
            async with message:
                provider.charge("a")
                mail("a", word)
        assert message.outcome is not None
        assert message.outcome.situation is Situation.UNKNOWN
    assert provider.charged == ["a"]


async def test_refusal_of_an_inner_function_does_not_refuse_the_message(
    memory: OnceKey, mail: Callable[[str, str], None]
) -> None:
    """A refused message is parked. This one is delivered again."""
    message = Queue(memory, "payments", policy=Policy(effects="repeatable")).message("m-1", b"{}")
    with contextlib.suppress(Refused):
        async with message:
            current().downstream_key("provider")
            mail("a", "Refused")
    assert message.outcome is not None
    assert message.outcome.situation is Situation.FAILED


@pytest.mark.parametrize("word", ["NotExecuted", "Refused"])
def test_effect_that_may_not_be_repeated_is_in_doubt_after_an_inner_word(
    memory: OnceKey,
    provider: Provider,
    mail: Callable[[str, str], None],
    word: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    @memory.function("ride", key="order", effects="phased")
    def ride(order: str) -> None:
        def charge() -> None:
            provider.charge(order)
            mail(order, word)

        current().blocking.effect("charge", charge, repeatable=False)

    assert called(3, lambda: ride("k-1"))[1:] == [OutcomeUnknown, OutcomeUnknown]
    assert provider.charged == ["k-1"]
    assert "while effect 'charge', which may not be repeated, had not said how it ended" in caplog.text


# -- what the inner operation raises -----------------------------------------------------------------------------------


@pytest.fixture
def db(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A connection whose deferred constraint fails at the commit."""
    connection = sqlite3.connect(tmp_path / "shop.db")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("CREATE TABLE orders (id TEXT PRIMARY KEY)")
    connection.execute(
        "CREATE TABLE invoices (id TEXT, parent TEXT REFERENCES orders (id) DEFERRABLE INITIALLY DEFERRED)"
    )
    connection.commit()
    yield connection
    connection.close()


def test_inner_transaction_that_cannot_commit_says_nothing_about_the_charge(
    tmp_path: Path, provider: Provider, db: sqlite3.Connection
) -> None:
    with OnceKey(f"sqlite:///{tmp_path / 'shop.db'}", scope=SINGLE_TENANT) as once:

        @once.function("invoice", key="order", effects="transactional", ignore=["db"])
        def invoice(db: sqlite3.Connection, order: str) -> None:
            current().blocking.enlist(db)
            db.execute("INSERT INTO invoices VALUES (?, 'no such order')", (order,))

        @once.function("pay", key="order")
        def pay(order: str) -> None:
            provider.charge(order)
            invoice(db, order)

        assert called(3, lambda: pay("k-1")) == [NotExecuted, OutcomeUnknown, OutcomeUnknown]
    assert provider.charged == ["k-1"]


def test_refusal_to_run_the_inner_function_is_about_its_own_key(memory: OnceKey) -> None:
    """OutcomeUnknown, KeyReused and InProgress of another key: the effects of the function around it decide."""

    @memory.function("inner", key="order")
    def inner(order: str, amount: int = 1) -> None:
        if amount == 3:
            outer("k-3", 3)
        raise TimeoutError

    @memory.function("outer", key="order", effects="repeatable")
    def outer(order: str, amount: int = 1) -> None:
        inner("shared", amount)

    assert called(2, lambda: outer("k-1")) == [TimeoutError, OutcomeUnknown]
    assert called(1, lambda: outer("k-2", 2)) == [KeyReused]
    assert called(1, lambda: inner("busy", 3)) == [KeyReused]
    for key in ("k-1", "k-2", "k-3"):
        assert state_of(memory, "outer", key) is State.FAILED_RETRYABLE


def test_external_function_is_unknown_if_the_inner_one_is_in_progress(memory: OnceKey, provider: Provider) -> None:
    @memory.function("inner", key="order", effects="repeatable")
    def inner(order: str) -> None:
        outer("k-1")

    @memory.function("outer", key="order")
    def outer(order: str) -> None:
        provider.charge(order)
        inner("shared")

    assert called(1, lambda: inner("shared")) == [InProgress]
    assert called(2, lambda: outer("k-1")) == [OutcomeUnknown, OutcomeUnknown]
    assert provider.charged == ["k-1"]


# -- ways of an exception ----------------------------------------------------------------------------------------------


def again(error: Exception) -> None:
    raise error


def in_a_thread(call: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def as_it_is(call: Callable[[], None]) -> None:
    try:
        call()
    except NotExecuted:
        raise


def by_name(call: Callable[[], None]) -> None:
    try:
        call()
    except NotExecuted as error:
        again(error)


def from_a_process(call: Callable[[], None]) -> None:
    """As ProcessPoolExecutor carries it over."""
    try:
        call()
    except NotExecuted as error:
        again(pickle.loads(pickle.dumps(error)))  # noqa: S301 - our own bytes


def in_a_group(call: Callable[[], None]) -> None:
    try:
        call()
    except NotExecuted as error:
        raise ExceptionGroup("two tasks", [error]) from None


@pytest.mark.parametrize("way", [in_a_thread, as_it_is, by_name, from_a_process, in_a_group])
def test_exception_stays_the_inner_functions_on_every_way(
    memory: OnceKey, mail: Callable[[str, str], None], way: Callable[..., None]
) -> None:
    @memory.function("pay", key="order")
    def pay(order: str) -> None:
        way(lambda: mail(order, "NotExecuted"))

    called(1, lambda: pay("k-1"))
    assert state_of(memory, "pay") is State.UNKNOWN


def test_exception_of_another_oncekey_is_not_the_handlers_word(memory: OnceKey, provider: Provider) -> None:
    with OnceKey("memory://", scope=SINGLE_TENANT) as other:

        @other.function("mail", key="order")
        def mail(order: str) -> None:
            raise NotExecuted("down")

        @memory.function("pay", key="order")
        def pay(order: str) -> None:
            provider.charge(order)
            mail(order)

        assert called(2, lambda: pay("k-1")) == [NotExecuted, OutcomeUnknown]
    assert provider.charged == ["k-1"]


def test_new_exception_of_the_handler_is_its_own_word(memory: OnceKey, mail: Callable[[str, str], None]) -> None:
    @memory.function("pay", key="order")
    def pay(order: str) -> None:
        try:
            mail(order, "NotExecuted")
        except NotExecuted as error:
            raise NotExecuted("not charged either") from error

    assert called(3, lambda: pay("k-1")) == [NotExecuted, NotExecuted, NotExecuted]
    assert state_of(memory, "pay") is State.FAILED_RETRYABLE


def test_log_names_the_exception_as_another_operations(
    memory: OnceKey, mail: Callable[[str, str], None], caplog: pytest.LogCaptureFixture
) -> None:
    @memory.function("pay", key="order")
    def pay(order: str) -> None:
        mail(order, "NotExecuted")

    called(1, lambda: pay("k-1"))
    assert "its function raised NotExecuted (of another protected operation)" in caplog.text


def test_lost_lease_of_an_inner_operation_is_not_the_outers(memory: OnceKey) -> None:
    @memory.function("inner", key="order", effects="repeatable")
    def inner(order: str) -> None:
        raise LeaseLost("another attempt has it")

    @memory.function("pay", key="order")
    def pay(order: str) -> Any:
        inner(order)

    assert called(2, lambda: pay("k-1")) == [LeaseLost, OutcomeUnknown]
