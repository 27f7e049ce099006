"""Requests to DynamoDB that are repeated, refused for a moment, or late: each write is applied once, and is recognised.

The first attempt is really applied, and its answer is really lost: on the wire by the proxy, or by a server in between
that answers with an error of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oncekey.core.audit import Audit
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.steps import Step, StepKind, StepsOf, StepState
from oncekey.core.swaps import Swap, swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.dynamodb import DynamoStore, writes
from oncekey.stores.dynamodb.client import Conflict
from oncekey.stores.dynamodb.items import address, hash_of
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import HOST, DynamoServer
from tests.engine.doubles import RESPONSE, reservation
from tests.stores.dynamo_between import between
from tests.stores.dynamo_rows import all_items, item, opened, port_of, through
from tests.stores.test_dynamodb_races import SERVERS

pytestmark = pytest.mark.stores

INTENT = Step("charge", StepKind.EFFECT, StepState.INTENDED, repeatable=True, downstream_key="dk_1")
DONE = Step("charge", StepKind.EFFECT, StepState.DONE, repeatable=True, result=b'"ch_1"', downstream_key="dk_1")
WHY = Audit("ana@example.com", "the ledger has it")


@pytest.fixture(params=SERVERS)
def url(request: pytest.FixtureRequest) -> str:
    server: DynamoServer = request.getfixturevalue(request.param)
    return server.new_url()


@pytest.fixture
def store(url: str) -> Iterator[DynamoStore]:
    with opened(url, timeout=20.0) as store:
        store.migrate()
        yield store


def begun(store: DynamoStore, key: str = "key", **options: Any) -> Record:
    record = store.reserve([reservation(key, **options)])[0].record
    assert record is not None
    return record


def one(rows: list[Record | None]) -> Record:
    assert rows[0] is not None
    return rows[0]


def retry(record: Record) -> Swap:
    return swap(record, Event.RETRY, Actor.REQUEST, reservation=reservation("key"))


def complete(record: Record, response: StoredResponse = RESPONSE) -> Swap:
    return swap(record, Event.COMPLETE, Actor.OWNER, response=response)


MOVES: dict[str, tuple[State, Callable[[Record], Swap]]] = {
    "complete": (State.IN_PROGRESS, complete),
    "complete, large": (State.IN_PROGRESS, lambda row: complete(row, StoredResponse(200, (), b"x" * 300_000))),
    "renew": (State.IN_PROGRESS, lambda row: swap(row, Event.RENEW, Actor.OWNER, lease_seconds=60.0, audit=WHY)),
    "advance": (State.IN_PROGRESS, lambda row: swap(row, Event.ADVANCE, Actor.OWNER, step=INTENT, audit=WHY)),
    "retry": (State.FAILED_RETRYABLE, retry),
    "postpone": (State.UNKNOWN, lambda row: swap(row, Event.POSTPONE, Actor.RECONCILER, reconcile_in=9.0, audit=WHY)),
}
_LEADS = {State.FAILED_RETRYABLE: Event.RELEASE, State.UNKNOWN: Event.DOUBT}


def prepared(store: DynamoStore, state: State) -> Record:
    record = begun(store, effects=Effects.REPEATABLE)
    return one(store.swap([swap(record, _LEADS[state], Actor.OWNER)])) if state in _LEADS else record


def check_applied_once(url: str, store: DynamoStore, change: Swap, moved: Record | None) -> None:
    assert moved is not None, "our own success, not a conflict"
    assert moved.state is change.to_state
    assert store.read([("tenant-1", "key")])[0] is not None
    found = item(url, "key")
    assert len(found.get("audit", {"L": []})["L"]) == (change.audit is not None)
    assert int(found["step_count"]["N"]) == (change.step is not None)


# ---------------------------------------------------------------- an answer that is lost


def test_reservation_whose_answer_is_lost_finds_itself(store: DynamoStore, url: str) -> None:
    with TcpProxy(HOST, port_of(url)) as proxy, opened(through(proxy, url), timeout=20.0) as far:
        cut = proxy.cut_on("to_server", b"cut-this-key", when="after")
        wanted = reservation("cut-this-key")
        found = far.reserve([wanted])[0].record
        assert cut.wait(5)
        assert found is not None
        assert (found.owner, found.state) == (wanted.owner, State.IN_PROGRESS)


@pytest.mark.parametrize("when", ["after", pytest.param("before", marks=pytest.mark.stores)])
@pytest.mark.parametrize("name", list(MOVES))
def test_move_whose_answer_is_lost_is_applied_once(store: DynamoStore, url: str, name: str, when: Any) -> None:
    state, move = MOVES[name]
    change = move(prepared(store, state))
    with TcpProxy(HOST, port_of(url)) as proxy, opened(through(proxy, url), timeout=20.0) as far:
        cut = proxy.cut_on("to_server", lambda sent: b"UpdateExpression" in sent or b"number" in sent, when=when)
        (moved,) = far.swap([change])
        assert cut.wait(5)
    check_applied_once(url, store, change, moved)


def test_key_that_is_deleted_with_an_audit_is_deleted_once_although_the_answer_is_lost(
    store: DynamoStore, url: str
) -> None:
    done = one(store.swap([complete(begun(store))]))
    with TcpProxy(HOST, port_of(url)) as proxy, opened(through(proxy, url), timeout=20.0) as far:
        cut = proxy.cut_on("to_server", b"UpdateExpression", when="after")
        gone = one(far.swap([swap(done, Event.FORGET, Actor.OPERATOR, audit=WHY)]))
        assert cut.wait(5)
    assert gone.response == RESPONSE
    assert store.read([("tenant-1", "key")]) == [None]
    assert len(store.audit("tenant-1", "key", 10)) == 1


def test_second_call_of_the_same_move_is_refused(store: DynamoStore) -> None:
    """Only a repeat of the same request is recognised: a caller that asks twice is told that the row has moved."""
    change = retry(prepared(store, State.FAILED_RETRYABLE))
    assert store.swap([change]) != [None]
    assert store.swap([change]) == [None]


def test_write_that_arrives_after_a_later_one_changes_nothing(store: DynamoStore) -> None:
    """The intent of an effect is held up in the network; its repeat, the call and the result come first."""
    record = begun(store)
    intent = swap(record, Event.ADVANCE, Actor.OWNER, recovery_point="started", step=INTENT)
    late = writes.move(intent, record, store._write(intent))
    started = one(store.swap([intent]))
    one(store.swap([swap(started, Event.ADVANCE, Actor.OWNER, recovery_point="charge", step=DONE)]))
    with pytest.raises(Conflict):
        store._client.verb()("update_item", Key=address("tenant-1", "key"), **late)
    assert store.steps([StepsOf("tenant-1", "key")]) == [[DONE]]


# ---------------------------------------------------------------- a server that is busy


BUSY = [
    ("InternalServerError", 500),
    pytest.param("ThrottlingException", 400, marks=pytest.mark.stores),
    pytest.param("ProvisionedThroughputExceededException", 400, marks=pytest.mark.stores),
]


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize(("error", "status"), BUSY)
@pytest.mark.parametrize("name", ["complete", "advance", "retry"])
def test_busy_server_is_asked_again_and_the_move_is_applied_once(
    store: DynamoStore, url: str, name: str, error: str, status: int, applied: bool
) -> None:
    """Also if the server had applied it: an internal error says nothing about that."""
    state, move = MOVES[name]
    change = move(prepared(store, state))
    with (
        between(url) as shim,
        opened(shim.url_of(url), timeout=20.0) as far,
    ):
        far.read([("tenant-1", "x")])
        shim.refusals, shim.applied, shim.error, shim.status = 2, applied, error, status
        (moved,) = far.swap([change])
        assert shim.seen == 2
    check_applied_once(url, store, change, moved)


def test_throttling_that_lasts_is_unavailable_in_time(store: DynamoStore, url: str) -> None:
    with (
        between(url) as shim,
        opened(shim.url_of(url), timeout=5.0) as far,
    ):
        shim.refusals = 10_000
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match="it is throttled"):
            far.reserve([reservation("throttled")])
        assert time.monotonic() - start < 15
    assert shim.seen > 1
    assert store.read([("tenant-1", "throttled")]) == [None]


def test_throttled_key_does_not_keep_the_others_of_its_batch_waiting(store: DynamoStore, url: str) -> None:
    """A client hammers one key: its requests get 409, and the keys beside it are reserved and completed (I6)."""
    wanted = [reservation(f"key-{number}") for number in range(6)]
    with (
        between(url) as shim,
        opened(shim.url_of(url), timeout=3.0) as far,
    ):
        shim.refusals, shim.hot = 10_000, hash_of("tenant-1", "key-2").encode()
        found = far.reserve(wanted)
        assert [each.busy for each in found] == [False, False, True, False, False, False]
        mine = store.reserve([wanted[2]])[0].record
        rows = [each.record or mine for each in found]
        moved = far.swap([complete(row) for row in rows if row is not None])
        assert [row is None for row in moved] == [False, False, True, False, False, False]


def test_refused_key_of_a_batch_does_not_lose_the_others(store: DynamoStore, url: str) -> None:
    """Each key commits by itself: asked again, those that were reserved find themselves."""
    wanted = [reservation(f"key-{number}") for number in range(6)]
    with (
        between(url) as shim,
        opened(shim.url_of(url), timeout=20.0) as far,
    ):
        shim.refusals, shim.error = 1, "AccessDeniedException"
        with pytest.raises(StoreUnavailable, match="IAM policy"):
            far.reserve(wanted)
        assert len(all_items(url)) == 5
        found = far.reserve(wanted)
    assert [each.record and each.record.owner for each in found] == [each.owner for each in wanted]
