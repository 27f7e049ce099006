"""The key for a call to somebody else. Here, because whoever asks about the call later has to compute the same one."""

from __future__ import annotations

import hashlib

from oncekey.core.record import Record


def downstream_key(record: Record, name: str) -> str:
    """The same for every attempt at this request, different for every ``name``."""
    digest = hashlib.sha256(b"oncekey-downstream-1")
    for part in (record.scope.encode(), record.key.encode(), record.fingerprint, name.encode()):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return f"oncekey-{digest.hexdigest()[:40]}"
