"""A plugin of pytest that gives every OnceKey a keyring, to run the tests of other folders with encryption on.

    python -m pytest -p tests.encryption.everywhere tests/web tests/engine -k "not postgres"

``make encrypted`` runs this. A test that gives a keyring itself, also None, gets its own. The commands of the operator
find the same keyring in ``ONCEKEY_KEYS``. Tests that cannot pass with one are skipped, each for its reason.
"""

from __future__ import annotations

import base64
import functools
import os
from typing import Any

import pytest

from oncekey import OnceKey
from tests.encryption.rings import ONE, TWO, ring

READS_ROWS = "it reads or writes rows past the keyring"
BY_URL = "its worker has the URL of the store, and no keyring"
OWN_STORE = "it looks at the store object that it gave to OnceKey"
TWICE = "it gives the store of one OnceKey to another, and would give a keyring twice"
PLAIN_PRINT = "it compares with the fingerprint of an app without a keyring"
ABOUT_IT = "it is about encryption, and about processes without it"

NOT_HERE: dict[str, str] = {
    "tests/engine/test_kept_request.py::test_request_is_kept_before_the_first_step_of_a_later_attempt": READS_ROWS,
    "tests/engine/test_kept_request.py::test_request_is_kept_with_its_first_step": READS_ROWS,
    "tests/engine/test_kept_request.py::test_resolver_and_operator_see_the_request_apart_from_the_steps": READS_ROWS,
    "tests/engine/test_once.py::test_a_request_becomes_a_reservation": PLAIN_PRINT,
    "tests/engine/test_once.py::test_a_store_may_be_given_instead_of_a_url": OWN_STORE,
    "tests/engine/test_once.py::test_a_url_opens_its_store_and_no_connection": OWN_STORE,
    "tests/engine/test_staging.py::test_202_until_the_job_has_settled_it": BY_URL,
    "tests/engine/test_staging.py::test_a_job_is_committed_with_the_row": READS_ROWS,
    "tests/engine/test_staging.py::test_its_downstream_key_is_the_same_in_every_attempt": PLAIN_PRINT,
    "tests/engine/test_staging.py::test_job_staged_in_a_phase_is_committed_once": READS_ROWS,
    "tests/engine/test_steps_docs.py::test_app_of_the_page_runs_as_described": READS_ROWS,
    "tests/engine/test_steps_docs.py::test_upkeep_goes_on_as_the_page_says": READS_ROWS,
    "tests/web/test_asgi_responses.py::test_a_header_with_a_line_break_is_never_stored": READS_ROWS,
    "tests/web/test_asgi_responses.py::test_a_row_from_somewhere_else_cannot_split_a_replay": READS_ROWS,
    "tests/web/test_asgi_responses.py::test_gzip_in_front_of_us": READS_ROWS,
    "tests/web/test_asgi_tombstones.py::test_more_than_a_mebibyte_leaves_a_tombstone": READS_ROWS,
    "tests/web/test_breaker_queue_keeper.py": OWN_STORE,
    "tests/web/test_checklist_time.py::test_a_lapsed_lease_of_harmless_work_is_taken_over": READS_ROWS,
    "tests/web/test_fastapi.py::test_the_operation_is_a_dependency": TWICE,
    "tests/web/test_keyed_fingerprints.py": ABOUT_IT,
    "tests/web/test_litestar.py::test_no_operation_on_an_exempt_route": TWICE,
    "tests/web/test_status_deferred.py::test_code_of_the_page_runs_as_described": BY_URL,
    "tests/web/test_status_deferred.py::test_status_of_a_deferred_request_is_202_until_the_worker_is_done": BY_URL,
    "tests/web/test_status_deferred.py::test_the_first_202_says_when_to_ask_again": BY_URL,
}
"""A file or a test, and why it cannot pass with a keyring."""


def pytest_configure() -> None:
    keys = ((2, TWO), (1, ONE))
    os.environ["ONCEKEY_KEYS"] = ",".join(f"{number}:{base64.b64encode(key).decode()}" for number, key in keys)
    made = OnceKey.__init__

    @functools.wraps(made)
    def with_keyring(self: OnceKey, *args: Any, **options: Any) -> None:
        options.setdefault("encryption", ring(2, 1))
        made(self, *args, **options)

    OnceKey.__init__ = with_keyring  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        test = item.nodeid.partition("[")[0]
        why = NOT_HERE.get(test) or NOT_HERE.get(test.partition("::")[0])
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=f"not with a keyring: {why}"))
