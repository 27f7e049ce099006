# ruff: noqa: E501 - a table: what stands in the product is quoted as it stands there
"""The guards against silence: what the log says, and how long a client is told to wait. See ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

TOLD = "tests/web/test_unknown_is_told.py"
HELD = "tests/enlist/test_held_too_long.py"
ACCEPTED = "tests/web/test_in_flight_accepted.py"
EXPORTER = "tests/telemetry/test_broken_exporter.py"
MEASURED, OBSERVED = "tests/telemetry/test_begin_measured.py", "oncekey.engine.observed"
OUTCOMES, LEASES, WIRE = "oncekey.web.unknown_outcomes", "oncekey.core.leases", "oncekey.web.responses"

SILENCE: tuple[Mutant, ...] = (
    # 47: what failed leaves no trace
    _(47, "I4", "a task that raised leaves its traceback", "tests/outbox/test_worker_logs.py::test_failing_task_logs_warnings_with_traceback_and_dead_letter_logs_error",
      ("oncekey.outbox.shift", "error = attempt.error = caught", "error = caught")),
    _(47, "I4", "a retry of a job is logged", "tests/outbox/test_worker_logs.py::test_failing_task_logs_warnings_with_traceback_and_dead_letter_logs_error",
      ("oncekey.telemetry.events.outbox", "    metric = \"api.idempotency.outbox.retried.count\"\n    level = WARNING\n", "    metric = \"api.idempotency.outbox.retried.count\"\n    level = INFO\n")),
    _(47, "I4", "the warning of an unknown outcome has the traceback", f"{TOLD}::test_warning_has_the_traceback_of_the_handler_even_if_the_app_responded",
      ("oncekey.core.evidence", "        self.cause = error\n", "")),
    _(47, "I4", "the command names the tenant and the endpoint of the key", f"{TOLD}::test_command_of_the_warning_settles_this_key",
      (OUTCOMES, "    if tenant != SINGLE_SCOPE:\n", "    if False:\n")),
    _(47, "I4", "an effect that is done is not named", f"{TOLD}::test_warning_names_the_effect_without_an_end_and_not_later_ones_that_have_one",
      ("oncekey.engine.steps", "            steps.open_effects.remove(name)\n        return", "            pass\n        return")),
    _(47, "I4", "an effect that did not happen is not named", f"{TOLD}::test_warning_names_the_effect_without_an_end_and_not_later_ones_that_have_one",
      ("oncekey.engine.steps", "            steps.open_effects.remove(name)\n        raise", "            pass\n        raise")),
    _(47, "I6", "support finds an unknown key by its reference", f"{TOLD}::test_reference_of_an_unknown_outcome_is_the_masked_key_that_keys_show_takes",
      (WIRE, "reference=redact(key))", "reference=None)")),
    _(47, "I4", "a question with limits is measured", f"{MEASURED}::test_request_over_a_limit_has_the_decision_turned_away",
      (OBSERVED, "return super().begin(wanted, policy, first, questions)", "return super().begin(wanted, policy, first, admission)")),
    _(47, "I4", "a question that a flow measures is not measured by the router", f"{MEASURED}::test_replay_with_a_limit_is_linked_and_counted_once",
      (OBSERVED, "        self._in_flows.add(wanted.owner)\n", "")),
    _(47, "I4", "a question that the router refuses is measured", f"{MEASURED}::test_full_queue_is_a_failed_question_counted_once",
      (OBSERVED, "            self._answered(work, began_ns, began, None)\n", "")),
    _(47, "I4", "an exporter that raises does not stop the start", f"{EXPORTER}::test_broken_exporter_stops_neither_the_start_nor_a_request",
      ("oncekey.engine.parts", "    tell(exporters, \"expect\", [", "    for each in exporters: each.expect([")),
    _(47, "I4", "an event that an exporter cannot count is logged with its class", f"{EXPORTER}::test_frozen_exporter_that_has_no_hash_is_reported_once",
      ("oncekey.telemetry.emitter", "partial(answer, exporter, \"on_event\", None)", "exporter.on_event")),
    _(47, "I4", "the log names the exporter's method that raised", f"{EXPORTER}::test_log_names_the_methods_that_the_user_wrote_once_each",
      ("oncekey.telemetry.exporter", "        answer(self, method, None, *what)\n", "        getattr(self, method)(*what)\n")),
    _(47, "I4", "an outage is reported once, not at each try to undo", "tests/engine/test_lanes_leaving.py::test_owed_undo_is_made_when_the_store_is_back",
      ("oncekey.engine.batching.thread_lane", "            if not self._failing:\n                self._failing = True\n", "            if True:\n")),
    _(47, "I4", "an outage in the loop and in the thread is one report", "tests/engine/test_loop_lane_trouble.py::test_outage_in_the_loop_and_in_the_thread_is_reported_once",
      ("oncekey.engine.batching.thread_lane", "        if not self._failing:\n            for", "        if True:\n            for")),
    _(47, "I4", "a loop lane that never works is reported", "tests/engine/test_loop_lane_trouble.py::test_after_its_rest_the_express_runs_again",
      ("oncekey.engine.batching.thread_lane", "            self._loop_failures.append(failure)\n", "            pass\n")),
    _(47, "I4", "max_age beside a signature over the body alone is warned of", "tests/web/test_window.py::test_signature_over_the_body_alone_is_warned_of_with_its_route",
      ("oncekey.engine.policy_checks", "elif not getattr(policy.verify, \"signs_time\", True):", "elif False:")),
    # 48: how long a client waits for a dead owner, and for a live one
    _(48, "I4", "a duplicate of an overdue lease gets the remaining seconds", "tests/engine/test_begin.py::test_duplicate_of_an_overdue_lease_gets_the_remaining_seconds",
      ("oncekey.engine.engine", "decision = Busy(decision.record, self.overdue_lease(decision.record, policy))", "pass")),
    _(48, "I4", "a renewal waits for the answer to the last one", "tests/engine/test_keeper.py::test_renewal_is_not_sent_again_while_the_store_is_slow_to_answer_it",
      ("oncekey.engine.keeper", "        operation.renew_at = now + lease  # not", "        operation.renew_at = again_at  # not")),
    _(48, "I4", "a key whose end is stored is not renewed", "tests/engine/test_keeper.py::test_end_of_this_owner_whose_answer_was_lost_is_not_called_a_lost_lease",
      ("oncekey.engine.keeper", "            operation.renew_at = math.inf\n", "            pass\n")),
    _(48, "I4", "a live owner is not called overdue", "tests/engine/test_keeper.py::test_renewals_of_a_live_handler_are_never_overdue",
      (LEASES, "OVERDUE_AT = 1 / 2\n", "OVERDUE_AT = 2 / 3\n")),
    _(48, "I4", "a live owner of this process is not called overdue", "tests/engine/test_keeper.py::test_live_handler_of_this_process_is_not_overdue_whatever_its_row_says",
      ("oncekey.engine.engine", "return None if self.keeper.keeps(record) else overdue_lease", "return overdue_lease")),
    _(48, "I4", "an owner with a shorter lease is not called overdue", "tests/core/test_leases.py::test_first_lease_counts_by_its_own_length_after_a_deploy_raised_it",
      (LEASES, "min(lease_seconds, record.lease_until - record.created_at)", "lease_seconds")),
    # 49: one transaction blocks every writer of an SQLite file
    _(49, "I4", "an overdue phase is 503", f"{HELD}::test_overdue_phase_is_503_and_its_log_line_names_it",
      ("oncekey.engine.steps", "        if opened.held_too_long and isinstance(error, Exception):\n", "        if False:\n")),
    _(49, "I4", "an exception caused by an overdue transaction is 503", f"{HELD}::test_overdue_enlisted_transaction_is_503_and_its_log_line_names_it",
      ("oncekey.core.situations", "        if event is Event.RELEASE and held_too_long:\n", "        if False:\n")),
    _(49, "I4", "a transaction opened late has its full time limit", f"{HELD}::test_transaction_opened_late_has_its_whole_time",
      ("oncekey.engine.keeper", "        if now < enlisted.opened_at + limit:", "        if False:")),
    _(49, "I4", "others write when an overdue transaction is ended", f"{HELD}::test_others_write_before_the_handler_of_an_overdue_transaction_has_ended",
      ("oncekey.engine.transactions.enlistment", "        self.hold.release()  # this", "        # this")),
    _(49, "I4", "a handler that does not commit is named", f"{HELD}::test_external_handler_that_does_not_commit_is_named_in_the_log",
      ("oncekey.stores.sqlite.transactions", "            return is_busy(error)\n", "            return False\n")),
    _(49, "I4", "a store that is down is not blamed on the handler", f"{HELD}::test_store_that_is_down_is_not_blamed_on_the_handler",
      ("oncekey.stores.sqlite.transactions", "            return is_busy(error)\n", "            return True\n")),
    # 50: a 202 that is taken for a result
    _(50, "I2", "202 only for a row in progress", f"{ACCEPTED}::test_202_only_where_a_row_says_that_a_request_runs",
      (WIRE, "running = record is not None and record.state is State.IN_PROGRESS and not record.lease_over", "running = True")),
    _(50, "I2", "no 202 without an address to ask", f"{ACCEPTED}::test_accepted_without_a_status_url_is_refused_at_start",
      ("oncekey.engine.policy_checks", "policy.in_flight == \"accepted\" and once.status_url is None:", "policy.in_flight == \"\":")),
    _(50, "I2", "the body says that the request still runs", f"{ACCEPTED}::test_duplicate_of_a_running_request_is_202_and_then_a_replay",
      ("oncekey.core.problems", "Situation.ACCEPTED: \"in_progress\"", "Situation.ACCEPTED: \"pending\"")),
)  # fmt: skip
