"""The guards of the cache in front of a store. See ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

ENTRIES, FRONT, REDIS = "oncekey.stores.cache.entries", "oncekey.stores.cache.front", "oncekey.stores.redis.cache"
SEALS, REQUESTS = "tests/stores/test_cache_entries.py", "tests/web/test_cache.py"
AGES = "tests/stores/test_cache_ages.py"
STOPPED = "test_forgotten_answer_is_not_replayed_if_its_reader_was_stopped_for_longer_than_the_mark"
ASKED = {
    "reserve": "answers if each.record is not None], asked)",
    "swap": "cache.keep(kept, asked)",
    "reserve, in the loop": "for each in answers if isinstance(each, Record)], asked)",
    "swap, in the loop": "self._keep_ended(batch, times, asked)",
    "both, in the loop": "self._keep_ended(ends, times, asked)",
}
"""Where each verb hands over the time before its question."""

CACHE: tuple[Mutant, ...] = (
    # 57: the cache says what is not so
    _(
        57,
        "I3",
        "an entry of the cache opens only with its MAC",
        f"{SEALS}::test_entry_with_one_byte_changed_does_not_open",
        (
            ENTRIES,
            "        if not hmac.compare_digest(entry[:_MAC_BYTES], self._mac(name, sealed)):\n",
            "        if False:\n",
        ),
    ),
    _(
        57,
        "I2",
        "an entry of the cache opens only for its key",
        f"{REQUESTS}::test_entry_of_another_key_is_not_replayed",
        (
            ENTRIES,
            "        mac = blake2b(name, key=self._secret",
            '        mac = blake2b(b"", key=self._secret',
        ),
    ),
    _(
        57,
        "I3",
        "an entry of the cache counts for its time only",
        f"{SEALS}::test_entry_counts_for_its_time_to_live_even_if_the_cache_keeps_it_longer",
        (ENTRIES, "not -SKEW_SECONDS <= now - written_at <= self.ttl", "not -SKEW_SECONDS <= now - written_at"),
    ),
    _(
        57,
        "I1",
        "only final rows are in the cache",
        f"{SEALS}::test_row_that_is_not_final_is_not_cacheable",
        (
            ENTRIES,
            "    return record.state in FINAL and record.response is not None and not record.past_expiry\n",
            "    return record.response is not None and not record.past_expiry\n",
        ),
    ),
    _(
        57,
        "I3",
        "an entry of a key past its expiry does not open",
        f"{SEALS}::test_entry_of_a_row_that_has_expired_does_not_open",
        (ENTRIES, "        return None if record.past_expiry else record\n", "        return record\n"),
    ),
    _(
        57,
        "I3",
        "a forgotten answer is not written again",
        f"{REQUESTS}::test_write_that_was_on_its_way_does_not_bring_a_forgotten_answer_back",
        (REDIS, "px=max(1, int(seconds[name] * 1000)), nx=True)", "px=max(1, int(seconds[name] * 1000)))"),
    ),
    _(
        57,
        "I3",
        "a row that waited for long is not written to the cache",
        f"{REQUESTS}::test_row_that_waited_too_long_is_not_written",
        (FRONT, "            if age > MAX_AGE_SECONDS or left <= 0.0:\n", "            if left <= 0.0:\n"),
    ),
    *(
        _(
            57,
            "I3",
            f"a row's age in the cache counts from before the question ({verb})",
            f"{AGES}::{STOPPED}",
            (FRONT, text, text.replace("asked)", "clocks())")),
        )
        for verb, text in ASKED.items()
    ),
    _(
        57,
        "I3",
        "an entry carries the time before the question",
        f"{AGES}::test_time_to_live_counts_from_before_the_store_was_asked",
        (FRONT, "self._entries.seal(name, record, read_at)", "self._entries.seal(name, record, time.time())"),
    ),
    _(
        57,
        "I3",
        "an entry's time in Redis counts from before the question",
        f"{AGES}::test_time_to_live_counts_from_before_the_store_was_asked",
        (FRONT, "record.expires_at - record.now) - age\n", "record.expires_at - record.now)\n"),
    ),
    _(
        57,
        "I3",
        "a row older than the time to live is not written to the cache",
        f"{AGES}::test_row_that_is_older_than_the_time_to_live_is_not_written",
        (FRONT, " or left <= 0.0:\n", ":\n"),
    ),
    _(
        57,
        "I3",
        "a deleted row is not written to the cache",
        f"{AGES}::test_row_that_was_deleted_is_not_written_if_the_mark_could_not_be",
        (FRONT, "record is not None and change.to_state is not None", "record is not None"),
    ),
    _(
        57,
        "I3",
        "forget marks the key in the cache",
        f"{REQUESTS}::test_forgotten_key_runs_as_new_at_once",
        (
            "oncekey.admin.changes",
            "isinstance(store, Identified) and mark_forgotten(cache, store, scope, key)",
            "isinstance(store, Identified)",
        ),
    ),
    _(
        57,
        "I7",
        "a cache that hangs is left alone",
        f"{REQUESTS}::test_cache_that_hangs_is_asked_once_and_then_left_alone",
        (FRONT, "        self._paused_until = time.monotonic() + self._pause\n", "        pass\n"),
    ),
    _(
        57,
        "I7",
        "a cache whose library misbehaves is a miss",
        f"{REQUESTS}::test_cache_whose_library_misbehaves_costs_nothing_but_speed",
        (
            FRONT,
            "        except Exception as error:  # noqa: BLE001 - as in look_up",
            "        except CacheDown as error:",
        ),
    ),
    _(
        57,
        "I7",
        "a cache's URL with an unknown option is refused at the start",
        f"{REQUESTS}::test_wrong_setting_is_refused_with_what_to_write",
        (REDIS, "            client.connection_pool.make_connection()  # it connects later", "            pass"),
    ),
    _(
        57,
        "I2",
        "two databases that share a cache share no answers",
        f"{REQUESTS}::test_two_databases_that_share_a_cache_and_a_secret_share_no_answers",
        (FRONT, "            self._identity = self._store.identity()\n", "            self._identity = str()\n"),
    ),
)
