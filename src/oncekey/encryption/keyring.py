"""The keyring: the app's secret keys, by number. It encrypts with the current one, and opens with all of them.

Give every process of the app the same ring. To replace a key, add the new one in front and keep the old one as long as
rows need it (docs/encryption.md).

A ring with ``encrypt=False`` (in a text: ``plain`` before the keys) opens values and does not encrypt new ones. The
deploys that switch encryption on or off pass through it. While old and new processes run side by side, each of them
then opens what the others write.

A key that is lost for good can be declared (``lost=[1]``, in a text ``1:lost``). No retry of a finished request under
it can ever be answered from the store, so its client gets a final refusal in place of 503.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from oncekey.core.sealed import VARIABLE, key_id_of
from oncekey.encryption.envelope import KEY_BYTES, Hasher, Row, Sealer, derived
from oncekey.errors import ConfigurationError

_log = logging.getLogger("oncekey")

PLAIN = 0
"""Stands for the number of a key where a value is not encrypted. Keys begin with 1."""
PLAIN_WORD = "plain"
"""The first entry of a text whose ring does not encrypt."""
LOST_WORD = "lost"
"""In the place of a key that is lost for good."""
MAX_ID = 120
"""The version of a row's fingerprint has the number in its high byte, in a column of 16 bits."""
NEW_KEY = "oncekey keys new-key"
_DIGITS = 6
"""A longer number is not repeated in a message: it may be a part of a key."""
_QUOTES = ('"', "'", "`", "\u201c", "\u201d", "\u2018", "\u2019")
_ASSIGNMENT = re.compile(r"(export\s+)?([A-Z_][A-Z0-9_]*_)?KEYS?\s*", re.IGNORECASE)

_LOST = (
    "a stored value was encrypted with key %d, which is not in the keyring of this process. A retry of a request "
    "that was first made under this key gets 503. If only the answer is under it, because it was re-encrypted, a retry "
    "gets the first status without the body. Neither a job nor a request that needs such a value runs. Add key %d to "
    "the keyring of every process; if the key is lost for good, docs/encryption.md says how to declare it. This is "
    "said once per key"
)
_FOREIGN = (
    "a stored value names key %d and does not open with it: it was changed, it was moved from another row or column, "
    "or another keyring has a different key %d. Compare the keyrings of all processes; if they are the same, find out "
    "what writes to the tables. This is said once per key"
)


