"""``oncekey doctor``: each line is seen to be ok, and to be what it is when something is wrong."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncekey.admin.doctor import counted, examine, span
from oncekey.cli.options import named
from oncekey.core.diagnosis import Diagnosis, Level, worst
from oncekey.core.health import COUNTED, NO_RESOLVER
from oncekey.core.states import Actor, Event, State
from oncekey.stores.memory import MemoryStore
from oncekey.stores.postgres import checks
from oncekey.stores.postgres.store import PostgresStore
from oncekey.stores.sql import diagnosis, probes
from oncekey.stores.sqlite import SqliteStore
from oncekey.stores.sqlite.checks import durability as sqlite_durability
from oncekey.telemetry.redaction import redact
from tests.cli.key_table import KeyTable, Run, runner
from tests.stores.writers import children_of

CHECKS = ["schema", "indexes", "plans", "lease", "clock", "durability", "connections"]
CHECKS += ["encryption", "upkeep", "running", "unknown", "resolvers", "half done", "dead keys", "outbox", "dead jobs"]


def lines(out: str) -> dict[str, dict[str, Any]]:
    return {line["check"]: line for line in json.loads(out)["checks"]}


def line(table: KeyTable, check: str) -> Diagnosis:
    (found,) = [each for each in examine(table.store) if each.check == check]
    return found


def test_doctor_has_a_line_for_each_check(table: KeyTable, operate: Run) -> None:
    """A line for each check. Only the tests' own PostgreSQL is not durable, and the doctor sees that."""
    table.put("order-1-of-today", State.COMPLETED)
    code, out, error = operate("doctor", "--json")
    found = lines(out)
    checks = [*CHECKS[:7], *(["writer"] if table.is_sqlite else []), *CHECKS[7:]]
    assert list(found) == checks
    bad = [check for check, said in found.items() if said["level"] != "ok"]
    assert (bad, code, error) == (([], 0, "") if table.is_sqlite else (["durability"], 2, ""))
    if not table.is_sqlite:
        assert "fsync off" in found["durability"]["found"]
        assert "fsync = on" in found["durability"]["advice"]
    code, out, _ = operate("doctor")
    assert out.count("\nok ") == len(checks) - len(bad)
    assert out.count("\n-> ") == 0
    assert out.count(" -> ") == len(bad)


