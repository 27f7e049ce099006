"""The guards of webhooks, windows, bound keys and limits. See ``mutant_table.py``."""

from __future__ import annotations

from tests.faults.mutant import Mutant
from tests.faults.mutant import mutant as _

WEBHOOKS, WINDOW, BOUND, LIMITS = (
    f"tests/web/test_{name}.py" for name in ("webhooks", "window", "bound_keys", "limits")
)

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
            "oncekey.web.status",
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
            "oncekey.engine.engine",
            "                        first = Found(seen)\n                    elif",
            "                        first, admission = Found(seen), None\n                    elif",
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
        "guesses are not answered after the limit",
        f"{LIMITS}::test_guessing_keys_at_the_status_endpoint_is_limited",
        (
            "oncekey.web.status",
            "            if wait is not None:\n                self.refused",
            "            if wait is not None and not self.key:\n                self.refused",
        ),
    ),
)
