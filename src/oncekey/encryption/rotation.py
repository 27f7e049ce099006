"""Writes all values of a store again under the current key of the ring, beside the running app.

With a ring that does not encrypt, it writes plain values in the place of encrypted ones.

It goes page by page over every row (:class:`oncekey.stores.api.KeptValues`). A new value is written only where the old
one still is, whatever the row's state, so it never undoes what the app writes. It can be ended at any moment, also by
kill -9, and started again: it then passes over what is under the current key already. Nothing else has to be
remembered.

Values that name the current key are opened, too, and not written. While none of them opens and some do not, the ring
seems to have another key under that number than the app has: the rotation then only counts, and writes nothing.

Fingerprints are not written again: only the client has the request. They keep an old key in use until their rows
have expired, and the report says how many there are, and until when.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from oncekey.core.audit import Audit
from oncekey.core.fingerprint import CHECK_BYTES, KEY_STEP
from oncekey.core.states import FINAL, State
from oncekey.encryption.keyring import PLAIN, PLAIN_WORD, Keyring
from oncekey.encryption.renewal import Renewal, Renewed
from oncekey.encryption.values import Values
from oncekey.errors import ConfigurationError, StoreError, StoreUnavailable
from oncekey.stores.api import KeptValues, Store
from oncekey.stores.kept_api import OPERATORS_LINE, Kept, KeptJob, KeptKey, KeptLine, KeptStep, Rewrite

EVENT = "re-encrypt"
PAGE = 100
"""How many rows are read at once."""
BATCH_BYTES = 1024 * 1024
"""How much is written at once: a store bounds the time of a statement and the size of a packet."""
WALKS = 3
TRIES = 3
NAMED = 3
"""How many rows that are not final are named for each key."""
SAMPLE = 20
"""How many rows with a value that does not open are looked at again, for the secret that their fingerprint names."""
PAUSE_SECONDS = 0.05
"""Between two tries to replace a value that the app changes or holds."""

_Work = tuple[Rewrite, list[int]]
"""A row to write, and for each of its values the number of the key that it was found under."""


@dataclass(slots=True)
class Fingerprints:
    """The rows whose fingerprint was made with one key."""

    rows: int = 0
    until: float = 0.0
    """When the last of those that are final expires."""
    unsettled: int = 0
    """How many are not final: their time begins when they are."""
    named: list[KeptKey] = field(default_factory=list)
    """Some of those that are not final."""


@dataclass(slots=True)
class Report:
    """Numbers of values, by the number of the key that they were found under; ``PLAIN``: they were not encrypted."""

    current: int
    """The number of the current key; ``PLAIN``: the ring does not encrypt."""
    walks: int = 0
    rows: int = 0
    """Of the last walk, as all that follows but ``found`` and ``rewritten``."""
    found: Counter[int] = field(default_factory=Counter)
    """Of the first walk."""
    rewritten: Counter[int] = field(default_factory=Counter)
    """Of all walks."""
    changed: Counter[int] = field(default_factory=Counter)
    """The app changed, deleted or held their rows meanwhile: only the next walk can tell under which key they are."""
    lost: Counter[int] = field(default_factory=Counter)
    """They do not open with this keyring, and stay as they are."""
    refused: Counter[int] = field(default_factory=Counter)
    """The store does not take the new value, which is a little longer."""
    waiting: Counter[int] = field(default_factory=Counter)
    """They open and were not written: in a dry run, or because the ring has the wrong current key."""
    opened: Counter[int] = field(default_factory=Counter)
    """Of all walks: they open. Lines about rotations are not counted."""
    doubted: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    """Some rows with a value that does not open, and with a fingerprint of the same number."""
    fingerprints: dict[int, Fingerprints] = field(default_factory=dict)

    @property
    def left(self) -> Counter[int]:
        """What a walk has left under another key, or may have."""
        return self.changed + self.lost + self.refused + self.waiting

    @property
    def wrong_current(self) -> bool:
        """The current key opens none of the values that name it."""
        return self.current != PLAIN and bool(self.lost[self.current] and not self.opened[self.current])

    def begin(self) -> None:
        """A walk begins."""
        self.walks += 1
        self.rows = 0
        counts = (self.changed, self.lost, self.refused, self.waiting)
        for numbers in (*counts, self.doubted, self.fingerprints):
            numbers.clear()


class Rotation:
    """``store`` has the rows: it is the one that ``encryption.store.sealed`` was made of."""

    def __init__(
        self,
        store: KeptValues,
        keyring: Keyring,
        *,
        dry_run: bool = False,
        audit: Audit | None = None,
        page: int = PAGE,
    ) -> None:
        self._store = store
        self._keyring = keyring
        self._renewed = Renewal(keyring)
        self._dry_run = dry_run
        self._audit = audit
        self._page = page
        self.report = Report(keyring.current)

    def run(self, seen: Callable[[Report], None] = lambda _: None) -> Report:
        """Walk over all rows, and once more if the app changed some meanwhile. ``seen``: called after each page."""
        if self._audit is not None and not self._dry_run:
            why = Values(self._keyring).sealed_audit(self._audit, OPERATORS_LINE)
            after_it = f"key {self._keyring.current}" if self._keyring.encrypts else PLAIN_WORD
            self._store.note_walk(EVENT, after_it, why)
        for _ in range(WALKS):
            self.report.begin()
            after = ""
            while True:
                page = self._store.kept(after, self._page)
                self._handle(page.rows)
                seen(self.report)
                if not (after := page.next):
                    break
            if not (self._dry_run or self.report.wrong_current):
                self.report.changed += self.report.waiting  # the current key has opened a value since
                self.report.waiting.clear()
            if not self.report.changed:
                break
        return self.report

    def _handle(self, rows: Sequence[Kept]) -> None:
        report = self.report
        pending: list[_Work] = []
        for row in rows:
            report.rows += 1
            if isinstance(row, KeptKey):
                self._count_fingerprint(row)
            renewed = self._renewed(row)
            if report.walks == 1:
                report.found.update((*renewed.current, *renewed.sealed, *renewed.lost))
            self._count(row, renewed)
            if renewed.sealed:
                pending.append((Rewrite(row, renewed.row), renewed.sealed))
        if self._dry_run or report.wrong_current:
            for _, keys in pending:
                report.waiting.update(keys)
            return
        for again in range(TRIES):
            if again and pending:
                time.sleep(PAUSE_SECONDS)
            pending = [work for batch in _batches(pending) for work in self._write(batch)]
        for _, keys in pending:
            report.changed.update(keys)

    def _count(self, row: Kept, renewed: Renewed) -> None:
        report = self.report
        report.lost.update(renewed.lost)
        if not isinstance(row, KeptLine) or (row.scope, row.key) != OPERATORS_LINE:
            report.opened.update((*renewed.current, *renewed.sealed))
        if renewed.lost and isinstance(row, KeptKey):
            number = row.fingerprint_version // KEY_STEP
            rows = report.doubted.setdefault(number, [])
            if number in renewed.lost and len(rows) < SAMPLE:
                rows.append((row.scope, row.key))

    def _count_fingerprint(self, row: KeptKey) -> None:
        """A row that is expired is started over without a look at its fingerprint."""
        if row.state is State.EXPIRED:
            return
        of_key = self.report.fingerprints.setdefault(row.fingerprint_version // KEY_STEP, Fingerprints())
        of_key.rows += 1
        if row.state in FINAL:
            of_key.until = max(of_key.until, row.expires_at)
        else:
            of_key.unsettled += 1
            if len(of_key.named) < NAMED:
                of_key.named.append(row)

    def _write(self, batch: list[_Work]) -> Iterator[_Work]:
        """Replace values; yield those that are not as they were, or that are held."""
        for work, done in zip(batch, self._rewrite([each for each, _ in batch]), strict=True):
            if done is None:
                self.report.refused.update(work[1])
            elif done:
                self.report.rewritten.update(work[1])
            else:
                yield work

    def _rewrite(self, works: list[Rewrite]) -> Iterable[bool | None]:
        """For each, whether it was written; None: the store refuses the value. One such value harms no other."""
        try:
            return self._store.rewrite(works)
        except StoreUnavailable:
            raise
        except StoreError:
            if len(works) == 1:
                return [None]
            return [done for work in works for done in self._rewrite([work])]


def _batches(pending: Sequence[_Work]) -> Iterator[list[_Work]]:
    batch: list[_Work] = []
    size = 0
    for work in pending:
        weight = _weight(work[0].new)
        if batch and size + weight > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(work)
        size += weight
    if batch:
        yield batch


def _weight(row: Kept) -> int:
    match row:
        case KeptKey(body=body):
            return len(body or b"")
        case KeptStep(result=result):
            return len(result)
        case KeptJob(payload=payload, history=history):
            return len(payload) + len(history)
    return len(row.why)


def has_another_secret(keyring: Keyring, report: Report, store: Store, number: int) -> bool:
    """Whether values that name key ``number`` were written by another key of that number than the ring's.

    A keyed fingerprint begins with bytes that identify its key. Without such a row, a key that opens no value at all is
    taken for another one.
    """
    check = (keyring.mac(number, b"check") or b"")[:CHECK_BYTES]
    rows = [row for row in store.read(report.doubted.get(number, [])) if row is not None]
    prints = [row.fingerprint for row in rows if row.fingerprint_version // KEY_STEP == number]
    if prints:
        return any(each[:CHECK_BYTES] != check for each in prints)
    return not report.opened[number]


def raw_values(store: object) -> KeptValues:
    """The values of a store as they are kept: those of the store inside, where ``store`` seals and opens them."""
    inner = getattr(store, "inner", store)
    if not isinstance(inner, KeptValues):
        raise ConfigurationError(
            f"{type(inner).__name__} cannot hand out its stored values, so their keys cannot be replaced: it needs the "
            "methods of oncekey.stores.api.KeptValues"
        )
    return inner
