"""The guards of encrypted values. See ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

KEYRING, VALUES, LOST = (f"tests/encryption/test_{name}.py" for name in ("keyring", "values", "lost_keys"))
UNREAD = "tests/upkeep/test_unreadable.py"
SQLITE_DUMP = "tests/encryption/test_dumps.py::test_dump_has_no_planted_secret_and_the_app_reads_them_all[sqlite]"
CACHED = "tests/encryption/test_cache.py::test_cache_has_no_planted_secret_and_replays_from_it"
PLAIN, RE_ENCRYPT = "tests/encryption/test_plain_ring.py", "tests/cli/test_re_encrypt.py"
WRITES_PLAIN = f"{PLAIN}::test_keyring_that_does_not_encrypt_writes_what_a_process_without_one_writes[sqlite]"
TO_PLAIN = f"{PLAIN}::test_rotation_with_a_keyring_that_does_not_encrypt_writes_plain_values[sqlite]"
ENVELOPE, SEALS = "oncekey.encryption.envelope", "oncekey.encryption.values"
STORE, OUTBOX, IN_LOOP = "oncekey.encryption.store", "oncekey.encryption.outbox", "oncekey.encryption.in_loop"

SEALED: tuple[Mutant, ...] = (
    # 59: a copy of the database is read, or a value in it is moved or changed
    _(
        59,
        "I6",
        "an envelope is bound to its column",
        f"{KEYRING}::test_sealed_content_does_not_open_in_another_row_or_column",
        (ENVELOPE, "    parts = (*row, column)", "    parts = row"),
    ),
    _(
        59,
        "I6",
        "an envelope is bound to its row",
        f"{KEYRING}::test_sealed_content_does_not_open_in_another_row_or_column",
        (ENVELOPE, "    parts = (*row, column)", "    parts = (column,)"),
    ),
    _(
        59,
        "I6",
        "the parts of a row's name have their lengths in front",
        f"{KEYRING}::test_sealed_content_does_not_open_in_another_row_or_column",
        (ENVELOPE, '[f"{len(part)}:{part}" for part in parts]', "parts"),
        (ENVELOPE, "(head, len(parts), named", "(head, 0, named"),
    ),
    _(
        59,
        "I6",
        "the head of an envelope is compared",
        f"{KEYRING}::test_every_changed_byte_is_noticed",
        (ENVELOPE, " or envelope[:_HEAD] != self._head:", ":"),
        (ENVELOPE, "% (head, len", '% (b"", len'),
    ),
    _(
        59,
        "I2",
        "every envelope has a nonce of its own",
        f"{KEYRING}::test_two_seals_of_the_same_content_share_no_nonce",
        (ENVELOPE, "nonce = urandom(_NONCED - _SALTED)", "nonce = bytes(_NONCED - _SALTED)"),
    ),
    _(
        59,
        "I2",
        "a derived key encrypts a bounded number of values",
        f"{KEYRING}::test_salt_is_replaced_after_so_many_values_and_all_of_them_open",
        (ENVELOPE, "        self._left -= 1\n", ""),
    ),
    _(
        59,
        "I6",
        "a step's result is bound to its step",
        f"{VALUES}::test_step_result_opens_in_its_own_step_only",
        (SEALS, '    return f"result:{step_name}"', '    return "result"'),
    ),
    _(
        59,
        "I6",
        "a payload is bound to its job",
        f"{VALUES}::test_payload_opens_in_its_own_job_only",
        (
            SEALS,
            "payload=self.sealed_json(job.payload, (job.id,), PAYLOAD)",
            "payload=self.sealed_json(job.payload, (), PAYLOAD)",
        ),
        (
            SEALS,
            "payload=self.opened_json(job.payload, (job.id,), PAYLOAD)",
            "payload=self.opened_json(job.payload, (), PAYLOAD)",
        ),
    ),
    _(
        59,
        "I2",
        "a response that does not open is a tombstone",
        f"{LOST}::test_response_that_was_moved_from_another_row_is_replayed_as_a_tombstone",
        (
            SEALS,
            "            return StoredResponse(response.status, (), None, SEALED_RESPONSE)",
            '            return StoredResponse(response.status, (), b"")',
        ),
    ),
    _(
        59,
        "I1",
        "no step runs beside a result that does not open",
        f"{LOST}::test_request_with_a_step_result_that_does_not_open_is_refused_and_runs_no_step",
        ("oncekey.engine.sealed_steps", "        if is_sealed(step.result):", "        if False:"),
    ),
    _(
        59,
        "I8",
        "no task gets a payload that does not open",
        f"{LOST}::test_job_whose_payload_never_opens_is_a_dead_letter_and_can_be_taken_up_again",
        (
            "oncekey.outbox.shift",
            'readable(attempt.job.payload, "the payload of this job")',
            "attempt.job.payload",
        ),
    ),
    # one for each way to the store
    _(
        59,
        "I6",
        "the event loop seals the ends of requests",
        SQLITE_DUMP,
        (IN_LOOP, "        return [seal(end) for end in ends]", "        return list(ends)"),
    ),
    _(
        59,
        "I6",
        "lanes seal swaps",
        SQLITE_DUMP,
        (STORE, "        return [seal(change) for change in batch]", "        return list(batch)"),
    ),
    _(
        59,
        "I6",
        "an enlisted transaction seals its response",
        SQLITE_DUMP,
        ("oncekey.engine.transactions.completion", "engine.sealing.sealed_swap(change)", "change"),
    ),
    _(
        59,
        "I6",
        "a phase seals its result",
        SQLITE_DUMP,
        (
            "oncekey.engine.steps",
            "engine.sealing.sealed_step(operation.record.scope, operation.record.key, step)",
            "step",
        ),
    ),
    _(
        59,
        "I6",
        "a job is sealed before it is added",
        SQLITE_DUMP,
        ("oncekey.engine.transactions.jobs", "job if engine is None else engine.sealing.sealed_job(job)", "job"),
    ),
    _(
        59,
        "I6",
        "the ends of jobs are sealed",
        SQLITE_DUMP,
        (OUTBOX, "each if each.error is None and each.response is None else self._conclusion(each)", "each"),
    ),
    _(
        59,
        "I6",
        "the reason to move a dead letter is sealed",
        SQLITE_DUMP,
        (OUTBOX, "self.values.sealed_audit(audit, self._row(job_id))", "audit"),
    ),
    _(
        59,
        "I6",
        "the cache gets sealed rows",
        CACHED,
        (
            "oncekey.encryption.cache",
            "self._values.sealed_response(record.response, row), record",
            "record.response, record",
        ),
    ),
    # upkeep of a process that does not have the key
    _(
        59,
        "I4",
        "upkeep claims no request that it cannot read",
        f"{UNREAD}::test_request_that_does_not_open_is_not_claimed_and_the_others_are_resumed[sqlite-another_keyring]",
        ("oncekey.upkeep.resumer", "        if self._unreadable.why(record, found) is not None:", "        if False:"),
    ),
    _(
        59,
        "I4",
        "upkeep claims no request whose error it cannot read",
        f"{UNREAD}::test_request_of_which_only_the_error_does_not_open_is_not_claimed[sqlite-no_keyring]",
        ("oncekey.engine.sealed_steps", "    if is_sealed_text(record.last_error):", "    if False:"),
    ),
    _(
        59,
        "I4",
        "a request that upkeep cannot read costs no try and is put off",
        f"{UNREAD}::test_request_that_does_not_open_is_put_off_after_a_minute_and_no_try_is_counted[sqlite-no_keyring]",
        ("oncekey.upkeep.unreadable", "return record.now - (record.reconcile_at or 0.0) < LEFT_SECONDS", "return True"),
    ),
    _(
        59,
        "I4",
        "an error of one key stops no other key",
        f"{UNREAD}::test_key_that_raises_after_its_claim_does_not_abandon_the_others[sqlite]",
        (
            "oncekey.upkeep.callers",
            "                    _log.error(_ONE_KEY, describe(error), exc_info=error)\n",
            "                    raise\n",
        ),
    ),
    _(
        59,
        "I4",
        "a kept request that does not open counts as a try of its key alone",
        f"{UNREAD}::test_kept_request_that_does_not_open_fails_for_its_key_alone_and_ends_as_a_dead_letter[sqlite-another_keyring]",
        (
            "oncekey.upkeep.reconciler",
            "            ended = await self._postpone(record, describe(error), self._retry_in(record), error)\n",
            "            raise\n",
        ),
    ),
    _(
        59,
        "I4",
        "an unknown key is left to the process that can read it",
        f"{UNREAD}::test_key_of_which_only_the_error_does_not_open_is_asked_about_after_a_minute[sqlite-another_keyring]",
        (
            "oncekey.upkeep.reconciler",
            "            if self._unreadable.why(record, found) is not None and is_left(record):",
            "            if False:",
        ),
    ),
    _(
        59,
        "I4",
        "an error that does not open stays sealed when its row is read",
        f"{UNREAD}::test_no_duty_of_a_process_without_the_key_writes_over_what_does_not_open[sqlite-another_keyring]",
        (
            SEALS,
            "return error if content is None else content.decode",
            "return self.opened_text(error, row, ERROR) if content is None else content.decode",
        ),
    ),
    _(
        59,
        "I4",
        "an error that does not open is written back as it was",
        f"{UNREAD}::test_request_that_does_not_open_is_put_off_after_a_minute_and_no_try_is_counted[sqlite-another_keyring]",
        (SEALS, " or is_sealed_text(error):", ":"),
    ),
    _(
        59,
        "I1",
        "a result that does not open is written back as it was",
        f"{UNREAD}::test_result_that_does_not_open_is_the_same_after_a_verdict[sqlite-another_keyring]",
        (SEALS, "        if step.result is None or is_sealed(step.result):  #", "        if step.result is None:  #"),
    ),
    _(
        59,
        "I4",
        "the cause of an unknown key is kept where it does not open",
        f"{UNREAD}::test_cause_that_does_not_open_is_kept_by_a_verdict_that_settles_one_of_two_effects[sqlite-another_keyring]",
        ("oncekey.core.doubts", "    if is_sealed_text(before):\n", "    if False:\n"),
    ),
    _(
        59,
        "I4",
        "the reaper does not write over an error that does not open",
        f"{UNREAD}::test_no_duty_of_a_process_without_the_key_writes_over_what_does_not_open[sqlite-no_keyring]",
        ("oncekey.upkeep.reaper", "last_error=unless_sealed(record.last_error, _REASON)", "last_error=_REASON"),
    ),
    _(
        59,
        "I4",
        "a key that raises before its claim is put off",
        f"{UNREAD}::test_key_that_raises_before_its_claim_is_put_off_and_the_others_are_resumed",
        (
            "oncekey.upkeep.resumer",
            '            await self._postpone(record, "put_off", NO_FUNCTION_SECONDS)\n            raise\n',
            "            raise\n",
        ),
    ),
    _(
        59,
        "I4",
        "a store in trouble ends the round, and no running request",
        "tests/upkeep/test_callers.py::test_store_in_trouble_ends_the_round_and_running_keys_end_as_they_can",
        ("oncekey.upkeep.callers", "                    failed.append(error)\n", "                    raise\n"),
    ),
    _(
        59,
        "I4",
        "no key begins while the store is in trouble",
        "tests/upkeep/test_callers.py::test_store_in_trouble_ends_the_round_and_running_keys_end_as_they_can",
        ("oncekey.upkeep.callers", "                if failed:\n", "                if False:\n"),
    ),
    # a ring that does not encrypt
    _(
        59,
        "I1",
        "a ring that does not encrypt leaves texts plain",
        TO_PLAIN,
        (SEALS, "        if not self.keyring.encrypts:\n            return text\n", ""),
    ),
    _(
        59,
        "I1",
        "a ring that does not encrypt leaves results and payloads plain",
        WRITES_PLAIN,
        (SEALS, "        if not self.keyring.encrypts:\n            return content\n", ""),
    ),
    _(
        59,
        "I1",
        "a ring that does not encrypt leaves responses plain",
        WRITES_PLAIN,
        (SEALS, "        if not self.keyring.encrypts:\n            return response\n", ""),
    ),
    _(
        59,
        "I2",
        "plain values stay when values are decrypted",
        TO_PLAIN,
        (
            "oncekey.encryption.renewal",
            "(renewed.sealed if self._keyring.encrypts else renewed.current).append(PLAIN)",
            "renewed.sealed.append(PLAIN)",
        ),
    ),
    _(
        59,
        "I2",
        "a damaged value does not stop a rotation to plain text",
        f"{PLAIN}::test_damaged_value_does_not_stop_a_rotation_to_plain_text",
        ("oncekey.encryption.report", "return self.current == PLAIN or bool(", "return bool("),
    ),
    _(
        59,
        "I6",
        "values are decrypted only if the operator says so",
        f"{RE_ENCRYPT}::test_plain_keyring_without_decrypt_is_refused_before_the_operator_is_asked[sqlite]",
        ("oncekey.cli.re_encrypt", "    if not (decrypt or dry_run or keyring.encrypts):\n", "    if False:\n"),
    ),
    _(
        59,
        "I6",
        "values are decrypted only if the keyring says so",
        f"{RE_ENCRYPT}::test_decrypt_with_a_keyring_that_encrypts_is_refused[sqlite-dry0]",
        ("oncekey.cli.re_encrypt", "    if decrypt and keyring.encrypts:\n", "    if False:\n"),
    ),
    # what an operator's commands write and say
    _(
        59,
        "I6",
        "a loss is not accepted with a plain reason beside encrypted rows",
        "tests/cli/test_accept_loss_encryption.py::test_command_without_a_keyring_is_refused_where_encrypted_values_are_left",
        ("oncekey.cli.migrate", "            raise refusal\n", "            pass\n"),
    ),
    _(
        59,
        "I4",
        "the doctor says that it has read a part of the rows",
        "tests/cli/test_doctor_encryption.py::test_doctor_that_read_a_part_says_so_at_every_level[sqlite]",
        ("oncekey.admin.encryption_check", "        if not self.is_whole:\n", "        if False:\n"),
    ),
    _(
        59,
        "I4",
        "the doctor goes on to the next page",
        "tests/cli/test_doctor_encryption.py::test_doctor_reads_all_pages_if_there_is_time[sqlite]",
        ("oncekey.admin.encryption", "        if not after or time.monotonic() >= ends_at:\n", "        if True:\n"),
    ),
)
