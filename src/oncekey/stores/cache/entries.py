"""A final row as an entry of the cache, sealed so that only the same (scope, key) can open it.

The cache is not trusted. An entry carries a MAC over the whole row, its scope and key, and the time at which it was
written. An entry that was forged, changed, moved to another key, or kept for too long does not open: it is a miss, and
the store is asked.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from hashlib import blake2b
from typing import Any

import orjson

from oncekey.core.record import Record, StoredResponse
from oncekey.core.states import FINAL, Effects, State
from oncekey.errors import ConfigurationError

VERSION = 1
"""The layout of an entry. An entry of another version does not open."""
MIN_SECRET_BYTES = 16
SKEW_SECONDS = 5.0
"""How far the clocks of two hosts may be apart. An entry from further in the future does not open."""

_MAC_BYTES = 16
_HEAD = struct.Struct(">BdI")  # version, written at, bytes of the JSON part


def name_of(identity: str, scope: str, key: str) -> bytes:
    """The name of a key's entry. It is a hash, so that the cache does not show scopes and keys.

    ``identity`` is that of the store: two databases that share a cache have no entry in common.
    """
    hashed = blake2b(digest_size=20)
    for part in (identity, scope, key):
        encoded = part.encode("utf-8", "surrogatepass")
        hashed.update(b"%d:" % len(encoded))
        hashed.update(encoded)
    return b"oncekey-cache:" + hashed.hexdigest().encode()


def secret_of(given: str | bytes) -> bytes:
    """The key of the MAC, of any length that is long enough."""
    secret = given.encode() if isinstance(given, str) else given
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigurationError(
            f"OnceKey(cache_secret=…): it has {len(secret)} bytes, and needs {MIN_SECRET_BYTES} or more. Make one with "
            "python -c 'import secrets; print(secrets.token_hex(32))', and give the same to all processes of the app"
        )
    return hashlib.sha256(b"oncekey cache\0" + secret).digest()


def cacheable(record: Record) -> bool:
    """Whether a row can be an entry: it is final, so no request can change it before it expires."""
    return record.state in FINAL and record.response is not None and not record.past_expiry


class NotSealed(Exception):
    """The MAC of an entry is wrong: it was made with another secret, changed, or moved to another name."""


class Entries:
    """Seals and opens entries. ``ttl``: for how many seconds an entry counts after it was written."""

    def __init__(self, secret: bytes, ttl: float) -> None:
        self._secret = secret
        self.ttl = ttl

    def seal(self, name: bytes, record: Record, written_at: float) -> bytes | None:
        """The entry of a row, under its name.

        None: the row has no response, or text that is not Unicode, such as a path in latin-1.
        """
        response = record.response
        if response is None:
            return None
        try:
            row = orjson.dumps(_row(record, response))
        except TypeError:
            return None
        body = response.body or b""
        sealed = b"".join((_HEAD.pack(VERSION, written_at, len(row)), row, body))
        return self._mac(name, sealed) + sealed

    def open(self, name: bytes, scope: str, key: str, entry: bytes, now: float) -> Record | None:
        """The row of an entry. None: it was not written in the last ``ttl`` seconds. Raises NotSealed."""
        if len(entry) < _MAC_BYTES + _HEAD.size:
            raise NotSealed
        sealed = entry[_MAC_BYTES:]
        if not hmac.compare_digest(entry[:_MAC_BYTES], self._mac(name, sealed)):
            raise NotSealed
        version, written_at, length = _HEAD.unpack_from(sealed)
        if version != VERSION or not -SKEW_SECONDS <= now - written_at <= self.ttl:
            return None
        start = _HEAD.size + length
        row, body, age = orjson.loads(sealed[_HEAD.size : start]), sealed[start:], max(0.0, now - written_at)
        record = _record(scope, key, row, body, age)
        return None if record.past_expiry else record

    def _mac(self, name: bytes, sealed: bytes) -> bytes:
        mac = blake2b(name, key=self._secret, digest_size=_MAC_BYTES)
        mac.update(sealed)
        return mac.digest()


def _row(record: Record, response: StoredResponse) -> list[Any]:
    return [
        record.operation,
        record.fingerprint.hex(),
        record.fingerprint_version,
        record.effects,
        record.state,
        record.attempt,
        record.owner,
        record.lease_until,
        record.recovery_point,
        record.last_error,
        record.reconcile_at,
        record.reconcile_tries,
        record.created_at,
        record.finished_at,
        record.retention_seconds,
        record.expires_at,
        record.now,
        record.fingerprint_recipe,
        record.quarantine_seconds,
        response.status,
        response.headers,
        response.body is None,
        response.schema_version,
    ]


def _record(scope: str, key: str, row: list[Any], body: bytes, age: float) -> Record:
    headers = tuple((name, text) for name, text in row[20])
    response = StoredResponse(row[19], headers, None if row[21] else body, row[22])
    return Record(
        scope,
        key,
        row[0],
        bytes.fromhex(row[1]),
        row[2],
        Effects(row[3]),
        State(row[4]),
        row[5],
        row[6],
        row[7],
        row[8],
        response,
        row[9],
        row[10],
        row[11],
        row[12],
        row[13],
        row[14],
        row[15],
        row[16] + age,
        row[17],
        row[18],
    )
