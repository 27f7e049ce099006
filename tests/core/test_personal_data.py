"""Which keys look like personal data, and that random keys never do."""

from __future__ import annotations

import json
import random
import string
import time
from base64 import b64encode, urlsafe_b64encode
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncekey.core.personal_data import Personal, personal_data
from oncekey.telemetry.redaction import redact


def part(document: object) -> str:
    return urlsafe_b64encode(json.dumps(document).encode()).decode().rstrip("=")


JWT = f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{part({'sub': '7'})}.c2lnbmF0dXJl"
SPACED = urlsafe_b64encode(b'{ "alg":"none"}').decode().rstrip("=")

SEEN = [
    *[("email", key) for key in ("ann@example.com", "a.b+c@x-y.co.uk", "order-7:ann@example.com", "ann%40example.com")],
    *[("email", key) for key in ("<ann@example.com>", "mailto:ann@example.com#3", "ann@example.com-2026-11-17")],
    *[("token", key) for key in (JWT, f"Bearer {JWT}", f"k:{JWT}", JWT[: JWT.rindex(".") + 1])],
    *[("token", f"{SPACED}.e30."), ("token", JWT.replace("eyJ", "x.eyJ", 1))],
    *[("phone", key) for key in ("+4915112345678", "+49 151 1234 5678", "+1 (555) 123-4567", "+1-555-123-4567")],
    *[
        ("phone", key)
        for key in ("user:+4915112345678", "+4915112345678-2026-11-17", "%2B4915112345678", "+12025550143")
    ],
    *[("phone", key) for key in ("phone=+15551234567", "x/+15551234567", "ord+4915112345678", "%2b49%20151%201234567")],
    *[("phone", key) for key in ("+15551234567/pay", "+15551234567x", "to=+15551234567&n=1", "tel=0151/1234567")],
    *[("phone", key) for key in ("(555) 234-4567", "555-234-4567", "1-555-234-4567", "020 7946 0958", "0151/1234567")],
    *[("phone", key) for key in ("06 12 34 56 78", "0049 151 1234567", "tel:555-234-4567", "(030) 12345678")],
    *[("card", key) for key in ("4111111111111111", "4111 1111 1111 1111", "4111-1111-1111-1111", "378282246310005")],
    *[("card", key) for key in ("3782 822463 10005", "30569309025904", "6011111111111117", "2223003122003222")],
    *[("card", key) for key in ("card=4242424242424242", "cus_1/4242424242424242", "a/4242424242424242/b")],
    *[("card", key) for key in ("c=4242-4242-4242-4242&n=1", "4242%204242%204242%204242")],
    *[("card", key) for key in ("card:4242424242424242", "4242424242424242|7", "4222222222222", "6304000000000000000")],
]
"""6304…: 19 digits."""

NOT_SEEN = [
    *("k-1", "x", "", " ", "@", "a@b", "a@b.", "@example.com", "job@2026.11.17", "user@localhost"),
    *("a.b.c", "e.e.e", "eyJ.eyJ.x", f"{part({'typ': 'JWT'})}.e30.x", f"{part(['alg'])}.e30.x", "eyJhbGciOiJ.x.y"),
    *("ORD-2026-000123", "order-4111111111111111", "112-3456789-1234567", "2026-11-17", "01-02-2026", "01.02.2026"),
    *("2026-11-17T19:30:00+01:00", "20261117T193000+1000", "abc+12345678/def=", "+1", "+0151123456", "192.168.0.1"),
    *("1.2.3+20261117", "v1.2.3+20261117193000", "a=b+12345678/def==", "cus/4111111111111112", "n=15551234567", "%zz"),
    *("15551234567", "4915112345679", "1234567890", "0015551234567", "100000001", "#1001", "5551234"),
    *("4111111111111112", "1111111111111117", "0000000000000000", "7992739871300000", "411111111111", "4" * 20),
    *("1763409000", "1763409000123", "1763409000123456", "1763409000123456789", "4111 11111111 1111"),
]


@pytest.mark.parametrize(("kind", "key"), SEEN)
def test_personal_data_is_recognised(kind: str, key: str) -> None:
    assert personal_data(key) is Personal(kind)


@pytest.mark.parametrize("key", NOT_SEEN)
def test_other_keys_are_not(key: str) -> None:
    assert personal_data(key) is None


def test_base64_is_not_personal() -> None:
    numbers = random.Random(9)
    assert not any(personal_data(b64encode(numbers.randbytes(24)).decode()) for _ in range(20_000))


