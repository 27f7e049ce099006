"""What an operator's command can say about encrypted values, with the keyring of the app and without it.

A command reads the keyring from a variable. If the variable is not set, values do not open, and what the command writes
would be plain text. ``oncekey.encryption`` is imported only where the store has a keyring: it needs a package that a
command without one does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from oncekey.core.audit import AuditLine
from oncekey.core.fingerprint import KEY_STEP, UnderKey
from oncekey.core.jobs import Job
from oncekey.core.record import Record
from oncekey.core.sealed import MARK, SEALED_RESPONSE, SEALED_TEXT, VARIABLE, envelope_in, key_id_of, not_opened
from oncekey.core.states import State
from oncekey.core.steps import Step, StepsOf
from oncekey.errors import MoveRefused
from oncekey.stores.api import Epochs, KeptValues, Store
from oncekey.stores.kept_api import Kept, KeptJob, KeptKey, KeptLine, KeptPage

PAGE_ROWS = 200
"""About how many rows are read at once: by ``oncekey doctor``, and by a command that must not write plain text."""
LOOK_SECONDS = 1.0
"""How long they go on reading pages. They read one page in any case."""
LINES = 20
"""How many lines of a key's audit are looked at."""
SET_IT = f"set {VARIABLE} to the keyring of the app, or name its variable with `oncekey --keys-env NAME …`"


def keyring_of(store: Store | Epochs) -> Any:
    """The keyring of a store that encrypts; None: it does not, and shows values as they are kept."""
    return getattr(store, "keyring", None)


def under_key_of(store: Store) -> UnderKey | None:
    """How the keyring of a store makes fingerprints; None: it has none."""
    keyring = keyring_of(store)
    if keyring is None:
        return None
    from oncekey.encryption.fingerprints import KeyedFingerprints

    return KeyedFingerprints(keyring).under_key


def plain_text_refused(store: Store, row: Record | Job) -> MoveRefused | None:
    """Why a command without the keyring must not write to this key or job: its values are encrypted, or others are.

    A row from before encryption is plain, and what the command writes to it would be plain text in a store where the
    app encrypts. A keyring that lacks the key of the row is enough: what is written is encrypted under its current key.
    """
    if keyring_of(store) is not None:
        return None
    what = f"the values of this {'job' if isinstance(row, Job) else 'key'} are encrypted"
    number = _number_in(row) or _number_near(store, row)
    if number is None:
        number, what = _number_elsewhere(store), "other values of this store are encrypted"
    if number is None:
        return None
    return MoveRefused(
        f"nothing was changed: {what} (key {number}), and this command has no keyring, so what it writes would be "
        f"plain text: {SET_IT}"
    )


def plain_reason_refused(store: Epochs) -> MoveRefused | None:
    """Why a command without the keyring must not accept a loss: what is left in the store is encrypted."""
    if keyring_of(store) is not None:
        return None
    numbers = {number for row in store.left_after_loss(PAGE_ROWS) for number in numbers_in(row)}
    if not numbers:
        return None
    named = keys_named(sorted(numbers), verb=False)
    return MoveRefused(
        f"nothing was changed: what is left in this store is encrypted ({named}), and this command has no keyring, so "
        f"it would write the reason as plain text: {SET_IT}"
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


def pages(store: KeptValues) -> Iterator[KeptPage]:
    """All pages, or the first ones: it stops after ``LOOK_SECONDS``, and reads one in any case."""
    ends_at, after = time.monotonic() + LOOK_SECONDS, ""
    while True:
        page = store.kept(after, PAGE_ROWS)
        yield page
        after = page.next
        if not after or time.monotonic() >= ends_at:
            return


def keys_named(numbers: list[int], *, verb: bool = True) -> str:
    listed = ", ".join(map(str, numbers))
    if len(numbers) == 1:
        return f"key {listed}{' is' if verb else ''}"
    return f"keys {listed}{' are' if verb else ''}"


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


def _number_elsewhere(store: Store) -> int | None:
    """In the other keys of the store that can be listed in ``LOOK_SECONDS``. Every request of an app that encrypts has
    a fingerprint under a key, so the first page shows it, unless the keyring was given to the app just now."""
    ends_at, after = time.monotonic() + LOOK_SECONDS, None
    while True:
        page = store.listing(limit=PAGE_ROWS, after=after)
        for record in page:
            if record.state is not State.EXPIRED and (number := _number_in(record)):
                return number
        if len(page) < PAGE_ROWS or time.monotonic() >= ends_at:
            return None
        after = (page[-1].scope, page[-1].key)


def numbers_in(row: Kept) -> set[int]:
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
