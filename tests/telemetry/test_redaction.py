"""A described exception shows no form of personal data that ``pii`` recognises, and still says what went wrong."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from oncekey.core import personal_data
from oncekey.telemetry.redaction import describe, mask
from tests.core.test_personal_data import JWT, SEEN
from tests.web.test_limits_docs import forms_of_the_page

ALSO = [
    *(
        "ann%2540example.com",
        "o'brien@example.com",
        "ann'@example.com",
        f"{'a' * 150}@example.com",
        "+(49) 151 1234567",
        "(+49) 151 1234567",
    ),
    *(f"{JWT.rsplit('.', 1)[0]}..c2VhbGVk.dGFn", "06.12.34.56.78", "030.12.34.56", "49.151.123.456"),
]
"""Written in other ways, or longer. The token with five parts is encrypted (JWE)."""


@pytest.mark.parametrize("form", [form for _, form in [*forms_of_the_page(), *(("", each) for each in ALSO)]])
def test_form_of_personal_data_is_masked_whole(form: str) -> None:
    assert describe(ValueError(f"no such customer {form} here")) == "ValueError: no such customer … here"
    assert mask(f"no such customer {form} here") == "no such customer … here"
    assert mask(f"ValueError: no such customer {form} here") == "ValueError: no such customer … here"


@pytest.mark.parametrize("key", [key for _, key in SEEN])
def test_no_part_of_a_personal_key_is_shown(key: str) -> None:
    """Around it there may be words: ``order-7:ann@example.com``."""
    for shown in (describe(ValueError(f"no such customer {key}")), mask(f"no such customer {key}")):
        assert re.findall(r"ann|@|example|eyJ|c2ln|\d\d", shown) == []


FORMS: Any = personal_data
NUMBERS = (FORMS._NATIONAL.__self__, FORMS._DIGITS.__self__, re.compile(FORMS._PLUS))


@given(st.one_of([st.from_regex(each, fullmatch=True) for each in NUMBERS]))
def test_every_number_that_is_taken_for_personal_is_masked(number: str) -> None:
    """The numbers are made by the patterns of ``Policy(pii=…)``, so a form that is added there is tested here."""
    assume(personal_data.personal_data(number) is not None)
    for shown in (describe(ValueError(f"no such customer {number} here")), mask(f"no such customer {number} here")):
        assert not any(map(str.isdigit, shown)), shown
        assert shown.endswith("here")


@given(st.from_regex(FORMS._EMAIL.__self__, fullmatch=True))
@example("'@0.AA")
def test_every_address_that_is_taken_for_personal_is_masked(address: str) -> None:
    shown = mask(f"no such customer ann{address}")
    assert "@" not in shown
    assert "ann" not in shown


KEPT = [
    *(
        "Error 111 connecting to 192.168.100.200:6379. Connection refused.",
        "no route to 10.20.30.40.",
        "10.0.0.0/24 only",
    ),
    *("version 10.11.14 is too old", "took 30.5 s, 3 of 10 (12 %)", "100% of 20 rows", "they see. . . nothing"),
    *("HTTP/1.1 503 from the store", "port 5432, line 12, column 7", "50%: half of them"),
]


@pytest.mark.parametrize("message", KEPT)
def test_words_that_help_an_operator_are_shown(message: str) -> None:
    assert describe(OSError(message)) == f"OSError: {message}"


@pytest.mark.parametrize(
    "unit", ["%", "%4", "%40", "a%", "'a", "a'", "a'@", "eya.", "ey", "ew-.", "(1", "+", "1.", "1.1.1.1 "]
)
def test_long_text_is_masked_in_time(unit: str) -> None:
    text = unit * (300_000 // len(unit))
    begun = time.process_time()
    describe(ValueError(text))
    mask(text)
    assert time.process_time() - begun < 2.0
