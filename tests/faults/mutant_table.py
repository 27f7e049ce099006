# ruff: noqa: E501 - a table: what stands in the product is quoted as it stands there
"""The guards that the hazards name: what takes each away, and the test that must notice."""

from __future__ import annotations

from dataclasses import dataclass

Edit = tuple[str, str, str]
"""Where, what stands there, and what is put in its place: see ``mutating/sitecustomize.py``."""

SQLITE, POSTGRES = "oncekey.stores.sqlite", "oncekey.stores.postgres"
IN_LOOP = "tests/stores/test_sqlite_in_loop.py"
SQLITE_SUITE = "tests/stores/test_sqlite.py::TestSqliteStore"
POSTGRES_SUITE = "tests/stores/test_postgres.py::TestPostgresStore"
SQLITE_OUTBOX = "tests/stores/test_outbox.py::TestSqliteOutbox"
POSTGRES_OUTBOX = "tests/stores/test_outbox.py::TestPostgresOutbox"

MODEL = "tests/faults/test_short_forms.py::test_short[model:_every_interleaving--]"


@dataclass(frozen=True)
class Mutant:
    hazard: int
    """The line of HAZARDS.md."""
    promise: str
    guard: str
    edits: tuple[Edit, ...]
    test: str


NOT_HERE = {
    "7 (MariaDB)": "there is no MySQL or MariaDB store yet",
    "24": "there is no Redis or DynamoDB store yet",
    "29": "there are no rate limits and caps per scope yet",
}


def _(hazard: int, promise: str, guard: str, test: str, *edits: Edit) -> Mutant:
    return Mutant(hazard, promise, guard, edits, test)


