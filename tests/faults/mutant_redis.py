"""The guards of the Redis store. A guard in a script is taken out of its text when the text is put together."""

from __future__ import annotations

from tests.faults.mutant import Edit, Mutant
from tests.faults.mutant import mutant as _

REDIS = "oncekey.stores.redis"
EPOCHS, SETTINGS = "tests/stores/test_redis_epochs.py", "tests/stores/test_redis_settings.py"
SUITE = "tests/stores/test_redis.py::TestRedisStore"
IN_LOOP = "tests/stores/test_redis_in_loop.py"
WATCH = "tests/stores/test_redis_watch.py"
BATCHES = "tests/stores/test_redis_batches.py"


def _script(text: str, instead: str) -> Edit:
    whole = 'whole = "".join([*parts, text])'
    return (f"{REDIS}.scripts", f"{whole}.encode()", f"{whole}.replace({text!r}, {instead!r}).encode()")


REDIS_STORE: tuple[Mutant, ...] = (
    _(
        5,
        "I4",
        "the pause after a failed node does not prolong itself",
        "tests/stores/test_redis_pause.py::test_node_is_tried_again_after_its_pause_though_calls_never_stop",
        (f"{REDIS}.calls", " and not isinstance(error, Paused):", ":"),
    ),
    _(
        24,
        "I2",
        "a Redis that can fail over is durable only if a replica confirms",
        f"{WATCH}::test_server_that_can_fail_over_is_durable_only_if_a_replica_confirms[redis+cluster://host:1-False]",
        (f"{REDIS}.watch", 'settings.kind == "server" or settings.replicas > 0', "True"),
    ),
    _(
        24,
        "I7",
        "every script compares the epoch",
        f"{EPOCHS}::test_redis_emptied_under_a_running_process_is_refused",
        _script("if epoch ~= ARGV[1] then", "if false then"),
    ),
    _(
        24,
        "I7",
        "a script compares the epochs of all buckets that it touches",
        f"{BATCHES}::test_batch_that_touches_one_bucket_without_its_epoch_does_nothing",
        _script("unpack(KEYS, 1, ARGV[2])", "KEYS[1]"),
    ),
    _(
        24,
        "I7",
        "a Redis that evicts keys is refused",
        f"{EPOCHS}::test_redis_that_evicts_keys_is_refused",
        (f"{REDIS}.servers", "    if server.policy == _SAFE:\n", "    if True:\n"),
    ),
    _(
        24,
        "I7",
        "eviction switched on under open connections is refused",
        f"{WATCH}::test_eviction_switched_on_under_open_connections_is_refused",
        (f"{REDIS}.calls", "                look = self.watch.due(address)\n", "                look = ()\n"),
    ),
    _(
        24,
        "I7",
        "the event loop looks for eviction too",
        f"{WATCH}::test_event_loop_notices_eviction_and_stays_refused",
        (f"{REDIS}.in_loop", "            looks = [store.calls.watch.due(address)", "            looks = [()"),
    ),
    _(
        24,
        "I7",
        "what one connection noticed about eviction holds for all",
        f"{WATCH}::test_what_one_connection_noticed_holds_for_all",
        (f"{REDIS}.watch", "self._loss is None and link.checked_at == self.", "link.checked_at >= 0 <= self."),
    ),
    _(
        24,
        "I7",
        "keys that were evicted unseen are noticed by their count",
        f"{WATCH}::test_keys_evicted_while_nobody_looked_are_noticed_by_their_count",
        (f"{REDIS}.watch", "        elif server.evicted > first and", "        elif False and"),
    ),
    _(
        24,
        "I7",
        "init refuses a Redis that lost a bucket",
        f"{EPOCHS}::test_init_of_redis_that_lost_one_bucket_is_refused",
        (
            f"{REDIS}.epochs",
            "        if not any(self._marks(deadline)):\n",
            "        if None in self._marks(deadline):\n",
        ),
    ),
    _(
        24,
        "I7",
        "init refuses an emptied Redis whose epoch is in the URL",
        f"{EPOCHS}::test_init_of_emptied_redis_is_refused_if_the_url_names_an_epoch",
        (f"{REDIS}.epochs", "        if self.settings.epoch is not None:\n", "        if False:\n"),
    ),
    _(
        24,
        "I7",
        "init refuses keys without an epoch",
        f"{EPOCHS}::test_init_of_redis_with_keys_and_without_epochs_is_refused",
        (f"{REDIS}.epochs", "        elif any(self.calls.ask_of(left, deadline)):\n", "        elif False:\n"),
    ),
    _(
        1,
        "I3",
        "a swap compares the owner (Redis)",
        f"{SUITE}::test_a_late_owner_writes_nothing",
        _script(" or row.owner ~= change.owner then", " then"),
    ),
    _(
        1,
        "I3",
        "an end compares the owner (Redis)",
        f"{IN_LOOP}::test_keys_are_inserted_found_and_ended_as_by_a_thread",
        _script("if live and string.sub(live, 1, #mine) == mine then", "if live then"),
    ),
    _(
        42,
        "I1",
        "a write counts after a replica has it",
        f"{SETTINGS}::test_write_without_its_replica_does_not_count",
        (f"{REDIS}.calls", "        if confirmed >= self.settings.replicas:\n", "        if True:\n"),
    ),
    _(
        42,
        "I1",
        "the event loop waits for a replica too",
        f"{IN_LOOP}::test_lost_epoch_and_missing_replicas_raise",
        (
            f"{REDIS}.in_loop",
            "if wait and (isinstance(replies[-1], Refusal) or replies[-1] < store.settings.replicas):",
            "if False:",
        ),
    ),
    _(
        4,
        "I2",
        "a late answer is not read as the next one's (Redis)",
        f"{IN_LOOP}::test_hung_server_is_left_in_time",
        (
            f"{REDIS}.in_loop",
            "        except BaseException:\n            # Also when cancelled",
            "        except ZeroDivisionError:\n            # Also when cancelled",
        ),
    ),
)
