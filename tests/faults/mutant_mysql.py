"""The guards of the MySQL store and of its enlisted transactions. See ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

CONNECTION = "oncekey.stores.mysql.connection"
SESSIONS, STORE = "oncekey.stores.mysql.sessions", "oncekey.stores.mysql.store"
ADAPTERS = "oncekey.engine.transactions.adapters"
LINKS, SQLALCHEMY_MYSQL = f"{ADAPTERS}.mysql", f"{ADAPTERS}.sqlalchemy_mysql"
QUERIES = "oncekey.stores.mysql"
LOCKS, ENLIST = "tests/stores/test_mysql_locks.py", "tests/enlist/test_mysql.py"
DEADLOCKS, ENDINGS = "tests/enlist/test_mysql_deadlocks.py", "tests/enlist/test_mysql_endings.py"
BENEATH, MYSQL_WATCH = f"{ADAPTERS}.sqlalchemy_beneath", f"{ADAPTERS}.mysql_watch"
DJANGO = f"{ADAPTERS}.django"
TORN, TLS = "tests/stores/test_mysql_torn.py", "tests/stores/test_mysql_tls.py"
OPTIONS = "tests/stores/test_url_options.py"

_KEPT = "test_rollback_that_leaves_rows_in_a_table_without_transactions_makes_the_key_unknown"
_KEPT_AFTER_DEADLOCK = "test_deadlock_that_leaves_rows_in_a_table_without_transactions_makes_the_key_unknown"
_KEPT_AND_WENT_ON = "test_handler_that_goes_on_after_such_a_deadlock_leaves_the_key_unknown"
_TWICE = "test_handler_that_ends_its_transaction_never_commits_twice"
_AFTER_ROLLBACK = "test_statement_on_the_driver_after_the_rollback_is_refused_or_the_key_is_unknown"
_PROCEDURE = "test_procedure_that_rolls_back_writes_and_commits_makes_the_key_unknown"

MYSQL: tuple[Mutant, ...] = (
    _(
        33,
        "I1",
        "a rollback that MyISAM did not follow is no proof (drivers of MySQL)",
        f"{ENLIST}::{_KEPT}[raises-pymysql]",
        (LINKS, "            note_kept_writes(self, self.execute((WARNINGS,), {}))\n", ""),
    ),
    _(
        33,
        "I1",
        "a rollback that MyISAM did not follow is no proof (SQLAlchemy)",
        f"{ENLIST}::{_KEPT}[raises-sa-asyncmy]",
        (
            "oncekey.engine.transactions.adapters.sqlalchemy",
            "            self._guard.look_for_kept_writes()\n",
            "            pass\n",
        ),
    ),
    _(
        33,
        "I1",
        "a deadlock that MyISAM did not follow is no proof (drivers of MySQL)",
        f"{DEADLOCKS}::{_KEPT_AFTER_DEADLOCK}[pymysql]",
        (LINKS, "        note_kept_writes(self, self.execute((WARNINGS,), {}))  # of a deadlock", "        # "),
    ),
    _(
        33,
        "I1",
        "a deadlock that MyISAM did not follow is no proof (SQLAlchemy)",
        f"{DEADLOCKS}::{_KEPT_AND_WENT_ON}[sa-asyncmy]",
        (SQLALCHEMY_MYSQL, "        watch.look_after_error()\n", "        pass\n"),
    ),
    _(
        33,
        "I4",
        "a deadlock of MySQL in an enlisted transaction leaves the key retryable (SQLAlchemy)",
        f"{DEADLOCKS}::test_handler_that_raises_after_a_deadlock_may_run_again[sa-asyncmy]",
        (f"{ADAPTERS}.sqlalchemy_guard", "self.link.may_have_ended_unseen = not self._is_watched()", "pass"),
    ),
    _(
        31,
        "I1",
        "an end on the driver's connection beneath SQLAlchemy is refused (MySQL)",
        f"{ENDINGS}::{_TWICE}[sa-asyncmy-does all of it on the driver]",
        (BENEATH, "    return mysql_watch.watch(driver, beneath)\n", "    return None\n"),
        (
            f"{ADAPTERS}.sqlalchemy_guard",
            "link.may_have_written_later = link.may_have_written_later or not link.ended",
            "pass",
        ),
    ),
    _(
        31,
        "I1",
        "a lost connection of MySQL is not opened again (SQLAlchemy)",
        f"{ENDINGS}::test_lost_connection_is_not_opened_again[True-sa-session]",
        (
            MYSQL_WATCH,
            '"_read_query_result": read_query_result, "connect": connect}',
            '"_read_query_result": read_query_result}',
        ),
        (
            BENEATH,
            "        link.end_refused = True\n        self._refused = verb\n        return None\n",
            "        return sql\n",
        ),
    ),
    _(
        31,
        "I1",
        "a procedure of MySQL that ended the transaction leaves the key unknown (drivers of MySQL)",
        f"{ENDINGS}::{_PROCEDURE}[raises-pymysql]",
        (LINKS, "            if may_end_unseen(sql):\n", "            if False:\n"),
    ),
    _(
        31,
        "I1",
        "a procedure of MySQL that ended the transaction leaves the key unknown (SQLAlchemy)",
        f"{ENDINGS}::{_PROCEDURE}[raises-sa-asyncmy]",
        (BENEATH, "mysql.may_end_unseen(sql)", "False"),
    ),
    _(
        31,
        "I1",
        "a procedure that ended the transaction before SQLAlchemy rolls back leaves the key unknown",
        f"{ENDINGS}::{_PROCEDURE}[rolls back-sa-asyncmy]",
        (SQLALCHEMY_MYSQL, "            if mysql.is_another(error):\n", "            if False:\n"),
    ),
    _(
        31,
        "I1",
        "a procedure that ended the transaction before a refused rollback leaves the key unknown",
        f"{ENDINGS}::{_PROCEDURE}[rolls back-pymysql]",
        (
            LINKS,
            "    def refused(self) -> EnlistError:\n        self._end_it()\n",
            "    def refused(self) -> EnlistError:\n        self._end()\n",
        ),
    ),
    _(
        31,
        "I1",
        "a write after a deadlock in autocommit mode leaves the key unknown",
        f"{ENDINGS}::test_write_after_a_deadlock_in_autocommit_mode_makes_the_key_unknown",
        (
            LINKS,
            "self.may_have_ended_unseen = bool(self._connection.get_autocommit())",
            "self.may_have_ended_unseen = False",
        ),
    ),
    _(
        31,
        "I1",
        "a statement on the driver outside of every transaction of SQLAlchemy leaves the key unknown",
        f"{ENDINGS}::{_AFTER_ROLLBACK}[CALL pays()-sa-connection]",
        (BENEATH, "            if self._is_idle():\n", "            if False:\n"),
    ),
    _(
        7,
        "I1",
        "in a Galera cluster COMMIT is a packet of its own",
        f"{TORN}::test_commit_in_a_galera_cluster_tells_of_a_lost_transaction[complete]",
        (CONNECTION, "if self.galera and text.endswith(_THEN_COMMIT)", "if False"),
    ),
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
        (LINKS, "ends_transaction(sql) or commits_by_itself(sql)", "ends_transaction(sql)"),
    ),
    _(
        5,
        "I4",
        "an owner that lost its key leaves no lock in MySQL",
        f"{ENLIST}::test_enlist_of_an_owner_that_lost_its_key_leaves_no_lock[pymysql]",
        (LINKS, "__dict__.get(mysql_watch.NAME) is self._watch", "__dict__.get(mysql_watch.NAME) is not None"),
    ),
    _(
        31,
        "I1",
        "a view of Django that wrote on a new connection leaves its key unknown",
        "tests/enlist/test_django_misuse.py::test_reopened_connection_makes_the_key_unknown[wsgi-own-blocks-postgresql]",
        (DJANGO, "self._inner.may_have_written_later or replaced", "self._inner.may_have_written_later"),
    ),
    _(
        31,
        "I1",
        "a transaction of MySQL keeps its number after a rollback to a savepoint (Django)",
        "tests/enlist/test_django_mysql.py"
        "::test_commit_in_a_procedure_after_a_rollback_to_a_savepoint_makes_the_key_unknown"
        "[wsgi-atomic-requests-mysql-pymysql]",
        (DJANGO, '{**key, "number": int(str(rows[0][0]).rpartition(":")[2])}', "key"),
    ),
    _(
        33,
        "I4",
        "the mark of an enlisted transaction of MySQL is set again after the release of an older savepoint (Django)",
        "tests/enlist/test_django.py"
        "::test_enlisted_view_pays_once_and_replays[wsgi-atomic-requests-pay_in_block-mysql-pymysql]",
        (DJANGO, "            if released in older:\n", "            if False:\n"),
    ),
    _(
        1,
        "I1",
        "a claim compares its jobs again (MySQL)",
        f"{TORN}::test_job_that_a_rival_claims_meanwhile_stays_the_rivals",
        (f"{QUERIES}/claim_rows", "\nWHERE j.state IN ('ready', 'running') AND j.due_at <= {now};", ";"),
    ),
    _(
        1,
        "I1",
        "the end of a job compares its owner again (MySQL)",
        f"{TORN}::test_job_that_a_rival_takes_over_is_not_concluded_and_its_key_not_settled",
        (f"{QUERIES}/conclude_rows", " AND j.state = 'running' AND j.owner = w.owner;", ";"),
    ),
    _(
        11,
        "I1",
        "the purge compares its keys again (MySQL)",
        f"{TORN}::test_key_that_a_rival_starts_over_is_not_purged",
        (
            f"{QUERIES}/purge",
            "utc_timestamp(6);\nSELECT @oncekey_count;",
            "utc_timestamp(6) OR {is_held};\nSELECT @oncekey_count;",
        ),
    ),
    _(
        12,
        "I7",
        "with ssl_ca the server's certificate and host are verified (MySQL)",
        f"{TLS}::test_certificate_of_another_host_is_refused",
        (f"{QUERIES}.address", "host = authority and certificate is None if", "host = False if"),
    ),
    _(
        12,
        "I7",
        "the host is verified without a file of the authority, too (MySQL)",
        f"{OPTIONS}::test_host_is_verified_without_a_file_of_the_authority",
        (CONNECTION, "                made.check_hostname = True  # PyMySQL", "                pass  # PyMySQL"),
    ),
    _(
        1,
        "I1",
        "a step belongs to the move of its key (MySQL)",
        f"{TORN}::test_key_that_a_rival_takes_over_is_not_moved[advance]",
        (f"{QUERIES}/is_moved", "NOT (o.state <=> w.moved_to AND o.owner = w.moved_owner)", "false"),
    ),
)
