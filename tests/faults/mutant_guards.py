"""The guards of webhooks, windows, bound keys and limits. See ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

WEBHOOKS, WINDOW, BOUND, LIMITS, PERSONAL = (
    f"tests/web/test_{name}.py" for name in ("webhooks", "window", "bound_keys", "limits", "personal_keys")
)
COUNTS, RACES = "tests/web/test_limit_counts.py", "tests/web/test_limit_races.py"
NARROWED = "tests/web/test_narrowed_keys.py"
PLANTED, REDACTION = "tests/security/test_planted_secrets.py", "tests/telemetry/test_redaction.py"

GUARDS: tuple[Mutant, ...] = (
    # 30: callers that may not have what they ask for
    _(
        30,
        "I6",
        "a signature is checked before the look-up",
        f"{WEBHOOKS}::test_known_key_under_a_bad_signature_is_not_replayed",
        ("oncekey.web.admission", "    if policy.verify is not None:\n", "    if False:\n"),
    ),
    _(
        30,
        "I6",
        "only True lets a request pass",
        f"{WEBHOOKS}::test_only_true_lets_a_request_pass",
        ("oncekey.web.admission", "if policy.verify(request, body) is True:", "if policy.verify(request, body):"),
    ),
    _(
        30,
        "I6",
        "a signature from the future is refused",
        f"{WEBHOOKS}::test_signature_outside_of_the_window_is_refused",
        (
            "oncekey.webhooks.signatures",
            "return _any(holds) and _time_of(sent) <= time.time() + seconds",
            "return _any(holds)",
        ),
    ),
    _(
        30,
        "I6",
        "a key of another binding is a mismatch",
        f"{BOUND}::test_key_of_another_user_is_a_mismatch_and_does_not_run",
        (
            "oncekey.core.decision",
            "    if not is_bound_to(record.fingerprint_recipe, wanted.bindings):\n        return False\n",
            "",
        ),
    ),
    _(
        30,
        "I6",
        "the status of a bound key is for its user",
        f"{BOUND}::test_status_of_another_users_key_is_404",
        (
            "oncekey.web.status_question",
            "return record if binding.is_bound_to(record.fingerprint_recipe, hashes) else None",
            "return record",
        ),
    ),
    _(
        30,
        "I1",
        "an old request gets no new key after it waited",
        f"{WINDOW}::test_old_request_does_not_run_after_the_first_left_its_key_unused",
        (
            "oncekey.engine.admission",
            "                return Found(seen)\n",
            "                self.over = True\n                return Found(seen)\n",
        ),
    ),
    _(
        30,
        "I6",
        "keys on their way count for the cap",
        f"{LIMITS}::test_count_never_forgets_keys_that_are_on_their_way",
        (
            "oncekey.engine.limiter",
            "return self.count + self.added - self.base + self.pending",
            "return self.count + self.added - self.base",
        ),
    ),
    _(
        30,
        "I6",
        "simultaneous requests with one key count once",
        f"{COUNTS}::test_requests_that_arrive_together_with_one_key_are_counted_once",
        ("oncekey.engine.arrivals", "if arrival.counted or arrival.asking:", "if arrival.asking:"),
    ),
    _(
        30,
        "I6",
        "a request waits for the count of another one with its key",
        f"{COUNTS}::test_duplicate_of_a_refused_key_is_not_reserved",
        ("oncekey.engine.admission", "            if arrival.counted:\n", "            if True:\n"),
    ),
    _(
        30,
        "I6",
        "a chain of requests with one key is counted",
        f"{COUNTS}::test_request_that_was_not_counted_and_made_the_row_ends_the_sharing",
        ("oncekey.engine.admission", "if self._made and not self._is_counted:", "if False:"),
    ),
    _(
        30,
        "I6",
        "a discarded key makes room under the cap at once",
        f"{COUNTS}::test_request_that_leaves_no_row_makes_room_under_the_cap_at_once",
        ("oncekey.engine.limiter", "is not None and known.discarded:", "is not None and False:"),
    ),
    _(
        30,
        "I6",
        "guesses are not answered after the limit",
        f"{LIMITS}::test_guessing_keys_at_the_status_endpoint_is_limited",
        (
            "oncekey.web.status_question",
            "            if wait is not None:\n                self.refused",
            "            if wait is not None and not self.key:\n                self.refused",
        ),
    ),
    _(
        30,
        "I6",
        "look-ups in flight take places under their limit",
        f"{RACES}::test_guesses_at_the_same_moment_do_not_pass_the_limit",
        ("oncekey.limits", "if window.remaining > others:", "if window.remaining > 0:"),
    ),
    _(
        30,
        "I6",
        "a miss is counted before its look-up leaves its place",
        f"{RACES}::test_miss_is_counted_before_it_leaves_its_place",
        (
            "oncekey.web.status_question",
            "as self.others:\n            yield\n",
            "as self.others:\n            pass\n        yield\n",
        ),
    ),
    _(
        30,
        "I6",
        "a look-up that fails leaves its place",
        f"{RACES}::test_look_up_that_fails_leaves_its_place",
        (
            "oncekey.engine.limiter",
            "        try:\n            yield others\n        finally:\n",
            "        yield others\n        if True:\n",
        ),
    ),
    _(
        30,
        "I6",
        "a count in memory is under a lock of its own",
        f"{RACES}::test_rate_in_memory_is_exact_when_the_library_has_dropped_its_lock",
        ("oncekey.limits", "nullcontext() if self.blocks else threading.Lock()", "nullcontext()"),
    ),
    _(
        30,
        "I6",
        "the count of a tenant that is being asked for is not forgotten",
        f"{COUNTS}::test_count_of_a_tenant_that_is_being_asked_for_is_not_forgotten",
        ("oncekey.engine.limiter", "            known.asking += 1\n", "            known.asking += 0\n"),
        ("oncekey.engine.limiter", "                known.asking -= 1\n", "                pass\n"),
    ),
    _(
        37,
        "I1",
        "a known key is answered though the route takes no new key of its form",
        f"{NARROWED}::test_known_key_is_answered_although_the_route_takes_no_new_key_of_its_form",
        ("oncekey.web.exchange", "if error.key is None:", "if True:"),
    ),
    _(
        37,
        "I1",
        "a known key of a sender is answered though it is too long now",
        f"{NARROWED}::test_known_key_of_a_sender_is_answered_although_it_is_too_long_now",
        (
            "oncekey.web.admission",
            "        exchange.refused_if_new = TurnedAway(Situation.KEY_MALFORMED, detail)\n",
            "        return exchange.refuse(Situation.KEY_MALFORMED, detail)\n",
        ),
    ),
    _(
        37,
        "I7",
        "a new key that is not of the route's form is refused",
        f"{NARROWED}::test_known_key_is_answered_although_the_route_takes_no_new_key_of_its_form",
        ("oncekey.web.exchange", "self.key, self.refused_if_new = error.key,", "self.key, _ = error.key,"),
    ),
    _(
        28,
        "I6",
        "a personal key that is not known is refused",
        f"{PERSONAL}::test_personal_key_is_refused_and_leaves_no_row",
        (
            "oncekey.web.exchange",
            "refused = personal_keys.refused(",
            "_ = personal_keys.refused(",
        ),
    ),
    _(
        28,
        "I6",
        "the answer to a personal key does not repeat it",
        f"{PERSONAL}::test_personal_key_is_refused_and_leaves_no_row",
        ("oncekey.web.exchange", "self.key_header = None  # the answer does not repeat the key", "pass"),
    ),
    _(
        28,
        "I6",
        "a route that looks at its keys leaves the flat way",
        f"{PERSONAL}::test_option_leaves_the_flat_way_only_if_it_is_set",
        ("oncekey.core.policy", " and self.pii is None)", ")"),
    ),
    _(
        28,
        "I6",
        "a mask of a personal key has no letter of it",
        "tests/core/test_personal_data.py::test_mask_of_personal_data_has_no_letter_of_it",
        ("oncekey.telemetry.redaction", " and personal_data(key) is None else", " else"),
    ),
    _(
        28,
        "I6",
        "a function with a personal key does not run",
        "tests/functions/test_attempt.py::test_function_with_a_personal_key_does_not_run",
        ("oncekey.functions.attempt", "None, self._admission)", "None, None)"),
    ),
    _(
        28,
        "I6",
        "a traceback is logged without the messages",
        "tests/core/test_events.py::test_traceback_of_a_chain_has_every_class_and_no_message",
        ("oncekey.telemetry.redaction", "            record.exc_info = None\n", "            return True\n"),
    ),
    _(
        28,
        "I6",
        "an exception within a message is described",
        "tests/core/test_events.py::test_exception_in_a_message_is_described",
        ("oncekey.telemetry.redaction", "tuple(_shown(each) for each in record.args)", "record.args"),
    ),
    _(
        28,
        "I6",
        "errors that apps wrote are masked on the command line",
        f"{PLANTED}::test_nothing_that_oncekey_says_has_a_secret",
        ("oncekey.cli.output", "return error if reveal or error is None else mask(shown(error))", "return error"),
    ),
    _(
        28,
        "I6",
        "a header with a credential is masked to the end of its line",
        f"{PLANTED}::test_nothing_that_oncekey_says_has_a_secret",
        ("oncekey.telemetry.redaction", "\\s{{0,3}}[:=][^\\n]* ", "\\s{{0,3}}[:=]\\s{{0,3}}\\S+ "),
    ),
    _(
        28,
        "I6",
        "numbers with dots, slashes and brackets are masked",
        f"{REDACTION}::test_form_of_personal_data_is_masked_whole",
        ("oncekey.telemetry.redaction", 'r"[ ()./-]{0,2}"', 'r"[ -]?"'),
    ),
    _(
        28,
        "I6",
        "a word with percent-encoding is masked",
        f"{REDACTION}::test_form_of_personal_data_is_masked_whole",
        ("oncekey.telemetry.redaction", "(?=\\S*%[0-9a-f]{{2}})\\S+", "(?!)"),
    ),
    _(
        28,
        "I6",
        "a token is masked to its last part",
        f"{REDACTION}::test_form_of_personal_data_is_masked_whole",
        ("oncekey.telemetry.redaction", "e[wy][\\w-]+(?:", "e[wy][\\w-]+(?!)(?:"),
    ),
    _(
        28,
        "I6",
        "values in the stored text of an exception are masked",
        f"{PLANTED}::test_nothing_that_oncekey_says_has_a_secret",
        ("oncekey.telemetry.redaction", "    if raised is None:\n", "    if True:\n"),
    ),
    _(
        28,
        "I6",
        "stored headers are masked on the command line",
        f"{PLANTED}::test_nothing_that_oncekey_says_has_a_secret",
        ("oncekey.cli.output", 'return text if reveal or name == "content-type" else None', "return text"),
    ),
    _(
        28,
        "I6",
        "a key that is tried again is masked on the command line",
        f"{PLANTED}::test_nothing_that_oncekey_says_has_a_secret",
        (
            "oncekey.cli.dead_letters",
            '_done(f"key {key_shown(record.key, False)}"',
            '_done(f"key {key_shown(record.key, True)}"',
        ),
    ),
    _(
        28,
        "I6",
        "errors that apps wrote are masked in Django's admin",
        "tests/web/test_django_project.py::test_project_from_migrate_to_the_admin",
        ("oncekey.web.django.admin", 'mask(shown(record.last_error or ""))', 'record.last_error or ""'),
    ),
    _(
        28,
        "I6",
        "addresses of a client's requests are shown without their query",
        "tests/security/test_planted_elsewhere.py::test_client_lists_requests_without_their_secrets",
        (
            "oncekey.cli.client",
            "return row.request.url if reveal else named(row.request.url)",
            "return row.request.url",
        ),
    ),
)
