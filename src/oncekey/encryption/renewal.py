"""The values of one row under the current key: what a row becomes when keys are replaced. Pure.

With a keyring that does not encrypt, plain is the current form: plain values stay, and values under a key become plain.

Every value is one of these: already under the current key, which opens it; plain, or under another key of the ring, and
so sealed again; or not to be opened, and then it stays as it is. A number alone proves nothing, since another key may
have had it, so values that name the current key are opened, too. Sentences of oncekey itself (``OURS``) are not secret:
stores write them without a keyring, so they stay plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import orjson

from oncekey.core.health import NO_RESOLVER
from oncekey.core.record import RESPONSE_SCHEMA_VERSION, StoredResponse
from oncekey.core.sealed import SEALED_RESPONSE, SEALED_TEXT, envelope_in, key_id_of
from oncekey.encryption.envelope import Row
from oncekey.encryption.keyring import PLAIN, Keyring
from oncekey.encryption.values import ERROR, LOSS, PAYLOAD, RESPONSE, WHY, Values, response_in, result_column
from oncekey.stores.kept_api import Kept, KeptJob, KeptKey, KeptLine, KeptStep
from oncekey.stores.sql.outbox_rows import LEASE_RAN_OUT, TIMED_OUT, TIMED_OUT_IN_DOUBT

OURS = frozenset({NO_RESOLVER, LEASE_RAN_OUT, TIMED_OUT, TIMED_OUT_IN_DOUBT})


@dataclass(slots=True)
class Renewed:
    """A row with all values that can be under the current key; each list has one key's number for each value."""

    row: Kept
    current: list[int] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)
    """The keys under which the values were that this row has under the current key now."""
    lost: list[int] = field(default_factory=list)
    """The keys of values that do not open: the key is not in the ring, or the value was changed or moved."""


class Renewal:
    """Call it with a row."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._values = Values(keyring)

    def __call__(self, row: Kept) -> Renewed:
        renewed = Renewed(row)
        match row:
            case KeptKey():
                at = (row.scope, row.key)
                with_answer = self._response(row, at, renewed)
                renewed.row = replace(with_answer, last_error=self._error(row.last_error, at, renewed))
            case KeptStep():
                column = result_column(row.name)
                renewed.row = replace(row, result=self._json(row.result, (row.scope, row.key), column, renewed))
            case KeptLine():
                renewed.row = replace(row, why=self._reason(row, renewed))
            case KeptJob():
                at = (row.scope, row.key)
                renewed.row = replace(
                    row,
                    payload=self._json(row.payload, (row.id,), PAYLOAD, renewed),
                    last_error=self._error(row.last_error, at, renewed),
                    history=self._history(row.history, at, renewed),
                )
        return renewed

    def _content(self, envelope: bytes, at: Row, column: str, renewed: Renewed) -> bytes | None:
        """The content that must be written again; None: it is under the current key already, or it does not open."""
        number = key_id_of(envelope) or PLAIN
        content = self._keyring.open(envelope, at, column)
        if content is None:
            renewed.lost.append(number)
            return None
        if number == self._keyring.current:
            renewed.current.append(number)
            return None
        renewed.sealed.append(number)
        return content

    def _is_current(self, renewed: Renewed) -> bool:
        """Whether a plain value stays as it is; counts it."""
        (renewed.sealed if self._keyring.encrypts else renewed.current).append(PLAIN)
        return not self._keyring.encrypts

    def _response(self, row: KeptKey, at: Row, renewed: Renewed) -> KeptKey:
        if row.status is None:
            return row
        if row.schema_version == SEALED_RESPONSE:
            content = self._content(row.body or b"", at, RESPONSE, renewed)
            if content is None:
                return row
            plain = response_in(content)
        elif row.schema_version != RESPONSE_SCHEMA_VERSION:  # of a newer version of oncekey, which knows its columns
            return row
        else:
            try:
                pairs: Sequence[tuple[str, str]] = [(name, text) for name, text in orjson.loads(row.headers or "[]")]
            except (ValueError, TypeError):
                renewed.lost.append(PLAIN)
                return row
            if self._is_current(renewed):
                return row
            plain = StoredResponse(row.status, tuple(pairs), row.body, row.schema_version)
        fresh = self._values.sealed_response(plain, at)
        headers = orjson.dumps(fresh.headers).decode()
        return replace(row, headers=headers, body=fresh.body, schema_version=fresh.schema_version)

    def _text(self, text: str, at: Row, column: str, renewed: Renewed) -> str:
        envelope = envelope_in(text)
        if envelope is None:
            return text if self._is_current(renewed) else self._values.sealed_text(text, at, column)
        content = self._content(envelope, at, column, renewed)
        return text if content is None else self._values.sealed_text(_text_of(content), at, column)

    def _error(self, error: str | None, at: Row, renewed: Renewed) -> str | None:
        return error if error is None or error in OURS else self._text(error, at, ERROR, renewed)

    def _json(self, content: bytes, at: Row, column: str, renewed: Renewed) -> bytes:
        return self._text(_text_of(content), at, column, renewed).encode("utf-8", "surrogatepass")

    def _reason(self, line: KeptLine, renewed: Renewed) -> str:
        """A store may put words before the reason for which an operator accepted a loss."""
        at = LOSS if line.event == LOSS[0] else (line.scope, line.key)
        if SEALED_TEXT.search(line.why) is None:
            return self._text(line.why, at, WHY, renewed)
        return SEALED_TEXT.sub(lambda found: self._text(found[0], at, WHY, renewed), line.why)

    def _history(self, history: bytes, at: Row, renewed: Renewed) -> bytes:
        try:
            entries = orjson.loads(history)
            errors = [entry["error"] for entry in entries]
        except (ValueError, TypeError, KeyError):
            renewed.lost.append(PLAIN)
            return history
        pairs = zip(entries, errors, strict=True)
        fresh = [{**entry, "error": self._error(error, at, renewed)} for entry, error in pairs]
        return history if fresh == entries else orjson.dumps(fresh)


def _text_of(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass")
