"""The guards of the DynamoDB store. See ``mutant_table.py``. They need dynalite (``make servers``)."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

STORE, WRITES, CLIENT, PARTS = (f"oncekey.stores.dynamodb.{name}" for name in ("store", "writes", "client", "parts"))
SUITE = "tests/stores/test_dynamodb.py::TestDynamoStore"
TESTED, REPEATED = "tests/stores/test_dynamodb_items.py", "tests/stores/test_dynamodb_repeats.py"
RACED, AWAY = "tests/stores/test_dynamodb_races.py", "tests/stores/test_dynamodb_unavailable.py"

DYNAMODB: tuple[Mutant, ...] = (
    _(1, "I3", "a write compares the owner (DynamoDB)", f"{SUITE}::test_a_late_owner_writes_nothing",
      (WRITES, '    change.where("owner", "=", text(swap.owner))\n', "")),
    _(27, "I3", "a lease of another counts a margin longer (DynamoDB)",
      f"{TESTED}::test_lease_of_another_counts_a_margin_longer",
      (WRITES, "max(swap.lease_over_by, write.margin)", "swap.lease_over_by")),
    _(6, "I1", "a reservation is for an absent key (DynamoDB)",
      f"{RACED}::test_of_many_requests_for_one_key_one_wins[dynalite_server]",
      (WRITES, '    change.where_there("state", there=False)\n',
       '    change.where_there("pk_of_nothing", there=False)\n')),
    _(11, "I1", "an expiry is compared in the write (DynamoDB)",
      f"{TESTED}::test_expired_key_is_started_over_although_nothing_deleted_it",
      (WRITES, '        change.where("expires_at", "<=", number(write.now))\n', "        pass\n")),
    _(8, "I2", "a repeated write is recognised (DynamoDB)",
      f"{REPEATED}::test_move_whose_answer_is_lost_is_applied_once[dynalite_server-complete-after]",
      (STORE, "                if item is not None and write.made(item):\n                    return items.record",
       "                if False:\n                    return items.record")),
    _(8, "I3", "a repeated or late write is not applied (DynamoDB)",
      f"{REPEATED}::test_write_that_arrives_after_a_later_one_changes_nothing[dynalite_server]",
      (WRITES, """            f"{change.name('number')} < {change.value(nth)}",\n""",
       """            f"{change.name('number')} <> {change.value(nth)}",\n""")),
    _(45, "I4", "a move from an older look takes the row as it is (DynamoDB)",
      f"{TESTED}::test_move_from_an_older_look_takes_the_row_as_it_is",
      (WRITES, '        change.where_there("recovery_point", there=seen.has_steps)\n', "        pass\n")),
    _(9, "I7", "throttling is asked again, and then unavailable (DynamoDB)",
      f"{REPEATED}::test_busy_server_is_asked_again_and_the_move_is_applied_once[dynalite_server-complete-ThrottlingException-400-False]",
      (CLIENT, "    if code in _LATER or status >= 500:\n", "    if status >= 500:\n")),
    _(12, "I7", "a key whose parts are gone is no first request (DynamoDB)",
      f"{TESTED}::test_key_whose_parts_are_gone_is_never_a_first_request",
      (PARTS, "        if body is None:\n            raise Gone\n",
       "        if body is None:\n            return None\n")),
    _(12, "I7", "requests of a verb end with it (DynamoDB)",
      f"{AWAY}::test_batch_ends_in_time_however_many_keys_it_has",
      (CLIENT, "            if self._gone is not None:\n                raise self._gone\n", ""),
      (CLIENT, "            if time.monotonic() > self._deadline:\n                break\n", "")),
    _(11, "I4", "an item with an audit is never deleted by DynamoDB",
      f"{TESTED}::test_item_with_an_audit_is_kept_by_later_moves_too",
      (WRITES, """f"if_not_exists({change.name('keep')}, {change.value(number(until))})\"""",
       "change.value(number(until))")),
    _(25, "I6", "a throttled key does not harm its batch (DynamoDB)",
      f"{REPEATED}::test_throttled_key_does_not_keep_the_others_of_its_batch_waiting[dynalite_server]",
      (STORE, "batch, if_throttled=_busy)", "batch)")),
)  # fmt: skip
