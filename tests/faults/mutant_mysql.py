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
DEADLOCKS = "tests/enlist/test_mysql_deadlocks.py"
DJANGO = f"{ADAPTERS}.django"
TORN, TLS = "tests/stores/test_mysql_torn.py", "tests/stores/test_mysql_tls.py"
OPTIONS = "tests/stores/test_url_options.py"

_KEPT = "test_rollback_that_leaves_rows_in_a_table_without_transactions_makes_the_key_unknown"
_KEPT_AFTER_DEADLOCK = "test_deadlock_that_leaves_rows_in_a_table_without_transactions_makes_the_key_unknown"
_KEPT_AND_WENT_ON = "test_handler_that_goes_on_after_such_a_deadlock_leaves_the_key_unknown"
_BENEATH = "test_commit_beneath_sqlalchemy_after_a_deadlock_makes_the_key_unknown"

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
        (
            LINKS,
            "                note_kept_writes(self, self.execute((WARNINGS,), {}))  # of a deadlock",
            "                # ",
        ),
    ),
    _(
        33,
        "I1",
        "a deadlock that MyISAM did not follow is no proof (SQLAlchemy)",
        f"{DEADLOCKS}::{_KEPT_AND_WENT_ON}[sa-asyncmy]",
        (SQLALCHEMY_MYSQL, "            mysql.note_kept_writes(self._link, warnings)\n", ""),
    ),
    _(
        33,
        "I1",
        "a key is not completed after a deadlock rolled its rows back (SQLAlchemy)",
        f"{DEADLOCKS}::test_handler_that_swallows_a_deadlock_completes_nothing[False-sa-asyncmy]",
        (
            f"{ADAPTERS}.sqlalchemy",
            "if guard is None or self.ended or guard.undone or",
            "if guard is None or self.ended or",
        ),
    ),
    _(
        31,
        "I1",
        "a commit beneath SQLAlchemy after a deadlock leaves the key unknown",
        f"{DEADLOCKS}::{_BENEATH}[False-sa-session]",
        (
            f"{ADAPTERS}.sqlalchemy_guard",
            "                link.may_have_written_later = link.may_have_written_later or self.undone\n",
            "",
        ),
    ),
    _(
        31,
        "I1",
        "a commit beneath SQLAlchemy before a deadlock leaves the key unknown",
        f"{DEADLOCKS}::test_commit_beneath_sqlalchemy_before_a_deadlock_makes_the_key_unknown[sa-session]",
        (f"{ADAPTERS}.sqlalchemy", "        return there and not guard.undone", "        return there"),
    ),
    _(
        33,
        "I4",
        "a deadlock of MySQL in an enlisted transaction leaves the key retryable (SQLAlchemy)",
        f"{DEADLOCKS}::test_handler_that_raises_after_a_deadlock_may_run_again[sa-asyncmy]",
        (SQLALCHEMY_MYSQL, "        watch.look_after_error()\n", "        pass\n"),
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
        (LINKS, "ends_transaction(text) or commits_by_itself(text)", "ends_transaction(text)"),
    ),
    _(
        5,
        "I4",
        "an owner that lost its key leaves no lock in MySQL",
        f"{ENLIST}::test_enlist_of_an_owner_that_lost_its_key_leaves_no_lock[pymysql]",
        (LINKS, "        return self if self._guarded else None\n", "        return self\n"),
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
