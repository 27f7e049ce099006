"""Writes all values of a store again under the current key of the ring, beside the running app.

With a ring that does not encrypt, it writes plain values in the place of encrypted ones.

It goes page by page over every row (:class:`oncekey.stores.api.KeptValues`). A new value is written only where the old
one still is, whatever the row's state, so it never undoes what the app writes. It can be ended at any moment, also by
kill -9, and started again: it then passes over what is under the current key already. Nothing else has to be
remembered.

The ring may have another key under the current number than the app has: a typing error, or a number that two keys had.
What is written under such a key, the app cannot open. So the first walk only reads. Nothing is written, not even the
line of the audit, unless the current key is proven: it opens every value of the app that names it, and there is one.
The operator can say that it is right (``trust_key``), because values can be damaged, and a new key may have no value
yet. A key that opens none of the values that name it is never taken. If the key loses its proof during a walk that
writes, because a process with another ring has come, the rest of the walk only counts.

Fingerprints are not written again: only the client has the request. They keep an old key in use until their rows
have expired, and the report says how many there are, and until when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from oncekey.core.audit import Audit
from oncekey.core.fingerprint import CHECK_BYTES, KEY_STEP
from oncekey.encryption.keyring import PLAIN_WORD, Keyring
from oncekey.encryption.renewal import Renewal, Renewed
from oncekey.encryption.report import Report
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
SAMPLE = 20
"""How many rows with a value that does not open are looked at again, for the secret that their fingerprint names."""
PAUSE_SECONDS = 0.05
"""Between two tries to replace a value that the app changes or holds."""

_Work = tuple[Rewrite, list[int]]
"""A row to write, and for each of its values the number of the key that it was found under."""


class Rotation:
    """``store`` has the rows: it is the one that ``encryption.store.sealed`` was made of."""

    def __init__(
        self,
        store: KeptValues,
        keyring: Keyring,
        *,
        dry_run: bool = False,
        audit: Audit | None = None,
        trust_key: bool = False,
        page: int = PAGE,
    ) -> None:
        self._store = store
        self._keyring = keyring
        self._renewed = Renewal(keyring)
        self._dry_run = dry_run
        self._audit = audit
        self._trust_key = trust_key
        self._page = page
        self.report = Report(keyring.current)

    @property
    def may_write(self) -> bool:
        """Whether the current key may be written with, by what was read so far."""
        return self.report.is_proven or (self._trust_key and not self.report.is_wrong)

    def run(self, seen: Callable[[Report], None] = lambda _: None) -> Report:
        """Read all rows, and then write. Walk once more if the app changed some meanwhile.

        ``seen``: called after each page.
        """
        report = self.report
        self._walk(seen)
        if self._dry_run or not self.may_write:
            return report
        self._note()
        while (report.waiting or report.changed) and report.walks < WALKS and self.may_write:
            report.walks += 1
            self._walk(seen)
        return report

    def _note(self) -> None:
        if self._audit is not None:
            why = Values(self._keyring).sealed_audit(self._audit, OPERATORS_LINE)
            after_it = f"key {self._keyring.current}" if self._keyring.encrypts else PLAIN_WORD
            self._store.note_walk(EVENT, after_it, why)

    def _walk(self, seen: Callable[[Report], None]) -> None:
        self.report.begin()
        after = ""
        while True:
            page = self._store.kept(after, self._page)
            self._handle(page.rows)
            seen(self.report)
            if not (after := page.next):
                return

    def _handle(self, rows: Sequence[Kept]) -> None:
        report = self.report
        pending: list[_Work] = []
        for row in rows:
            renewed = self._renewed(row)
            self._count(row, renewed)
            if renewed.sealed:
                pending.append((Rewrite(row, renewed.row), renewed.sealed))
        if not report.walks or not self.may_write:
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
        report, lost = self.report, renewed.lost
        report.read += 1
        if not report.walks:
            report.rows += 1
            report.found.update((*renewed.current, *renewed.sealed, *lost))
        report.not_opened.add(row, lost, self._store)
        if not isinstance(row, KeptLine):
            report.opened.update((*renewed.current, *renewed.sealed))
        if isinstance(row, KeptKey):
            report.count_row(row, lost)
            number = row.fingerprint_version // KEY_STEP
            rows = report.doubted.setdefault(number, [])
            if number in lost and len(rows) < SAMPLE:
                rows.append((row.scope, row.key))

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
