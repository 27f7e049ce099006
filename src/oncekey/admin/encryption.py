"""What an operator's command can say about encrypted values, with the keyring of the app and without it.

A command reads the keyring from a variable. If the variable is not set, values do not open, and what the command writes
would be plain text. ``oncekey.encryption`` is imported only where the store has a keyring: it needs a package that a
command without one does not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from oncekey.core.audit import AuditLine
from oncekey.core.diagnosis import Diagnosis, Level
from oncekey.core.fingerprint import KEY_STEP
from oncekey.core.jobs import Job
from oncekey.core.record import Record
from oncekey.core.sealed import MARK, SEALED_RESPONSE, SEALED_TEXT, VARIABLE, envelope_in, key_id_of, not_opened
from oncekey.core.states import State
from oncekey.core.steps import Step, StepsOf
from oncekey.errors import MoveRefused
from oncekey.stores.api import Epochs, KeptValues, Store
from oncekey.stores.kept_api import Kept, KeptJob, KeptKey, KeptLine

PAGE_ROWS = 200
"""About how many rows ``oncekey doctor`` reads at once."""
LOOK_SECONDS = 1.0
"""How long it goes on reading pages. It reads one page in any case."""
LINES = 20
"""How many lines of a key's audit are looked at."""
SET_IT = f"set {VARIABLE} to the keyring of the app, or name its variable with `oncekey --keys-env NAME …`"
ANOTHER_KEY = (
    "run `oncekey keys re-encrypt --dry-run`: it says whether the keyring has another key under this number, or values "
    "were changed"
)
ON_OR_OFF = (
    "when every process has it: to switch encryption on, take plain out of the keyring; to switch it off, run `oncekey "
    "keys re-encrypt --decrypt`, and remove the keyring when `oncekey keys re-encrypt --dry-run` says that no key is "
    "needed"
)


def keyring_of(store: Store | Epochs) -> Any:
    """The keyring of a store that encrypts; None: it does not, and shows values as they are kept."""
    return getattr(store, "keyring", None)


def plain_text_refused(store: Store, row: Record | Job) -> MoveRefused | None:
    """Why a command without the keyring must not write to this key or job: its values are encrypted.

    A keyring that lacks the key of the row is enough: what is written is encrypted under its current key.
    """
    if keyring_of(store) is not None:
        return None
    number = _number_in(row) or _number_near(store, row)
    if number is None:
        return None
    what = "job" if isinstance(row, Job) else "key"
    return MoveRefused(
        f"nothing was changed: the values of this {what} are encrypted (key {number}), and this command has no "
        f"keyring, so what it writes would be plain text: {SET_IT}"
    )


def plain_reason_refused(store: Epochs) -> MoveRefused | None:
    """Why a command without the keyring must not accept a loss: what is left in the store is encrypted."""
    if keyring_of(store) is not None:
        return None
    numbers = {number for row in store.left_after_loss(PAGE_ROWS) for number in _numbers(row)}
    if not numbers:
        return None
    return MoveRefused(
        f"nothing was changed: what is left in this store is encrypted ({_keys(sorted(numbers), verb=False)}), and "
        f"this command has no keyring, so it would write the reason as plain text: {SET_IT}"
    )


def response_not_opened(store: Store, record: Record | None) -> str | None:
    """The words in the place of an encrypted response that this process cannot open; None: there is none."""
    if record is None or record.response is None or record.response.replayable:
        return None
    (kept,) = getattr(store, "inner", store).read([(record.scope, record.key)])
    if kept is None or kept.response is None or kept.response.schema_version != SEALED_RESPONSE:
        return None
    envelope = kept.response.body or b""
    keyring = keyring_of(store)
    if keyring is None:
        return not_opened(envelope)
    if keyring.open(envelope, (record.scope, record.key), "response") is not None:
        return None
    if key_id_of(envelope) in keyring.ids:
        return not_opened(envelope, "and the key of this number in the keyring does not open it")
    return not_opened(envelope)


# -- the doctor ----------------------------------------------------------------------------------------------------


