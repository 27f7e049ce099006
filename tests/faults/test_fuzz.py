"""The fuzzers report what they find: each with a reader that is too lax."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import orjson
from hypothesis import strategies as st

from oncekey.core.header import parse_key
from oncekey.core.record import StoredResponse
from oncekey.errors import StoreError
from tests.core import test_header
from tests.faults import fuzz
from tests.faults.campaign import Run


def believes_anything(status: Any, headers: Any, body: Any, version: Any) -> StoredResponse:
    """As it was read before: whatever can be unpacked is a header."""
    try:
        pairs = tuple((name, value) for name, value in orjson.loads(headers))
    except (TypeError, ValueError) as error:
        raise StoreError("damaged") from error
    return StoredResponse(status, pairs, body, version)


def test_a_reader_that_believes_anything_is_seen(tmp_path: Path) -> None:
    run = Run("-", 2_000, 1, tmp_path)
    with patch.object(fuzz, "stored_response", believes_anything):
        fuzz.responses(run)
    assert run.violations


def test_a_parser_that_folds_case_is_seen(tmp_path: Path) -> None:
    run = Run("-", 2_000, 1, tmp_path)
    with patch.object(test_header, "parse_key", lambda values, **how: parse_key(values, **how).lower()):
        fuzz.long_form_of(test_header)(run)
    assert run.violations


def test_as_many_examples_as_were_asked_for(tmp_path: Path) -> None:
    run = Run("-", 120, 1, tmp_path)
    seen: list[int] = []

    def test(number: int) -> None:
        seen.append(number)

    fuzz.search(run, test, {"number": st.integers()}, "I5", 120)
    assert len(seen) == run.hits >= 120