def test_deep_json_in_a_token_is_no_error() -> None:
    deep = urlsafe_b64encode(b'{"a":' + b"[" * 100_000).decode().rstrip("=")
    assert personal_data(f"{deep}.e30.x") is None


# -- random keys -------------------------------------------------------------------------------------------------------

BASE62 = string.digits + string.ascii_letters
CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def encoded(number: int, alphabet: str, length: int) -> str:
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(alphabet))
        digits.append(alphabet[digit])
    return "".join(reversed(digits))


@given(st.integers(0, 2**128 - 1))
def test_uuid_in_any_spelling_is_never_personal(number: int) -> None:
    uuid = UUID(int=number)
    for key in (str(uuid), uuid.hex, str(uuid).upper(), uuid.urn, f"{{{uuid}}}", f"order:{uuid}", f"{uuid}:{uuid}"):
        assert personal_data(key) is None


@given(st.integers(0, 9), st.integers(0, 9))
def test_uuid_of_digits_only_is_never_personal(first: int, other: int) -> None:
    uuid = UUID(hex=f"{first}{str(other) * 31}")
    assert (personal_data(str(uuid)), personal_data(uuid.hex)) == (None, None)


@given(st.uuids(version=4))
def test_uuid4_is_never_personal(uuid: UUID) -> None:
    assert personal_data(str(uuid)) is None


@given(st.integers(0, 2**128 - 1))
def test_ulid_is_never_personal(number: int) -> None:
    assert personal_data(encoded(number, CROCKFORD, 26)) is None


@given(st.integers(0, 2**160 - 1))
def test_ksuid_is_never_personal(number: int) -> None:
    assert personal_data(encoded(number, BASE62, 27)) is None


@given(st.integers(0, 2**126 - 1))
def test_nanoid_is_never_personal(number: int) -> None:
    assert personal_data(encoded(number, f"{BASE62}_-", 21)) is None


@given(st.integers(2**40, 2**42), st.integers(0, 2**22 - 1))
def test_snowflake_before_its_second_digit_is_never_personal(milliseconds: int, rest: int) -> None:
    """An id of Twitter's or Discord's epoch begins with 1 until the end of the decade."""
    snowflake = (milliseconds << 22) | rest
    if str(snowflake)[0] == "1":
        assert personal_data(str(snowflake)) is None


@given(
    st.one_of(
        st.integers(1, 10**12 - 1).map(str),
        st.integers(1, 10**15).map(lambda number: f"ORD-{number}"),
        st.builds("{}-{:06}".format, st.integers(2000, 2099), st.integers(0, 999_999)),
        st.builds(
            "{:03}-{:07}-{:07}".format, st.integers(1, 999), st.integers(0, 9_999_999), st.integers(0, 9_999_999)
        ),
        st.builds(
            "{:04}{:02}{:02}-{:04}".format, st.just(2026), st.integers(1, 12), st.integers(1, 31), st.integers(0)
        ),
    )
)
def test_order_number_of_a_usual_form_is_never_personal(key: str) -> None:
    assert personal_data(key) is None


def test_rate_of_wrong_alarms_is_that_of_the_docs() -> None:
    """docs/limits.md: of random digits, 7 % are taken for a card number if they are 13 to 19, and none otherwise."""
    numbers = random.Random(22)
    for length in range(1, 41):
        keys = ["".join(numbers.choices(string.digits, k=length)) for _ in range(4000)]
        rate = sum(personal_data(key) is not None for key in keys) / len(keys)
        assert 0.05 < rate < 0.09 if 13 <= length <= 19 else rate == 0, length


def test_time_of_a_long_key_is_bounded() -> None:
    """No pattern tries the ways to read a key one after the other: the number of these grows with its length."""
    texts = ("a.", "e", "ey.", "+1", "+ 1", "1-", "a@", "a@a.", "%40", "0", "01 ", "4111 ", "+1 (.", "1:")
    for text in (*texts, "%2B1", "4/", "+1234567"):
        for end in ("", "!", "."):
            started = time.thread_time()  # of this thread's own work: a busy machine adds nothing
            personal_data((text * 255)[:254] + end)
            assert time.thread_time() - started < 0.1


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "key"), SEEN)
def test_mask_of_personal_data_has_no_letter_of_it(kind: str, key: str) -> None:
    del kind
    assert redact(key)[0] == "~"


def test_mask_of_a_random_key_begins_with_it() -> None:
    key = str(uuid4())
    assert redact(key).startswith(key[:4])
