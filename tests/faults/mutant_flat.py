"""The guards of the flat way, and of the loop lane under it. See ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

ASGI, CALL, LANE = "oncekey.web.asgi", "oncekey.web.asgi_call", "oncekey.engine.batching.loop_lane"
FLAT, LANES = "tests/web/test_flat_way.py", "tests/engine/test_loop_lane.py"
TROUBLE = "tests/engine/test_loop_lane_trouble.py"

FLAT_WAY: tuple[Mutant, ...] = (
    _(
        58,
        "I5",
        "a second key, or a header of the fingerprint, leaves the flat way",
        f"{FLAT}::test_repeated_key_header_leaves_before_the_store",
        (ASGI, "        if len(head) != len(lines) and not _once_each(lines):\n", "        if False:\n"),
    ),
    _(
        58,
        "I5",
        "the flat way replays only to the same request",
        f"{FLAT}::test_other_request_under_a_stored_key_leaves_at_the_stores_word",
        (ASGI, "        and record.fingerprint == wanted.fingerprint\n", ""),
    ),
    _(
        58,
        "I2",
        "the flat way replays no expired response",
        f"{FLAT}::test_expired_key_leaves_at_the_stores_word_and_runs_again",
        (ASGI, "        and record.expires_at > record.now\n", ""),
    ),
    _(
        58,
        "I3",
        "a reservation that was asked for twice leaves the flat way",
        f"{FLAT}::test_reservation_whose_answer_was_lost_leaves_at_the_stores_word",
        (ASGI, " and record.created_at == record.now:", ":"),
    ),
    _(
        58,
        "I5",
        "a body of another length leaves the flat way",
        f"{FLAT}::test_request_that_is_refused_leaves_before_the_store",
        (ASGI, "        if len(body) != length:\n", "        if False:\n"),
    ),
    _(
        58,
        "I7",
        "a OnceKey that is closed, or whose store fails, leaves the flat way",
        "tests/web/test_shutdown.py::test_app_whose_lifespan_is_over_can_be_used_again",
        (ASGI, "            or engine.closed\n", ""),
    ),
    _(
        58,
        "I2",
        "a status that the endpoint did not return leaves the flat way",
        f"{FLAT}::test_success_in_place_of_another_outcome_is_not_stored",
        (CALL, "            or evidence.returned >= 400\n", ""),
    ),
    _(
        58,
        "I1",
        "a call that has not returned leaves the flat way",
        f"{FLAT}::test_success_in_place_of_another_outcome_is_not_stored",
        (
            CALL,
            "            or evidence.returned is None\n            or evidence.returned >= 400\n",
            "            or (evidence.returned or 0) >= 400\n",
        ),
    ),
    _(
        58,
        "I1",
        "what was heard of the handler leaves the flat way",
        f"{FLAT}::test_success_in_place_of_another_outcome_is_not_stored",
        (CALL, "            or evidence.cause is not None\n", ""),
    ),
    _(
        58,
        "I1",
        "a handler that used a verb leaves the flat way",
        f"{FLAT}::test_unusual_response_leaves_the_flat_way_and_is_replayed",
        (CALL, "            or not operation.is_plain\n", ""),
    ),
    _(
        58,
        "I3",
        "a row that was not moved leaves the flat way",
        f"{FLAT}::test_row_that_is_no_longer_this_owners_leaves_at_the_storing",
        (CALL, "        if moved is None:  #", "        if False:  #"),
    ),
    _(
        58,
        "I2",
        "what cannot be stored on the flat way is adopted",
        "tests/web/test_store_faults.py::test_the_store_dies_between_begin_and_finish",
        (CALL, "            self._storing_failed(error)\n", "            pass\n"),
    ),
    _(
        58,
        "I4",
        "a loop lane undoes the reservation of a caller that left",
        f"{TROUBLE}::test_caller_that_times_out_leaves_no_reservation",
        (LANE, "                self._undo(work)  # its caller has left\n", "                pass\n"),
    ),
    _(
        58,
        "I1",
        "one of several callers of a key in a batch reserves it",
        f"{LANES}::test_work_that_arrives_during_a_batch_is_the_next_batch",
        (
            LANE,
            "        row = first.record(there) if type(there) is float and isinstance(first, Reservation) else there\n",
            "        row = there\n",
        ),
    ),
    _(
        58,
        "I3",
        "a batch of a loop lane has each key once",
        f"{LANES}::test_two_ends_of_one_key_are_two_batches",
        (LANE, "    if len({work.key for work in works}) < len(works) or", "    if"),
        (LANE, "        if work.key in keys or", "        if"),
    ),
    _(
        58,
        "I4",
        "work without an answer is not given up with its loop lane",
        f"{TROUBLE}::test_ticket_given_to_a_thread_lane_is_not_given_to_it_again",
        (LANE, "            self._fall_back(self._take_unanswered(), None)\n", ""),
    ),
    _(
        58,
        "I3",
        "a batch of which nothing was moved says so (PostgreSQL)",
        "tests/stores/test_postgres_in_loop.py::test_no_row_counts_as_moved_if_the_owner_lost_them_all",
        ("oncekey.stores.postgres/end", "coalesce(array_agg(number), ARRAY[]::bigint[])", "array_agg(number)"),
    ),
    _(
        58,
        "I5",
        "a text with a NUL shifts no other row of its batch (PostgreSQL)",
        "tests/stores/test_postgres_arrays.py::test_packed_text_with_a_nul_is_left_to_the_database",
        ("oncekey.stores.postgres.packing", "    if len(encoded) != length:", "    if False:"),
    ),
)
