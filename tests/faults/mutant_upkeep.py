# ruff: noqa: E501 - a table: what stands in the product is quoted as it stands there
"""The guards of upkeep: whose turn it is, what it deletes, and what it says. See ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

SQLITE, POSTGRES, FAIRNESS = "oncekey.stores.sqlite", "oncekey.stores.postgres", "oncekey.stores.duties"
SQLITE_SUITE = "tests/stores/test_sqlite.py::TestSqliteStore"
POSTGRES_SUITE = "tests/stores/test_postgres.py::TestPostgresStore"
MEMORY_SUITE = "tests/stores/test_memory.py::TestMemoryStore"

UPKEEP: tuple[Mutant, ...] = (
    # 43: one tenant's backlog is every tenant's
    _(43, "I6", "unknown keys are handed out by scope", f"{SQLITE_SUITE}::test_unknown_keys_of_one_scope_do_not_keep_anothers_waiting",
      (FAIRNESS, "if len(oldest) < limit or shared == 0:", "if True:")),
    _(43, "I6", "the first key of each scope comes first", "tests/upkeep/test_reconciler.py::test_another_tenants_key_does_not_wait_for_two_thousand_of_one",
      (FAIRNESS, "        ranks.append(seen[row.scope])\n", "        ranks.append(0)\n")),
    _(43, "I6", "the next call goes on where the last one ended", f"{MEMORY_SUITE}::test_every_scope_has_its_turn_however_many_there_are",
      (FAIRNESS, "            self._after[duty] = scopes[-1]\n", "            pass\n")),
    _(43, "I6", "scopes with nothing due are passed over", f"{SQLITE_SUITE}::test_scopes_with_nothing_due_are_passed_over",
      (FAIRNESS, "visited[-1][0] if len(visited) == VISITED else \"\"", "\"\"")),
    _(43, "I4", "the keys that have waited longest have half of the turns", f"{SQLITE_SUITE}::test_scopes_share_the_keys_that_are_handed_out",
      (FAIRNESS, "        shared = limit // 2\n", "        shared = limit\n")),
    _(43, "I6", "a planner cannot choose to read all unknown keys for each scope (PostgreSQL)",
      "tests/stores/test_beside.py::test_every_statement_of_postgres_uses_its_index",
      (f"{POSTGRES}/fair_keys", "i.state = (SELECT %(state)s::text)", "i.state = 'unknown'"),),
    # 44: an unknown key that no resolver knows is forgotten
    _(44, "I4", "tries are counted without a resolver", "tests/upkeep/test_resolvers.py::test_key_of_an_app_without_any_resolver_ends_as_a_dead_letter",
      ("oncekey.upkeep.reconciler", "        while not stop.is_set():\n", "        while self._once.resolvers and not stop.is_set():\n")),
    _(44, "I4", "a key is left to the process that has its resolver", "tests/upkeep/test_resolvers.py::test_process_without_the_resolver_leaves_a_key_to_the_one_that_has_it",
      ("oncekey.upkeep.reconciler", "if record.reconcile_tries and record.now - (record.reconcile_at or 0.0) < LEFT_BACKOFFS * self._backoff:", "if False:")),
    _(44, "I4", "the log names operations without a resolver", "tests/upkeep/test_resolvers.py::test_log_names_an_operation_without_a_resolver_once_an_hour",
      ("oncekey.upkeep.reconciler", "        if counts[\"unasked\"]:\n", "        if False:\n")),
    _(44, "I4", "the log names an operation once an hour", "tests/upkeep/test_resolvers.py::test_log_names_an_operation_without_a_resolver_once_an_hour",
      ("oncekey.upkeep.unasked", "if before and number < GROWN * before and now - at < AGAIN_SECONDS:", "if False:")),
    _(44, "I4", "an upkeep without the app counts no tries", "tests/upkeep/test_service.py::test_upkeep_without_an_app_counts_no_tries",
      ("oncekey.upkeep.service", "self._reconciler = reconciler or (Reconciler(app) if app else None)", "self._reconciler = reconciler or Reconciler(app or OnceKey(self.store, scope=__import__(\"oncekey\").SINGLE_TENANT))")),
    _(44, "I4", "a resolver that raises leaves its traceback", "tests/upkeep/test_resolvers.py::test_failing_resolver_logs_its_traceback_its_try_and_the_next_time",
      ("oncekey.upkeep.reconciler", "emit(failed, error=error)", "emit(failed)")),
    # 52: upkeep does not run where nothing else would
    _(52, "I4", "upkeep runs by itself on an embedded store", "tests/web/test_upkeep_in_app.py::test_upkeep_runs_by_itself_during_the_lifespan_on_an_embedded_store",
      ("oncekey.upkeep.in_app", "once.store.capabilities.embedded if upkeep == \"auto\" else upkeep", "upkeep is True")),
    _(52, "I4", "a mounted app says that its upkeep never started", "tests/web/test_upkeep_in_app.py::test_mounted_app_says_once_that_its_upkeep_never_started",
      ("oncekey.web.asgi", "        if self._misses_start:\n", "        if False:\n")),
    _(52, "I4", "a WSGI app starts upkeep", "tests/web/test_upkeep_in_app.py::test_flask_starts_upkeep_at_its_first_protected_request",
      ("oncekey.web.wsgi", "            self._upkeep.start()\n", "            pass\n")),
    _(52, "I4", "a WSGI app starts one upkeep", "tests/web/test_upkeep_in_app.py::test_two_first_requests_at_once_start_one_upkeep",
      ("oncekey.upkeep.in_app", "            if self._running is None or not self._running.running:\n", "            if True:\n")),
    _(52, "I4", "a forked worker starts an upkeep of its own", "tests/web/test_upkeep_in_app.py::test_forked_worker_starts_an_upkeep_of_its_own_and_ends_quietly",
      ("oncekey.upkeep.in_app", "        process.enroll(self)\n", "")),
    _(52, "I4", "upkeep of a WSGI app ends with its OnceKey", "tests/web/test_upkeep_in_app.py::test_flask_starts_upkeep_at_its_first_protected_request",
      ("oncekey.upkeep.in_app", "                self._once.on_close(self._running.stop)\n", "")),
    _(52, "I4", "upkeep of a WSGI app that is gone ends", "tests/web/test_upkeep_in_app.py::test_upkeep_of_a_flask_app_that_is_gone_ends",
      ("oncekey.upkeep.in_app", "                weakref.finalize(self, self._running.ask_to_stop).atexit = False\n", "")),
    _(52, "I4", "upkeep leaves the process's random numbers alone", "tests/web/test_upkeep_in_app.py::test_upkeep_draws_no_random_number_of_the_apps_own",
      ("oncekey.upkeep.service", "random = SystemRandom()\n", "import random\n")),
    # 11: upkeep touches what is alive
    _(11, "I4", "the audit of a key that is not over stays (SQLite)", f"{SQLITE_SUITE}::test_the_audit_of_a_key_that_is_not_over_is_not_purged",
      (f"{SQLITE}/audit_purge", "'pending', 'unknown', 'failed_retryable'", "'pending'")),
    _(11, "I4", "the audit of a key that is not over stays (PostgreSQL)", f"{POSTGRES_SUITE}::test_the_audit_of_a_key_that_is_not_over_is_not_purged",
      (f"{POSTGRES}/audit_purge", "'pending', 'unknown', 'failed_retryable'", "'pending'")),
    _(11, "I4", "young lines of the audit stay", f"{SQLITE_SUITE}::test_old_lines_of_the_audit_are_purged_and_younger_ones_stay",
      (f"{SQLITE}/audit_purge", "a.at <= ?1 AND", "?1 > 0 AND")),
    _(11, "I4", "an audit without a retention is kept", "tests/upkeep/test_reaper.py::test_audit_of_keys_that_are_over_ends_after_its_retention",
      ("oncekey.upkeep.reaper", "None if audit_retention is None else audit_retention.total_seconds()", "audit_retention.total_seconds() if audit_retention else 0.0")),
    # 45: a half-done request is never ended, or ended twice
    _(45, "I4", "a key settled by a verdict gets a new retention (SQLite)", "tests/upkeep/test_resumer.py::test_verdict_on_a_key_past_its_expiry_stands",
      (f"{SQLITE}/swap", "?15 OR (?3 = 'unknown' AND ?8 = 'failed_retryable')", "?15")),
    _(45, "I4", "a key settled by a verdict gets a new retention (PostgreSQL)", "tests/upkeep/test_resumer.py::test_verdict_on_a_key_past_its_expiry_stands",
      (f"{POSTGRES}/set", " OR (w.from_state = 'unknown' AND w.to_state = 'failed_retryable')", "")),
    _(45, "I4", "a half-done request is on the resumer's list", "tests/core/test_swaps.py::test_half_done_request_is_always_on_the_resumers_list",
      ("oncekey.core.swaps", "            reconcile_in = resume_in(record.reconcile_tries)\n", "            pass\n")),
    _(45, "I4", "a caller that gave up leaves a half-done request on the list", "tests/core/test_swaps.py::test_caller_that_gave_up_leaves_a_half_done_request_on_the_list",
      ("oncekey.core.swaps", "reconcile_in=RESUME_SECONDS if half_done else None", "reconcile_in=None")),
    _(45, "I4", "a try that kills the process counts", "tests/upkeep/test_resumer.py::test_try_that_kills_the_process_counts",
      ("oncekey.core.swaps", "record.reconcile_tries + 1 if by is Actor.RESUMER else", "record.reconcile_tries if by is Actor.RESUMER else")),
    _(45, "I4", "the last try that killed the process ends it", "tests/upkeep/test_resumer.py::test_try_that_kills_the_process_counts",
      ("oncekey.upkeep.resumer", "        if record.reconcile_tries >= self._max_tries:", "        if False:")),
    _(45, "I4", "a function that always raises ends in the dead letters", "tests/upkeep/test_resumer.py::test_function_that_always_raises_ends_in_the_dead_letters",
      ("oncekey.upkeep.resumer", "if move.event is Event.RELEASE and finished.record.reconcile_tries >= self._max_tries:", "if False:")),
    _(45, "I1", "a resumed request has the steps of earlier attempts", "tests/upkeep/test_resume_functions.py::test_function_is_given_the_operation",
      ("oncekey.engine.resumption", "Steps.remembering(found)", "Steps.remembering(())")),
    _(45, "I3", "the keeper renews a resumed key, and stops when it is cut off", "tests/upkeep/test_resumer.py::test_stop_cuts_a_function_off_that_does_not_end",
      ("oncekey.upkeep.resumer", "            self._engine.keeper.unwatch(operation)\n            task.cancel()\n", "            task.cancel()\n")),
    _(45, "I4", "a key is left to the process that has its function", "tests/upkeep/test_resume_functions.py::test_process_without_the_function_leaves_the_key_to_one_that_has_it",
      ("oncekey.upkeep.unreadable", "return record.now - (record.reconcile_at or 0.0) < LEFT_SECONDS", "return False")),
    _(45, "I6", "half-done requests are handed out by scope", f"{SQLITE_SUITE}::test_half_done_keys_are_handed_out_in_turns_too",
      (FAIRNESS, ", Duty.RESUMABLE: State.FAILED_RETRYABLE}", "}")),
    _(37, "I1", "a route that is not phased any more is not resumed", "tests/upkeep/test_resume_functions.py::test_route_that_is_not_phased_any_more_is_not_resumed",
      ("oncekey.engine.once", "return policy if policy is not None and policy.effects_kind is Effects.PHASED else None", "return policy")),
    _(37, "I4", "a kept request is not written again, nor taken for a step", "tests/engine/test_kept_request.py::test_kept_request_is_no_step",
      ("oncekey.engine.known_steps", "if not step.is_request}", "}")),
)  # fmt: skip
