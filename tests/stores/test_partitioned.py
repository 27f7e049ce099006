"""Keys in hash partitions by tenant, as docs/scaling.md makes them; and which statements name their tenant.

A row's place (ctid) is one of its partition: without the partition beside it, completing a key would complete whatever
stands in the same place of the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from oncekey.core.record import Reservation
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.stores.api import Duty, Store
from oncekey.stores.postgres import PostgresStore, statements
from oncekey.stores.sql import queries
from oncekey.testing.store_suite import StoreSuite
from tests.engine.doubles import RESPONSE, reservation
from tests.stores.postgres import older

SCALING = Path(__file__).parents[2] / "docs/scaling.md"
TENANTS = 40
"""Enough that every partition has a row in its first places."""


def partition(url: str) -> None:
    """What the docs say to run once, on tables that are still empty."""
    (recipe,) = re.findall(r"```sql\n(DO .*?)```", SCALING.read_text(), re.DOTALL)
    with psycopg.connect(url, autocommit=True) as own:
        own.execute(recipe.encode())


def of_tenant(number: int) -> Reservation:
    return replace(reservation(f"key-{number}"), scope=f"tenant-{number}")


@pytest.fixture
def store(postgres_url: str) -> Iterator[PostgresStore]:
    with closing(PostgresStore(postgres_url)) as store:
        store.migrate()
        partition(postgres_url)
        yield store


def states(store: Store) -> dict[str, State]:
    return {record.scope: record.state for record in store.listing(limit=1000)}


def test_a_move_moves_no_other_tenants_key(store: PostgresStore, postgres_url: str) -> None:
    """Complete, remove, restart and purge one key at a time: the others stay as they are."""
    asked = [of_tenant(number) for number in range(TENANTS)]
    records = [found.record for found in store.reserve(asked)]
    expected = dict.fromkeys((each.scope for each in asked), State.IN_PROGRESS)
    assert states(store) == expected

    assert all(records)
    first, second, third, fourth, fifth = (record for record in records[:5] if record)
    (done,) = store.swap([swap(first, Event.COMPLETE, Actor.OWNER, response=RESPONSE)])  # end.sql
    assert done is not None
    (again,) = store.swap([swap(second, Event.RELEASE, Actor.OWNER, last_error="not now")])  # swap.sql
    assert again is not None
    assert store.swap([swap(third, Event.DISCARD, Actor.OWNER)]) != [None]  # remove.sql
    expected |= {first.scope: State.COMPLETED, second.scope: State.FAILED_RETRYABLE}
    del expected[third.scope]
    assert states(store) == expected

    for record in (fourth, fifth):
        store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)])
    older(postgres_url, 10 * 86_400, fourth.scope, fourth.key)
    older(postgres_url, 10 * 86_400, fifth.scope, fifth.key)
    (old,) = store.read([(fourth.scope, fourth.key)])
    assert old is not None
    assert store.swap([swap(old, Event.RESERVE, Actor.REQUEST, reservation=of_tenant(3))]) != [None]  # restart.sql
    assert store.purge(100) == 1  # of tenant-4, and no row in the same place elsewhere
    del expected[fifth.scope]
    assert states(store) == expected


def test_a_look_up_goes_to_one_partition(store: PostgresStore) -> None:
    """The partitions of other tenants are not even opened."""
    store.reserve([of_tenant(number) for number in range(TENANTS)])
    connection = store._connection()
    for name in ("read", "reserve"):
        text = statements.statement(name, statements.COLUMNS)
        look = re.search(r"SELECT (?:\*|i AS found) FROM idempotency_keys AS i WHERE [^)]*OFFSET 0", text)
        assert look is not None, name
        asked = f"FROM (VALUES ('tenant-7'::text, 'key-7'::text)) AS w (scope, key), LATERAL ({look[0]}) AS k"
        ((plan,),) = connection.execute(f"EXPLAIN (ANALYZE, FORMAT JSON) SELECT 1 {asked}".encode())
        ran = set(re.findall(r"'Relation Name': '(idempotency_keys_\d+)'", str(_ran(plan[0]["Plan"]))))
        assert len(ran) == 1, ran


def _ran(plan: dict[str, object]) -> list[dict[str, object]]:
    below = plan.get("Plans", [])
    assert isinstance(below, list)
    mine = {name: value for name, value in plan.items() if name != "Plans"}
    return [*([mine] if plan["Actual Loops"] else []), *(node for each in below for node in _ran(each))]


@pytest.mark.faults
class TestPartitionedStore(StoreSuite):
    """Everything that every store does, in partitions: a minute, and so only with the long campaign."""

    @pytest.fixture(autouse=True)
    def _database(self, postgres_url: str) -> None:
        self.url = postgres_url
        with closing(PostgresStore(postgres_url)) as store:
            store.migrate()
        partition(postgres_url)

    def make_store(self) -> PostgresStore:
        return PostgresStore(self.url)

    def age(self, store: Store, scope: str, key: str, seconds: float) -> None:
        older(self.url, seconds, scope, key)


# ---------------------------------------------------------------- which statements name their tenant

_TABLE = re.compile(
    r"(?P<verb>INSERT INTO|DELETE FROM|UPDATE|FROM|JOIN)\s+idempotency_(?P<table>keys|steps|outbox|audit)"
    r"(?:\s+AS\s+(?P<alias>\w+))?(?P<columns>\s*\([^)]*\))?"
)
_PARTS = {"columns", "held", "set", "forgotten", "noted", "outbox_columns", "outbox_history"}
"""Not statements: put into others."""


def homeless(text: str) -> set[str]:
    """Tables that a statement visits without saying whose rows it wants.

    Named by its scope, or in the place where a look-up by scope has just found it, is at home.
    """
    text = re.sub(r"--.*", "", text)
    found = set()
    for visit in _TABLE.finditer(text):
        table, alias, text_of_it = visit["table"], visit["alias"], _block(text[visit.end() :])
        if visit["verb"] == "INSERT INTO":
            at_home = re.search(r"\bscope\b", visit["columns"] or "") is not None
        elif alias is None:
            at_home = re.search(r"(?<![.\w])scope = ", text_of_it) is not None
        else:
            by_place = rf"\b{alias}\.ctid = (\w+)\.place AND {alias}\.tableoid IS NOT DISTINCT FROM \1\.part\b"
            at_home = re.search(rf"\b{alias}\.scope = |{by_place}", text_of_it) is not None
        if not at_home:
            found.add(table)
    return found


def _block(text: str) -> str:
    """Up to the bracket that closes the query in which this begins."""
    depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            return text[:place]
    return text


def every_statement() -> dict[str, str]:
    names = queries.names(statements.PACKAGE).keys() - _PARTS
    return {name: statements.statement(name, lock="UPDATE") for name in names}


def listed() -> dict[str, str]:
    """The exceptions as docs/scaling.md lists them: statement, and why."""
    (table,) = re.findall(r"\| statement \| tables \| why \|\n\|[-|]+\n((?:\|.*\n)+)", SCALING.read_text())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {name.strip("`"): tables for names, tables, _ in rows for name in names.split(", ")}


def test_every_statement_names_its_tenant_or_is_listed() -> None:
    found = {name: ", ".join(sorted(tables)) for name, text in every_statement().items() if (tables := homeless(text))}
    assert found == listed()
    assert not {"reserve", "swap", "swap_beside", "restart", "remove", "read", "steps"} & set(found)
    assert {f"due_{duty}" for duty in Duty} <= set(found)


@pytest.mark.parametrize(
    ("planted", "tables"),
    [
        ("UPDATE idempotency_keys AS k SET state = 'x' FROM held AS w WHERE k.ctid = w.place", {"keys"}),
        ("SELECT 1 FROM idempotency_steps AS s -- s.scope = w.scope\nWHERE s.key = w.key", {"steps"}),
        (
            "DELETE FROM idempotency_keys AS k USING a, b WHERE k.ctid = a.place AND k.tableoid = b.part",
            {"keys"},
        ),
        ("INSERT INTO idempotency_audit (who, key) SELECT 1, 2", {"audit"}),
        ("SELECT 1 FROM idempotency_keys AS k, idempotency_keys AS i WHERE i.scope = 'a'", {"keys"}),
        ("WITH a AS (SELECT 1 FROM idempotency_keys AS k) UPDATE idempotency_keys AS k WHERE k.scope = 'b'", {"keys"}),
        ("SELECT 1 FROM idempotency_keys AS i WHERE i.scope = 'a'", set()),
    ],
)
def test_partition_check_finds_planted_statements(planted: str, tables: set[str]) -> None:
    assert homeless(planted) == tables
