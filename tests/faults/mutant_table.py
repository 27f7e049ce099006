# ruff: noqa: E501 - a table: what stands in the product is quoted as it stands there
"""The guards of the product: what takes each away, and the test that must notice."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _
from tests.faults.mutant_cache import CACHE
from tests.faults.mutant_clients import CLIENTS
from tests.faults.mutant_declared import DECLARED
from tests.faults.mutant_django import DJANGO
from tests.faults.mutant_doubts import DOUBTS_OF_EFFECTS
from tests.faults.mutant_dynamodb import DYNAMODB
from tests.faults.mutant_encryption import ENCRYPTION
from tests.faults.mutant_endings import ENDINGS
from tests.faults.mutant_enlisted import ENLISTED
from tests.faults.mutant_flat import FLAT_WAY
from tests.faults.mutant_guards import GUARDS
from tests.faults.mutant_mysql import MYSQL
from tests.faults.mutant_mysqlclient import MYSQLCLIENT
from tests.faults.mutant_redis import REDIS_STORE
from tests.faults.mutant_rotation import ROTATIONS
from tests.faults.mutant_sealed import SEALED
from tests.faults.mutant_silence import SILENCE
from tests.faults.mutant_upkeep import UPKEEP
from tests.faults.mutant_writer import WRITERS

SQLITE, POSTGRES = "oncekey.stores.sqlite", "oncekey.stores.postgres"
IN_LOOP = "tests/stores/test_sqlite_in_loop.py"
SQLITE_SUITE = "tests/stores/test_sqlite.py::TestSqliteStore"
POSTGRES_SUITE = "tests/stores/test_postgres.py::TestPostgresStore"
SQLITE_OUTBOX = "tests/stores/test_outbox.py::TestSqliteOutbox"
POSTGRES_OUTBOX = "tests/stores/test_outbox.py::TestPostgresOutbox"

MODEL = "tests/faults/test_short_forms.py::test_short[model:_every_interleaving--]"


NOT_HERE = {
    "29": "the guards of limits and bound keys stand under 30",
}


MUTANTS: tuple[Mutant, ...] = (
    # 1: the lease is over while the owner lives
    _(1, "I3", "a swap compares the owner (SQLite)", f"{SQLITE_SUITE}::test_a_late_owner_writes_nothing",
      (f"{SQLITE}/swap", "AND owner = ?4", "")),
    _(1, "I3", "a completion compares the owner (PostgreSQL)",
      f"{POSTGRES_SUITE}::test_a_late_owner_writes_nothing",
      (f"{POSTGRES}/end", " AND i.owner = w.owner", ""), (f"{POSTGRES}/held", " AND i.owner = w.owner", "")),
    _(1, "I3", "a completion compares the owner (SQLite)", f"{IN_LOOP}::test_completion_by_a_replaced_owner_writes_nothing",
      (f"{SQLITE}/batch", "      AND idempotency_keys.owner = json_extract(w.value, '$[2]')\n", "")),
    _(1, "I3", "a batch that changed too few rows is read back (SQLite)",
      f"{IN_LOOP}::test_where_not_all_rows_change_the_rows_tell",
      (f"{SQLITE}.batch", "connection.total_changes - before == packed.rows", "True")),
    _(1, "I3", "a swap compares the owner (memory)", "tests/stores/test_memory.py::TestMemoryStore::test_a_late_owner_writes_nothing",
      ("oncekey.core.swaps", " or row.owner != self.owner", "")),
    _(1, "I3", "enlist compares the owner (SQLite)",
      "tests/enlist/test_leases.py::test_a_lost_lease_writes_nothing_and_answers_as_the_record_says",
      (f"{SQLITE}/transaction_enlist", " AND owner = :owner", ""), (f"{SQLITE}/transaction_complete", " AND owner = :owner", "")),
    _(1, "I3", "finish that reads another owner reports a lost lease",
      "tests/engine/test_finish.py::test_a_lost_lease_writes_nothing_more",
      ("oncekey.engine.engine", "elif seen is None or seen.owner != record.owner:", "elif seen is None:")),
    _(1, "I2", "finish does not overwrite a settled row",
      "tests/engine/test_finish.py::test_a_lost_lease_writes_nothing_more",
      ("oncekey.engine.engine", " and seen.response == response:", ":")),
    _(1, "I3", "a refused renewal marks the operation as lost", "tests/engine/test_keeper.py::test_a_lost_lease_is_noticed",
      ("oncekey.engine.keeper", "            operation.lost = True\n", "            pass\n")),
    # 2: an expired lease runs a payment again
    _(2, "I1", "an external key is not taken over", "tests/core/test_decision.py::test_lapsed_lease_becomes_unknown_or_is_taken_over_by_effects",
      ("oncekey.core.decision", "if record.state is State.IN_PROGRESS and record.effects not in MAY_RERUN:", "if False:")),
    _(37, "I1", "a row with steps is resumed by a phased route only",
      "tests/engine/test_changed_effects.py::test_deploy_with_other_effects_charges_no_second_time",
      ("oncekey.core.decision", "    if record.has_steps:\n        declared", "    if False:\n        declared")),
    _(37, "I1", "a repeatable attempt is repeated by a repeatable route only",
      "tests/engine/test_changed_effects.py::test_deploy_with_other_effects_charges_no_second_time",
      ("oncekey.core.decision", "elif record.effects is Effects.REPEATABLE:", "elif False:")),
    _(37, "I1", "a lapsed phased key is released before another declaration claims it",
      "tests/faults/test_model.py::test_deploys_between_two_requests_break_nothing",
      ("oncekey.core.decision", "if record.effects is Effects.PHASED is not wanted.effects:", "if False:")),
    _(37, "I7", "a migration that older versions can work with does not shut them out",
      "tests/stores/test_versions.py::test_migration_raises_the_oldest_version_that_can_work_with_the_tables",
      ("oncekey.stores.sql.queries", "self.number if self.works_from == self.number else -self.number", "self.number")),
    _(37, "I7", "a migration that needs a newer version shuts older ones out",
      "tests/stores/test_versions.py::test_migration_raises_the_oldest_version_that_can_work_with_the_tables",
      ("oncekey.stores.sql.queries", "if applied.works_from > newest:", "if False:")),
    _(37, "I1", "handlers end before the app closes what they use",
      "tests/web/test_shutdown.py::test_running_handler_ends_before_the_app_closes_its_pool",
      ("oncekey.web.asgi_lifespan", "await self.once.drain()", "pass")),
    _(37, "I4", "a OnceKey that is used after its lifespan opens again",
      "tests/web/test_shutdown.py::test_app_whose_lifespan_is_over_can_be_used_again",
      ("oncekey.engine.engine", "        self.closed = True\n", "        pass\n")),
    _(37, "I8", "a deferred job is due before its key is over",
      "tests/engine/test_staging.py::test_job_due_after_its_key_is_over_is_refused",
      ("oncekey.engine.transactions.jobs", "if settles and at is not None:", "if False:")),
    _(37, "I4", "a handler that never ends loses its lease",
      "tests/web/test_max_run.py::test_wsgi_handler_goes_on_and_its_lease_is_no_longer_renewed",
      ("oncekey.engine.keeper", "        operation.runs_until = None\n        self.unwatch(operation)\n", "        operation.runs_until = None\n")),
    _(2, "I1", "a retry requires effects that may run again", "tests/core/test_swaps.py::test_a_second_run_needs_effects_that_allow_it",
      ("oncekey.core.swaps", "(Condition.MAY_RERUN, record.effects in MAY_RERUN)", "(Condition.MAY_RERUN, True)")),
    _(2, "I1", "the sweeper makes external keys unknown", "tests/upkeep/test_sweeper.py::test_by_where_the_effects_live",
      ("oncekey.upkeep.sweeper", "Event.RELEASE if record.effects in MAY_RERUN else Event.DOUBT", "Event.RELEASE"),
      ("oncekey.core.swaps", "(Condition.MAY_RERUN, record.effects in MAY_RERUN)", "(Condition.MAY_RERUN, True)")),
    _(2, "I1", "a swap compares the effects (SQLite)", f"{SQLITE_SUITE}::test_actor_that_read_before_an_external_effect_moves_nothing",
      (f"{SQLITE}/swap", "AND (?22 IS NULL OR effects = ?22)", "AND (?22 IS NULL OR 1)")),
    _(2, "I1", "a swap compares the effects (PostgreSQL)",
      f"{POSTGRES_SUITE}::test_actor_that_read_before_an_external_effect_moves_nothing",
      (f"{POSTGRES}/swap", "(w.from_effects IS NULL OR k.effects = w.from_effects)", "true")),
    _(2, "I1", "nothing is refuted before the quarantine is over", "tests/upkeep/test_ingest.py::test_refuted_is_accepted_after_the_quarantine",
      ("oncekey.engine.settlement", "if isinstance(verdict, Refuted | NotHappened) and early > 0:\n        # When the provider", "if False:\n        # When the provider"),
      ("oncekey.core.swaps", "lease_over_by = record.quarantine if quarantine_seconds is None else quarantine_seconds", "lease_over_by = 0.0")),
    _(2, "I1", "a verdict counts from the time of its inquiry",
      "tests/upkeep/test_reconciler.py::test_asked_before_the_quarantine_is_over_and_answered_after_it",
      ("oncekey.engine.settlement", "if isinstance(verdict, Refuted | NotHappened) and early > 0:\n        # When the provider", "if False:\n        # When the provider")),
    _(2, "I1", "an open effect that may not be repeated makes its key unknown",
      "tests/engine/test_steps_trouble.py::test_a_crash_in_an_effect",
      ("oncekey.engine.steps", "without if repeatable else Effects.EXTERNAL", "without")),
    _(2, "I1", "an open effect makes its key unknown (in the model)", MODEL,
      ("oncekey.upkeep.sweeper", "Event.RELEASE if record.effects in MAY_RERUN else Event.DOUBT", "Event.RELEASE"),
      ("oncekey.core.swaps", "(Condition.MAY_RERUN, record.effects in MAY_RERUN)", "(Condition.MAY_RERUN, True)")),
    _(9, "I1", "a claim with a lost answer is recognised by its token",
      "tests/engine/test_lost_claims.py::test_a_charge_is_not_made_again",
      ("oncekey.engine.batching.thread_lane", "        self._look_for_claims(places)\n", ""),
      ("oncekey.core.swaps", " and (row.attempt > 1 or row.has_steps))", " and False)")),
    _(9, "I1", "discard refuses a key that has later work",
      "tests/stores/test_memory.py::TestMemoryStore::test_reservation_with_later_work_is_not_discarded",
      ("oncekey.core.swaps", " and (row.attempt > 1 or row.has_steps))", " and False)")),
    _(4, "I4", "a busy lane undoes reservations of callers that left",
      "tests/engine/test_loop_lane_trouble.py::test_reservation_of_a_gone_caller_is_undone_by_a_busy_lane",
      ("oncekey.engine.batching.thread_lane", "                    elif ticket.asked:\n", "                    elif False:\n")),
    _(9, "I8", "a job's end stays unsaved until its owner is known",
      "tests/outbox/test_worker_store_faults.py::test_an_end_whose_answer_was_lost_keeps_no_place_when_the_look_for_it_fails_too",
      ("oncekey.outbox.pump", "        pairs = zip(self._unsaved, answers, strict=True)\n        mine = [answer or (doubtful and self._was_mine(attempt)) for attempt, answer in pairs]\n        self._doubtful = False  # only now: after an error they stay unsaved, and may be stored or not\n        self._all_saved(mine)\n", "        saved, self._unsaved, self._doubtful = self._unsaved, [], False\n        pairs = zip(saved, answers, strict=True)\n        mine = [answer or (doubtful and self._was_mine(attempt)) for attempt, answer in pairs]\n        self._unsaved = saved\n        self._all_saved(mine)\n")),
    # 3: a client that leaves
    _(3, "I2", "a disconnect is not passed on to the handler",
      "tests/web/test_asgi_odd_apps.py::test_dependency_commits_after_a_disconnect",
      ("oncekey.web.asgi_response", "        elif not self.done.done():", "        else:"),
      ("oncekey.web.asgi_call", "        if self.done.done():\n            return  #", "        if False:\n            return  #")),
    _(3, "I1", "no disconnect is seen before the response is stored",
      "tests/web/test_asgi_disconnect.py::test_the_disconnect_message_is_not_seen_before_the_response_is_stored",
      ("oncekey.web.asgi_call", "        if self.stage in (RUNNING, STORING):\n", "        if False:\n")),
    _(3, "I1", "the handler runs in a task of its own",
      "tests/web/test_asgi_disconnect.py::test_cancelled_from_outside_stored_and_replayed",
      ("oncekey.web.asgi", "            await call.done\n", "            await call.task\n")),
    _(3, "I2", "an outcome that is cancelled while it is stored is adopted",
      "tests/web/test_asgi_disconnect.py::test_cancelled_from_inside_while_storing_does_not_lose_the_outcome",
      ("oncekey.web.exchange", "        if adopt:\n", "        if False:\n")),
    # 4: a cancelled call leaves something behind
    _(4, "I4", "a caller cancelled with its answer releases the key",
      "tests/web/test_asgi_disconnect.py::test_cancelled_at_the_moment_of_the_reservation_leaves_none",
      ("oncekey.web.asgi", "                engine.router.give_up(wanted, future.result())\n", "                pass\n")),
    _(4, "I5", "a late answer of the server is dropped", "tests/stores/test_postgres_unavailable.py::test_a_late_answer_is_never_the_answer_to_the_next_question",
      (f"{POSTGRES}.store", "isinstance(trouble, StoreUnavailable):", "False:")),
    # 5: unlock by anyone
    _(5, "I3", "release compares the owner", f"{SQLITE_SUITE}::test_move_is_refused_if_the_row_changed_since_it_was_read",
      (f"{SQLITE}/delete", "AND owner = ?4", "")),
    _(5, "I4", "a lease that was not renewed ends", f"{SQLITE_SUITE}::test_a_duty_lists_its_own_rows_and_no_others",
      (f"{SQLITE}/due_leases", "lease_until <= ?1", "lease_until <= ?1 - 1e9")),
    # 6: neither row is seen
    _(6, "I1", "a row that cannot be read is busy", "tests/core/test_decision.py::test_a_row_that_could_not_be_read_is_busy",
      ("oncekey.core.decision", "    if record is None:\n        return Busy(None)\n", "    if record is None:\n        return Execute(wanted.record(0.0))\n")),
    _(6, "I1", "reserve asks again if a race shows no row", "tests/stores/test_postgres_races.py::test_a_race_that_shows_no_row_is_asked_again_and_then_busy",
      (f"{POSTGRES}.store", "_TRIES = 5", "_TRIES = 1")),
    # 7: deadlocks
    _(7, "I4", "a batch is inserted in the order of its keys", "tests/stores/test_postgres_races.py::test_a_batch_is_inserted_in_the_order_of_its_keys",
      (f"{POSTGRES}/reserve", "    ORDER BY w.scope COLLATE \"C\", w.key COLLATE \"C\"\n", "")),
    # 8 and 9: answers that were lost
    _(8, "I1", "begin recognises its own reservation", "tests/engine/test_begin.py::test_a_claim_whose_answer_was_lost_is_recognised",
      ("oncekey.core.decision", "if record.owner == wanted.owner and record.state is State.IN_PROGRESS:", "if False:")),
    _(8, "I1", "a batch with a lost answer is sent again",
      "tests/engine/test_lanes_trouble.py::test_a_lost_answer_is_asked_for_again_with_the_same_tokens",
      ("oncekey.engine.batching.thread_lane", "            try:\n                results = self._ask(call, work)\n            except Exception:\n                return self._fail(verb, places, error)\n", "            return self._fail(verb, places, error)\n")),
    _(9, "I2", "a completion with a lost answer is recognised",
      "tests/engine/test_finish.py::test_a_completion_whose_answer_was_lost_is_recognised",
      ("oncekey.engine.engine", "elif seen.state is change.to_state and seen.response == response:", "elif False:")),
    _(9, "I1", "a failed commit does not count as committed", "tests/enlist/test_endings.py::test_a_deferred_constraint_fails_at_commit",
      ("oncekey.engine.transactions.completion", "            return (yield from outcome.settle(engine, operation, event, response, reason))\n", "            operation.enlisted = None\n            return Finished(True, operation.record)\n")),
    _(9, "I1", "a commit that was cut off makes the key unknown", "tests/enlist/test_cut_off.py::test_commit_by_hand_and_cut_off_makes_the_key_unknown",
      ("oncekey.engine.transactions.stages", "*_rows({_S.CUT_OFF},                         _H.ROW_IN_PROGRESS,    _S.ENDED)", "*_rows({_S.CUT_OFF},                         _H.ROW_IN_PROGRESS,    _S.ROLLED_BACK)"),
      ("oncekey.engine.transactions.outcome", "            elif enlisted.link.may_have_written_later:\n", "            elif False:\n")),
    _(9, "I1", "only an open transaction is settled by its row", "tests/enlist/test_cut_off.py::test_enlist_not_awaited_and_cut_off_makes_the_key_unknown",
      ("oncekey.engine.transactions.stages", "*_stays({_S.NOT_AWAITED},                    _H.CUT_OFF)", "*_rows({_S.NOT_AWAITED}, _H.CUT_OFF, _S.CUT_OFF_EARLY)")),
    # 10: an outbox that loses late commits
    _(10, "I8", "jobs are found by row, not by a watermark", "tests/stores/test_outbox.py::TestPostgresOutbox::test_a_job_that_commits_late_is_delivered",
      (f"{POSTGRES}/outbox_taken", "i.state = 'ready' AND i.run_at <= now()", "i.state = 'ready' AND i.run_at <= now() AND i.created_at > coalesce((SELECT max(o.created_at) FROM idempotency_outbox AS o WHERE o.state <> 'ready'), 'epoch')")),
    _(10, "I8", "a claim of jobs skips locked rows", "tests/stores/test_outbox.py::TestPostgresOutbox::test_claim_skips_locked_jobs",
      (f"{POSTGRES}/outbox_taken", "    LIMIT %(limit)s - (SELECT count(*) FROM lapsed) - (SELECT count(*) FROM fair)\n    FOR NO KEY UPDATE SKIP LOCKED", "    LIMIT %(limit)s - (SELECT count(*) FROM lapsed) - (SELECT count(*) FROM fair)\n    FOR NO KEY UPDATE")),
    _(10, "I8", "a worker that lost its job cannot settle the key", f"{SQLITE_OUTBOX}::test_only_the_keys_own_generation_is_settled",
      (f"{SQLITE}/outbox_settle", " AND owner = ?3", "")),
    # 11: upkeep touches what is alive
    _(11, "I1", "purge deletes final keys only (SQLite)", f"{SQLITE_SUITE}::test_purge_deletes_only_final_expired_keys",
      (f"{SQLITE}/doomed_keys", "(state IN ('completed', 'failed')", "(state IN ('completed', 'failed', 'in_progress', 'unknown')")),
    _(11, "I1", "purge deletes final keys only (PostgreSQL)",
      f"{POSTGRES_SUITE}::test_purge_deletes_only_final_expired_keys",
      (f"{POSTGRES}/purge", "(k.state IN ('completed', 'failed')", "(k.state IN ('completed', 'failed', 'in_progress', 'unknown')")),
    _(11, "I1", "a swap compares the lease", "tests/upkeep/test_sweeper.py::test_renewed_between_the_look_and_the_move",
      (f"{SQLITE}/swap", "(?5 IS NULL OR lease_until + ?5 <= ?7)", "(?5 IS NULL OR 1)")),
    _(11, "I1", "a swap compares the expiry", f"{SQLITE_SUITE}::test_move_is_refused_if_the_row_changed_since_it_was_read",
      (f"{SQLITE}/restart", "(NOT ?6 OR expires_at <= ?7)", "(NOT ?6 OR 1)")),
    _(11, "I8", "a key whose job runs is not timed out", f"{SQLITE_OUTBOX}::test_a_key_whose_job_is_running_is_left_to_it",
      (f"{SQLITE}/outbox_late", "AND i.state = 'running' AND i.lease_until > ?1", "AND 0")),
    _(11, "I1", "a key whose job was tried is unknown", f"{SQLITE_OUTBOX}::test_a_key_whose_job_was_tried_is_unknown",
      (f"{SQLITE}/outbox_late", "AND (i.attempt > 0 OR i.history <> '[]')", "AND 0")),
    # 12: the store is down
    _(12, "I7", "a store that is down is 503, and the handler is not called", "tests/web/test_store_faults.py::test_a_locked_sqlite_file_is_503_and_the_handler_is_not_called",
      ("oncekey.web.asgi_shell", "        await answer(exchange, exchange.unavailable(), send)\n", "        await app(scope, receive, send)\n"),
      ("oncekey.web.asgi", "            await asgi_shell.answer(exchange, exchange.unavailable(), send)\n", "            await self.app(scope, receive, send)\n")),
    _(12, "I7", "a SQLite file that vanished is not created again", "tests/stores/test_sqlite_files.py::test_a_file_that_vanished_is_never_begun_anew",
      (f"{SQLITE}.connections", "if known is not None and _file_id(self.path) != known:", "if False:"),
      (f"{SQLITE}.connections", "        if _file_id(self.path) != file_id:\n", "        if False:\n")),
    _(12, "I7", "an event loop opens no other file than its store", f"{IN_LOOP}::test_opens_no_other_file_than_the_stores",
      (f"{SQLITE}.in_loop", "store.check_schema, beside=store.connections)", "store.check_schema)"),
      (f"{SQLITE}.in_loop", "self._prepare, beside=store.connections, lock", "self._prepare, lock")),
    _(12, "I4", "work that was given up is not done later (SQLite)",
      f"{IN_LOOP}::test_work_behind_a_hung_disk_is_given_up_and_not_done_later",
      (f"{SQLITE}.in_loop", "            if job.given_up():\n", "            if False:\n")),
    _(12, "I7", "a response that could not be stored is not sent", "tests/web/test_store_faults.py::test_the_store_dies_between_begin_and_finish",
      ("oncekey.web.exchange", "        self.once.engine.adopt(self.unfinished())\n        self._replace_by_not_stored()\n", "        self.once.engine.adopt(self.unfinished())\n        self._enter(ENDED)\n")),
    _(12, "I2", "a damaged row is a store error, never a replay", "tests/stores/test_sqlite.py::test_a_row_that_cannot_be_read_is_an_error_of_ours",
      ("oncekey.stores.sql.key_rows", "        raise StoreError(\"the stored headers of a row are damaged\") from error\n", "        pairs = ()\n")),
    # 13: headers that leak
    _(13, "I6", "only headers of the list are stored", "tests/web/test_asgi_responses.py::test_set_cookie_and_authorization_are_not_replayed_while_location_is",
      ("oncekey.web.responses", "    allowed = policy.stored_headers\n", "    allowed = policy.stored_headers | {\"set-cookie\", \"authorization\", \"x-other\"}\n"),
      ("oncekey.web.responses", "    stored, kept, sent = policy.stored_names, [], []\n", "    stored, kept, sent = {n.encode(): n for n in (*policy.stored_headers, 'set-cookie', 'authorization', 'x-other')}, [], []\n")),
    _(13, "I6", "the list of stored headers excludes secrets", "tests/core/test_policy.py",
      ("oncekey.core.policy", "if forbidden := self.stored_headers & NEVER_STORED:", "if False:\n            forbidden: set[str] = set()")),
    _(13, "I6", "no line break is stored", "tests/web/test_asgi_responses.py::test_a_header_with_a_line_break_is_never_stored",
      ("oncekey.web.responses", "tuple([pair for pair in kept if _is_clean(*pair)])", "tuple(kept)"),
      ("oncekey.web.responses", "if text.isprintable() or _is_clean(name, text):", "if True:")),
    _(13, "I6", "no line break is replayed", "tests/web/test_asgi_responses.py::test_a_row_from_somewhere_else_cannot_split_a_replay",
      ("oncekey.web.responses", "        elif _is_clean(name, text):\n            headers", "        else:\n            headers")),
    # 15: a part stored as the whole
    _(15, "I2", "a streamed response leaves a tombstone", "tests/web/test_asgi_tombstones.py::test_an_event_stream_passes_as_it_comes_and_leaves_a_tombstone",
      ("oncekey.web.exchange", "endings.answered(operation, status, headers, body, self.once)", "endings.answered(operation, status, headers, body or b\"\", self.once)")),
    _(15, "I2", "a response without an end is not stored", "tests/web/test_asgi_tombstones.py::test_an_app_that_returns_without_an_end_is_not_stored",
      ("oncekey.web.asgi_call", "            self.raised(EOFError())\n", "            self.answered(201, [], b\"\".join(self.chunks or []))\n")),
    _(15, "I2", "a response that is too large leaves a tombstone", "tests/web/test_asgi_tombstones.py::test_more_than_a_mebibyte_leaves_a_tombstone",
      ("oncekey.web.responses", "len(body) > policy.max_response_bytes:", "False:")),
    # 16: a replay that is not the first answer
    _(16, "I2", "identity bytes are stored", "tests/web/test_asgi_responses.py::test_response_is_stored_without_gzip_of_the_app",
      ("oncekey.web.asgi_scope", " if item[0] != b\"accept-encoding\"]", "]")),
    _(16, "I2", "Location is kept", "tests/web/test_asgi_responses.py::test_set_cookie_and_authorization_are_not_replayed_while_location_is",
      ("oncekey.core.policy_headers", "        \"location\",\n", "")),
    _(16, "I2", "204 has no length", "tests/web/test_asgi_responses.py::test_204_has_no_length_and_no_body",
      ("oncekey.web.responses", "BODILESS = frozenset({204, 205, 304})", "BODILESS = frozenset({0})")),
    # 17: keys that collide
    _(17, "I5", "keys are compared as bytes", f"{SQLITE_SUITE}::test_keys_that_look_alike_are_different_keys",
      (f"{SQLITE}/0001_keys", "key                     TEXT    NOT NULL COLLATE BINARY", "key                     TEXT    NOT NULL COLLATE NOCASE")),
    _(17, "I6", "scopes are compared as bytes", f"{SQLITE_SUITE}::test_scopes_that_look_alike_are_different_scopes",
      (f"{SQLITE}/0001_keys", "scope                   TEXT    NOT NULL COLLATE BINARY", "scope                   TEXT    NOT NULL COLLATE NOCASE")),
    _(17, "I5", "the header is not folded", "tests/core/test_header.py::test_both_spellings_are_one_key",
      ("oncekey.core.header", "key, bare = raw.decode(\"ascii\"), True", "key, bare = raw.decode(\"ascii\").lower(), True")),
    # 18: a fingerprint that forgets
    _(18, "I5", "the query counts", "tests/core/test_fingerprint.py::test_every_field_changes_the_fingerprint",
      ("oncekey.core.fingerprint", "(head, method_, path_, query, media, lines, content)", "(head, method_, path_, media, lines, content)"),
      ("oncekey.core.fingerprint", "len(query), len(media), len(lines)", "0, len(media), len(lines)")),
    _(18, "I5", "the method counts", "tests/core/test_fingerprint.py::test_every_field_changes_the_fingerprint",
      ("oncekey.core.fingerprint", "(head, method_, path_, query, media, lines", "(head, path_, query, media, lines"),
      ("oncekey.core.fingerprint", "query_form, form, len(method_)", "query_form, form, 0")),
    _(18, "I5", "fields are length-prefixed", "tests/core/test_fingerprint.py::test_delimiters_inside_a_field_do_not_end_it",
      ("oncekey.core.fingerprint", "b\"\".join((head, method_, path_, query, media, lines", "b\"/\".join((method_, path_, query, media, lines")),
    _(18, "I5", "fingerprints of two versions are not compared", "tests/core/test_decision.py::test_fingerprint_that_cannot_be_compared_is_unreadable",
      ("oncekey.core.decision", "    if same is None:\n        return _unreadable(record, wanted)\n", "")),
    # 19: JSON that a lax parser merges
    _(19, "I5", "a body with integers past 2^53 is hashed raw", "tests/web/test_bad_input.py::test_bodies_that_look_alike_to_a_lax_parser_are_different_requests",
      ("oncekey.core.json_form", "    if len(literal) > 17 or not -(2**53) < (number := int(literal)) < 2**53:\n        raise ValueError(\"integer past 2^53 - 1\")\n", "    number = int(float(literal))\n"),
      ("oncekey.core.fingerprint", "parsed = fast(body, limit) or slow(", "parsed = slow(")),
    _(19, "I5", "a body with duplicate names is hashed raw", "tests/web/test_bad_input.py::test_bodies_that_look_alike_to_a_lax_parser_are_different_requests",
      ("oncekey.core.json_form", "    if len(members) != len(pairs):\n", "    if False:\n")),
    # 20: documents that break a parser
    _(20, "I7", "the depth of JSON is limited", "tests/web/test_bad_input.py::test_odd_bodies_are_protected_like_any_other",
      ("oncekey.core.json_form", "    return bool(brackets)\n", "    return False\n")),
    _(20, "I7", "a body that cannot be parsed is hashed raw", "tests/web/test_bad_input.py::test_odd_bodies_are_protected_like_any_other",
      ("oncekey.core.json_form", "and accepts pairs\n    except (ValueError, TypeError):", "and accepts pairs\n    except KeyError:")),
    _(20, "I7", "the size of a body is limited", "tests/web/test_bad_input.py::test_a_body_over_the_cap_is_413",
      ("oncekey.web.asgi_shell", "    if len(body) > exchange.policy.max_request_bytes:\n", "    if False:\n")),
    # 21: a new boundary
    _(21, "I5", "form data is hashed by its parts", "tests/core/test_multipart.py::test_a_new_boundary_is_the_same_request",
      ("oncekey.core.fingerprint", "        parts = canonical_parts(body, boundary)\n", "        parts = None\n")),
    # 22: 409 before the mismatch is seen
    _(22, "I5", "the fingerprint is compared before the state", "tests/core/test_decision.py::test_a_mismatch_wins_over_every_state",
      ("oncekey.core.decision", "    if not same:\n", "    if not same and record.state is not State.IN_PROGRESS:\n")),
    # 23: SQLite's defaults
    _(23, "I1", "a batch begins with BEGIN IMMEDIATE", "tests/stores/test_sqlite.py::test_a_batch_is_one_immediate_transaction",
      (f"{SQLITE}.store", "            connection.execute(\"BEGIN IMMEDIATE\")\n            try:", "            connection.execute(\"BEGIN\")\n            try:")),
    _(23, "I2", "SQLite runs with synchronous=FULL", "tests/stores/test_sqlite.py::test_the_settings_that_the_promises_hang_on_are_set",
      (f"{SQLITE}.connections", "PRAGMA synchronous = FULL", "PRAGMA synchronous = NORMAL")),
    _(23, "I2", "PostgreSQL commits with synchronous_commit=on", "tests/stores/test_postgres_settings.py::test_a_commit_is_never_left_unsynchronised",
      (f"{POSTGRES}.connection", "WHERE current_setting('synchronous_commit') = 'off'", "WHERE false")),
    # 25: one bad row
    _(25, "I4", "a failed batch is tried row by row", "tests/engine/test_lanes_trouble.py::test_a_bad_row_fails_alone",
      ("oncekey.engine.batching.thread_lane", "            for place in places:\n                self._answer(verb, call, [place])\n            return None\n", "            return self._fail(verb, places, error)\n")),
    # 26: fork
    _(26, "I4", "lanes belong to a process", "tests/engine/test_lanes_ending.py::test_a_forked_child_has_lanes_of_its_own",
      ("oncekey.engine.batching.router", "        self._lanes = None\n        _inherited", "        _inherited")),
    _(26, "I5", "connections belong to a process", "tests/stores/test_postgres_connections.py::test_a_child_uses_and_closes_nothing_of_its_parents",
      ("oncekey.stores.sql.connections", "if getattr(local, \"pid\", None) != os.getpid():", "if getattr(local, \"pid\", None) is None:")),
    _(26, "I1", "owner tokens belong to a process", "tests/engine/test_operation.py::test_a_forked_child_takes_other_tokens",
      ("oncekey.engine.process", "        enroll(self)\n", "")),
    _(26, "I2", "SQLite is closed before a fork", "tests/stores/test_sqlite_files.py::test_no_connection_is_open_at_the_moment_of_a_fork",
      (f"{SQLITE}.connections", "os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)", "pass")),
    # 27: the clock of the host
    _(27, "I1", "leases are compared on the store's clock", "tests/core/test_decision.py::test_a_running_lease_is_busy",
      ("oncekey.core.record", "return self.lease_until <= self.now", "return self.lease_until <= __import__('time').time()")),
    _(27, "I1", "expiry is compared on the store's clock", "tests/core/test_decision.py::test_same_request_gets_the_decision_of_its_state",
      ("oncekey.core.record", "return self.expires_at <= self.now", "return self.expires_at <= __import__('time').time()")),
    # 28: keys in logs
    _(28, "I6", "keys are redacted", "tests/core/test_events.py::test_redacted_keys_are_distinct_and_unreadable",
      ("oncekey.telemetry.redaction", "start = key[:4] if len(key) >= 12 and personal_data(key) is None else \"\"", "start = key")),
    _(28, "I6", "errors are described without values", "tests/core/test_events.py::test_an_error_is_described_without_values",
      ("oncekey.telemetry.redaction", "_VALUES.sub(_masked, _CONTROLS.sub(\"…\", lines[0][:_LONGEST_READ]))[:longest]", "lines[0][:longest]")),
    _(28, "I6", "a driver's error is not quoted", "tests/engine/test_lanes_trouble.py::test_a_drivers_error_is_not_quoted",
      ("oncekey.engine.batching.thread_lane", "with {type(error).__name__}\")", "with {error}\")")),
    # 30: callers whose permission was withdrawn
    _(30, "I6", "authentication comes before the replay", "tests/web/test_asgi_auth.py::test_a_revoked_user_gets_no_replay",
      ("oncekey.web.asgi", "                exchange = self._exchange(route, None)\n                await asgi_shell.answer(exchange, exchange.refuse_caller(error), send)\n                return\n", "                tenant = \"ann\"\n")),
    _(30, "I6", "a key belongs to its tenant", "tests/web/test_asgi_auth.py::test_key_of_another_tenant_looks_unused",
      ("oncekey.engine.once", "        return tenant if operation is None else f\"{tenant}{ENDPOINT_MARK}{operation}\"\n", "        return \"everybody\"\n")),
    _(30, "I6", "a request without a tenant is refused", "tests/web/test_asgi_auth.py::test_a_tenant_that_cannot_be_one_never_runs",
      ("oncekey.engine.once", "        policy_checks.check_tenant(tenant)\n", "")),
    _(30, "I6", "the tenant of every request is checked on the flat way", "tests/web/test_asgi_auth.py::test_a_tenant_that_cannot_be_one_never_runs",
      ("oncekey.web.asgi", "            if tenant is SINGLE_SCOPE and of_tenant\n", "            if of_tenant\n")),
    *GUARDS,
    *CLIENTS,
    *ENCRYPTION,
    *SEALED,
    *ROTATIONS,
    *DJANGO,
    *ENDINGS,
    *ENLISTED,
    *DECLARED,
    *CACHE,
    *MYSQL,
    *MYSQLCLIENT,
    *DYNAMODB,
    *SILENCE,
    *DOUBTS_OF_EFFECTS,
    *UPKEEP,
    *FLAT_WAY,
    *WRITERS,
    *REDIS_STORE,
)  # fmt: skip
