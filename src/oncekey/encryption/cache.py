"""Entries of the cache in front of a sealed store: the cache's server must not see what the store must not see."""

from __future__ import annotations

from oncekey.core.record import Record
from oncekey.core.sealed import SEALED_RESPONSE, key_id_of
from oncekey.encryption.keyring import Keyring
from oncekey.encryption.values import Values, with_contents
from oncekey.stores.cache.entries import Entries


class SealedEntries(Entries):
    def __init__(self, keyring: Keyring, secret: bytes, ttl: float) -> None:
        super().__init__(secret, ttl)
        self._values = Values(keyring)

    def seal(self, name: bytes, record: Record, written_at: float) -> bytes | None:
        if record.response is None or record.response.schema_version == SEALED_RESPONSE:
            return None  # what this process did not open, another one may
        row = (record.scope, record.key)
        response, error = self._values.sealed_response(record.response, row), record.last_error
        return super().seal(name, with_contents(record, response, self._values.sealed_error(error, row)), written_at)

    def open(self, name: bytes, scope: str, key: str, entry: bytes, now: float) -> Record | None:
        """None also for an entry under a key that this process does not have: the store may have another one by now."""
        record = super().open(name, scope, key, entry, now)
        if record is None or record.response is None:
            return record
        is_sealed = record.response.schema_version == SEALED_RESPONSE
        if is_sealed and key_id_of(record.response.body or b"") not in self._values.keyring.ids:
            return None
        return self._values.opened_record(record)
