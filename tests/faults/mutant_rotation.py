"""The guards of a change of encryption keys: a value is replaced only if it still is as it was."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutant
from tests.faults.mutant import mutant as _

SQLITE, POSTGRES, MYSQL = "oncekey.stores.sqlite", "oncekey.stores.postgres", "oncekey.stores.mysql"
DYNAMODB, MEMORY = "oncekey.stores.dynamodb.kept", "oncekey.stores.memory.kept"
TESTS = {
    SQLITE: ("tests/stores/test_sqlite.py::TestSqliteStore", "tests/stores/test_outbox.py::TestSqliteOutbox"),
    POSTGRES: ("tests/stores/test_postgres.py::TestPostgresStore", "tests/stores/test_outbox.py::TestPostgresOutbox"),
    MYSQL: ("tests/stores/test_mysql.py::TestMysqlStore", "tests/stores/test_mysql_outbox.py::TestMysqlOutbox"),
}
VALUE = "test_value_that_is_not_as_it_was_is_not_replaced"
STEP = "test_result_of_a_step_is_replaced_if_it_still_is_as_it_was"
LINE = "test_reason_in_the_audit_is_replaced_if_it_still_is_as_it_was"
JOB = "test_job_that_is_not_as_it_was_is_not_replaced"
ROTATION, WRONG_KEY = "tests/encryption/test_rotation.py", "tests/encryption/test_wrong_current_key.py"
ROTATES, REPORT = "oncekey.encryption.rotation", "oncekey.encryption.report"
KEPT = "tests/stores/test_kept.py"


def _compared(store: str, what: str, test: str, *edits: Edit) -> Mutant:
    of_keys, of_jobs = TESTS[store]
    suite = of_jobs if test == JOB else of_keys
    name = store.rpartition(".")[2]
    return _(37, "I2", f"{name}: a new value is not written over another {what}", f"{suite}::{test}", *edits)


ROTATIONS: tuple[Mutant, ...] = (
    # 37: what a key was reserved under stands in its row, and an operator replaces the encryption key meanwhile
    _compared(SQLITE, "body", VALUE, (f"{SQLITE}/rewrite_keys", "AND response_body IS ?5 ", "")),
    _compared(SQLITE, "status", VALUE, (f"{SQLITE}/rewrite_keys", "AND response_status IS ?3 ", "")),
    _compared(SQLITE, "list of headers", VALUE, (f"{SQLITE}/rewrite_keys", "AND response_headers IS ?4 ", "")),
    _compared(SQLITE, "layout", VALUE, (f"{SQLITE}/rewrite_keys", "AND response_schema_version IS ?6", "")),
    _compared(SQLITE, "error", VALUE, (f"{SQLITE}/rewrite_keys", "AND last_error IS ?7", "")),
    _compared(SQLITE, "result", STEP, (f"{SQLITE}/rewrite_steps", " AND result IS ?4", "")),
    _compared(SQLITE, "reason", LINE, (f"{SQLITE}/rewrite_audit", " AND why IS ?2", "")),
    _compared(SQLITE, "payload", JOB, (f"{SQLITE}/rewrite_jobs", " AND payload IS ?2", "")),
    _compared(SQLITE, "error of a job", JOB, (f"{SQLITE}/rewrite_jobs", " AND last_error IS ?3", "")),
    _compared(SQLITE, "history", JOB, (f"{SQLITE}/rewrite_jobs", " AND history IS ?4", "")),
    *(
        _compared(
            POSTGRES,
            what,
            VALUE,
            (f"{POSTGRES}/rewrite_keys", f"    AND k.{column} IS NOT DISTINCT FROM h.{old}\n", ""),
        )
        for what, column, old in (
            ("status", "response_status", "old_status"),
            ("list of headers", "response_headers", "old_headers"),
            ("body", "response_body", "old_body"),
            ("layout", "response_schema_version", "old_version"),
            ("error", "last_error", "old_error"),
        )
    ),
    _compared(POSTGRES, "result", STEP, (f"{POSTGRES}/rewrite_steps", " AND s.result = h.old_result", "")),
    _compared(POSTGRES, "reason", LINE, (f"{POSTGRES}/rewrite_audit", " AND a.why = h.old_why", "")),
    _compared(POSTGRES, "payload", JOB, (f"{POSTGRES}/rewrite_jobs", "AND j.payload = h.old_payload ", "")),
    _compared(
        *(POSTGRES, "error of a job", JOB),
        (f"{POSTGRES}/rewrite_jobs", "AND j.last_error IS NOT DISTINCT FROM h.old_error", ""),
    ),
    _compared(POSTGRES, "history", JOB, (f"{POSTGRES}/rewrite_jobs", "    AND j.history = h.old_history\n", "")),
    _(
        *(37, "I1", "postgres: no wait for a row that the app's transaction holds"),
        f"{KEPT}::test_row_that_an_open_transaction_holds_is_not_waited_for",
        (f"{POSTGRES}/rewrite_keys", "FOR NO KEY UPDATE SKIP LOCKED", "FOR NO KEY UPDATE"),
    ),
    _compared(MYSQL, "body", VALUE, (f"{MYSQL}/is_old_key", "AND sha2(k.response_body, 256) <=> w.old_body ", "")),
    _compared(MYSQL, "error", VALUE, (f"{MYSQL}/is_old_key", "AND sha2(k.last_error, 256) <=> w.old_error", "")),
    _(
        *(37, "I1", "mysql: no wait for a row that the app's transaction holds"),
        f"{KEPT}::test_row_that_an_open_transaction_of_mysql_holds_is_not_waited_for",
        (f"{MYSQL}/rewrite_keys", "FOR UPDATE SKIP LOCKED", "FOR UPDATE"),
    ),
    _(
        *(37, "I2", "dynamodb: a new value is compared in the write itself"),
        f"{KEPT}::test_write_of_the_app_after_the_comparison_is_not_overwritten",
        (DYNAMODB, "            _where_as_in(item, name, change)\n", '            change.where_there("pk")\n'),
    ),
    _(
        *(37, "I2", "memory: a new value is not written over another"),
        "tests/stores/test_memory.py::TestMemoryStore::test_value_that_is_not_as_it_was_is_not_replaced",
        (MEMORY, "if row is None or _values(kept_key(row)) != _values(old):", "if row is None:"),
    ),
    _(
        *(37, "I2", "what the app changed during a walk is found by the next one"),
        f"{ROTATION}::test_value_that_the_app_writes_meanwhile_is_kept_and_found_by_the_next_walk[memory]",
        (ROTATES, "while (report.waiting or report.changed) and", "while report.waiting and"),
    ),
    _(
        *(37, "I2", "a value that does not open stays as it is"),
        f"{ROTATION}::test_value_moved_to_another_row_is_not_rewritten[memory]",
        (
            "oncekey.encryption.renewal",
            "            renewed.lost.append(number)\n            return None\n",
            "            renewed.lost.append(number)\n            renewed.sealed.append(1)\n            return b''\n",
        ),
    ),
    # 37: the ring of the operator has another key under the current number than the app has
    _(
        *(37, "I2", "no line of the audit is under a key that is not proven"),
        f"{WRONG_KEY}::test_value_that_the_current_key_does_not_open_is_reported",
        (ROTATES, "if self._dry_run or not self.may_write:", "if self._dry_run:"),
    ),
    _(
        *(37, "I2", "a key that opens some of the values that name it is not proven"),
        f"{WRONG_KEY}::test_key_that_opens_some_of_its_values_is_not_taken_for_the_right_one",
        (REPORT, "bool(self.opened[self.current] and not self.unopened)", "bool(self.opened[self.current])"),
    ),
    _(
        *(37, "I2", "a key that no value names is not proven"),
        f"{WRONG_KEY}::test_key_without_any_value_is_not_proven",
        (REPORT, "bool(self.opened[self.current] and not self.unopened)", "not self.unopened"),
    ),
    _(
        *(37, "I2", "a key that opens none of the values that name it is never taken"),
        f"{WRONG_KEY}::test_key_that_opens_no_value_is_never_taken[option1]",
        (ROTATES, "(self._trust_key and not self.report.is_wrong)", "self._trust_key"),
    ),
    _(
        *(37, "I2", "a reason in the audit proves no key"),
        f"{WRONG_KEY}::test_reason_in_the_audit_proves_no_key",
        (ROTATES, "        if not isinstance(row, KeptLine):\n", "        if True:\n"),
    ),
    _(
        *(37, "I2", "nothing is written before all rows are read"),
        f"{WRONG_KEY}::test_nothing_is_written_before_all_rows_are_read",
        (ROTATES, "if not report.walks or not self.may_write:", "if not self.may_write:"),
    ),
    _(
        *(37, "I2", "a rotation stops when a process with another key appears"),
        f"{WRONG_KEY}::test_rotation_stops_when_a_process_with_another_key_appears_while_it_writes[False]",
        (ROTATES, "if not report.walks or not self.may_write:", "if not report.walks:"),
    ),
    # 59: a key that is lost for good
    _(
        *(59, "I4", "reasons in the audit keep no lost key in the ring"),
        "tests/cli/test_re_encrypt.py::test_lost_key_is_needed_as_long_as_a_row_or_a_job_that_has_not_ended_is_under_it"
        "[sqlite]",
        (REPORT, "return self.values - self.reasons - self.ended", "return self.values - self.ended"),
    ),
    _(
        *(59, "I8", "a job that has not ended keeps its lost key in the ring"),
        "tests/cli/test_doctor_encryption.py::test_job_that_has_not_ended_keeps_its_missing_key_broken[sqlite]",
        (REPORT, "return job is None or job.state in ENDED", "return True"),
    ),
    _(
        *(59, "I4", "what a retry gets is told by whether its request can be compared"),
        "tests/encryption/test_outlook.py::test_predicted_response_equals_the_real_response[missing-flat]",
        (
            "oncekey.core.decision",
            "return _unreadable(record, wanted) if same is None else decision",
            "return decision",
        ),
    ),
    _(
        *(59, "I6", "a command without the keyring writes no plain text to a plain row of a store that is encrypted"),
        "tests/cli/test_encrypted_rows.py::test_plain_row_in_a_store_where_the_app_encrypts_needs_the_keyring[sqlite]",
        ("oncekey.admin.encryption", "number, what = _number_elsewhere(store),", "number, what = None,"),
    ),
    _(
        *(37, "I2", "a cached answer under a key that is not in the ring is not replayed"),
        f"{ROTATION}::test_cached_answer_under_a_removed_key_is_not_used",
        ("oncekey.encryption.cache", "        if is_sealed and key_id_of", "        if False and key_id_of"),
    ),
)