def test_doctor_exit_code_counts_warnings_with_strict_only(
    table: KeyTable, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings count with --strict only; failures always."""
    monkeypatch.setattr(type(table.store), "diagnose", lambda _: [Diagnosis("schema", Level.OK, "fine")])
    assert operate("doctor", "--strict")[0] == 0
    table.dead_job()
    assert operate("doctor")[0] == 0
    assert operate("doctor", "--strict")[0] == 1
    monkeypatch.setattr(type(table.store), "diagnose", lambda _: [Diagnosis("plans", Level.FAIL, "bad")])
    assert operate("doctor")[0] == 2
    assert operate("doctor", "--strict")[0] == 2
    assert worst([]) is Level.OK


# -- the store -----------------------------------------------------------------------------------------------------


def test_doctor_without_tables_names_the_command_to_run(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what to run, and all the same how the server is set up; once that is run, the line is ok."""
    run = runner(postgres_url, monkeypatch, capsys)
    code, out, _ = run("doctor", "--json")
    found = lines(out)
    assert (code, list(found)) == (2, ["schema", "clock", "durability", "connections"])
    assert "oncekey migrate" in found["schema"]["advice"]
    run("migrate")
    assert lines(run("doctor", "--json")[1])["schema"]["level"] == "ok"


@pytest.mark.parametrize("url", ["postgresql://ann:s3cret@127.0.0.1:1/app", "sqlite:///{}/later.db"])
def test_a_store_that_cannot_be_asked(operate: Run, tmp_path: Path, url: str) -> None:
    """Down, or of a later version: a line as any other, exit code 2, and no password."""
    later = tmp_path / "later.db"
    table = KeyTable(f"sqlite:///{later}")
    table.execute("INSERT INTO oncekey_schema (number, name, applied_at) VALUES (9999, 'later', 0)")
    table.close()
    code, out, error = operate("doctor", "--json", "--store", url.format(tmp_path))
    assert (code, list(lines(out)), lines(out)["store"]["level"]) == (2, ["store"], "fail")
    assert "s3cret" not in out + error


@pytest.mark.parametrize("url", ["sqlite:///{}/none.db", "memory://", "redis://ann:s3cret@h/0", "s3cret", ""])
def test_doctor_without_a_store_to_look_at_exits_2(operate: Run, tmp_path: Path, url: str) -> None:
    """1 is for warnings: a health check that goes by the code must see that the file is missing."""
    code, out, error = operate("doctor", "--store", url.format(tmp_path))
    assert code == 2
    assert "s3cret" not in out + error
    if url.startswith("sqlite"):
        assert "there is no file" in out
        told = lines(operate("doctor", "--json", "--store", url.format(tmp_path))[1])
        assert told["store"]["level"] == "fail"
    assert not (tmp_path / "none.db").exists()


def test_missing_index_is_named_with_the_statement_that_creates_it(table: KeyTable, operate: Run) -> None:
    """It is named, the plan that needs it too, and the statement that is given heals both."""
    table.execute("DROP INDEX idempotency_keys_leases")
    table.store.disconnect()
    code, out, _ = operate("doctor", "--json")
    found = lines(out)
    assert code == 2
    assert "idempotency_keys_leases" in found["indexes"]["found"]
    assert "due_leases" in found["plans"]["found"]
    assert "due_expired" not in found["plans"]["found"]
    advice = found["indexes"]["advice"]
    assert advice.startswith("run CREATE INDEX idempotency_keys_leases ON idempotency_keys")
    table.execute(advice.removeprefix("run "))
    found = lines(operate("doctor", "--json")[1])
    assert (found["indexes"]["level"], found["plans"]["level"]) == ("ok", "ok"), found["plans"]


def test_an_index_without_which_the_rows_cannot_be_asked(table: KeyTable) -> None:
    """What can be told is told: the index that is missing, and how the rest of the store is set up."""
    table.execute("DROP INDEX idempotency_keys_expired")
    table.store.disconnect()
    found = {each.check: each.level for each in examine(table.store)}
    assert found["indexes"] is found["plans"] is Level.FAIL
    assert "durability" in found


def test_an_index_that_is_not_valid(postgres_url: str) -> None:
    """What an interrupted CREATE INDEX CONCURRENTLY leaves: there, and worth nothing."""
    table = KeyTable(postgres_url)
    where = "indexrelid = 'idempotency_keys_leases'::regclass"
    table.execute(f"UPDATE pg_index SET indisvalid = false WHERE {where}")
    found = line(table, "indexes")
    assert (found.level, line(table, "plans").level) == (Level.FAIL, Level.FAIL)
    assert found.advice.startswith("run DROP INDEX idempotency_keys_leases; CREATE INDEX idempotency_keys_leases")
    table.execute(found.advice.removeprefix("run "))
    assert line(table, "indexes").level is Level.OK
    table.close()


def test_every_index_of_the_schema_is_known() -> None:
    for package in ("oncekey.stores.postgres", "oncekey.stores.sqlite"):
        wanted = diagnosis.wanted_indexes(package)
        assert len(wanted) == 20
        assert set().union(*diagnosis.USES.values()) <= set(wanted)


def test_clock_an_hour_apart_is_a_warning(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour apart is a warning on either side; what the round trip takes is not a difference."""
    table = KeyTable(postgres_url)
    real = probes.host_clock
    for apart, side in ((3600.0, "behind"), (-3600.0, "ahead of")):
        monkeypatch.setattr(probes, "host_clock", lambda apart=apart: real() + apart)
        found = line(table, "clock")
        assert (found.level, f"{side} this host" in found.found) == (Level.WARN, True)
    assert diagnosis.clock(20.0, 16.0).level is Level.OK
    table.close()


GOOD = {"synchronous_commit": "on", "fsync": "on", "full_page_writes": "on", "standby": "false"}


@pytest.mark.parametrize(
    ("changed", "levels"),
    [
        ({}, [Level.OK]),
        ({"synchronous_commit": "local"}, [Level.OK]),
        ({"synchronous_commit": "off"}, [Level.OK]),  # ours and enlisted transactions turn it on
        ({"full_page_writes": "off"}, [Level.WARN]),
        ({"fsync": "off"}, [Level.FAIL]),
        ({"standby": "true"}, [Level.FAIL, Level.OK]),
    ],
)
def test_postgres_durability_is_checked(changed: dict[str, str], levels: list[Level]) -> None:
    found = list(checks.durability(GOOD | changed))
    assert [each.level for each in found] == levels
    assert all(each.advice for each in found if each.level is not Level.OK)


def test_the_database_is_asked_and_not_our_connection(postgres_url: str) -> None:
    """Our own connections turn synchronous_commit on: what is shown is what the app gets."""
    name = postgres_url.rpartition("/")[2].partition("?")[0]
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f'ALTER DATABASE "{name}" SET synchronous_commit = off'.encode())
    table = KeyTable(postgres_url)
    assert "synchronous_commit off" in line(table, "durability").found
    table.close()


def test_sqlite_durability_is_checked(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "keys.db")
    with store.connections.use() as connection:
        connection.execute("PRAGMA synchronous = NORMAL")
    (found,) = [each for each in store.diagnose() if each.check == "durability"]
    assert (found.level, found.found.partition(":")[0]) == (Level.FAIL, "journal_mode wal, synchronous normal")
    store.close()
    assert sqlite_durability("delete", "full").level is Level.FAIL
    assert sqlite_durability("wal", "extra").level is Level.OK


def test_tightest_connection_limit_counts(postgres_url: str) -> None:
    """The tightest limit counts, and what is in use of it."""
    name = postgres_url.rpartition("/")[2].partition("?")[0]
    table = KeyTable(postgres_url)
    assert line(table, "connections").level is Level.OK
    table.execute(f'ALTER DATABASE "{name}" CONNECTION LIMIT 8')
    found = line(table, "connections")
    assert (found.level, "1 of 8 are in use (CONNECTION LIMIT of the database)" in found.found) == (Level.WARN, True)
    table.execute(f'ALTER DATABASE "{name}" CONNECTION LIMIT 9')
    assert line(table, "connections").level is Level.OK
    table.close()


def test_memory_store_is_checked() -> None:
    (first, *_) = examine(MemoryStore())
    assert (first.check, first.level) == ("durability", Level.WARN)


# -- the rows ------------------------------------------------------------------------------------------------------


def finished(table: KeyTable, number: int, took: float, lease: float, operation: str = "POST /payments") -> None:
    """So many keys that took so long, under such a lease."""
    for each in range(number):
        table.put(f"key-{took:g}-{each:03d}-{operation}", State.COMPLETED, operation=operation)
    later = "+ {:g}" if table.is_sqlite else "+ interval '{:g} seconds'"
    times = f"finished_at = created_at {later.format(took)}, lease_until = created_at {later.format(lease)}"
    table.execute(f"UPDATE idempotency_keys SET {times} WHERE key LIKE 'key-{took:g}-%'")


def test_doctor_warns_if_handlers_take_longer_than_the_lease(table: KeyTable) -> None:
    """The worst operation is named, with a lease that would do; too few keys say nothing."""
    finished(table, diagnosis.ENOUGH - 1, 50.0, 90.0, "POST /slow")
    assert line(table, "lease").found.startswith("no operation with 20 finished keys")
    finished(table, diagnosis.ENOUGH, 1.0, 60.0)
    found = line(table, "lease")
    assert (found.level, found.found) == (
        Level.OK,
        "POST /payments: 99 % are done within 1 s, and the lease is 60 s",
    )
    finished(table, 30, 80.0, 90.0)
    table.execute("UPDATE idempotency_keys SET attempt = 2 WHERE key LIKE 'key-80-%'")  # from the first attempt on
    assert line(table, "lease") == found
    finished(table, 1, 70.0, 90.0)  # renewed in time, and still longer than the lease
    finished(table, 1, 90_000.0, 60.0)  # settled by the reconciler, long after its lease
    found = line(table, "lease")
    assert found.level is Level.WARN
    assert "99 % are done within 70 s, and the lease is 60 s" in found.found
    assert "lease=timedelta(seconds=210)" in found.advice


def test_upkeep_that_does_not_run(table: KeyTable) -> None:
    """A lease that is over, or a key that is past its expiry, for longer than upkeep ever takes."""
    table.put("order-1-of-today", State.IN_PROGRESS, age=200)
    table.put("order-2-of-today", State.COMPLETED, age=86_400 + 3600)
    assert line(table, "upkeep").level is Level.OK
    table.put("order-3-of-today", State.COMPLETED, age=3 * 86_400)
    found = line(table, "upkeep")
    assert (found.level, "a key expired 2 d ago" in found.found) == (Level.WARN, True)
    table.put("order-4-of-today", State.IN_PROGRESS, age=1000)
    found = line(table, "upkeep")
    assert (found.level, "a lease has been over for 15 min" in found.found) == (Level.WARN, True)
    assert "oncekey upkeep" in found.advice


def test_keys_in_progress_for_over_an_hour_are_named(table: KeyTable) -> None:
    """Their leases are renewed, so nothing else notices. The keys themselves are masked."""

    def running(key: str, age: float) -> None:
        record = table.put(key, State.IN_PROGRESS, age=age)
        table.move(record, Event.RENEW, lease_seconds=60.0)

    running("order-1-of-today", 3000)
    table.put("order-2-of-today", State.IN_PROGRESS, age=5000)  # its lease is over: the sweeper's
    table.put("order-3-of-today", State.UNKNOWN, age=5000)
    assert line(table, "running") == Diagnosis("running", Level.OK, "no key has been in progress for over 1 h")
    for number, age in enumerate((4000, 7300, 5000, 6000)):
        running(f"order-{number}-that-hangs", age)
    found = line(table, "running")
    assert found.level is Level.WARN
    assert found.found.startswith("4 keys in progress for over 1 h, the oldest for 2 h 1 min; their clients get 409: ")
    named = [redact(f"order-{number}-that-hangs") for number in (1, 3, 2)]
    assert found.found.endswith(": " + ", ".join(f"POST /payments {hint}" for hint in named) + ", …")
    assert "that-hangs" not in found.found
    assert "max_run" in found.advice


def test_unknown_outcomes_are_counted(table: KeyTable) -> None:
    assert line(table, "unknown").level is Level.OK
    table.put("order-1-of-today", State.UNKNOWN)
    found = line(table, "unknown")
    assert (found.level, "1 key with an unknown outcome" in found.found) == (Level.WARN, True)
    assert "should have been asked" not in found.found
    table.put("order-2-of-today", State.UNKNOWN, age=1000)  # due, and no resolver was asked
    found = line(table, "unknown")
    assert (found.level, "2 keys with an unknown outcome" in found.found) == (Level.WARN, True)
    assert "should have been asked about 16 min" in found.found
    assert "oncekey keys resolve" in found.advice


def test_unknown_outcome_that_is_due_means_that_no_upkeep_of_the_app_runs(table: KeyTable) -> None:
    table.put("order-1-of-today", State.UNKNOWN)
    assert line(table, "upkeep").level is Level.OK
    table.put("order-2-of-today", State.UNKNOWN, age=200)
    found = line(table, "upkeep")
    assert found.level is Level.WARN
    assert "no resolver was asked: no upkeep of the app runs" in found.found
    assert "oncekey upkeep MODULE:ONCE" in found.advice


def test_unknown_keys_without_a_resolver_are_counted_by_operation(table: KeyTable) -> None:
    """By what the app's own upkeep has written: those that it has not asked about yet are another line's."""
    table.put("order-0-of-today", State.UNKNOWN)
    assert line(table, "resolvers").level is Level.OK
    for number in range(1, 4):
        record = table.put(f"order-{number}-of-today", State.UNKNOWN)
        table.move(record, Event.POSTPONE, by=Actor.RECONCILER, reconcile_in=60.0, last_error=NO_RESOLVER)
    found = line(table, "resolvers")
    words = "3 keys are unknown and no resolver is registered for POST /payments"
    assert (found.level, found.found) == (Level.WARN, words)
    assert "@once.resolver('POST /payments')" in found.advice


def test_an_old_unknown_and_a_dead_one(table: KeyTable) -> None:
    """No resolver is asked about it any more, so nothing is due; it is old, and a dead letter."""
    assert line(table, "dead keys").level is Level.OK
    table.dead_key("order-1-of-today", age=7200)
    found = line(table, "unknown")
    assert (found.level, "the oldest 2 h old" in found.found) == (Level.WARN, True)
    found = line(table, "dead keys")
    assert (found.level, found.found) == (
        Level.WARN,
        "1 key that upkeep leaves alone after the last try: unknown or half done",
    )


def test_waiting_and_dead_jobs_are_counted(table: KeyTable) -> None:
    """Jobs that wait for a worker, and jobs that were given up."""
    table.add("send_receipt")
    assert line(table, "outbox").level is Level.OK
    table.execute(f"UPDATE idempotency_outbox SET run_at = {'100' if table.is_sqlite else 'to_timestamp(100)'}")
    found = line(table, "outbox")
    assert (found.level, found.found.startswith("1 job due, lag "), "oncekey worker" in found.advice) == (
        *(Level.WARN, True),
        True,
    )
    assert line(table, "dead jobs").level is Level.OK
    table.dead_job("another")
    assert line(table, "dead jobs").level is Level.WARN


def test_the_probes_use_an_index(postgres_url: str) -> None:
    """Looking for the time that handlers take reads the newest keys, not all."""
    store = PostgresStore(postgres_url)
    store.migrate()
    ((plan,),) = store._ask("EXPLAIN (FORMAT JSON) " + checks._TIMES, diagnosis.SAMPLE)
    assert set(checks._indexes_in(plan)) == {"idempotency_keys_expired"}
    store.close()


def test_findings_are_in_plain_words() -> None:
    assert [span(seconds) for seconds in (-1, 0.2, 59.6, 3601, 7261, 266_400)] == [
        *("0 s", "0 s", "1 min", "1 h", "2 h 1 min", "3 d 2 h"),
    ]
    assert [counted(number, "job") for number in (0, 1, 1234, COUNTED)] == [
        *("0 jobs", "1 job", "1,234 jobs", "10,000 jobs or more"),
    ]


def test_half_done_keys_that_wait_are_named_by_operation(table: KeyTable) -> None:
    """They are charged, and their clients are gone. The doctor does not know the app, and asks the rows."""
    assert line(table, "half done").level is Level.OK
    for number in range(2):
        table.age(table.half_done(f"order-{number}-of-today", operation="POST /rides"), 7_260)
    table.half_done("order-3-of-today", operation="POST /fresh")
    found = line(table, "half done")
    words = "2 keys are half done for over 10 min, without an attempt of a client or of upkeep, for POST /rides"
    assert (found.level, found.found) == (Level.WARN, f"{words}; the oldest waits for 2 h")
    assert "once.resume('POST /rides', fn)" in (found.advice or "")


def test_doctor_says_which_writer_a_sqlite_file_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process is started for it, and ended again."""
    url = f"sqlite:///{tmp_path / 'keys.db'}"
    assert runner(url, monkeypatch, capsys)("migrate")[0] == 0
    said = lines(runner(url, monkeypatch, capsys)("doctor", "--json")[1])["writer"]
    assert (said["level"], said["found"]) == ("ok", "a thread of each event loop")
    operate = runner(f"{url}?writer=process", monkeypatch, capsys)
    code, out, _ = operate("doctor", "--json")
    said = lines(out)["writer"]
    assert (code, said["level"]) == (0, "ok")
    assert "was started, and opened the file" in said["found"]
    assert children_of(os.getpid()) == []
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    code, out, _ = operate("doctor", "--json", "--strict")
    said = lines(out)["writer"]
    assert (code, said["level"]) == (1, "warn")
    assert "could not be started" in said["found"]
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert "ended (" in lines(operate("doctor", "--json")[1])["writer"]["found"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql:///?user=ann&password=s3cret&host=127.0.0.1&port=5544&dbname=shop", "ann@127.0.0.1:5544/shop"),
        ("postgresql:///shop?host=/tmp&password=s3cret", "/shop"),
        ("postgresql://ann:s3cret@db/shop?sslpassword=s3cret", "ann@db/shop"),
    ],
)
def test_store_is_named_by_its_place_without_secrets(url: str, shown: str) -> None:
    """The first one is what Django's settings become."""
    assert named(url) == f"postgresql://{shown}"
