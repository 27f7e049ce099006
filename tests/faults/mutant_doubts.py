# ruff: noqa: E501 - a table: what stands in the product is quoted as it stands there
"""The guards of verdicts about effects, and of the time before something is said not to have happened. See ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

SQLITE, POSTGRES = "oncekey.stores.sqlite", "oncekey.stores.postgres"
DOUBTS = "oncekey.core.doubts"
SETTLING = "oncekey.engine.settlement"
OF_EFFECTS = "tests/upkeep/test_effects_in_doubt.py"
DEFERRED = "tests/upkeep/test_deferred_verdicts.py"
LEASES = "tests/web/test_doubt_and_lease.py"
SQLITE_SUITE = "tests/stores/test_sqlite.py::TestSqliteStore"
POSTGRES_SUITE = "tests/stores/test_postgres.py::TestPostgresStore"

DOUBTS_OF_EFFECTS: tuple[Mutant, ...] = (
    # 46: a verdict skips the rest of a request, or an effect that is settled is settled again
    _(46, "I1", "a settled effect fences the late owner (SQLite)", f"{SQLITE_SUITE}::test_late_owner_writes_nothing_after_an_effect_was_settled",
      (f"{SQLITE}/swap", "owner = coalesce(?9, owner)", "owner = CASE WHEN ?3 = 'unknown' THEN owner ELSE coalesce(?9, owner) END")),
    _(46, "I1", "a settled effect fences the late owner (PostgreSQL)", f"{POSTGRES_SUITE}::test_late_owner_writes_nothing_after_an_effect_was_settled",
      (f"{POSTGRES}/set", "owner = coalesce(w.new_owner, k.owner)", "owner = CASE WHEN w.from_state = 'unknown' THEN k.owner ELSE coalesce(w.new_owner, k.owner) END")),
    _(46, "I1", "no move settles an effect without a new owner token", "tests/core/test_swaps.py::test_settling_an_effect_needs_its_name_a_new_owner_and_an_effect_in_doubt",
      ("oncekey.core.swaps", "if (event in FENCES) != (new_owner is not None) or (event in FENCES and step is None):", "if False:")),
    _(46, "I1", "an effect is settled as not happened after the quarantine only", f"{OF_EFFECTS}::test_not_happened_waits_for_the_quarantine",
      (SETTLING, "if isinstance(verdict, Refuted | NotHappened) and early > 0:\n        # When the provider", "if False:\n        # When the provider"),
      ("oncekey.core.swaps", "lease_over_by = record.quarantine if quarantine_seconds is None else quarantine_seconds", "lease_over_by = 0.0")),
    _(46, "I1", "Confirmed needs final=True to skip phases", f"{OF_EFFECTS}::test_verdict_about_an_effect_that_is_not_in_doubt_is_refused",
      (SETTLING, "if not verdict.final and (why := doubts.skips_phases(record, steps)) is not None:", "if False:")),
    _(46, "I1", "--confirm needs --final to skip phases", "tests/cli/test_keys_resolve_effects.py::test_verdict_that_does_not_fit_the_effects_is_refused_before_any_prompt",
      ("oncekey.admin.changes", "    what, how = f\"this key has steps", "    return None\n    what, how = f\"this key has steps")),
    _(46, "I1", "a request goes on from a done effect only if it is phased", f"{OF_EFFECTS}::test_happened_about_a_done_effect_does_not_settle_a_route_that_is_not_phased",
      (SETTLING, "return record.has_steps and record.effects is Effects.PHASED", "return record.has_steps"),
      ("oncekey.core.swaps", "        (Condition.NONE_IN_DOUBT, not record.may_have_effect_in_doubt),\n", "")),
    _(46, "I4", "a request that expired half done goes on after a verdict", f"{OF_EFFECTS}::test_happened_about_a_done_effect_lets_an_expired_half_done_request_go_on",
      (SETTLING, "return record.has_steps and record.effects is Effects.PHASED", "return False")),
    _(46, "I3", "a corrected result fences a caller that saw the old one", f"{SQLITE_SUITE}::test_corrected_result_replaces_the_old_one_under_a_new_owner",
      ("oncekey.core.states", "Event.GO_ON, Event.CORRECT})", "Event.GO_ON})"), (DOUBTS, "        new_owner=new_owner,\n    )\n\n\ndef settled(", "    )\n\n\ndef settled(")),
    _(46, "I1", "an effect that is done keeps its result", f"{OF_EFFECTS}::test_effect_that_is_done_is_not_done_again",
      (SETTLING, "    if chosen.state is StepState.DONE:\n", "    if False:\n")),
    _(46, "I1", "a webhook about one effect does not settle another", f"{OF_EFFECTS}::test_webhook_about_one_effect_does_not_settle_another",
      (DOUBTS, "if effect not in (None, found.name):", "if False:"), (DOUBTS, "        return found\n    if effect is None:", "        return next((step for step in effects if step.name == effect), found)\n    if effect is None:")),
    _(46, "I1", "a webhook about a job does not settle an effect", f"{OF_EFFECTS}::test_webhook_about_a_job_does_not_settle_an_effect",
      (DOUBTS, 'return "the id belongs to a job of this key, and to none of its effects"', "return None")),
    _(46, "I1", "a verdict must name one of several effects in doubt", f"{OF_EFFECTS}::test_verdict_about_an_effect_that_is_not_in_doubt_is_refused",
      (DOUBTS, "return doubted[0] if len(doubted) == 1 else", "return doubted[0] if doubted else")),
    _(46, "I1", "a key stays unknown while another effect is in doubt", f"{OF_EFFECTS}::test_key_stays_unknown_until_every_effect_in_doubt_is_settled",
      (DOUBTS, "last = len(in_doubt(record, steps)) == 1", "last = True")),
    _(46, "I1", "Refuted clears every effect in doubt", f"{OF_EFFECTS}::test_refuted_clears_every_effect_in_doubt",
      (SETTLING, "if isinstance(verdict, Refuted) and not doubted:", "if isinstance(verdict, Refuted):")),
    _(46, "I1", "an effect that raised NotExecuted is not in doubt", "tests/engine/test_steps_interrupted.py::test_effect_that_was_not_executed_is_not_in_doubt_later",
      ("oncekey.engine.steps", "_advance(operation, cleared(step),", "_advance(operation, step,")),
    _(46, "I4", "a verdict that was refused is not asked for again at once", f"{OF_EFFECTS}::test_reconciler_postpones_a_verdict_that_was_refused_and_says_why",
      ("oncekey.upkeep.reconciler", "if settled.reason is not None and settled.outcome in _REFUSALS:", "if False:")),
    _(46, "I1", "a deferred request is not run again by a verdict", f"{DEFERRED}::test_deferred_request_is_not_run_again_by_a_verdict",
      (SETTLING, "if job is not None and not isinstance(verdict, Confirmed):", "if False:")),
    _(46, "I1", "a deferred request is not run again by an operator", f"{DEFERRED}::test_deferred_request_is_not_run_again_by_a_verdict",
      ("oncekey.admin.changes", "return None if job is None else MoveRefused(", "return None if job is None or job else MoveRefused(")),
    _(46, "I1", "the proof that a request was deferred is not purged (SQLite)", f"{DEFERRED}::test_discarded_job_still_proves_that_the_request_is_done",
      (f"{SQLITE}/outbox_purge", "AND NOT (i.settles AND EXISTS", "AND (i.settles OR EXISTS")),
    _(46, "I1", "the proof that a request was deferred is not purged (PostgreSQL)", f"{DEFERRED}::test_discarded_job_still_proves_that_the_request_is_done",
      (f"{POSTGRES}/outbox_purge", "AND NOT (i.settles AND EXISTS", "AND (i.settles OR EXISTS")),
    # 2: an expired lease runs a payment again
    _(2, "I1", "the quarantine counts from the time the key became unknown", f"{SQLITE_SUITE}::test_quarantine_counts_from_becoming_unknown_or_from_the_end_of_the_kept_lease",
      ("oncekey.core.swaps", "                lease_seconds = 0.0\n", "                pass\n")),
    _(2, "I1", "a handler that may still run keeps a lease before the quarantine", f"{LEASES}::test_quarantine_counts_from_the_end_of_a_lease_where_the_handler_may_still_run",
      ("oncekey.engine.operation", "return 0.0 if self.evidence.ended and not cut_off else self.policy.lease_seconds", "return 0.0")),
    _(2, "I1", "the thread of an effect that was given up may still send", f"{LEASES}::test_quarantine_counts_from_the_end_of_a_lease_where_the_handler_may_still_run",
      ("oncekey.engine.steps", "            operation.steps.cut_off = True\n", "            pass\n")),
    _(2, "I1", "the quarantine of a dead letter counts from its end (SQLite)", "tests/upkeep/test_ingest.py::test_quarantine_of_a_deferred_request_counts_from_the_dead_letter",
      (f"{SQLITE}/outbox_settle", "    lease_until = CASE WHEN ?5 = 'unknown' THEN ?4 ELSE lease_until END,\n", "")),
    _(2, "I1", "the quarantine of a dead letter counts from its end (PostgreSQL)", "tests/upkeep/test_ingest.py::test_quarantine_of_a_deferred_request_counts_from_the_dead_letter",
      (f"{POSTGRES}/outbox_ended", "        lease_until = CASE WHEN e.settle = 'unknown' THEN now() ELSE k.lease_until END,\n", "")),
    _(2, "I1", "the quarantine is read from the row", "tests/upkeep/test_ingest.py::test_quarantine_of_the_row_counts_whatever_the_policy_says_now",
      ("oncekey.core.record", "return DEFAULT_QUARANTINE_SECONDS if self.quarantine_seconds is None else self.quarantine_seconds", "return DEFAULT_QUARANTINE_SECONDS")),
)  # fmt: skip