class _Look:
    """What the doctor has read: every row, or the first ones until its time was over."""

    def __init__(self, store: KeptValues, keyring: Any) -> None:
        self.rows = 0
        self.opened: Counter[int] = Counter()
        self.not_opened: Counter[int] = Counter()
        self.named: set[int] = set()
        """The numbers of the keys that values and fingerprints name, as a command without a keyring finds them."""
        self.prints: set[int] = set()
        """The numbers of the keys that fingerprints need. A row that is expired is started over without a look at
        its fingerprint."""
        self.is_whole = False
        ends_at, after = time.monotonic() + LOOK_SECONDS, ""
        while not self.is_whole:
            page = store.kept(after, PAGE_ROWS)
            self._read(page.rows, keyring)
            after = page.next
            self.is_whole = not after
            if time.monotonic() >= ends_at:
                break

    def _read(self, rows: Sequence[Kept], keyring: Any) -> None:
        self.rows += len(rows)
        if keyring is None:
            self.named.update(number for row in rows for number in _numbers(row))
            return
        live = [row for row in rows if isinstance(row, KeptKey) and row.state is not State.EXPIRED]
        self.prints.update(row.fingerprint_version // KEY_STEP for row in live)
        from oncekey.encryption.renewal import Renewal

        renewal = Renewal(keyring)
        for each in map(renewal, rows):
            self.opened.update((*each.current, *each.sealed))
            self.not_opened.update(each.lost)

    def where(self) -> str:
        """The beginning of the line: it never speaks of rows that were not read."""
        if not self.is_whole:
            return f"in the first {self.rows:,} rows (the others were not read): "
        return {0: "no rows yet: ", 1: "in the only row: "}.get(self.rows, f"in all {self.rows:,} rows: ")

    def rest(self) -> str:
        return "" if self.is_whole else "run `oncekey keys re-encrypt --dry-run`: it reads all rows"


def examine_encryption(store: Store) -> list[Diagnosis]:
    """Whether values are encrypted, and open with the keyring of this command: of the rows that it can read in time."""
    inner = getattr(store, "inner", store)
    if not isinstance(inner, KeptValues):
        return []
    keyring = keyring_of(store)
    look = _Look(inner, keyring)
    level, found, advice = _without_keyring(look) if keyring is None else _with_keyring(look, keyring)
    return [Diagnosis("encryption", level, look.where() + found, advice)]


def _without_keyring(look: _Look) -> tuple[Level, str, str]:
    if not look.named:
        return Level.OK, "no value is encrypted, and no keyring is given", ""
    return Level.WARN, f"{_keys(sorted(look.named))} in use, and this command has no keyring to try", SET_IT


def _with_keyring(look: _Look, keyring: Any) -> tuple[Level, str, str]:
    from oncekey.encryption.keyring import PLAIN

    used = (look.prints | {*look.not_opened}) - keyring.ids - {PLAIN}
    if missing := sorted(used - keyring.lost):
        found = f"{_keys(missing)} in use, and not in the keyring: retries of such rows get 503, or an answer without"
        return Level.FAIL, f"{found} its body", f"add {_keys(missing, verb=False)} to the keyring of every process"
    for number in sorted({*look.not_opened} - keyring.lost):
        none = "" if look.opened[number] else ", and opens none"
        values = _values(look.not_opened[number])
        if number == PLAIN:
            return Level.FAIL, f"damaged: {values}", "find out what writes to the tables"
        return Level.FAIL, f"key {number} of this keyring does not open {values} that name it{none}", ANOTHER_KEY
    if lost := sorted(used):
        found = f"{_keys(lost)} declared lost, and in use: retries of such finished requests get 410 until they expire"
        return Level.WARN, found, "run `oncekey keys re-encrypt --dry-run`: it says until when"
    plain = look.opened.pop(PLAIN, 0)
    under = ", ".join(f"{count:,} under key {number}" for number, count in sorted(look.opened.items(), reverse=True))
    if not keyring.encrypts:
        listed = ", ".join([f"{_values(plain)} not encrypted", *([under] if under else [])])
        return Level.WARN, f"the keyring does not encrypt (plain), and opens: {listed}", ON_OR_OFF
    if plain:
        found = (
            f"not encrypted: {_values(plain)}, from before the keyring was given, or written by a process without it"
        )
        return Level.WARN, found, "give the keyring to every process, then run `oncekey keys re-encrypt`"
    current = f"key {keyring.current} is current"
    if not under:
        return Level.OK, f"no value yet; {current}", look.rest()
    return Level.OK, f"all values are encrypted, and open: {under}; {current}", look.rest()


def _keys(numbers: list[int], *, verb: bool = True) -> str:
    listed = ", ".join(map(str, numbers))
    if len(numbers) == 1:
        return f"key {listed}{' is' if verb else ''}"
    return f"keys {listed}{' are' if verb else ''}"


def _values(count: int) -> str:
    return "1 value" if count == 1 else f"{count:,} values"


# -- the numbers of keys, without the keyring ----------------------------------------------------------------------


def _number_in(row: Record | Job) -> int | None:
    if isinstance(row, Job):
        return _in_text(f"{row.payload!r} {row.last_error} {row.history!r}")
    if number := row.fingerprint_version // KEY_STEP:
        return number
    if row.response is not None and row.response.schema_version == SEALED_RESPONSE:
        return key_id_of(row.response.body or b"")
    return _in_text(row.last_error or "")


def _number_near(store: Store, row: Record | Job) -> int | None:
    """In what else the store has about the key."""
    if isinstance(row, Job):
        (record,) = store.read([(row.scope, row.key)])
        if record is not None and (number := _number_in(record)):
            return number
    steps: list[Step] = store.steps([StepsOf(row.scope, row.key)])[0]
    lines: list[AuditLine] = store.audit(row.scope, row.key, LINES)
    return _in_text(" ".join([*(repr(step.result) for step in steps), *(line.why for line in lines)]))


def _numbers(row: Kept) -> set[int]:
    numbers: set[int | None] = set()
    match row:
        case KeptKey():
            numbers.add(row.fingerprint_version // KEY_STEP or None)
            numbers.add(key_id_of(row.body or b"") if row.schema_version == SEALED_RESPONSE else None)
            numbers.add(_in_text(row.last_error or ""))
        case KeptLine():
            numbers.add(_in_text(row.why))
        case KeptJob():
            numbers.add(_in_text(f"{row.payload!r} {row.last_error} {row.history!r}"))
        case _:
            numbers.add(_in_text(repr(row.result)))
    return {number for number in numbers if number is not None}


def _in_text(text: str) -> int | None:
    """The number of the first key that is named in a text."""
    if MARK not in text:
        return None
    found = SEALED_TEXT.search(text)
    return None if found is None else key_id_of(envelope_in(found[0]) or b"")
