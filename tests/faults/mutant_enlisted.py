# ruff: noqa: E501 - a table: what stands in the product is quoted as it stands there
"""The guards of an enlisted transaction that its handler ends itself: see ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

ENLIST = "oncekey.engine.transactions.adapters"
GUARD, PSYCOPG, WATCH, ASYNCPG, TEXTS = (
    f"{ENLIST}.sqlalchemy_guard",
    f"{ENLIST}.psycopg",
    f"{ENLIST}.psycopg_watch",
    f"{ENLIST}.asyncpg",
    f"{ENLIST}.texts",
)
OWN = "tests/enlist/test_own_endings.py::test_handler_that_ends_its_transaction_never_commits_twice"
LATER, UNDER = "tests/enlist/test_later_transactions.py", "tests/enlist/test_beneath.py"
BENEATH = f"{ENLIST}.sqlalchemy_beneath"

ENLISTED: tuple[Mutant, ...] = (
    # 31: a handler that ends its transaction and writes again
    _(31, "I1", "a key is unknown where a later transaction may have written", f"{OWN}[postgresql-asyncpg-ROLLBACK, write, COMMIT]",
      ("oncekey.engine.transactions.outcome", "if enlisted.number is None or enlisted.link.may_have_written_later:", "if enlisted.number is None:"),
      ("oncekey.engine.transactions.outcome", "            elif enlisted.link.may_have_written_later:\n", "            elif False:\n")),
    _(31, "I1", "statements of asyncpg are seen", f"{OWN}[postgresql-asyncpg-ROLLBACK, BEGIN, write, COMMIT, BEGIN]",
      (ASYNCPG, "        self._beneath.add_query_logger(self._see)\n", "")),
    _(31, "I1", "a transaction after the enlisted one only reads (SQLAlchemy)", f"{LATER}::test_write_that_no_verb_shows_is_refused_by_the_server",
      (GUARD, "            connection.exec_driver_sql(READ_ONLY[self.link.dialect]).close()\n", "            pass\n"),
      (WATCH, "connection._read_only, True, b\"\"", "connection._read_only, False, b\"\"")),
    _(31, "I1", "a write after the enlisted transaction is refused (SQLAlchemy)", f"{LATER}::test_rolled_back_session_reads_and_refuses_to_write",
      (GUARD, "            if link.ended and (verb := writes(statement)) is not None:\n", "            if False:\n")),
    _(31, "I1", "a commit beneath SQLAlchemy is refused (psycopg)", f"{OWN}[postgresql-sa-session-commits beneath]",
      (WATCH, "    watch.replace(commit=method(\"COMMIT\"), rollback=method(\"ROLLBACK\"))\n", "")),
    _(31, "I1", "SQL on the driver's connection beneath SQLAlchemy is seen (psycopg)", f"{OWN}[postgresql-sa-session-one text on the driver]",
      (WATCH, "    watch.start()\n    watch.see_statements()\n", "    watch.start()\n")),
    _(31, "I1", "an end on the driver's connection beneath SQLAlchemy is refused (asyncpg)", f"{OWN}[postgresql-sa-asyncpg-does all of it on the driver]",
      (f"{ENLIST}.asyncpg_watch", "        connection._protocol = self._protocol\n", "        pass\n"),
      (GUARD, "link.may_have_written_later = link.may_have_written_later or not link.ended", "pass")),
    _(31, "I1", "a COPY of asyncpg after the rollback of SQLAlchemy leaves the key unknown", f"{UNDER}::test_write_of_asyncpg_after_the_rollback_makes_the_key_unknown[copy]",
      (f"{ENLIST}.asyncpg_watch", "\"copy_in\", \"copy_out\"", "")),
    _(31, "I1", "the driver's connection of a later transaction of SQLAlchemy is watched, too", f"{OWN}[postgresql-sa-session-rolls back, does all of it on the driver]",
      (GUARD, "            return\n        self._watch_beneath(connection)\n        with self._sending():", "            return\n        with self._sending():"),
      (GUARD, "    def _watch(self, connection: Connection) -> None:\n        self._watch_beneath(connection)\n", "    def _watch(self, connection: Connection) -> None:\n        if connection is self.connection:\n            self._watch_beneath(connection)\n")),
    _(31, "I4", "SQLAlchemy's own ROLLBACK is not refused on the driver's connection", f"{LATER}::test_rolled_back_session_reads_and_refuses_to_write[postgresql-sa-session]",
      (BENEATH, "        if self.announced:\n", "        if False:\n")),
    _(31, "I1", "a psycopg in autocommit mode after the rollback of SQLAlchemy leaves the key unknown", f"{UNDER}::test_psycopg_in_autocommit_mode_after_the_rollback_makes_the_key_unknown",
      (BENEATH, "        if self._watch.bypassed():\n", "        if False:\n")),
    _(31, "I1", "an end that no watch can see leaves the key unknown: the next statement", f"{UNDER}::test_end_that_cannot_be_seen_makes_the_key_unknown[SqlAlchemyAsyncpg-read]",
      (GUARD, "link.may_have_written_later = link.may_have_written_later or not link.ended", "pass")),
    _(31, "I1", "an end that no watch can see leaves the key unknown: the rollback of SQLAlchemy", f"{UNDER}::test_end_that_cannot_be_seen_makes_the_key_unknown[SqlAlchemyAsyncpg-rollback]",
      (GUARD, "        self._look_for_mark()\n        self.link.ended = True\n", "        self.link.ended = True\n")),
    _(31, "I1", "a transaction whose end was refused is not committed (SQLAlchemy)", f"{UNDER}::test_end_on_the_drivers_connection_is_refused_and_says_so[commit-postgresql-sa-session]",
      (f"{ENLIST}.sqlalchemy", "self.ended or self.end_refused or not guard.is_current()", "self.ended or not guard.is_current()")),
    _(31, "I1", "a text of several statements counts as a commit (SQLAlchemy)", f"{OWN}[postgresql-sa-session-two others in one text]",
      (GUARD, "            if may_end_transaction(statement):\n", "            if False:\n"),
      (BENEATH, "        if may_end_transaction(sql):\n", "        if False:\n")),
    _(31, "I1", "a text of several statements on the driver's connection counts as a commit (SQLAlchemy)", f"{OWN}[postgresql-sa-asyncpg-a later text on the driver]",
      (BENEATH, "        if may_end_transaction(sql):\n", "        if False:\n")),
    _(31, "I1", "a COMMIT behind a comment is refused", f"{OWN}[postgresql-psycopg-COMMIT behind a comment]",
      (TEXTS, "_ENDS = re.compile(rf\"(?:{_GAP}|;)*+({_END})\", re.IGNORECASE).match", "_ENDS = re.compile(rf\"\\s*({_END})\", re.IGNORECASE).match")),
    _(31, "I1", "an early commit of psycopg is refused", f"{OWN}[postgresql-psycopg-commits]",
      (PSYCOPG, "        def commit() -> None:\n            if self.end_allowed or self.ended:\n", "        def commit() -> None:\n            if True:\n")),
    _(31, "I1", "statements of psycopg are seen before they are sent", f"{OWN}[postgresql-psycopg-COMMIT]",
      (WATCH, "        self._connection.cursor_factory = _watched(self._factory)\n", "        pass\n")),
    _(31, "I1", "psycopg begins a later transaction READ ONLY", f"{OWN}[postgresql-psycopg-rolls back, writes again, commits]",
      (WATCH, "connection._read_only, True, b\"\"", "connection._read_only, False, b\"\"")),
    _(31, "I1", "SQLite refuses a write after an allowed rollback", f"{LATER}::test_rolled_back_session_reads_and_refuses_to_write",
      (f"{ENLIST}.sqlite", "        _log.error(\"%s\", self.refuse_later(\"a write\"))\n        return sqlite3.SQLITE_DENY\n", "        return sqlite3.SQLITE_OK\n"),
      (GUARD, "            if link.ended and (verb := writes(statement)) is not None:\n", "            if False:\n")),
    _(31, "I4", "the guards of a session end with the request (SQLAlchemy)", f"{LATER}::test_background_task_writes_with_the_session_after_the_response",
      (GUARD, "        self._freed = True\n", "        pass\n"), (GUARD, "                event.remove(target, name, function)\n", "                pass\n")),
    _(31, "I4", "the guards end when a connection goes back to its pool", f"{LATER}::test_connection_given_back_to_its_pool_in_the_handler_is_free",
      (GUARD, "            record.finalize_callback.append(function)\n", "            pass\n")),
    _(31, "I1", "a transaction that the server has committed makes the key unknown", "tests/enlist/test_endings.py::test_callers_block_that_commits_in_the_handler_is_noticed[Psycopg]",
      ("oncekey.engine.transactions.stages", "_H.SERVER_COMMITTED,   _S.MAY_BE_COMMITTED)", "_H.SERVER_COMMITTED,   _S.ROLLED_BACK)")),
    # 32: what a commit proves
    _(32, "I2", "only the transaction seen at enlist is committed (SQLAlchemy)", "tests/enlist/test_closed_meanwhile.py",
      (f"{ENLIST}.sqlalchemy", "            if not guard.committed:\n", "            if False:\n"),
      (f"{ENLIST}.sqlalchemy", "            return rows if self._still() else []  #", "            return rows  #"),
      (f"{ENLIST}.sqlalchemy", "            if guard is None or not self._still():\n", "            if guard is None:\n")),
    _(23, "I2", "an enlisted commit waits for the disk", "tests/enlist/test_durability.py::test_synchronous_commit_off_is_on_in_the_enlisted_transaction",
      ("oncekey.stores.postgres/transaction_enlist", "WHEN 'off' THEN 'on'", "WHEN 'off' THEN 'off'")),
    # 31 to 33: what first users' apps did
    _(31, "I1", "a removed scoped session is noticed", "tests/enlist/test_ordinary_flask.py::test_session_removed_and_used_again_makes_the_key_unknown",
      (f"{ENLIST}.sqlalchemy", "        if self.ended and self._was_removed():\n", "        if False:\n")),
    _(31, "I1", "a removed scoped session is noticed in another thread", "tests/enlist/test_scoped_sessions.py::test_removed_session_that_is_used_again_makes_the_key_unknown",
      (f"{ENLIST}.sqlalchemy", "        return thread != threading.get_ident() or not registry.has() or", "        return thread == threading.get_ident() and")),
    _(31, "I1", "an enlist that was not awaited is noticed behind an error", "tests/enlist/test_misuse.py::test_enlist_that_was_not_awaited_is_noticed_behind_an_error_too",
      ("oncekey.engine.transactions.completion", "    if enlisted.stage is Stage.NOT_AWAITED and event is not Event.DISCARD:\n", "    if enlisted.stage is Stage.NOT_AWAITED and event in COMMITTING:\n")),
    _(33, "I4", "a 4xx after a failed statement is stored", "tests/enlist/test_ordinary_flask.py::test_integrity_error_answered_with_409_is_stored_and_replayed",
      ("oncekey.engine.transactions.completion", " and (event is not Event.FAIL or enlisted.held_too_long):\n", ":\n")),
    _(31, "I1", "a SQLAlchemy that does not report autocommit is refused", "tests/enlist/test_misused_transactions.py::test_sqlalchemy_that_cannot_tell_autocommit_is_refused",
      (f"{ENLIST}.sqlalchemy", "        if _numbers(sqlalchemy.__version__) < (2, 0, 43):\n", "        if False:\n")),
    _(31, "I1", "a function cannot enlist the transaction of its caller", "tests/functions/test_nested_transactions.py::test_function_is_refused_the_transaction_that_its_caller_enlisted",
      ("oncekey.engine.transactions.enlistment", "around.enlisted.target is target", "False")),
    _(31, "I1", "a function cannot enlist a block of Django that was open before it", "tests/enlist/test_django_misuse.py::test_function_in_the_block_of_a_view_cannot_enlist_it",
      ("oncekey.engine.transactions.enlistment", "        if operation.in_callers_block:\n", "        if False:\n")),
)  # fmt: skip
