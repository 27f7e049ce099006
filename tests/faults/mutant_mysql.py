"""The guards of the MySQL store and of its enlisted transactions. See ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

SESSIONS, STORE = "oncekey.stores.mysql.sessions", "oncekey.stores.mysql.store"
LINKS = "oncekey.engine.transactions.adapters.mysql"
LOCKS, ENLIST = "tests/stores/test_mysql_locks.py", "tests/enlist/test_mysql.py"

MYSQL: tuple[Mutant, ...] = (
    _(
        7,
        "I4",
        "a deadlock of MySQL is sent again",
        f"{LOCKS}::test_deadlock_is_sent_again",
        (SESSIONS, "if code in NOTHING_DONE and left and", "if False and left and"),
    ),
    _(
        15,
        "I2",
        "a response that exceeds MySQL's packet is a tombstone",
        f"{LOCKS}::test_response_that_exceeds_the_packet_becomes_a_tombstone",
        (STORE, "_without_body(change) if _size(change.response) > most else change", "change"),
    ),
    _(
        31,
        "I1",
        "DDL in an enlisted transaction of MySQL is refused",
        f"{ENLIST}::test_statement_that_ends_the_transaction_is_refused[CREATE TABLE other (id int)-pymysql]",
        (LINKS, "ends_transaction(text) or commits_by_itself(text)", "ends_transaction(text)"),
    ),
    _(
        5,
        "I4",
        "an owner that lost its key leaves no lock in MySQL",
        f"{ENLIST}::test_enlist_of_an_owner_that_lost_its_key_leaves_no_lock[pymysql]",
        (LINKS, "        return self if self._guarded else None\n", "        return self\n"),
    ),
)
