"""The downstream key. It is in ``core``, because handlers, workers and resolvers must all compute the same one."""

from __future__ import annotations

import hashlib

from oncekey.core.record import Record


def downstream_key(record: Record, name: str) -> str:
    """The key for the call ``name``: the same at every attempt of this request, different for every name."""
    digest = hashlib.sha256(b"oncekey-downstream-1")
    for part in (record.scope.encode(), record.key.encode(), record.fingerprint, name.encode()):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return f"oncekey-{digest.hexdigest()[:40]}"
