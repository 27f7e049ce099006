"""What DynamoDB's items hold besides the record: parts, pointers, the audit of a deleted key, a time to live."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from oncekey.core.audit import Audit
from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.steps import Step, StepKind, StepsOf, StepState
from oncekey.core.swaps import swap
from oncekey.errors import StoreError
from oncekey.stores.api import Duty
from oncekey.stores.dynamodb import DynamoStore
from oncekey.stores.dynamodb.items import DAY, hash_of
from oncekey.stores.dynamodb.writes import KEPT
from oncekey.testing.servers import DynaliteServer
from oncekey.testing.store_suite import Clock
from tests.engine.doubles import RESPONSE, reservation
from tests.stores.dynamo_rows import all_items, asking, item, opened

pytestmark = pytest.mark.stores

LARGE = StoredResponse(200, (), bytes(range(256)) * 4000)
REQUEST = Step("oncekey:request", StepKind.PHASE, StepState.INTENDED, repeatable=True, result=b"r" * 900_000)
CHARGE = Step("charge", StepKind.EFFECT, StepState.INTENDED, repeatable=True, downstream_key="dk_1")
WHY = Audit("ana@example.com", "the ledger has it")


@pytest.fixture
def url(dynalite_server: DynaliteServer) -> str:
    return dynalite_server.new_url()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(url: str, clock: Clock) -> Iterator[DynamoStore]:
    with opened(url, timeout=20.0, clock=clock) as store:
        store.migrate()
        yield store


def begun(store: DynamoStore, key: str = "key") -> Record:
    record = store.reserve([reservation(key, effects=Effects.REPEATABLE)])[0].record
    assert record is not None
    return record


def one(rows: list[Record | None]) -> Record:
    assert rows[0] is not None
    return rows[0]


def completed(store: DynamoStore, response: StoredResponse = RESPONSE, key: str = "key") -> Record:
    return one(store.swap([swap(begun(store, key), Event.COMPLETE, Actor.OWNER, response=response)]))


def sort_keys(url: str) -> list[str]:
    return sorted(item["sk"]["S"].partition("-")[0] for item in all_items(url))


# ---------------------------------------------------------------- large values


def test_large_body_and_large_result_are_stored_beside_the_key(store: DynamoStore, url: str) -> None:
    record = one(store.swap([swap(begun(store), Event.ADVANCE, Actor.OWNER, recovery_point="r", step=REQUEST)]))
    done = one(store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=LARGE)]))
    assert done.response == LARGE
    assert store.read([("tenant-1", "key")])[0] == replace(done, now=store._clock())
    found = store.reserve([reservation("key")])[0].record
    assert found is not None
    assert found.response == LARGE
    assert store.steps([StepsOf("tenant-1", "key")]) == [[REQUEST]]
    assert sort_keys(url) == ["key", *["part"] * 6]
    assert max(len(str(each)) for each in all_items(url) if each["sk"]["S"] == "key") < 10_000


@pytest.mark.parametrize("ending", ["forgotten", "purged", "expired and kept", "started over"])
def test_parts_and_pointers_are_deleted_with_what_named_them(
    store: DynamoStore, url: str, clock: Clock, ending: str
) -> None:
    record = begun(store)
    for step in (REQUEST, replace(CHARGE, provider_id="ch_1")):
        record = one(store.swap([swap(record, Event.ADVANCE, Actor.OWNER, recovery_point="r", step=step)]))
    done = one(store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=LARGE)]))
    assert len(all_items(url)) == 1 + 3 + 3 + 2
    clock.now = done.expires_at + 1.0
    match ending:
        case "forgotten":
            assert one(store.swap([swap(done, Event.FORGET, Actor.OPERATOR)])).response == LARGE
        case "purged":
            assert store.purge(10) == 1
        case "expired and kept":
            one(store.swap([swap(done, Event.EXPIRE, Actor.REAPER, to_state=State.EXPIRED)]))
        case _:
            one(store.swap([swap(done, Event.RESERVE, Actor.REQUEST, reservation=reservation("key"))]))
    assert sort_keys(url) == ([] if ending in ("forgotten", "purged") else ["key"])


def test_step_that_is_written_again_replaces_its_parts(store: DynamoStore, url: str) -> None:
    record = one(store.swap([swap(begun(store), Event.ADVANCE, Actor.OWNER, recovery_point="r", step=REQUEST)]))
    again = replace(REQUEST, result=b"s" * 20_000)
    one(store.swap([swap(record, Event.ADVANCE, Actor.OWNER, step=again)]))
    assert store.steps([StepsOf("tenant-1", "key")]) == [[again]]
    assert sort_keys(url) == ["key", "part"]


def test_refused_write_leaves_no_parts(store: DynamoStore, url: str) -> None:
    late = replace(swap(begun(store), Event.COMPLETE, Actor.OWNER, response=LARGE), owner="another")
    assert store.swap([late]) == [None]
    assert sort_keys(url) == ["key"]


def test_key_whose_parts_are_gone_is_never_a_first_request(store: DynamoStore, url: str) -> None:
    """It can only be so for a moment, while the key is deleted; if it stays so, requests get 409."""
    completed(store, LARGE)
    with asking(url) as ask:
        for each in all_items(url):
            if each["sk"]["S"] != "key":
                ask("delete_item", Key={"pk": each["pk"], "sk": each["sk"]})
    assert store.reserve([reservation("key")])[0].busy


def test_key_that_outgrows_its_item_is_an_error_that_says_so(store: DynamoStore) -> None:
    record = begun(store)
    steps = [replace(REQUEST, name=f"step-{number}", result=b"x" * 16_000) for number in range(40)]

    def write_all() -> None:
        for step in steps:
            one(store.swap([swap(record, Event.ADVANCE, Actor.OWNER, lease_seconds=60.0, step=step)]))

    with pytest.raises(StoreError, match="400 KB"):
        write_all()


# ---------------------------------------------------------------- pointers


def test_pointer_to_a_step_that_was_not_written_is_not_believed(store: DynamoStore, url: str) -> None:
    """The pointer is written first. The write of the step was refused, or its process died."""
    late = replace(swap(begun(store), Event.ADVANCE, Actor.OWNER, step=CHARGE), owner="another")
    assert store.swap([late]) == [None]
    assert len(all_items(url)) == 2
    assert store.find(downstream_key="dk_1") == []


# ---------------------------------------------------------------- the audit


def test_audit_of_a_deleted_key_stays_and_the_key_is_new(store: DynamoStore, url: str, clock: Clock) -> None:
    """No duty and no listing shows what is left of it; a reservation is a first one; purged, nothing is left."""
    gone = one(store.swap([swap(completed(store), Event.FORGET, Actor.OPERATOR, audit=WHY)]))
    assert gone.response == RESPONSE
    left = item(url, "key")
    assert {"audit", "scope", "key"} <= left.keys()
    assert not {"state", "owner", "body", "place", "due", "steps"} & left.keys()
    assert (store.read([("tenant-1", "key")]), store.listing(), store.counts().counts[State.COMPLETED]) == (
        [None],
        [],
        0,
    )
    assert begun(store).attempt == 1
    assert len(store.audit("tenant-1", "key", 9)) == 1
    assert store.purge_audit(9, 0.0) == 0, "the key is in progress"
    clock.advance(100)
    one(store.swap([swap(one(store.read([("tenant-1", "key")])), Event.DISCARD, Actor.OWNER)]))
    assert len(store.audit("tenant-1", "key", 9)) == 1
    assert store.purge_audit(9, 0.0) == 1
    assert all_items(url) == []


def test_purged_key_leaves_its_audit(store: DynamoStore, clock: Clock) -> None:
    record = begun(store)
    record = one(store.swap([swap(record, Event.RENEW, Actor.OWNER, lease_seconds=60.0, audit=WHY)]))
    done = one(store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)]))
    clock.now = done.expires_at + 1.0
    assert store.purge(10) == 1
    assert store.read([("tenant-1", "key")]) == [None]
    assert [line.who for line in store.audit("tenant-1", "key", 9)] == [WHY.who]
    assert store.purge(10) == 0


# ---------------------------------------------------------------- time


def test_time_to_live_is_set_on_keys_that_are_over_and_on_no_others(store: DynamoStore, url: str) -> None:
    record = begun(store)
    assert "ttl" not in item(url, "key")
    done = one(store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)]))
    assert int(item(url, "key")["ttl"]["N"]) == int(done.expires_at + done.retention_seconds) + DAY
    doubted = one(store.swap([swap(begun(store, "doubted"), Event.DOUBT, Actor.OWNER)]))
    assert "ttl" not in item(url, "doubted")
    one(store.swap([swap(doubted, Event.CONFIRM, Actor.OPERATOR, response=RESPONSE, audit=WHY)]))
    assert int(item(url, "doubted")["ttl"]["N"]) == KEPT, "its audit would be deleted with it"


def test_item_with_an_audit_is_kept_by_later_moves_too(store: DynamoStore, url: str) -> None:
    record = begun(store)
    record = one(store.swap([swap(record, Event.RENEW, Actor.OWNER, lease_seconds=60.0, audit=WHY)]))
    one(store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)]))
    assert int(item(url, "key")["ttl"]["N"]) == KEPT


def test_expired_key_is_started_over_although_nothing_deleted_it(store: DynamoStore, clock: Clock) -> None:
    """No decision waits for DynamoDB's own deletion, and none comes too early."""
    done = completed(store)
    again = swap(done, Event.RESERVE, Actor.REQUEST, reservation=reservation("key"))
    clock.now = done.expires_at - 0.1
    assert store.swap([again]) == [None]
    clock.now = done.expires_at
    assert one(store.swap([again])).state is State.IN_PROGRESS


