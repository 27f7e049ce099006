"""The two packets of a request on MySQL: each row gets its own values, and no batch reads the whole table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import pytest

from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.swaps import Swap, swap
from oncekey.stores.mysql import MysqlStore, request_rows
from oncekey.stores.mysql.connection import Connection
from oncekey.stores.mysql.packets import filled, statement
from tests.engine.doubles import reservation
from tests.stores.mysql import complete, holding, opened, put, run

pytestmark = pytest.mark.stores

_T = TypeVar("_T")


@pytest.fixture
def store(ready_mysql: str) -> Iterator[MysqlStore]:
    with opened(ready_mysql) as store:
        yield store


def varied(number: int) -> Reservation:
    """A reservation that shares as little as it can with the others. Two scopes have the same keys."""
    return replace(
        reservation(f"key-{number // 2}", scope=f"tenant-{number % 2}", fingerprint=b"%032d" % number),
        operation=f"POST /payments/{number}",
        fingerprint_version=number,
        fingerprint_recipe=f"recipe-{number}" if number % 3 else None,
        effects=list(Effects)[number % len(Effects)],
        lease_seconds=10.0 + number,
        retention_seconds=1000.5 + number,
        quarantine_seconds=float(number) if number % 3 else None,
    )


def varied_end(record: Record, number: int) -> Swap:
    headers = (("x-number", f"it's {number}"),)
    if number % 4 == 3:
        return swap(record, Event.FAIL, Actor.OWNER, response=None, last_error=f"error {number}")
    answer = StoredResponse(200 + number, headers, b"\0\xff'%d\\" % number)
    return swap(record, Event.COMPLETE, Actor.OWNER, response=answer)


def read(store: MysqlStore, records: list[Record]) -> list[Record | None]:
    return [row and replace(row, now=0.0) for row in store.read([(record.scope, record.key) for record in records])]


def reserved(store: MysqlStore, wanted: list[Reservation]) -> list[Record]:
    records = [found.record for found in store.reserve(wanted) if found.record is not None]
    assert len(records) == len(wanted)
    return records


@pytest.mark.parametrize("size", [1, 2, 12])
def test_reserve_answers_what_read_finds(store: MysqlStore, size: int) -> None:
    """Records of rows that were all inserted are not read back: they are made of the reservations."""
    wanted = [varied(number) for number in range(size)]
    records = reserved(store, wanted)
    assert read(store, records) == [replace(record, now=0.0) for record in records]
    assert [record.operation for record in records] == [each.operation for each in wanted]
    assert [record.owner for record in records] == [each.owner for each in wanted]


def test_reserve_reads_the_rows_if_one_was_there(store: MysqlStore) -> None:
    (first,) = reserved(store, [varied(0)])
    records = reserved(store, [varied(number) for number in range(4)])
    assert records[0].owner == first.owner
    assert read(store, records) == [replace(record, now=0.0) for record in records]


@pytest.mark.parametrize("verb", ["reserve", "both"])
@pytest.mark.parametrize("galera", [True, False])
def test_reserve_reads_the_rows_in_a_galera_cluster(
    store: MysqlStore, verb: str, galera: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write of another node can come between two statements of a packet. A single server has no such writes."""
    (other,) = put(store, "other")
    real = Connection._run
    counted = "SET @oncekey_count = row_count();"
    packets: list[str] = []

    def run(self: Connection, text: str) -> list[object]:
        packets.append(text)
        return real(self, text.replace(counted, f"{counted} UPDATE idempotency_keys SET owner = 'rival';"))

    monkeypatch.setattr(Connection, "galera", galera)
    monkeypatch.setattr(Connection, "_run", run)
    wanted = reservation("key-1")
    found = store.reserve([wanted]) if verb == "reserve" else store.both([wanted], [complete(other)])[0]
    assert found[0].record is not None
    assert found[0].record.owner == ("rival" if galera else wanted.owner)
    assert sum(counted in packet for packet in packets) == 1


@pytest.mark.parametrize("size", [1, 2, 12])
def test_end_gives_each_row_its_own_values(store: MysqlStore, size: int) -> None:
    records = reserved(store, [varied(number) for number in range(size)])
    moved = store.swap([varied_end(record, number) for number, record in enumerate(records)])
    assert None not in moved
    assert [row and row.response for row in moved] == [varied_end(row, n).response for n, row in enumerate(records)]
    assert read(store, records) == [row and replace(row, now=0.0) for row in moved]


def test_both_gives_each_row_its_own_values(store: MysqlStore) -> None:
    records = reserved(store, [varied(number) for number in range(6)])
    begins = [varied(number) for number in range(6, 12)]
    found, moved = store.both(begins, [varied_end(record, number) for number, record in enumerate(records)])
    begun = [each.record for each in found if each.record is not None]
    assert [record.owner for record in begun] == [wanted.owner for wanted in begins]
    assert read(store, [*records, *begun]) == [row and replace(row, now=0.0) for row in [*moved, *begun]]


