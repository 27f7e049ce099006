"""The guards of encryption. See ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

KEYED, HTTP = "tests/encryption/test_fingerprints.py", "tests/web/test_keyed_fingerprints.py"
PLAIN, LOST = "tests/encryption/test_plain_ring.py", "tests/encryption/test_declared_lost.py"
DECISION, RECIPE, FINGERPRINTS = "oncekey.core.decision", "oncekey.core.recipe", "oncekey.encryption.fingerprints"

ENCRYPTION: tuple[Mutant, ...] = (
    # 37: a deploy between two attempts
    _(
        37,
        "I1",
        "a key that is not in the ring is not a mismatch",
        f"{KEYED}::test_row_under_a_key_that_is_not_in_the_ring_is_not_compared_in_any_state",
        (RECIPE, "    if not keyed or not one_key(keyed, stored):\n", "    if False:\n"),
    ),
    _(
        37,
        "I1",
        "another secret under the same id is not a mismatch",
        f"{KEYED}::test_row_under_another_secret_of_the_same_id_is_not_compared",
        (DECISION, "        same = None  # two processes have different keys under one id\n", "        pass\n"),
    ),
    _(
        37,
        "I1",
        "another secret under an older id is not a mismatch",
        f"{KEYED}::test_row_under_another_secret_of_an_older_id_is_not_compared",
        (RECIPE, "if not keyed or not one_key(keyed, stored):", "if not keyed:"),
    ),
    _(
        37,
        "I5",
        "a row without a key is compared without one",
        f"{KEYED}::test_request_is_compared_under_the_key_and_recipe_of_the_row",
        (RECIPE, "    if key_id == 0:\n        return plain == stored\n", ""),
    ),
    _(
        37,
        "I5",
        "a row is compared under its own key",
        f"{KEYED}::test_request_is_compared_under_the_key_and_recipe_of_the_row",
        (
            FINGERPRINTS,
            "        hashed = self._mac(key_id, b",
            '        hashed = self._mac(key_id, b"") and self._mac(self._current, b',
        ),
    ),
    # 18: a fingerprint that forgets
    _(
        18,
        "I6",
        "the flat way keys its fingerprints",
        f"{HTTP}::test_new_row_has_a_keyed_fingerprint_and_is_compared_by_it[memory]",
        ("oncekey.web.asgi", "            wanted = once.keyed(wanted)\n", "            pass\n"),
    ),
    _(
        18,
        "I6",
        "the general way keys its fingerprints",
        f"{HTTP}::test_every_framework_makes_and_compares_keyed_fingerprints[wsgi]",
        ("oncekey.engine.once", "return wanted if self.keyed is None else self.keyed(wanted)", "return wanted"),
    ),
    _(
        18,
        "I6",
        "a keyed fingerprint covers the name of its row",
        f"{KEYED}::test_two_rows_with_one_request_share_no_fingerprint",
        (FINGERPRINTS, "(_lengths(len(scope_), len(key_)), scope_, key_, digest)", "(digest,)"),
    ),
    _(
        18,
        "I6",
        "the parts of a row's name have their lengths in front",
        f"{KEYED}::test_two_rows_with_one_request_share_no_fingerprint",
        (FINGERPRINTS, "(_lengths(len(scope_), len(key_)), scope_, key_, digest)", "(scope_, key_, digest)"),
    ),
    # 37: a deploy switches encryption on or off
    _(
        37,
        "I1",
        "a ring that does not encrypt compares rows under its keys",
        f"{PLAIN}::test_retry_at_the_other_process_is_answered_from_the_store[sqlite-old-first-off-1]",
        (FINGERPRINTS, "            self._under_key,\n", "            None,\n"),
    ),
    _(
        37,
        "I5",
        "two plain fingerprints name no key",
        f"{PLAIN}::test_keyring_of_another_secret_is_noticed_and_a_plain_row_is_compared[sqlite-opens]",
        (DECISION, "        and wanted.fingerprint_version >= KEY_STEP  # two plain fingerprints name no key\n", ""),
    ),
    # 59: a key that is lost for good
    _(
        59,
        "I4",
        "a finished request under a lost key is refused for good",
        f"{LOST}::test_call_is_neither_a_result_nor_worth_another_try[sqlite]",
        (FINGERPRINTS, "return LOST_KEY if key_id in self._lost else None", "return None"),
    ),
    _(
        59,
        "I4",
        "only a final row under a lost key is refused for good",
        f"{LOST}::test_only_a_final_row_is_refused_for_good[unknown]",
        (
            DECISION,
            "    is_lost = keyed == LOST_KEY and record.state in FINAL  #",
            "    is_lost = keyed == LOST_KEY  #",
        ),
    ),
    _(
        59,
        "I5",
        "the fingerprint of a lost key equals none",
        f"{LOST}::test_row_with_a_fingerprint_that_is_damaged_equals_no_request",
        (RECIPE, "    if not keyed or not one_key", "    if keyed is None or not one_key"),
    ),
    _(
        59,
        "I1",
        "the client keeps an intent open whose answer is lost",
        "tests/client/test_decisions.py::test_answer_of_oncekey_is_recognised_in_every_profile[ietf-None]",
        ("oncekey.client.reading", "    Situation.ANSWER_LOST: Seen.UNKNOWN,", "    #"),
    ),
    _(
        59,
        "I8",
        "a message whose answer is lost is a dead letter",
        f"{LOST}::test_message_is_a_dead_letter[sqlite]",
        (
            "oncekey.consumers.message",
            "        case AnswerLost():\n            return Situation.ANSWER_LOST\n",
            "",
        ),
    ),
)
