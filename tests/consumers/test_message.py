"""One delivery without a broker, blocking and async: every situation of the table, reached for real."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import pytest

from oncekey import SINGLE_TENANT, NotExecuted, OnceKey, OutcomeUnknown, Policy, Refused, current
from oncekey.consumers import Action, Message, MessageNotRun, Outcome, Queue, Situation
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.errors import ConfigurationError, NoOperation, OperatorError, SchemaError, StoreUnavailable
from oncekey.stores.api import Store
from tests.cli.key_table import KeyTable
from tests.functions.test_attempt import SwapsFail

REPEATABLE = Policy(effects="repeatable")


def record_of(once: OnceKey, message_id: str = "m-1", queue: str = "payments") -> Record | None:
    return once.store.read([(once.key_scope("single-tenant", f"message {queue}"), message_id)])[0]


def state_of(once: OnceKey, message_id: str = "m-1", queue: str = "payments") -> State | None:
    record = record_of(once, message_id, queue)
    return None if record is None else record.state


def not_run(once: OnceKey, message_id: object = "m-1", body: Any = b"{}", **settings: Any) -> Outcome:
    """Deliver a message that must not run, and return what the broker is told."""
    message = once.message("payments", message_id, body, **settings)
    with pytest.raises(MessageNotRun) as caught, message:
        pytest.fail("the block ran")
    assert caught.value.outcome is message.outcome
    assert message.outcome is not None
    assert message.outcome.reason in str(caught.value)
    return message.outcome


def fail(once: OnceKey, error: BaseException, **settings: Any) -> Outcome:
    """Deliver a message whose block raises, and return what the broker is told."""
    message = once.message("payments", "m-1", b"{}", **settings)
    with pytest.raises(type(error)), message:
        raise error
    assert message.outcome is not None
    return message.outcome


def test_message_runs_once_and_its_duplicates_are_acknowledged(once: OnceKey) -> None:
    message = once.message("payments", "m-1", b"{}")
    with message as same:
        assert same is message
        assert (message.operation, message.attempt) == (current(), 1)
        assert message.outcome is None
    assert message.outcome == Outcome(Situation.HANDLED, Action.ACK)
    for _ in range(2):
        assert not_run(once) == Outcome(Situation.DUPLICATE, Action.ACK)
    assert state_of(once) is State.COMPLETED


async def test_async_message_runs_once_and_its_duplicates_are_acknowledged(once: OnceKey) -> None:
    runs = 0
    outcomes = []
    for _ in range(3):
        message = once.message("payments", "m-1", {"amount": 5})
        try:
            async with message:
                runs += 1
                assert message.operation is current()
        except MessageNotRun:
            pass
        outcomes.append(message.outcome and message.outcome.situation)
    assert runs == 1
    assert outcomes == [Situation.HANDLED, Situation.DUPLICATE, Situation.DUPLICATE]


def test_same_id_in_another_queue_is_another_message(once: OnceKey) -> None:
    with once.message("payments", "m-1", b"{}"), once.message("refunds", "m-1", b"other"):
        pass
    assert state_of(once, queue="refunds") is State.COMPLETED


def test_message_in_flight_goes_back_to_the_broker_with_a_delay(once: OnceKey) -> None:
    policy = Policy(retry_after=timedelta(seconds=3))
    with once.message("payments", "m-1", b"{}", policy=policy):
        outcome = not_run(once, policy=policy)
    assert outcome == Outcome(Situation.IN_FLIGHT, Action.RETRY, 3.0)


def test_message_in_flight_does_not_wait_also_if_the_policy_says_so(once: OnceKey) -> None:
    policy = Policy(in_flight="wait", wait=timedelta(seconds=50))
    with once.message("payments", "m-1", b"{}", policy=policy):
        assert not_run(once, policy=policy).situation is Situation.IN_FLIGHT


def end_lease(message: Message, url: str) -> None:
    """As if this process had died, or were paused, and the lease were over."""
    operation = message.operation
    message.queue.once.engine.keeper.unwatch(operation)
    table = KeyTable(url)
    table.age(operation.record, 3600)
    table.close()


def test_message_in_flight_with_a_dead_owner_is_delivered_after_the_lease(once: OnceKey, url: str) -> None:
    policy = Policy(effects="repeatable")
    first = once.message("payments", "m-1", b"{}", policy=policy)
    first.__enter__()
    with pytest.raises(MessageNotRun), once.message("payments", "m-1", b"{}", policy=policy):
        pass
    end_lease(first, url)
    with once.message("payments", "m-1", b"{}", policy=policy) as second:
        assert second.attempt == 2
    with pytest.raises(RuntimeError, match="entered before"):
        first.__enter__()
    first.__exit__(None, None, None)  # it was only paused: what the second delivery stored counts
    assert first.outcome == Outcome(Situation.DUPLICATE, Action.ACK)


def test_other_body_under_one_id_is_a_dead_letter(once: OnceKey) -> None:
    with once.message("payments", "m-1", b'{"amount": 5}'):
        pass
    outcome = not_run(once, body=b'{"amount": 6}')
    assert (outcome.situation, outcome.action) == (Situation.OTHER_BODY, Action.DEAD_LETTER)


def test_json_body_is_compared_by_its_values(once: OnceKey) -> None:
    with once.message("payments", "m-1", b'{"a": 1, "b": 2}', content_type="application/json"):
        pass
    assert not_run(once, body={"b": 2, "a": 1}).situation is Situation.DUPLICATE


@pytest.mark.parametrize("body", [bytearray(b"text"), memoryview(b"text"), "text"])
def test_body_may_be_bytes_or_text(once: OnceKey, body: Any) -> None:
    with once.message("payments", "m-1", b"text"):
        pass
    assert not_run(once, body=body).situation is Situation.DUPLICATE


def test_body_that_is_not_json_is_refused_before_anything_is_stored(once: OnceKey) -> None:
    with pytest.raises(ConfigurationError, match="bytes, text or a JSON value"):
        once.message("payments", "m-1", {"amount": {1, 2}}).__enter__()
    assert state_of(once) is None


@pytest.mark.parametrize("message_id", [None, "", " ", b"", "a\nb", "é", "x" * 256, 1.5, True, ["m-1"], b"\xff"])
def test_message_without_a_usable_id_is_a_dead_letter(once: OnceKey, message_id: object) -> None:
    outcome = not_run(once, message_id)
    assert (outcome.situation, outcome.action) == (Situation.BAD_ID, Action.DEAD_LETTER)
    assert "1 to 255 printable ASCII characters" in outcome.reason


@pytest.mark.parametrize(
    ("message_id", "key"),
    [("x" * 255, "x" * 255), (b"m-1", "m-1"), (42, "42"), (UUID(int=7), "00000000-0000-0000-0000-000000000007")],
)
def test_id_may_be_text_bytes_a_number_or_a_uuid(once: OnceKey, message_id: object, key: str) -> None:
    with once.message("payments", message_id, b"{}"):
        pass
    assert state_of(once, key) is State.COMPLETED


def test_body_larger_than_the_policy_allows_is_a_dead_letter(once: OnceKey) -> None:
    outcome = not_run(once, body=b"12345", policy=Policy(max_request_bytes=4))
    assert (outcome.situation, outcome.action) == (Situation.TOO_LARGE, Action.DEAD_LETTER)
    assert state_of(once) is None


def test_exception_under_external_effects_parks_the_message_and_it_never_runs_again(once: OnceKey) -> None:
    outcome = fail(once, RuntimeError("card declined?"))
    assert (outcome.situation, outcome.action) == (Situation.UNKNOWN, Action.PARK)
    assert not_run(once).action is Action.PARK
    assert state_of(once) is State.UNKNOWN


def test_unknown_message_is_kept_by_the_broker_if_declared_so(once: OnceKey) -> None:
    outcome = fail(once, OutcomeUnknown("timed out"), unknown="keep")
    assert (outcome.situation, outcome.action) == (Situation.UNKNOWN, Action.RETRY)
    assert not_run(once, unknown="keep") == Outcome(Situation.UNKNOWN, Action.RETRY, 60.0)


def test_exception_under_repeatable_effects_is_delivered_again_with_growing_delays(once: OnceKey) -> None:
    delays = [fail(once, RuntimeError(), policy=REPEATABLE).delay for _ in range(3)]
    assert delays == [1, 2, 4]
    with once.message("payments", "m-1", b"{}", policy=REPEATABLE) as message:
        assert message.attempt == 4
    assert not_run(once, policy=REPEATABLE).situation is Situation.DUPLICATE


def test_not_executed_is_delivered_again_whatever_the_effects(once: OnceKey) -> None:
    outcome = fail(once, NotExecuted("the provider is down"))
    assert (outcome.situation, outcome.action) == (Situation.FAILED, Action.RETRY)
    assert outcome.reason == "the handler raised NotExecuted"


def test_message_that_failed_at_its_last_attempt_is_a_dead_letter_and_runs_if_moved_back(once: OnceKey) -> None:
    settings: dict[str, Any] = {"policy": REPEATABLE, "max_attempts": 2}
    actions = [fail(once, ValueError(), **settings).action for _ in range(3)]
    assert actions == [Action.RETRY, Action.DEAD_LETTER, Action.DEAD_LETTER]
    with once.message("payments", "m-1", b"{}", **settings) as message:
        pass
    assert message.outcome is not None
    assert message.outcome.situation is Situation.HANDLED


@pytest.mark.parametrize("earlier", [0, 1])
def test_refused_message_is_a_dead_letter_and_runs_if_moved_back(once: OnceKey, earlier: int) -> None:
    for _ in range(earlier):
        fail(once, NotExecuted("at first"))
    outcome = fail(once, Refused("no such customer"))
    assert (outcome.situation, outcome.action) == (Situation.REFUSED, Action.DEAD_LETTER)
    with once.message("payments", "m-1", b"{}") as message:
        assert message.attempt == 1 + 2 * earlier


def test_message_whose_key_failed_for_good_is_a_dead_letter(once: OnceKey) -> None:
    def refuse_late() -> None:
        current().downstream_key("charge")  # the operation has begun, so a refusal is its final answer
        raise Refused("no such customer")

    message = once.message("payments", "m-1", b"{}")
    with pytest.raises(Refused), message:
        refuse_late()
    assert message.outcome is not None
    assert (message.outcome.situation, message.outcome.action) == (Situation.GIVEN_UP, Action.DEAD_LETTER)
    assert not_run(once).situation is Situation.GIVEN_UP


@pytest.mark.parametrize("error", [StoreUnavailable("down"), SchemaError("there is no epoch")])
async def test_store_that_cannot_be_asked_leaves_the_message_with_the_broker(
    once: OnceKey, error: OperatorError
) -> None:
    class Down:
        def __getattr__(self, name: str) -> Any:
            if name == "reserve":
                return self.refuse
            if name != "capabilities" and not hasattr(Store, name):
                raise AttributeError(name)
            return getattr(once.store, name)

        def refuse(self, batch: Any) -> Any:
            raise error

    with OnceKey(cast("Store", Down()), scope=SINGLE_TENANT) as failing:
        reason = f"its key could not be looked up in the store, so it was not run: {error}"
        assert not_run(failing) == Outcome(Situation.NO_STORE, Action.RETRY, 1.0, reason)
        message = failing.message("payments", "m-1", b"{}")
        with pytest.raises(MessageNotRun, match=f"message payments was not run: {reason}. Tell the broker: retry"):
            async with message:
                pytest.fail("the block ran")
        assert message.outcome == Outcome(Situation.NO_STORE, Action.RETRY, 1.0, reason)


async def test_outcome_that_is_not_stored_leaves_the_message_with_the_broker(once: OnceKey) -> None:
    policy = Policy(begin_timeout=timedelta(seconds=0.5))
    store = SwapsFail(once.store)
    with OnceKey(cast("Store", store), scope=SINGLE_TENANT) as failing:
        message = failing.message("payments", "m-1", b"{}", policy=policy)
        with pytest.raises(StoreUnavailable):
            async with message:
                pass
        assert message.outcome == Outcome(Situation.NOT_STORED, Action.RETRY, 1.0)
        store.down = False
    assert not_run(once, policy=policy).situation is Situation.DUPLICATE


def test_delivery_that_lost_its_key_takes_the_outcome_of_the_other(once: OnceKey, url: str) -> None:
    policy = Policy(effects="repeatable")
    first = once.message("payments", "m-1", b"{}", policy=policy)
    with first:
        end_lease(first, url)
        with once.message("payments", "m-1", b"{}", policy=policy):
            pass
    assert first.outcome == Outcome(Situation.DUPLICATE, Action.ACK)


def test_transactional_writes_commit_with_the_message(once: OnceKey, url: str) -> None:
    if not url.startswith("sqlite"):
        pytest.skip("the same in PostgreSQL is tests/consumers/test_kills.py")
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    connection.execute("CREATE TABLE payments (id TEXT)")
    policy = Policy(effects="transactional")
    for attempt in range(3):
        try:
            with once.message("payments", "m-1", b"{}", policy=policy) as message:
                message.operation.blocking.enlist(connection)
                connection.execute("INSERT INTO payments VALUES ('m-1')")
                if attempt == 0:
                    raise RuntimeError("after the insert")
        except (RuntimeError, MessageNotRun):
            pass
    assert connection.execute("SELECT count(*) FROM payments").fetchone() == (1,)
    connection.close()


async def test_cancelled_block_is_judged_by_its_effects(once: OnceKey) -> None:
    entered = asyncio.Event()
    message = once.message("payments", "m-1", b"{}", policy=REPEATABLE)

    async def handle() -> None:
        async with message:
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(handle())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert message.outcome is not None
    assert message.outcome.action is Action.RETRY
    assert state_of(once) is State.FAILED_RETRYABLE


@pytest.mark.parametrize(
    ("policy", "days"),
    [
        (None, 14),
        (Policy(effects="repeatable"), 14),
        (replace(Policy(effects="repeatable"), lease=timedelta(seconds=5)), 14),
        (Policy(ttl=timedelta(days=3)), 3),
        (Policy(effects="repeatable", ttl=timedelta(hours=24)), 1),
    ],
)
def test_keys_of_messages_are_kept_for_two_weeks_unless_the_policy_states_a_ttl(
    once: OnceKey, policy: Policy | None, days: int
) -> None:
    with once.message("payments", "m-1", b"{}", policy=policy):
        pass
    record = record_of(once)
    assert record is not None
    assert record.retention_seconds == days * 86_400


def test_message_of_an_app_with_tenants_needs_a_scope(once: OnceKey) -> None:
    with OnceKey(once.store, scope=lambda request: "acme") as tenants:
        with pytest.raises(ConfigurationError, match=r"scope='…'"):
            tenants.message("payments", "m-1", b"{}").__enter__()
        for tenant in ("acme", "other"):
            with tenants.message("payments", "m-1", b"{}", scope=tenant) as message:
                assert message.operation.scope == tenant


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"name": ""}, "1 to 200 printable"),
        ({"name": "a\nb"}, "1 to 200 printable"),
        ({"unknown": "ignore"}, "'park' or 'keep'"),
        ({"max_attempts": 0}, "whole number from 1"),
        ({"max_attempts": "3"}, "whole number from 1"),
        ({"policy": "transactional"}, "it takes a Policy"),
    ],
)
def test_setting_that_makes_no_sense_is_refused_with_what_it_takes(settings: dict[str, Any], says: str) -> None:
    with OnceKey("memory://", scope=SINGLE_TENANT) as once, pytest.raises(ConfigurationError, match=says):
        Queue(once, **{"name": "payments", **settings})


def test_message_outside_of_its_block_has_no_operation() -> None:
    with OnceKey("memory://", scope=SINGLE_TENANT) as once:
        message = once.message("payments", "m-1", b"{}")
        with pytest.raises(NoOperation):
            message.operation  # noqa: B018
        with pytest.raises(RuntimeError, match="was not entered"):
            message.__exit__(None, None, None)


@pytest.mark.parametrize("is_async", [False, True])
async def test_message_with_a_personal_id_is_a_dead_letter(once: OnceKey, is_async: bool) -> None:
    message = once.message("payments", "ann@example.com", b"{}", policy=Policy(pii="refuse"))
    with pytest.raises(MessageNotRun) as caught:
        await message.__aenter__() if is_async else message.__enter__()
    assert message.outcome is not None
    assert (message.outcome.situation, message.outcome.action) == (Situation.BAD_ID, Action.DEAD_LETTER)
    assert "an e-mail address" in str(caught.value)
    assert "ann@" not in str(caught.value)
    assert once.store.listing() == []


@pytest.mark.parametrize("is_async", [False, True])
async def test_repeated_message_with_a_personal_id_from_before_is_a_duplicate(once: OnceKey, is_async: bool) -> None:
    with once.message("payments", "ann@example.com", b"{}"):
        pass
    message = once.message("payments", "ann@example.com", b"{}", policy=Policy(pii="refuse"))
    with pytest.raises(MessageNotRun):
        await message.__aenter__() if is_async else message.__enter__()
    assert message.outcome is not None
    assert (message.outcome.situation, message.outcome.action) == (Situation.DUPLICATE, Action.ACK)


async def test_warning_about_an_unknown_outcome_speaks_of_the_queue(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/keys.db"
    with OnceKey(url, scope=SINGLE_TENANT) as once, pytest.raises(ZeroDivisionError):
        async with once.message("payments", "m-1", b""):
            _ = 1 / 0
    (line,) = [each.getMessage() for each in caplog.records if "left a key whose" in each.getMessage()]
    assert "message payments left a key" in line
    assert "Its repeated deliveries are refused" in line
    assert "declare the queue 'transactional'" in line
    assert "--endpoint 'message payments'" in line
    assert "route" not in line
