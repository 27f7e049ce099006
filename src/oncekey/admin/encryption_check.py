"""The line ``encryption`` of ``oncekey doctor``: whether values are encrypted, and open with the keyring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from oncekey.admin.encryption import SET_IT, keyring_of, keys_named, numbers_in, pages
from oncekey.core.diagnosis import Diagnosis, Level
from oncekey.core.fingerprint import KEY_STEP
from oncekey.core.states import State
from oncekey.stores.api import KeptValues, Store
from oncekey.stores.kept_api import Kept, KeptKey

PLAIN = 0
"""Stands for the number of a key where a value is damaged or not encrypted, as in ``oncekey.encryption``."""
ON_OR_OFF = (
    "when every process has it: to switch encryption on, take plain out of the keyring; to switch it off, run `oncekey "
    "keys re-encrypt --decrypt`, and remove the keyring when `oncekey keys re-encrypt --dry-run` says that no key is "
    "needed"
)
ANOTHER_KEY = (
    "run `oncekey keys re-encrypt --dry-run`: it says whether the keyring has another key under this number, or values "
    "were changed"
)


class _Look:
    """What the doctor has read: every row, or the first ones until its time was over."""

    def __init__(self, store: KeptValues, keyring: Any) -> None:
        self.rows = 0
        self.opened: Counter[int] = Counter()
        self.not_opened: Any = None
        """``NotOpened`` of ``encryption/report.py``; None: there is no keyring to try."""
        self.named: set[int] = set()
        """The numbers of the keys that values and fingerprints name, as a command without a keyring finds them."""
        self.prints: set[int] = set()
        """The numbers of the keys that fingerprints need. A row that is expired is started over without a look at
        its fingerprint."""
        self.is_whole = False
        self._store = store
        if keyring is not None:
            from oncekey.encryption.report import NotOpened

            self.not_opened = NotOpened()
        for page in pages(store):
            self._read(page.rows, keyring)
            self.is_whole = not page.next

    def _read(self, rows: Sequence[Kept], keyring: Any) -> None:
        self.rows += len(rows)
        if keyring is None:
            self.named.update(number for row in rows for number in numbers_in(row))
            return
        from oncekey.encryption.renewal import Renewal

        live = [row for row in rows if isinstance(row, KeptKey) and row.state is not State.EXPIRED]
        self.prints.update(row.fingerprint_version // KEY_STEP for row in live)
        for row, each in zip(rows, map(Renewal(keyring), rows), strict=True):
            self.opened.update((*each.current, *each.sealed))
            self.not_opened.add(row, each.lost, self._store)

    def where(self) -> str:
        """The beginning of the line: it never speaks of rows that were not read."""
        if not self.is_whole:
            return f"in the first {self.rows:,} rows (the others were not read): "
        return {0: "no rows yet: ", 1: "in the only row: "}.get(self.rows, f"in all {self.rows:,} rows: ")

    def rest(self) -> str:
        return "" if self.is_whole else "run `oncekey keys re-encrypt --dry-run`: it reads all rows"


_Found = tuple[Level, str, str]


def examine_encryption(store: Store) -> list[Diagnosis]:
    """Whether values are encrypted, and open with the keyring of this command: of the rows that it can read in time.

    There is a line for each thing that is wrong, and the worst come first.
    """
    inner = getattr(store, "inner", store)
    if not isinstance(inner, KeptValues):
        return []
    keyring = keyring_of(store)
    look = _Look(inner, keyring)
    lines = [_without_keyring(look)] if keyring is None else _with_keyring(look, keyring)
    return [Diagnosis("encryption", level, look.where() + found, advice) for level, found, advice in lines]


def _without_keyring(look: _Look) -> _Found:
    if not look.named:
        return Level.OK, "no value is encrypted, and no keyring is given", ""
    return Level.WARN, f"{keys_named(sorted(look.named))} in use, and this command has no keyring to try", SET_IT


def _with_keyring(look: _Look, keyring: Any) -> list[_Found]:
    plain = look.opened.pop(PLAIN, 0)
    under = ", ".join(f"{count:,} under key {number}" for number, count in sorted(look.opened.items(), reverse=True))
    lines = [*_not_opened(look, keyring), *_missing(look, keyring), *_over(look, keyring)]
    if not keyring.encrypts:
        listed = ", ".join([f"{_values(plain)} not encrypted", *([under] if under else [])])
        lines.append((Level.WARN, f"the keyring does not encrypt (plain), and opens: {listed}", ON_OR_OFF))
    elif plain:
        found = (
            f"not encrypted: {_values(plain)}, from before the keyring was given, or written by a process without it"
        )
        lines.append((Level.WARN, found, "give the keyring to every process, then run `oncekey keys re-encrypt`"))
    if lines:
        return lines
    current = f"key {keyring.current} is current"
    found = f"all values are encrypted, and open: {under}; {current}" if under else f"no value yet; {current}"
    return [(Level.OK, found, look.rest())]


def _not_opened(look: _Look, keyring: Any) -> Iterator[_Found]:
    """Values that name a key of the ring, and do not open with it."""
    for number, count in sorted(look.not_opened.needed.items()):
        if number == PLAIN:
            yield Level.FAIL, f"damaged: {_values(count)}", "find out what writes to the tables"
        elif number in keyring.ids:
            none = "" if look.opened[number] else ", and opens none"
            found = f"key {number} of this keyring does not open {_values(count)} that name it{none}"
            yield Level.FAIL, found, ANOTHER_KEY


def _missing(look: _Look, keyring: Any) -> Iterator[_Found]:
    """Keys that rows or jobs need, and that the ring does not have."""
    used = (look.prints | {*look.not_opened.needed}) - keyring.ids - {PLAIN}
    if missing := sorted(used - keyring.lost):
        found = (
            f"{keys_named(missing)} in use, and not in the keyring: retries of such rows get 503, or an answer without"
        )
        advice = f"add {keys_named(missing, verb=False)} to the keyring of every process"
        yield Level.FAIL, f"{found} its body, and such jobs do not run", advice
    if lost := sorted(used & keyring.lost):
        found = (
            f"{keys_named(lost)} declared lost, and in use: retries of such finished requests get 410 until they expire"
        )
        yield Level.WARN, found, "run `oncekey keys re-encrypt --dry-run`: it says until when"


def _over(look: _Look, keyring: Any) -> Iterator[_Found]:
    """What does not open, and neither a retry nor a worker needs. Keys that have a worse line are left out."""
    found = look.not_opened
    numbers = {*found.reasons, *found.ended} - {*found.needed} - (look.prints - keyring.ids)
    if not numbers:
        return
    reasons, ended = (sum(each[number] for number in numbers) for each in (found.reasons, found.ended))
    kinds = [f"{_count(reasons, 'reason')} in the audit"] if reasons else []
    kinds += [f"{_values(ended)} of jobs and rows that have ended"] if ended else []
    named = sorted(numbers - {PLAIN})
    of = f" ({keys_named(named, verb=False)})" if named else ""
    advice = "add the key that wrote it, if you have it. Otherwise there is nothing to do: upkeep deletes it in time"
    if look.is_whole and (unneeded := sorted(keyring.lost & numbers)):
        advice = f"take the entry of {keys_named(unneeded, verb=False)} out of the keyring: no request needs it"
    yield Level.WARN, f"this cannot be read, and no request needs it: {' and '.join(kinds)}{of}", advice


def _values(count: int) -> str:
    return _count(count, "value")


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number:,} {what}s"
