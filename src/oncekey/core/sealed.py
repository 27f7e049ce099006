"""How an encrypted value looks from outside. Pure: a process without the keyring must recognise such a value, too.

``oncekey.encryption`` makes and opens them. A response is one envelope of bytes, and its ``schema_version`` is
``SEALED_RESPONSE``. Every other column is text: ``MARK``, and the envelope in base64url. The text is not JSON, on
purpose: a step's result or a job's payload that was not opened must never pass for a value.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable

from oncekey.errors import StoreError

MARK = "oncekey-sealed:"
VARIABLE = "ONCEKEY_KEYS"
"""The environment variable that a keyring is read from, if no other is named."""
SEALED_RESPONSE = 2
"""``StoredResponse.schema_version`` of an encrypted response. With the envelope as its body, it is as the store has it:
this process has no keyring. Without a body, the keyring of this process did not open it: a tombstone."""

SEALED_TEXT = re.compile(re.escape(MARK) + "[A-Za-z0-9_=-]*")
"""Finds encrypted texts within another one."""

_MARK_BYTES = MARK.encode()


def is_sealed(content: bytes | None) -> bool:
    """Whether a step's result or a job's payload is encrypted, so that it must not be used as it is."""
    return content is not None and content.startswith(_MARK_BYTES)


def readable(content: bytes, what: str) -> bytes:
    """The content, if it is not encrypted. Otherwise this raises StoreError: no work may begin without it."""
    if not content.startswith(_MARK_BYTES):
        return content
    raise StoreError(f"{not_readable(content, what)}, and try again")


def not_readable(content: bytes, what: str) -> str:
    """The sentence about an encrypted value that did not open."""
    sentence = shown(content.decode("ascii", "replace"))
    return (
        f"{what} cannot be read {sentence}: give this process a keyring that has the key, OnceKey(encryption=…) or "
        "Worker(encryption=…)"
    )


def is_sealed_text(text: str | None) -> bool:
    """Whether a column's text is one encrypted value, and nothing else."""
    return text is not None and text.startswith(MARK) and SEALED_TEXT.fullmatch(text) is not None


def unless_sealed(before: str | None, words: str) -> str:
    """What to write over ``before``: the words, or ``before`` if it does not open here. It may have no other copy."""
    return before if before is not None and is_sealed_text(before) else words


def as_text(envelope: bytes) -> str:
    return MARK + base64.urlsafe_b64encode(envelope).decode()


def envelope_in(text: str) -> bytes | None:
    """The envelope of a text that ``as_text`` made; None: the text is something else."""
    if not text.startswith(MARK):
        return None
    try:
        return base64.b64decode(text[len(MARK) :], altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""


def key_id_of(envelope: bytes) -> int | None:
    """The number of the key that an envelope names; None: it is damaged."""
    return envelope[1] if len(envelope) > 1 else None


def key_ids_in(contents: Iterable[bytes]) -> set[int]:
    """The numbers of the keys that those of the contents are under that are encrypted; 0: of a damaged one."""
    texts = [content.decode("ascii", "replace") for content in contents if is_sealed(content)]
    return {key_id_of(envelope_in(text) or b"") or 0 for text in texts}


def not_opened(envelope: bytes, why: str = "which this process does not have") -> str:
    """What is shown in the place of a value that was not opened."""
    number = key_id_of(envelope)
    return f"(encrypted with key {number}, {why})" if number is not None else "(encrypted, and damaged)"


def shown(text: str) -> str:
    """A text for a human: what is still encrypted in it is not printed, and a sentence says so."""
    return SEALED_TEXT.sub(lambda found: not_opened(envelope_in(found[0]) or b""), text) if MARK in text else text