class Keyring:
    """Keys of 32 random bytes, by number (1 to 120). The first one is current, unless ``current`` names another.

    ``encrypt=False``: the ring opens what is under its keys, and new values are written as without a ring.
    ``lost``: the numbers of keys that no process has any more, and none ever will.
    """

    __slots__ = ("_hashers", "_sealer", "_sealers", "_told", "current", "encrypts", "ids", "lost")

    def __init__(
        self,
        keys: Mapping[int, bytes],
        *,
        current: int | None = None,
        encrypt: bool = True,
        lost: Iterable[int] = (),
    ) -> None:
        self.lost = frozenset(lost)
        """The numbers of the keys that are declared lost. None of them is in ``ids``."""
        if not keys and (encrypt or not self.lost):
            raise ConfigurationError(f"Keyring(…): it needs a key: make one with `{NEW_KEY}`")
        given: Mapping[Any, Any] = keys  # annotations do not hold at run time
        for number in (*given, *self.lost):
            if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_ID:
                raise ConfigurationError(f"Keyring(…): the numbers of keys are 1 to {MAX_ID}")
        if found := sorted(self.lost.intersection(given)):
            raise ConfigurationError(f"Keyring(lost={found}): the ring has a key of this number, so it is not lost")
        for number, master in given.items():
            if not isinstance(master, bytes) or len(master) != KEY_BYTES:
                raise ConfigurationError(
                    f"Keyring(…): key {number} must be {KEY_BYTES} random bytes: make one with `{NEW_KEY}`"
                )
        self.ids = frozenset(keys)
        """The numbers of all keys."""
        if len(set(keys.values())) < len(keys):
            raise ConfigurationError("Keyring(…): two numbers have the same key: give each its own")
        if current is not None and current not in keys:
            raise ConfigurationError(f"Keyring(current={current}): the ring has no key of this number")
        if current is not None and not encrypt:
            raise ConfigurationError(
                f"Keyring(current={current}, encrypt=False): a ring that does not encrypt has none"
            )
        self.encrypts = encrypt
        """Whether new values and fingerprints are made with a key."""
        self.current = PLAIN if not encrypt else next(iter(keys)) if current is None else current
        """The number of the key that encrypts; ``PLAIN``: none does."""
        self._sealers = {number: Sealer(number, master) for number, master in keys.items()}
        self._hashers = {number: Hasher(derived(master, b"fingerprints")) for number, master in keys.items()}
        self._sealer = self._sealers.get(self.current)
        self._told: set[tuple[str, int]] = set()

    @classmethod
    def from_env(cls, name: str = VARIABLE) -> Keyring:
        """The ring in an environment variable: ``2:<base64>,1:<base64>``, the current key first.

        ``plain,1:<base64>``: it does not encrypt, and key 1 opens values.
        """
        text = os.environ.get(name, "").strip()
        if not text:
            raise ConfigurationError(f"{name} is not set: it takes NUMBER:KEY, and `{NEW_KEY}` prints one")
        return cls.from_text(text, name)

    @classmethod
    def from_text(cls, text: str, name: str = VARIABLE) -> Keyring:
        """The ring in a text of that form, such as a file of secrets has. ``name`` is for messages."""
        given: Any = text  # annotations do not hold at run time
        if not isinstance(given, str):
            raise ConfigurationError(
                f"Keyring.from_text(…): it takes a text, NUMBER:KEY, and got {type(given).__name__}; "
                f"`{NEW_KEY}` prints one"
            )
        keys: dict[int, bytes] = {}
        lost: list[int] = []
        encrypt = True
        for place, entry in enumerate(_entries(text, name), 1):
            where = f"{name}: entry {place}"
            if entry.lower() == PLAIN_WORD:
                if place > 1:
                    raise ConfigurationError(
                        f"{where} is {PLAIN_WORD}: it must be the first one, and then no key of the ring encrypts"
                    )
                encrypt = False
                continue
            number, colon, encoded = entry.partition(":")
            if entry.lower().startswith(PLAIN_WORD):
                raise ConfigurationError(f"{where}: {PLAIN_WORD} is an entry of its own: {PLAIN_WORD},NUMBER:KEY")
            if not colon or not number.isascii() or not number.isdigit():
                raise ConfigurationError(
                    f"{where} is not of the form NUMBER:KEY, with a comma between entries, as `{NEW_KEY}` prints it"
                )
            if len(number) > _DIGITS or not 1 <= int(number) <= MAX_ID:
                seen = f"the number {number}" if len(number) <= _DIGITS else f"a number of {len(number)} digits"
                raise ConfigurationError(f"{where} has {seen}: the numbers of keys are 1 to {MAX_ID}")
            if int(number) in {*keys, *lost}:
                raise ConfigurationError(f"{name}: two entries have the number {int(number)}")
            if encoded.strip().lower() == LOST_WORD:
                lost.append(int(number))
                continue
            master = _decoded(encoded, where)
            for other, key in keys.items():
                if key == master:
                    raise ConfigurationError(
                        f"{name}: the numbers {other} and {int(number)} have the same key: `{NEW_KEY}` prints another"
                    )
            keys[int(number)] = master
        if not keys and lost and encrypt:
            raise ConfigurationError(
                f"{name}: all its keys are lost, and it needs one that encrypts: `{NEW_KEY}` prints one. To go on "
                f"without encryption, put {PLAIN_WORD} in front"
            )
        if not keys and not lost:
            raise ConfigurationError(
                f"{name}: after {PLAIN_WORD} it needs the keys that open values, {PLAIN_WORD},NUMBER:KEY; "
                f"`{NEW_KEY}` prints one"
            )
        return cls(keys, encrypt=encrypt, lost=lost)

    def seal(self, content: bytes, row: Row, column: str) -> bytes:
        """The content, encrypted for this row and column with the current key."""
        assert self._sealer is not None  # noqa: S101 - the callers look at ``encrypts`` first
        return self._sealer.seal(content, row, column)

    def open(self, sealed: bytes, row: Row, column: str) -> bytes | None:
        """The content. None: its key is not in the ring, or it does not open here. The log says which, once."""
        number = key_id_of(sealed) or 0
        sealer = self._sealers.get(number)
        if sealer is None:
            if number not in self.lost:
                self._tell(_LOST, number)
            return None
        content = sealer.opened(sealed, row, column)
        if content is None:
            self._tell(_FOREIGN, number)
        return content

    def mac(self, key_id: int, content: bytes) -> bytes | None:
        """HMAC-SHA-256 under the key for fingerprints. None: the ring has no key of this number."""
        hasher = self._hashers.get(key_id)
        return None if hasher is None else hasher.hash(content)

    def _tell(self, message: str, number: int) -> None:
        if (message, number) not in self._told:
            self._told.add((message, number))
            _log.warning(message, number, number)

    def __repr__(self) -> str:
        current = f"current={self.current}" if self.encrypts else "encrypt=False"
        lost = f", lost={sorted(self.lost)}" if self.lost else ""
        return f"Keyring({current}, ids={sorted(self.ids)}{lost})"


def new_key(number: int) -> str:
    """A new entry for the variable, as :meth:`Keyring.from_env` reads it."""
    return f"{number}:{base64.b64encode(os.urandom(KEY_BYTES)).decode()}"


def _entries(text: str, name: str) -> list[str]:
    """The entries of a text. What shells and files of settings often add is named, and a comma at the end is fine."""
    whole = text.strip()
    if whole[:1] in _QUOTES or whole[-1:] in _QUOTES:
        raise ConfigurationError(
            f"{name}: there is a quotation mark around the value: leave the quotation marks out (a shell removes them, "
            "Docker's --env-file and some other readers of settings do not)"
        )
    head, assigned, _ = whole.partition("=")
    if assigned and _ASSIGNMENT.fullmatch(head):
        raise ConfigurationError(f"{name}: the value begins with the name of a variable and =: give what follows it")
    entries = [entry.strip() for entry in whole.split(",")]
    return entries[:-1] if len(entries) > 1 and not entries[-1] else entries


def _decoded(encoded: str, where: str) -> bytes:
    """Base64 with either alphabet. The errors never quote it."""
    text = encoded.strip().replace("-", "+").replace("_", "/").rstrip("=")
    try:
        master = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigurationError(f"{where}: its key is not base64; `{NEW_KEY}` prints one") from None
    if len(master) != KEY_BYTES:
        raise ConfigurationError(
            f"{where}: its key has {len(master)} bytes, and needs {KEY_BYTES}; `{NEW_KEY}` prints one"
        )
    return master