def test_lease_of_another_counts_a_margin_longer(url: str, clock: Clock) -> None:
    """The owner's clock may be behind the one of the host that takes over."""
    with opened(url, timeout=20.0, clock=clock, margin=5.0) as store:
        store.migrate()
        record = begun(store)
        clock.now = record.lease_until + 4.9
        over = swap(replace(record, now=clock.now), Event.RELEASE, Actor.SWEEPER)
        assert store.swap([over]) == [None]
        assert store.due(Duty.LEASES, 10) == []
        clock.now = record.lease_until + 5.0
        assert len(store.due(Duty.LEASES, 10)) == 1
        assert one(store.swap([over])).state is State.FAILED_RETRYABLE


def test_move_from_an_older_look_takes_the_row_as_it_is(store: DynamoStore, url: str, clock: Clock) -> None:
    """The owner wrote a step after its caller had read the row: the released key is half done, and listed as such."""
    record = begun(store)
    one(store.swap([swap(record, Event.ADVANCE, Actor.OWNER, recovery_point="charged", step=CHARGE)]))
    released = one(store.swap([swap(record, Event.RELEASE, Actor.OWNER)]))
    assert released.recovery_point == "charged"
    assert item(url, "key")["place"]["S"].startswith("half_done#")
    clock.now = released.expires_at
    assert [row.key for row in store.due(Duty.LAPSED, 10)] == ["key"]
    assert store.purge(10) == 0


def test_tenants_do_not_share_a_hash() -> None:
    assert len({hash_of("a", "bc"), hash_of("ab", "c"), hash_of("abc", ""), hash_of("", "abc")}) == 4
