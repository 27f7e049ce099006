"""Keyed fingerprints: the fingerprint of a request as an app with a keyring stores it.

A plain fingerprint is the SHA-256 of the request. A reader of the database could hash guessed requests and look for
equal values: amounts and names of customers are easy to guess. A keyed fingerprint has 36 bytes:

    4 bytes   the beginning of HMAC-SHA-256("check"): they identify the key
    32 bytes  HMAC-SHA-256(length of the scope, length of the key, scope, key, plain fingerprint)

both under the key's sub-key for fingerprints. A length is 4 bytes, big-endian, and counts bytes of UTF-8. The name of
the row is hashed too, so equal requests of two rows share nothing. Fingerprints are only compared within one row, so no
comparison needs them to be equal.

``fingerprint_version`` in the row is the id of the key * 256 + the version of the plain fingerprint. So a row says how
to compare it:

    no key             the plain fingerprint, as before the keyring was given
    a key of the ring  the HMAC under that key, which need not be the current one
    another key        cannot be compared: 503, and the handler does not run (``core/decision.py``)
    a lost key         cannot ever be compared: if the row is final 410, and the handler does not run

The first four bytes are for an operator who replaces a key and keeps its id. Without them every retry would look like
another request. Its client would get 422, take a new key, and the handler would run twice.

A process without the keyring answers 503 for keyed rows for the same reason. A keyring that does not encrypt leaves new
fingerprints plain, and compares rows under its keys: a deploy that switches encryption on or off needs no 503.

This module needs no third-party package: the keyring does the hashing.
"""

from __future__ import annotations

from struct import Struct
from typing import Protocol

from oncekey.core.fingerprint import CHECK_BYTES, KEY_STEP, LOST_KEY
from oncekey.core.record import Reservation


class Macs(Protocol):
    """The part of a keyring that fingerprints need."""

    @property
    def current(self) -> int:
        """0: new fingerprints stay plain."""
        ...

    @property
    def lost(self) -> frozenset[int]: ...
    def mac(self, key_id: int, content: bytes) -> bytes | None: ...


_lengths = Struct(">II").pack


class KeyedFingerprints:
    """Called with a reservation that has a plain fingerprint, it returns the same one with a keyed fingerprint.

    If the keyring does not encrypt, the fingerprint stays plain, and the reservation only gets the way to compare it
    with rows under a key.
    """

    __slots__ = ("_checks", "_current", "_lost", "_mac", "_under_key")

    def __init__(self, keyring: Macs) -> None:
        self._mac = keyring.mac
        self._current = keyring.current
        self._lost = keyring.lost
        self._checks: dict[int, bytes] = {}
        self._under_key = self.under_key  # made once, and not for every request

    def __call__(self, plain: Reservation) -> Reservation:
        scope, key, current = plain.scope, plain.key, self._current
        fingerprint = self.under_key(current, scope, key, plain.fingerprint) if current else plain.fingerprint
        assert fingerprint is not None  # noqa: S101 - the current key is in the keyring
        return Reservation(
            scope,
            key,
            plain.operation,
            fingerprint,
            current * KEY_STEP + plain.fingerprint_version,
            plain.effects,
            plain.owner,
            plain.lease_seconds,
            plain.retention_seconds,
            plain.fingerprint_recipe,
            plain.quarantine_seconds,
            plain.parts,
            plain.bindings,
            self._under_key,
        )

    def under_key(self, key_id: int, scope: str, key: str, digest: bytes) -> bytes | None:
        """The keyed fingerprint of a hash in the row (scope, key); None: the keyring has no such key.

        ``LOST_KEY``: the keyring declares it lost.
        """
        # surrogatepass: one to one, and nothing that a client sends makes it fail.
        scope_, key_ = scope.encode("utf-8", "surrogatepass"), key.encode("utf-8", "surrogatepass")
        hashed = self._mac(key_id, b"".join((_lengths(len(scope_), len(key_)), scope_, key_, digest)))
        if hashed is None:
            return LOST_KEY if key_id in self._lost else None
        check = self._checks.get(key_id)
        if check is None:
            check = self._checks[key_id] = (self._mac(key_id, b"check") or b"")[:CHECK_BYTES]
        return check + hashed
