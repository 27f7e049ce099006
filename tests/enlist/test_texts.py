"""What the text of a statement tells: certain enough to refuse, or a reason to claim less."""

from __future__ import annotations

import pytest

from oncekey.engine.transactions.adapters.texts import ends_transaction, may_end_transaction, writes


@pytest.mark.parametrize(
    ("sql", "verb"),
    [
        ("COMMIT", "COMMIT"),
        (" /* hint */ commit;", "COMMIT"),
        ("-- a\n-- b\nEND", "END"),
        ("; ;rollback work", "ROLLBACK"),
        ("/* ** */ ROLLBACK AND CHAIN", "ROLLBACK"),
        ("abort", "ABORT"),
        ("PREPARE TRANSACTION 'x'", "PREPARE TRANSACTION"),
    ],
)
def test_statement_that_ends_the_transaction_is_recognised(sql: str, verb: str) -> None:
    assert ends_transaction(sql) == verb


@pytest.mark.parametrize(
    "sql",
    [
        "ROLLBACK TO a",
        "ROLLBACK TRANSACTION TO SAVEPOINT a",
        "rollback /* x */ work to a",
        "PREPARE x AS SELECT 1",
        "SELECT 'commit'",
        "/* hint */ SELECT 1 /* */ commit",
        "/* COMMIT */ SELECT 1",
        "-- COMMIT",
        "endpoint",
        "commit_all()",
        "SELECT CASE WHEN true THEN 1 END",
    ],
)
def test_other_statement_is_never_refused(sql: str) -> None:
    assert ends_transaction(sql) is None
    assert not may_end_transaction(sql)


def test_end_behind_a_semicolon_is_only_suspected() -> None:
    for sql in ("INSERT INTO t VALUES (1); COMMIT", "SELECT 1;\n-- x\nROLLBACK; BEGIN", "SELECT 'a; end of it'"):
        assert ends_transaction(sql) is None
        assert may_end_transaction(sql)
    assert not may_end_transaction("SELECT 1; SELECT 2;")


def test_write_is_recognised_by_its_verb() -> None:
    assert [writes(sql) for sql in ("/* x */ insert into t", "Update t", "SELECT 1", "WITH a AS (DELETE FROM t)")] == [
        "INSERT",
        "UPDATE",
        None,
        None,
    ]


def test_long_comment_costs_linear_time() -> None:
    assert ends_transaction("/* " + "* / " * 100_000 + "*/ COMMIT") == "COMMIT"
    assert ends_transaction("/*" * 100_000) is None
