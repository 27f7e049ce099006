"""Where a key lives: in one of sixteen buckets, chosen by a hash of (scope, key).

All that belongs to a key (its row, steps, audit and sorted sets) has the bucket's hash tag in its Redis name. So a
script can stay in one slot, and one layout serves a single server and a cluster. The tags are chosen so that their
slots lie evenly in Redis Cluster's 16,384: with up to sixteen masters, each one has its share.
"""

from __future__ import annotations

from zlib import crc32

from oncekey.errors import StoreError

TAGS = (
    *("0146", "1239", "2162", "3169", "4125", "5139", "64", "7269"),
    *("8166", "9219", "a21", "b208", "c17", "d258", "e61", "f108"),
)
SLOTS = (440, 1572, 2614, 3561, 4492, 5509, 6628, 7752, 8729, 9605, 10718, 11697, 12843, 13789, 14810, 15888)
"""The slot of each tag: CRC16 of the tag, modulo 16,384."""
BUCKETS = range(len(TAGS))


def name_of(scope: str, key: str) -> bytes:
    """Scope and key as one name. Names sort as (scope, key) do, and a scope without NUL cannot be confused."""
    if "\0" in scope:
        raise StoreError("a scope with a NUL character cannot be stored")
    try:
        return scope.encode() + b"\0" + key.encode()
    except UnicodeEncodeError as error:
        raise StoreError("a scope or key that is not valid text cannot be stored") from error


def at_of(name: bytes) -> tuple[str, str]:
    """The (scope, key) of a name."""
    scope, _, key = name.partition(b"\0")
    return scope.decode(), key.decode()


def bucket_of(name: bytes) -> int:
    return crc32(name) & 15


class Names:
    """The Redis names of one store. ``prefix`` keeps two stores in one database apart."""

    def __init__(self, prefix: str) -> None:
        self.bases = [f"{prefix}:{{{tag}}}:".encode() for tag in TAGS]
        self.epochs = [base + b"epoch" for base in self.bases]
        self.rows = [base + b"k:" for base in self.bases]
        """What the names of rows begin with, by bucket."""

    def kept(self, bucket: int) -> tuple[bytes, bytes]:
        """What is there as long as a bucket has any key, or any line of the audit."""
        return self.bases[bucket] + b"names", self.bases[bucket] + b"audit"
