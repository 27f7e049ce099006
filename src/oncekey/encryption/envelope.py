"""One encrypted value: AES-256-GCM, bound to its row and its column.

========  ==========  ==================================================================================================
bytes     what        why
========  ==========  ==================================================================================================
0         version     another layout does not open, and is never taken for this one
1         key id      which key of the ring opens it
2 to 9    salt        which key was derived from that one
10 to 21  nonce       96 random bits
22 on     ciphertext  with its tag of 16 bytes at the end
========  ==========  ==================================================================================================

Random nonces are safe for 2**32 values under one key, and a busy API writes more than that in a week. So no key of the
ring encrypts anything itself. A process derives keys from it, each for ``VALUES_PER_SALT`` values, by a random salt.
(One for each row would do as well, and take five times as long.)

The head, the row and the column are associated data: a value that was copied to another row or column does not open.
"""

from __future__ import annotations

from os import urandom

from oncekey.errors import ConfigurationError

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.hmac import HMAC
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ModuleNotFoundError as error:
    raise ConfigurationError(
        "encryption needs a package that is not installed: pip install 'oncekey[encryption]'"
    ) from error

Row = tuple[str, ...]
"""The name of a row: (scope, key) of a key, or (id,) of a job."""
VERSION = 1
KEY_BYTES = 32
VALUES_PER_SALT = 2**24
MAX_CIPHERS = 1_000
"""How many derived keys are remembered, to open values: one for each process that wrote them, as a rule."""

_HEAD, _SALTED, _NONCED = 2, 10, 22
_LEAST_BYTES = _NONCED + 16


def derived(master: bytes, purpose: bytes) -> bytes:
    """A key for one purpose. Keys for different purposes say nothing about each other."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=b"oncekey", info=purpose).derive(master)


class Hasher:
    """HMAC-SHA-256 under one key. A copy of a prepared hash takes a tenth of the time of ``hmac.digest``."""

    __slots__ = ("_prepared",)

    def __init__(self, key: bytes) -> None:
        self._prepared = HMAC(key, SHA256())

    def hash(self, content: bytes) -> bytes:
        hashing = self._prepared.copy()
        hashing.update(content)
        return hashing.finalize()


class Sealer:
    """Seals and opens values with one key of the ring. Safe in several threads, and after a fork: nonces are random."""

    __slots__ = ("_ciphers", "_derive", "_head", "_left", "_own")

    def __init__(self, key_id: int, master: bytes) -> None:
        self._derive = Hasher(derived(master, b"encryption")).hash
        self._head = bytes((VERSION, key_id))
        self._ciphers: dict[bytes, AESGCM] = {}
        self._own: tuple[bytes, AESGCM] = (b"", AESGCM(bytes(KEY_BYTES)))
        """The head and salt of new values, and the cipher for them. Made with the first value."""
        self._left = 0

    def seal(self, content: bytes, row: Row, column: str) -> bytes:
        if self._left <= 0:
            salt = urandom(_SALTED - _HEAD)
            self._own, self._left = (self._head + salt, self._cipher(salt)), VALUES_PER_SALT
        self._left -= 1
        head, cipher = self._own
        nonce = urandom(_NONCED - _SALTED)
        return b"".join((head, nonce, cipher.encrypt(nonce, content, _bound_to(head, row, column))))

    def opened(self, envelope: bytes, row: Row, column: str) -> bytes | None:
        """The content. None: it was sealed with another key, for another row or column, or it was changed."""
        if len(envelope) < _LEAST_BYTES or envelope[:_HEAD] != self._head:
            return None
        cipher = self._cipher(envelope[_HEAD:_SALTED])
        bound_to = _bound_to(envelope[:_SALTED], row, column)
        try:
            return cipher.decrypt(envelope[_SALTED:_NONCED], envelope[_NONCED:], bound_to)
        except InvalidTag:
            return None

    def _cipher(self, salt: bytes) -> AESGCM:
        cipher = self._ciphers.get(salt)
        if cipher is None:
            if len(self._ciphers) >= MAX_CIPHERS:
                self._ciphers.clear()
            cipher = self._ciphers[salt] = AESGCM(self._derive(salt))
        return cipher


def _bound_to(head: bytes, row: Row, column: str) -> bytes:
    """The associated data: the same bytes for the same texts only, by their number and the length of each."""
    parts = (*row, column)
    named = "".join([f"{len(part)}:{part}" for part in parts])
    return b"%b%d;%b" % (head, len(parts), named.encode("utf-8", "surrogatepass"))
