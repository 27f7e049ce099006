"""The result of a function, as its key keeps it: JSON (``forms.py``), or what a codec makes of it.

Every caller gets the value that was stored and read again, the first one too. So a tuple is a list for all of them, and
a result that a duplicate could not get is noticed at the first call, not at the first retry.
"""

from __future__ import annotations

import json
from typing import Any

from oncekey.core.record import RESPONSE_SCHEMA_VERSION, StoredResponse
from oncekey.engine.direct import Codec
from oncekey.errors import ConfigurationError, ResultNotKept
from oncekey.functions import forms
from oncekey.functions.attempt import JSON, Attempt
from oncekey.functions.refusals import failed
from oncekey.telemetry.redaction import describe

ENCODED = "application/octet-stream"
"""The content type of a result that a codec wrote."""


class Results:
    """How one function keeps its results. ``codec`` None: as JSON."""

    def __init__(self, name: str, codec: Codec | None) -> None:
        if codec is not None and not (
            callable(getattr(codec, "dumps", None)) and callable(getattr(codec, "loads", None))
        ):
            raise ConfigurationError(
                f"@once.function({name!r}, codec=…): it takes an object with dumps(value) and loads(data), such as the "
                "module pickle"
            )
        self._name = name
        self._codec = codec

    def keep(self, attempt: Attempt, result: Any) -> Kept:
        """Give the result to the attempt. Never raises: the function has run, so its key is completed in every case."""
        try:
            data = self._written(result)
            kept = Kept(self._read(data, ENCODED if self._codec is not None else JSON))
        except Exception as error:
            attempt.keep(None)
            return Kept(result, error)
        attempt.keep(data, ENCODED if self._codec is not None else JSON)
        return kept

    def of_first(self, kept: Kept) -> Any:
        """What the first caller gets, after its result was stored."""
        if kept.error is None:
            return kept.value
        how = "is not JSON" if self._codec is None else "was refused by the codec"
        error = ResultNotKept(
            f"{self._name} ran and its key is completed, but its result {how} ({describe(kept.error)}), so it is not "
            "kept: a repeated call does not run, and gets no result. Return values of JSON, Decimal, UUID, dates or "
            "bytes, or pass codec=…. The result of this call is in the attribute `result` of this exception"
        )
        error.result = kept.value
        raise error from kept.error

    def of_answer(self, answer: StoredResponse | None) -> Any:
        """What a later caller gets. CallFailed: the key has failed for good."""
        if answer is not None and answer.status >= 400:
            raise failed(self._name, answer)
        if answer is not None and answer.schema_version != RESPONSE_SCHEMA_VERSION:
            raise ResultNotKept(
                f"{self._name} has run with this key, and its kept result cannot be read: it is encrypted and does not "
                "open with the keyring of this process, or a newer version of oncekey wrote it. It does not run again. "
                "When the keyring has its key, or the deploy has ended, a repeated call gets the result"
            )
        if answer is None or answer.body is None:
            raise ResultNotKept(
                f"{self._name} has run with this key, and its result was not kept: it was too large, or not what JSON "
                "or the codec can hold. It does not run again"
            )
        try:
            return self._read(answer.body, dict(answer.headers).get("content-type"))
        except Exception as error:
            raise ResultNotKept(
                f"{self._name} has run with this key, and its kept result cannot be read ({describe(error)}): another "
                "version may have written it with another codec. It does not run again"
            ) from error

    def _written(self, result: Any) -> bytes:
        if self._codec is None:
            plain = forms.plain(result)
            return json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        data = self._codec.dumps(result)
        return data.encode() if isinstance(data, str) else bytes(data)

    def _read(self, data: bytes, content_type: str | None) -> Any:
        # An operator or a resolver confirms a key with JSON, also if the function has a codec.
        if self._codec is None or (content_type is not None and content_type != ENCODED):
            return forms.restored(json.loads(data)) if data else None
        return self._codec.loads(data)


class Kept:
    """A result after it was given to its attempt. ``error``: why it could not be kept."""

    __slots__ = ("error", "value")

    def __init__(self, value: Any, error: Exception | None = None) -> None:
        self.value = value
        self.error = error
