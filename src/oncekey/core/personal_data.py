"""Keys that look like personal data or a credential: ``Policy(pii=…)``.

A key is kept in plain text, is the name of its row, and is shown to operators. So it must not be an e-mail address, a
phone number, a card number or a token. This module guesses by the form of the key. A random key (UUID, ULID, KSUID,
nanoid) is never taken for personal data; the price is that a number without any sign of its kind passes.

* **e-mail address**, anywhere in the key: ``ann@example.com``, ``order-7:ann%40example.com``.
* **JWT**, anywhere: three parts of base64url with dots between, of which the first is a JSON object with ``alg``.
* **phone number**: with its ``+`` anywhere but after a digit, ``+49 151 1234567``, ``ord+4915112345678`` (a digit
  before the ``+`` is of a version, ``1.2.3+20261117``); otherwise only if it is the whole key, or a whole part of it,
  and is written like one: ``(555) 123-4567``, ``020 7946 0958``. Digits alone are not taken for a phone number: order
  numbers and times look the same.
* **card number**, as the whole key or a whole part of it, also between slashes: 13 to 19 digits, together or in groups
  of a card, whose last digit is right by Luhn's sum. Of numbers without a meaning every tenth has a right sum. Cards
  begin with none of 0, 1 and 7, so times in milliseconds and most snowflake ids, which begin with 1, are not among
  them.

A part is what stands between ``:``, ``|``, ``,``, ``;``, ``=`` and ``&``. A key is read with its percent-encoding
undone. Pure.
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode
from enum import StrEnum
from typing import Final, Literal
from urllib.parse import unquote

Pii = Literal["warn", "refuse"]


class Personal(StrEnum):
    """What a key looks like."""

    EMAIL = "email"
    TOKEN = "token"  # noqa: S105 - a name
    CARD = "card"
    PHONE = "phone"

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS: Final = {
    Personal.EMAIL: "an e-mail address",
    Personal.TOKEN: "a token (JWT)",
    Personal.CARD: "a card number",
    Personal.PHONE: "a phone number",
}

# A key of letters, digits, - and _ with one letter at least: none of the forms below, and nearly every key.
_PLAIN = re.compile(r"[0-9_-]*[A-Za-z][0-9A-Za-z_-]*").fullmatch
# One character before the @ is enough: a pattern for all of them would read a long key many times.
_EMAIL = re.compile(r"[A-Za-z0-9._%+'-]@(?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,}").search
_TOKENS = re.compile(r"(?<![A-Za-z0-9_-])(e[wy][A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+\.").finditer
_DIGITS = re.compile(r"\d{13,19}|\d{4}(?:[ .-]\d{3,6}){2,4}", re.ASCII).fullmatch
_PLUS = r"\+[1-9](?:[ ()./-]{0,2}[0-9]){6,14}"
# After a letter or a slash it may be within base64, where + and digits are letters as all others are.
_INTERNATIONAL = re.compile(rf"(?<![0-9A-Za-z+/]){_PLUS}(?![0-9])|(?<![0-9]){_PLUS}(?![0-9A-Za-z+/=])").search
_NATIONAL = re.compile(
    r"""(?:1[ .-])?(?:\([2-9]\d{2}\)[ ]?|[2-9]\d{2}[ .-])[2-9]\d{2}[ .-]\d{4}   # (555) 123-4567
      | 0[1-9](?:[ .-]\d{2}){4}                                                 # 06 12 34 56 78
      | \(?00?[1-9]\d{1,4}\)?(?:[ ./-]\d{2,8}){1,4}                             # 020 7946 0958, 0151/1234567
    """,
    re.ASCII | re.VERBOSE,
).fullmatch
_PARTS = re.compile(r"[:|,;=&]").split
_NO_CARD: Final = frozenset("017")


def personal_data(key: str) -> Personal | None:
    """What this key looks like; None: it is no personal data that could be recognised."""
    if _PLAIN(key):
        return None
    if "%" in key:
        key = unquote(key)
    if "@" in key and _EMAIL(key):
        return Personal.EMAIL
    if key.count(".") >= 2 and any(_is_header_of_token(found[1]) for found in _TOKENS(key)):
        return Personal.TOKEN
    if _INTERNATIONAL(key):
        return Personal.PHONE
    for part in dict.fromkeys((key, *_PARTS(key))):
        if any(map(_is_card, part.split("/"))):
            return Personal.CARD
        if _NATIONAL(part) and 8 <= sum(map(str.isdigit, part)) <= 15:
            return Personal.PHONE
    return None


def _is_header_of_token(text: str) -> bool:
    try:
        header = json.loads(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, RecursionError):
        return False
    return isinstance(header, dict) and "alg" in header


def _is_card(text: str) -> bool:
    if text[:1] in _NO_CARD or not _DIGITS(text):
        return False
    digits = [int(each) for each in text if each.isdigit()]
    doubled = [sum(divmod(2 * each, 10)) for each in digits[-2::-2]]
    return 13 <= len(digits) <= 19 and (sum(digits[-1::-2]) + sum(doubled)) % 10 == 0