MUTANTS: tuple[Mutant, ...] = (
    # 1: the lease is over while the owner lives
    _(1, "I3", "the owner is compared in the statement", f"{SQLITE_SUITE}::test_a_late_owner_writes_nothing",
      (f"{SQLITE}/swap", "AND owner = ?4", "")),
    _(1, "I3", "the owner is compared when a request ends (PostgreSQL)",
      f"{POSTGRES_SUITE}::test_a_late_owner_writes_nothing",
      (f"{POSTGRES}/end", " AND i.owner = w.owner", ""), (f"{POSTGRES}/held", " AND i.owner = w.owner", "")),
    _(1, "I3", "the owner is compared when a request ends (SQLite)", f"{IN_LOOP}::test_ends_only_what_is_still_its_owners",
      (f"{SQLITE}/batch", "      AND idempotency_keys.owner = json_extract(w.value, '$[2]')\n", "")),
    _(1, "I3", "a batch that did not change all of its rows is looked at (SQLite)",
      f"{IN_LOOP}::test_where_not_all_rows_change_the_rows_tell",
      (f"{SQLITE}.batch", "connection.total_changes - before == packed.rows", "True")),
    _(1, "I3", "the owner is compared in the dictionary", "tests/stores/test_memory.py::TestMemoryStore::test_a_late_owner_writes_nothing",
      ("oncekey.stores.memory", " or row.owner != change.owner", "")),
    _(1, "I3", "who enlists must still be the owner (SQLite)",
      "tests/enlist/test_leases.py::test_a_lost_lease_writes_nothing_and_answers_as_the_record_says",
      (f"{SQLITE}/enlisted/enlist", " AND owner = :owner", ""), (f"{SQLITE}/enlisted/complete", " AND owner = :owner", "")),
    _(1, "I3", "who finds another owner in the row has lost",
      "tests/engine/test_finish.py::test_a_lost_lease_writes_nothing_more",
      ("oncekey.engine.engine", "elif seen is None or seen.owner != record.owner:", "elif seen is None:")),
    _(1, "I2", "what was settled meanwhile stands",
      "tests/engine/test_finish.py::test_a_lost_lease_writes_nothing_more",
      ("oncekey.engine.engine", " and seen.response == response:", ":")),
    _(1, "I3", "a keeper that may not renew tells its operation", "tests/engine/test_keeper.py::test_a_lost_lease_is_noticed",
      ("oncekey.engine.keeper", "            operation.lost = True\n", "            pass\n")),
    # 2: an expired lease runs a payment again
    _(2, "I1", "an external key is not taken over", "tests/core/test_decision.py::test_the_process_died",
      ("oncekey.core.decision", "if record.state is State.IN_PROGRESS and record.effects not in MAY_RERUN:", "if False:")),
    _(37, "I1", "a row with steps is resumed by a phased route only",
      "tests/engine/test_changed_effects.py::test_deploy_with_other_effects_charges_no_second_time",
      ("oncekey.core.decision", "    if record.has_steps:\n        declared", "    if False:\n        declared")),
    _(37, "I1", "a repeatable attempt is repeated by a repeatable route only",
      "tests/engine/test_changed_effects.py::test_deploy_with_other_effects_charges_no_second_time",
      ("oncekey.core.decision", "elif record.effects is Effects.REPEATABLE:", "elif False:")),
    _(2, "I1", "a second run needs effects that allow it", "tests/core/test_states.py::test_a_second_run_needs_effects_that_allow_it",
      ("oncekey.core.record", "(Condition.MAY_RERUN, record.effects in MAY_RERUN)", "(Condition.MAY_RERUN, True)")),
    _(2, "I1", "the sweeper doubts what is external", "tests/upkeep/test_sweeper.py::test_by_where_the_effects_live",
      ("oncekey.upkeep.sweeper", "Event.RELEASE if record.effects in MAY_RERUN else Event.DOUBT", "Event.RELEASE"),
      ("oncekey.core.record", "(Condition.MAY_RERUN, record.effects in MAY_RERUN)", "(Condition.MAY_RERUN, True)")),
    _(2, "I1", "effects are compared in the statement", f"{SQLITE_SUITE}::test_who_looked_before_the_doubt_does_not_take_it_over",
      (f"{SQLITE}/swap", "AND (?22 IS NULL OR effects = ?22)", "AND (?22 IS NULL OR 1)")),
    _(2, "I1", "effects are compared in the statement (PostgreSQL)",
      f"{POSTGRES_SUITE}::test_who_looked_before_the_doubt_does_not_take_it_over",
      (f"{POSTGRES}/swap", "(w.from_effects IS NULL OR k.effects = w.from_effects)", "true")),
    _(2, "I1", "nothing is refuted before the quarantine is over", "tests/upkeep/test_ingest.py::test_refuted",
      ("oncekey.engine.settling", "if isinstance(verdict, Refuted) and early > 0:\n        # Whoever", "if False:\n        # Whoever"),
      ("oncekey.core.record", "        lease_over_by = quarantine_seconds\n", "        lease_over_by = 0.0\n")),
    _(2, "I1", "a verdict counts from when it was asked for",
      "tests/upkeep/test_reconciler.py::test_asked_before_the_quarantine_is_over_and_answered_after_it",
      ("oncekey.engine.settling", "if isinstance(verdict, Refuted) and early > 0:\n        # Whoever", "if False:\n        # Whoever")),
    _(2, "I1", "an effect that may not be repeated puts its key in doubt",
      "tests/engine/test_steps_trouble.py::test_a_crash_in_an_effect",
      ("oncekey.engine.steps", "without if repeatable else Effects.EXTERNAL", "without")),
    _(2, "I1", "the same, as the model sees it", MODEL,
      ("oncekey.upkeep.sweeper", "Event.RELEASE if record.effects in MAY_RERUN else Event.DOUBT", "Event.RELEASE"),
      ("oncekey.core.record", "(Condition.MAY_RERUN, record.effects in MAY_RERUN)", "(Condition.MAY_RERUN, True)")),
    _(2, "I3", "what was raised is known, whoever answers for it",
      "tests/engine/test_staging.py::test_raised_it_is_no_promise_either",
      ("oncekey.web.speakers", "            operation.raised = True\n", "            pass\n")),
    _(2, "I1", "an error in the place of the handler is in doubt",
      "tests/web/test_speakers.py::test_middleware_around_flask_that_catches_is_in_doubt",
      ("oncekey.web.wire", " and not operation.said_error)):", " and False)):")),
    _(2, "I1", "what an earlier call said is forgotten",
      "tests/web/test_speakers.py::test_what_an_earlier_call_said_is_not_said_by_a_later_one",
      ("oncekey.web.speakers", "        operation.said = None  #", "        #")),
    _(2, "I1", "what was forwarded has used its key",
      "tests/web/test_speakers.py::test_a_request_that_no_route_took_is_forwarded_once",
      ("oncekey.web.wire", " and _refuses(operation, status):", ":")),
    _(2, "I1", "no word for it makes a timeout harmless",
      "tests/web/test_speakers.py::test_no_word_for_it_makes_a_timeout_harmless",
      ("oncekey.web.wire", " and _spoken_for(operation, status):", " and False:")),
    _(2, "I3", "a success of a second try is not stored without its writes",
      "tests/web/test_spoken_for.py::test_a_success_of_a_second_try_is_not_stored_without_its_writes",
      ("oncekey.engine.enlisted", " or tried_again:", ":")),
    _(2, "I1", "an answer waits for a handler whose transaction is open",
      "tests/web/test_spoken_for.py::test_what_a_handler_commits_after_somebody_has_answered_for_it",
      ("oncekey.web.handling", "        if self._handler_may_run(status):\n", "        if False:\n")),
    _(9, "I1", "a claim whose answer was lost is known by its token",
      "tests/engine/test_lost_claims.py::test_a_charge_is_not_made_again",
      ("oncekey.engine.lane", "        self._look_for_claims(places)\n", ""),
      ("oncekey.stores.memory", " and (row.attempt > 1 or row.has_steps):", " and False:")),
    _(9, "I1", "what is no longer new is not discarded",
      "tests/stores/test_memory.py::TestMemoryStore::test_what_is_no_longer_new_is_not_discarded",
      ("oncekey.stores.memory", " and (row.attempt > 1 or row.has_steps):", " and False:")),
    _(4, "I4", "who left while the lane was busy is undone",
      "tests/engine/test_express_trouble.py::test_who_left_while_the_lane_was_busy_is_undone_too",
      ("oncekey.engine.lane", "                    elif ticket.asked:\n", "                    elif False:\n")),
    _(9, "I8", "an end stays unsaved while nobody can say whose it is",
      "tests/outbox/test_worker_store_faults.py::test_an_end_whose_answer_was_lost_keeps_no_place_when_the_look_for_it_fails_too",
      ("oncekey.outbox.pump", "        pairs = zip(self._unsaved, answers, strict=True)\n        mine = [answer or (doubtful and self._was_mine(attempt)) for attempt, answer in pairs]\n        self._doubtful = False  # not before: while there is trouble, they stay unsaved and in doubt\n        saved, self._unsaved = self._unsaved, []\n", "        saved, self._unsaved, self._doubtful = self._unsaved, [], False\n        pairs = zip(saved, answers, strict=True)\n        mine = [answer or (doubtful and self._was_mine(attempt)) for attempt, answer in pairs]\n")),
    _(2, "I2", "one response is sent",
      "tests/web/test_spoken_for.py::test_one_response_is_sent_although_the_app_sends_another",
      ("oncekey.web.handling", "        elif self.concluded and kind in _RESPONSE:\n", "        elif False:\n")),
    _(2, "I1", "what a step says of itself settles no other",
      "tests/engine/test_steps_trouble.py::test_not_executed_of_another_effect_does_not_take_the_doubt_back",
      ("oncekey.web.wire", "if operation.steps is None or not any(said is error for said in operation.steps.not_executed):", "if True:")),
    # 3: a client that leaves
    _(3, "I2", "a handler does not learn that nobody listens any more",
      "tests/web/test_asgi_odd_apps.py::test_a_dependency_commits_although_nobody_listens_any_more",
      ("oncekey.web.handling", "        elif not self.done.done():", "        else:")),
    _(3, "I3", "an error around the handler is not the handler's",
      "tests/web/test_speakers.py::test_an_error_that_the_handler_returns_inside_of_an_except_is_its_word",
      ("oncekey.web.handling", " and status != self.operation.said and", " and")),
    _(3, "I3", "a success in an except commits",
      "tests/web/test_spoken_for.py::test_a_success_sent_in_an_except_commits",
      ("oncekey.web.handling", "            if status >= 400 and", "            if")),
    _(3, "I1", "no disconnect is seen before the response is stored",
      "tests/web/test_asgi_disconnect.py::test_the_disconnect_message_is_not_seen_before_the_response_is_stored",
      ("oncekey.web.handling", "        if not self.settled and self.held is None:\n", "        if False:\n")),
    _(3, "I1", "the handler runs in a task of its own",
      "tests/web/test_asgi_disconnect.py::test_cancelled_from_outside_stored_and_replayed",
      ("oncekey.web.handling", "        await self.done\n", "        await task\n")),
    _(3, "I2", "an outcome that is cancelled while it is stored is adopted",
      "tests/web/test_asgi_disconnect.py::test_cancelled_from_inside_while_storing_does_not_lose_the_outcome",
      ("oncekey.web.handling", "            if plain:\n                engine.keeper.adopt", "            if False:\n                engine.keeper.adopt")),
    # 4: a cancelled call leaves something behind
    _(4, "I4", "who is cancelled at the moment of its answer gives the key back",
      "tests/web/test_asgi_disconnect.py::test_cancelled_at_the_moment_of_the_reservation_leaves_none",
      ("oncekey.engine.engine", "                        self.lanes.give_up(ticket)\n", "                        pass\n")),
    _(4, "I5", "a late answer is nobody's", "tests/stores/test_postgres_unavailable.py::test_a_late_answer_is_never_the_answer_to_the_next_question",
      (f"{POSTGRES}.store", "isinstance(trouble, StoreUnavailable):", "False:")),
    # 5: unlock by anyone
    _(5, "I3", "only the owner gives a key back", f"{SQLITE_SUITE}::test_a_move_is_refused_unless_the_row_is_what_the_mover_saw",
      (f"{SQLITE}/delete", "AND owner = ?4", "")),
    _(5, "I4", "a lease that was not renewed ends", f"{SQLITE_SUITE}::test_a_duty_lists_its_own_rows_and_no_others",
      (f"{SQLITE}/due_leases", "lease_until <= ?1", "lease_until <= ?1 - 1e9")),
    # 6: neither row is seen
    _(6, "I1", "who sees nothing does not go on", "tests/core/test_decision.py::test_a_row_that_could_not_be_read_is_busy",
      ("oncekey.core.decision", "    if record is None:\n        return Busy(None)\n", "    if record is None:\n        return Execute(wanted.record(0.0))\n")),
    _(6, "I1", "a race that shows no row is asked again", "tests/stores/test_postgres_races.py::test_a_race_that_shows_no_row_is_asked_again_and_then_busy",
      (f"{POSTGRES}.store", "_TRIES = 5", "_TRIES = 1")),
    # 7: deadlocks
    _(7, "I4", "a batch is inserted in the order of its keys", "tests/stores/test_postgres_races.py::test_a_batch_is_inserted_in_the_order_of_its_keys",
      (f"{POSTGRES}/reserve", "    ORDER BY w.scope COLLATE \"C\", w.key COLLATE \"C\"\n", "")),
    # 8 and 9: answers that were lost
    _(8, "I1", "a reservation of my own is mine", "tests/engine/test_begin.py::test_a_claim_whose_answer_was_lost_is_recognised",
      ("oncekey.core.decision", "if record.owner == wanted.owner and record.state is State.IN_PROGRESS:", "if False:")),
    _(8, "I1", "a batch whose answer was lost is asked for again",
      "tests/engine/test_lanes_trouble.py::test_a_lost_answer_is_asked_for_again_with_the_same_tokens",
      ("oncekey.engine.lane", "            try:\n                results = self._ask(call, work)\n            except Exception:\n                return self._fail(verb, places, error)\n", "            return self._fail(verb, places, error)\n")),
    _(9, "I2", "a completion whose answer was lost is recognised",
      "tests/engine/test_finish.py::test_a_completion_whose_answer_was_lost_is_recognised",
      ("oncekey.engine.engine", "elif seen.state is change.to_state and seen.response == response:", "elif False:")),
    _(9, "I1", "a commit that failed is not taken for done", "tests/enlist/test_endings.py::test_a_deferred_constraint_fails_at_commit",
      ("oncekey.engine.enlisted", "        return (yield from settle(engine, operation, event, response, reason))\n    enlisted.release()", "        operation.enlisted = None\n        return Finished(True, moved)\n    enlisted.release()")),
    _(9, "I1", "an end that was cut off proves nothing", "tests/enlist/test_cut_off.py::test_committed_by_hand",
      ("oncekey.engine.enlisted", "if enlisted.stage is Stage.CUT_OFF and not", "if False and not")),
    _(9, "I1", "only an open transaction is settled by its row", "tests/enlist/test_cut_off.py::test_not_awaited",
      ("oncekey.engine.enlisted", " and enlisted.stage in (Stage.OPENING, Stage.OPEN):", ":")),
    # 10: an outbox that loses late commits
    _(10, "I8", "jobs are found by row, not by a watermark", "tests/stores/test_outbox.py::TestPostgresOutbox::test_a_job_that_commits_late_is_delivered",
      (f"{POSTGRES}/outbox_claim", "i.state = 'ready' AND i.run_at <= now()", "i.state = 'ready' AND i.run_at <= now() AND i.created_at > coalesce((SELECT max(o.created_at) FROM idempotency_outbox AS o WHERE o.state <> 'ready'), 'epoch')")),
    _(10, "I8", "a claim waits for nobody", "tests/stores/test_outbox.py::TestPostgresOutbox::test_a_claim_waits_for_nobody",
      (f"{POSTGRES}/outbox_claim", "    LIMIT %(limit)s - (SELECT count(*) FROM lapsed)\n    FOR NO KEY UPDATE SKIP LOCKED", "    LIMIT %(limit)s - (SELECT count(*) FROM lapsed)\n    FOR NO KEY UPDATE")),
    _(10, "I8", "who has lost a job settles nothing", f"{SQLITE_OUTBOX}::test_only_the_keys_own_generation_is_settled",
      (f"{SQLITE}/outbox_settle", " AND owner = ?3", "")),
    # 11: upkeep touches what is alive
    _(11, "I1", "only what is final is deleted", f"{SQLITE_SUITE}::test_purging_deletes_what_is_final_and_expired_and_nothing_else",
      (f"{SQLITE}/doomed_keys", "(state IN ('completed', 'failed')", "(state IN ('completed', 'failed', 'in_progress', 'unknown')")),
    _(11, "I1", "only what is final is deleted (PostgreSQL)",
      f"{POSTGRES_SUITE}::test_purging_deletes_what_is_final_and_expired_and_nothing_else",
      (f"{POSTGRES}/purge", "(k.state IN ('completed', 'failed')", "(k.state IN ('completed', 'failed', 'in_progress', 'unknown')")),
    _(11, "I1", "the lease is compared in the statement", "tests/upkeep/test_sweeper.py::test_renewed_between_the_look_and_the_move",
      (f"{SQLITE}/swap", "(?5 IS NULL OR lease_until + ?5 <= ?7)", "(?5 IS NULL OR 1)")),
    _(11, "I1", "the expiry is compared in the statement", f"{SQLITE_SUITE}::test_a_move_is_refused_unless_the_row_is_what_the_mover_saw",
      (f"{SQLITE}/restart", "(NOT ?6 OR expires_at <= ?7)", "(NOT ?6 OR 1)")),
    _(11, "I8", "a key whose job runs is not timed out", f"{SQLITE_OUTBOX}::test_a_key_whose_job_is_running_is_left_to_it",
      (f"{SQLITE}/outbox_late", "AND i.state = 'running' AND i.lease_until > ?1", "AND 0")),
    _(11, "I1", "a key whose job was tried is unknown", f"{SQLITE_OUTBOX}::test_a_key_whose_job_was_tried_is_unknown",
      (f"{SQLITE}/outbox_late", "AND (i.attempt > 0 OR i.history <> '[]')", "AND 0")),
    # 12: the store is down
    _(12, "I7", "store down: 503, and no call", "tests/web/test_store_faults.py::test_a_locked_sqlite_file_is_503_and_the_handler_is_not_called",
      ("oncekey.web.asgi", "            await self._refuse(Situation.STORE_UNAVAILABLE, retry_after=UNAVAILABLE_RETRY_SECONDS)\n", "            await self.app(self.scope, self.receive, self.send)\n")),
    _(12, "I7", "a file that vanished is not begun anew", "tests/stores/test_sqlite_files.py::test_a_file_that_vanished_is_never_begun_anew",
      (f"{SQLITE}.connections", "if known is not None and _file_id(self.path) != known:", "if False:"),
      (f"{SQLITE}.connections", "        if _file_id(self.path) != handle.file_id:\n", "        if False:\n")),
    _(12, "I7", "an event loop opens no other file than its store", f"{IN_LOOP}::test_opens_no_other_file_than_the_stores",
      (f"{SQLITE}.in_loop", "store.check_schema, beside=store.connections)", "store.check_schema)"),
      (f"{SQLITE}.in_loop", "self._prepare, beside=store.connections)", "self._prepare)")),
    _(12, "I4", "what was given up is not done later (SQLite)",
      f"{IN_LOOP}::test_a_disk_that_hangs_is_given_up_in_time_and_what_waited_is_not_done_later",
      (f"{SQLITE}.in_loop", "            if job.given_up():\n", "            if False:\n")),
    _(12, "I7", "a response that could not be stored is not sent", "tests/web/test_store_faults.py::test_the_store_dies_between_begin_and_finish",
      ("oncekey.web.handling", "            return await self._instead(refusal(self.once, Situation.NOT_STORED, retry_after=1.0), operation.record)\n", "            return operation.record\n")),
    _(12, "I2", "a damaged row is an outage, never an answer", "tests/stores/test_sqlite.py::test_a_row_that_cannot_be_read_is_an_error_of_ours",
      ("oncekey.stores.stored_responses", "        raise StoreError(\"the stored headers of a row are damaged\") from error\n", "        pairs = ()\n")),
    # 13: headers that leak
    _(13, "I6", "only headers of the list are stored", "tests/web/test_asgi_responses.py::test_set_cookie_and_authorization_are_not_replayed_while_location_is",
      ("oncekey.web.wire", "    allowed = policy.stored_headers\n", "    allowed = policy.stored_headers | {\"set-cookie\", \"authorization\", \"x-other\"}\n")),
    _(13, "I6", "the list never holds what leaks", "tests/core/test_policy.py",
      ("oncekey.core.policy", "if forbidden := self.stored_headers & NEVER_STORED:", "if False:\n            forbidden: set[str] = set()")),
    _(13, "I6", "no line break is stored", "tests/web/test_asgi_responses.py::test_a_header_with_a_line_break_is_never_stored",
      ("oncekey.web.wire", "tuple([pair for pair in kept if _is_clean(*pair)])", "tuple(kept)")),
    _(13, "I6", "no line break is replayed", "tests/web/test_asgi_responses.py::test_a_row_from_somewhere_else_cannot_split_a_replay",
      ("oncekey.web.wire", " for n, text in response.headers if _is_clean(n, text)]", " for n, text in response.headers]")),
    # 14: what says nothing about the operation
    _(14, "I4", "401, 403, 408, 425, 429 are not stored", "tests/web/test_checklist_endings.py::test_what_says_nothing_about_the_operation_is_not_stored",
      ("oncekey.core.decision", "frozenset({401, 403, 408, 425, 429})", "frozenset({0})")),
    _(14, "I4", "a 500 is not stored for ever", "tests/core/test_decision.py::test_a_failed_handler",
      ("oncekey.core.decision", "        case _:\n            return Event.RELEASE\n", "        case _:\n            return Event.FAIL\n")),
    _(14, "I1", "what an external handler raised is unknown", "tests/core/test_decision.py::test_a_failed_handler",
      ("oncekey.core.decision", "return Event.DOUBT if policy.effects_kind is Effects.EXTERNAL else Event.RELEASE", "return Event.RELEASE")),
    # 15: a part stored as the whole
    _(15, "I2", "a streamed response leaves a tombstone", "tests/web/test_asgi_responses.py::test_an_event_stream_passes_as_it_comes_and_leaves_a_tombstone",
      ("oncekey.web.handling", "await self._conclude(start, None)", "await self._conclude(start, body)")),
    _(15, "I2", "a response without an end is not stored", "tests/web/test_asgi_responses.py::test_an_app_that_returns_without_an_end_is_not_stored",
      ("oncekey.web.handling", "await self._finish_ended(raised(self.operation, EOFError(), self.once)[0])", "await self._finish(returned(self.operation, 201, [], b\"\".join(self.chunks)))")),
    _(15, "I2", "a response that is too large leaves a tombstone", "tests/web/test_asgi_responses.py::test_more_than_a_mebibyte_leaves_a_tombstone",
      ("oncekey.web.wire", "len(body) > policy.max_response_bytes:", "False:")),
    # 16: a replay that is not the first answer
    _(16, "I2", "identity bytes are stored", "tests/web/test_asgi_responses.py::test_gzip_behind_us",
      ("oncekey.web.handling", " if item[0] != b\"accept-encoding\"]", "]")),
    _(16, "I2", "Location is kept", "tests/web/test_asgi_responses.py::test_set_cookie_and_authorization_are_not_replayed_while_location_is",
      ("oncekey.core.policy", "        \"location\",\n", "")),
    _(16, "I2", "204 has no length", "tests/web/test_asgi_responses.py::test_204_has_no_length_and_no_body",
      ("oncekey.web.wire", "BODILESS = frozenset({204, 205, 304})", "BODILESS = frozenset({0})")),
    _(16, "I2", "a response is stored before it is sent", "tests/web/test_asgi_responses.py::test_a_response_is_stored_before_it_is_sent",
      ("oncekey.web.handling", "        if self._handler_may_run(status):\n", "        if body is not None:\n            await self._pass_on(*messages(status, list(raw_headers), body))\n        if self._handler_may_run(status):\n")),
    # 17: keys that collide
    _(17, "I5", "keys compare as bytes", f"{SQLITE_SUITE}::test_keys_that_look_alike_are_different_keys",
      (f"{SQLITE}/0001_keys", "key                     TEXT    NOT NULL COLLATE BINARY", "key                     TEXT    NOT NULL COLLATE NOCASE")),
    _(17, "I6", "scopes compare as bytes", f"{SQLITE_SUITE}::test_scopes_that_look_alike_are_different_scopes",
      (f"{SQLITE}/0001_keys", "scope                   TEXT    NOT NULL COLLATE BINARY", "scope                   TEXT    NOT NULL COLLATE NOCASE")),
    _(17, "I5", "the header is not folded", "tests/core/test_header.py::test_both_spellings_are_one_key",
      ("oncekey.core.header", "        key = raw.decode(\"ascii\")\n", "        key = raw.decode(\"ascii\").lower()\n")),
    # 18: a fingerprint that forgets
    _(18, "I5", "the query counts", "tests/core/test_fingerprint.py::test_every_field_counts",
      ("oncekey.core.fingerprint", "(head, method_, path_, query, media, lines, content)", "(head, method_, path_, media, lines, content)"),
      ("oncekey.core.fingerprint", "len(query), len(media), len(lines)", "0, len(media), len(lines)")),
    _(18, "I5", "the method counts", "tests/core/test_fingerprint.py::test_every_field_counts",
      ("oncekey.core.fingerprint", "(head, method_, path_, query, media, lines", "(head, path_, query, media, lines"),
      ("oncekey.core.fingerprint", "sizes = (len(method_), len(path_)", "sizes = (0, len(path_)")),
    _(18, "I5", "fields are length-prefixed", "tests/core/test_fingerprint.py::test_no_delimiter_is_believed",
      ("oncekey.core.fingerprint", "b\"\".join((head, method_, path_, query, media, lines", "b\"/\".join((method_, path_, query, media, lines")),
    _(18, "I5", "fingerprints of two versions are not compared", "tests/core/test_decision.py::test_fingerprint_that_cannot_be_compared_is_unreadable",
      ("oncekey.core.decision", "if version == wanted.fingerprint_version and recipe == ours:", "if True:")),
    # 19: JSON that a lax parser merges
    _(19, "I5", "integers past 2^53 are bytes", "tests/web/test_bad_input.py::test_bodies_that_look_alike_to_a_lax_parser_are_different_requests",
      ("oncekey.core.json_form", "    if len(literal) > 17 or not -(2**53) < (number := int(literal)) < 2**53:\n        raise ValueError(\"integer past 2^53 - 1\")\n", "    number = int(float(literal))\n"),
      ("oncekey.core.json_form", "return _fast(body, max_floats) or _slow(", "return _slow(")),
    _(19, "I5", "duplicate names are bytes", "tests/web/test_bad_input.py::test_bodies_that_look_alike_to_a_lax_parser_are_different_requests",
      ("oncekey.core.json_form", "    if len(members) != len(pairs):\n", "    if False:\n")),
    # 20: documents that break a parser
    _(20, "I7", "depth has a cap", "tests/web/test_bad_input.py::test_odd_bodies_are_protected_like_any_other",
      ("oncekey.core.json_form", "    return bool(brackets)\n", "    return False\n")),
    _(20, "I7", "what a parser cannot read is bytes, and no error", "tests/web/test_bad_input.py::test_odd_bodies_are_protected_like_any_other",
      ("oncekey.core.json_form", "and takes pairs\n    except (ValueError, TypeError):", "and takes pairs\n    except KeyError:")),
    _(20, "I7", "a body has a cap", "tests/web/test_bad_input.py::test_a_body_over_the_cap_is_413",
      ("oncekey.web.asgi", "            if size > limit:\n", "            if False:\n")),
    # 21: a new boundary
    _(21, "I5", "form data is hashed by its parts", "tests/core/test_multipart.py::test_a_new_boundary_is_the_same_request",
      ("oncekey.core.fingerprint", "        parts = canonical_parts(body, boundary)\n", "        parts = None\n")),
    # 22: 409 before the mismatch is seen
    _(22, "I5", "422 before 409", "tests/core/test_decision.py::test_a_mismatch_wins_over_every_state",
      ("oncekey.core.decision", "    if not same:\n", "    if not same and record.state is not State.IN_PROGRESS:\n")),
    # 23: SQLite's defaults
    _(23, "I1", "IMMEDIATE", "tests/stores/test_sqlite.py::test_a_batch_is_one_immediate_transaction",
      (f"{SQLITE}.store", "connection.execute(\"BEGIN IMMEDIATE\")", "connection.execute(\"BEGIN\")")),
    _(23, "I2", "FULL", "tests/stores/test_sqlite.py::test_the_settings_that_the_promises_hang_on_are_set",
      (f"{SQLITE}.connections", "PRAGMA synchronous = FULL", "PRAGMA synchronous = NORMAL")),
    _(23, "I2", "synchronous_commit is on", "tests/stores/test_postgres_settings.py::test_a_commit_is_never_left_unsynchronised",
      (f"{POSTGRES}.connection", "WHERE current_setting('synchronous_commit') = 'off'", "WHERE false")),
    # 25: one bad row
    _(25, "I4", "a bad row is asked for alone", "tests/engine/test_lanes_trouble.py::test_a_bad_row_fails_alone",
      ("oncekey.engine.lane", "            for place in places:\n                self._answer(verb, call, [place])\n            return None\n", "            return self._fail(verb, places, error)\n")),
    # 26: fork
    _(26, "I4", "lanes belong to a process", "tests/engine/test_lanes_ending.py::test_a_forked_child_has_lanes_of_its_own",
      ("oncekey.engine.lanes", "        self._lanes = None\n        _inherited", "        _inherited")),
    _(26, "I5", "connections belong to a process", "tests/stores/test_postgres_connections.py::test_a_child_uses_and_closes_nothing_of_its_parents",
      (f"{POSTGRES}.store", "if getattr(local, \"pid\", None) != os.getpid():", "if getattr(local, \"pid\", None) is None:")),
    _(26, "I1", "owner tokens belong to a process", "tests/engine/test_operation.py::test_a_forked_child_takes_other_tokens",
      ("oncekey.engine.owners", "        forks.enroll(self)\n", "")),
    _(26, "I2", "SQLite is closed before a fork", "tests/stores/test_sqlite_files.py::test_no_connection_is_open_at_the_moment_of_a_fork",
      (f"{SQLITE}.connections", "os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)", "pass")),
    # 27: the clock of the host
    _(27, "I1", "leases are compared on the store's clock", "tests/core/test_decision.py::test_a_running_lease_is_busy",
      ("oncekey.core.record", "return self.lease_until <= self.now", "return self.lease_until <= __import__('time').time()")),
    _(27, "I1", "expiry is compared on the store's clock", "tests/core/test_decision.py::test_the_same_request_gets_what_its_state_says",
      ("oncekey.core.record", "return self.expires_at <= self.now", "return self.expires_at <= __import__('time').time()")),
    # 28: keys in logs
    _(28, "I6", "keys are redacted", "tests/core/test_events.py::test_redacted_keys_can_be_told_apart_but_not_read",
      ("oncekey.telemetry.redaction", "start = key[:4] if len(key) >= 12 else \"\"", "start = key")),
    _(28, "I6", "errors are described without values", "tests/core/test_events.py::test_an_error_is_described_without_values",
      ("oncekey.telemetry.redaction", "_VALUES.sub(\"…\", lines[0])[:200]", "lines[0][:200]")),
    _(28, "I6", "a driver's error is not quoted", "tests/engine/test_lanes_trouble.py::test_a_drivers_error_is_not_quoted",
      ("oncekey.engine.lane", "with {type(error).__name__}\")", "with {error}\")")),
    # 30: who may not ask any more
    _(30, "I6", "authentication comes before the replay", "tests/web/test_asgi_auth.py::test_a_revoked_user_gets_no_replay",
      ("oncekey.web.asgi", "            await self._refuse(Situation.NOT_AUTHENTICATED, detail=str(error) or None)\n            return\n", "            tenant = \"ann\"\n")),
    _(30, "I6", "a key is its tenant's", "tests/web/test_asgi_auth.py::test_a_key_of_somebody_else_looks_unused",
      ("oncekey.engine.once", "            scope = self.key_scope(tenant, None if", "            scope = self.key_scope(\"everybody\", None if")),
    _(30, "I6", "who has no name shares no keys", "tests/web/test_asgi_auth.py::test_a_tenant_that_cannot_be_one_never_runs",
      ("oncekey.engine.once", "if tenant is not SINGLE_SCOPE or", "if tenant is not self.single_tenant or")),
    # 35: header names in user code
    _(35, "I6", "a header is found by its name in any case", "tests/web/test_frameworks_requests.py::test_tenant_is_found_by_a_header_name_in_any_case",
      ("oncekey.engine.request", "return self._values[name.lower()]", "return self._values[name]")),
    # 36: headers and forms are part of the request
    _(36, "I5", "the chosen headers count", "tests/core/test_fingerprint.py::test_chosen_headers_count",
      ("oncekey.core.fingerprint", "lines = _lines(headers) if headers else b\"\"", "lines = b\"\"")),
    _(36, "I5", "names of a form are compared decoded", "tests/core/test_fingerprint_properties.py::test_shuffled_form_text_meets_only_where_every_server_reads_the_same",
      ("oncekey.core.form_text", "            name = _ESCAPE.sub(_decoded, name)\n", "")),
    _(36, "I5", "half a body does not run", "tests/web/test_asgi_body_length.py",
      ("oncekey.web.asgi", "(length is not None and len(body) != length) or", "False or")),
    # 37: a deploy between two attempts
    _(37, "I5", "a request is compared by the recipe of the row", "tests/web/test_recipes.py",
      ("oncekey.core.decision", "return None if wanted.parts is None else same_request(version, recipe, record.fingerprint, wanted.parts, ours)", "return record.fingerprint == wanted.fingerprint")),
    # 39: authorization of replays
    _(39, "I6", "authorize runs before the look-up", "tests/web/test_authorize.py::test_replay_is_not_given_to_a_caller_who_may_not_use_the_operation",
      ("oncekey.web.asgi", "if authorize and once.authorize is not None:", "if False:"), ("oncekey.web.wsgi", "if authorize and once.authorize is not None:", "if False:")),
)  # fmt: skip