def test_owners_that_are_not_those_of_their_rows_end_nothing(store: MysqlStore) -> None:
    """Each owner is one of the batch, but of another row."""
    first, second, third = put(store, "key-1", "key-2", "key-3")
    crossed = [replace(complete(first), owner=second.owner), replace(complete(second), owner=first.owner)]
    moved = store.swap([*crossed, complete(third)])
    assert [row and row.state for row in moved] == [None, None, State.COMPLETED]
    assert [row and row.state for row in store.read([("tenant-1", f"key-{n}") for n in (1, 2, 3)])] == [
        State.IN_PROGRESS,
        State.IN_PROGRESS,
        State.COMPLETED,
    ]


def test_one_owner_of_two_rows_ends_both_with_their_own_responses(store: MysqlStore) -> None:
    records = reserved(store, [reservation(f"key-{number}", owner="same") for number in range(2)])
    moved = store.swap([varied_end(record, number) for number, record in enumerate(records)])
    assert [row and row.response and row.response.status for row in moved] == [200, 201]
    assert read(store, records) == [row and replace(row, now=0.0) for row in moved]


def test_rows_beside_one_that_is_locked_or_lost_end_with_their_own_responses(store: MysqlStore) -> None:
    records = reserved(store, [varied(number) for number in range(0, 12, 2)])
    changes = [varied_end(record, number) for number, record in enumerate(records)]
    changes[1] = replace(changes[1], owner="an owner that lost its lease")
    with holding(store.url, "SELECT 1 FROM idempotency_keys WHERE scope = 'tenant-0' AND `key` = 'key-4' FOR UPDATE"):
        moved = store.swap(changes)
    assert [row is None for row in moved] == [False, True, False, False, True, False]
    for row, found in zip(moved, read(store, records), strict=True):
        assert found is not None
        assert found.state is State.IN_PROGRESS if row is None else found == replace(row, now=0.0)


@pytest.mark.parametrize("scopes", [1, 3])
@pytest.mark.parametrize("size", [1, 3, 600])
def test_packets_of_a_request_read_their_rows_by_the_primary_key(store: MysqlStore, size: int, scopes: int) -> None:
    """MariaDB reads more for some lists of pairs: its UPDATE the whole scope for one pair, and 1,000 values a table."""
    wanted = [reservation(f"key-{number}", scope=f"tenant-{number % scopes}") for number in range(size + 100)]
    records = reserved(store, wanted)[:size]
    ends = [complete(record) for record in records]
    values = {"size": size, "owned": request_rows.owned(ends), **request_rows.ending(ends)}
    lock, update = filled(statement("end_rows"), values).split(";\n")
    keys = [(record.scope, record.key) for record in records]
    look = filled(statement("read", "k.state"), {"among": request_rows.among(keys)})
    connection = store._connection()
    connection.run(f"SET @oncekey_count = {size}")
    assert [_rows_of_plan(connection, text) for text in (lock, update, look)] == [size] * 3


_NAMES = ("Com_insert_select", "Com_update", "Com_commit")
_STATUS = f"SHOW GLOBAL STATUS WHERE Variable_name IN {(*_NAMES, 'Handler_commit')}"


def test_batch_is_one_packet_and_one_commit_however_many_rows_it_has(
    store: MysqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reservation is one INSERT, which commits by itself. The end is one UPDATE with one COMMIT."""
    packets: list[str] = []
    send = Connection._run

    def counting(self: Connection, text: str) -> list[object]:
        packets.append(text)
        return send(self, text)

    def counted(verb: Callable[[], list[_T]]) -> tuple[list[_T], dict[str, int]]:
        """``Handler_commit``: transactions of InnoDB, those of this test's own questions too."""
        before = dict(run(store.url, _STATUS))
        packets.clear()
        result = verb()
        after = dict(run(store.url, _STATUS))
        return result, {"packets": len(packets)} | {name: int(after[name]) - int(before[name]) for name in before}

    def counts(size: int) -> list[dict[str, int]]:
        records, reserving = counted(lambda: put(store, *(f"key-{size}-{number}" for number in range(size))))
        moved, ending = counted(lambda: store.swap([complete(record) for record in records]))
        assert [row and row.state for row in moved] == [State.COMPLETED] * size
        return [reserving, ending]

    monkeypatch.setattr(Connection, "_run", counting)
    put(store, "warm")
    reserving, ending = of_one = counts(1)
    assert [reserving[name] for name in ("packets", *_NAMES)] == [1, 1, 0, 0]
    assert [ending[name] for name in ("packets", *_NAMES)] == [1, 0, 1, 1]
    assert counts(32) == of_one


def _rows_of_plan(connection: Connection, text: str) -> int:
    """How many rows the server expects to read, of its own primary key's ranges."""
    ((row,),) = connection.run(f"EXPLAIN FORMAT = TRADITIONAL {text.replace('INTO @oncekey_count', '')}")
    *_, kind, _possible, index, _length, _refers, count = row[: 9 if len(row) == 10 else 10]  # MySQL has partitions
    assert (kind in {"range", "const"}, index) == (True, "PRIMARY"), row
    return int(count)
