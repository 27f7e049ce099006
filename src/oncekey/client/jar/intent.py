"""One intent while it is used: what is written before and after each request, and when nothing may be sent."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from oncekey.client.attempts import CURRENT
from oncekey.client.calls import TIMESTAMP, Begun, Request
from oncekey.client.jar import table
from oncekey.client.jar.table import Execute, Row
from oncekey.client.reading import Answer
from oncekey.client.spelling import KeyForm, Spelling
from oncekey.errors import ConfigurationError, IntentChanged, IntentExpired, JarError

if TYPE_CHECKING:
    from oncekey.client.jar.jar import KeyJar

_log = logging.getLogger("oncekey.client")


class Intent:
    """``key`` is its Idempotency-Key, ``answer`` its answer if there is one."""

    def __init__(self, jar: KeyJar, name: str, key: str, row: Row | None, *, again: bool = False) -> None:
        self._jar = jar
        self.name = name
        self.key = key
        self.row = row
        self.again = again
        self.ended = False
        """The ``with`` block is over: nothing is sent under this intent any more."""
        self._used = False

    @property
    def answer(self) -> Answer | None:
        return self.row.answer if self.row is not None else None

    def begin(self, request: Request, form: KeyForm) -> Begun:
        """Put the request on disk, or find it there. Raises what forbids to send it."""
        self._used = True
        now = self._jar.clock()
        wanted = self._jar.row_of(self.name, self.key, request, form.header, form.spelling)

        def write(execute: Execute) -> Row:
            execute(table.INSERT, wanted.values())
            found = table.row(execute(table.READ_INSERTED, (self._jar.account, self.name)).fetchone())
            self.check_same(found, request)
            if found.answer is not None:
                return found
            if self._check_time(found, now):
                execute(table.RESTARTED, (now, now, self._jar.account, self.name))
                return replace(found, first_sent_at=now, expires_at=None)
            sent = found.form(form)
            execute(table.SENT, (now, now, sent.header, sent.spelling, self._jar.account, self.name))
            return replace(found, first_sent_at=now) if found.first_sent_at is None else found

        found: Row = self._jar.run(write, writes=True)
        self.row, self.key = found, found.key
        if found.answer is not None:
            return Begun(found.answer, request, form)
        replaced = self._jar.kept_headers | {"content-length"}
        if found.request.header(TIMESTAMP) is None:  # the row has no time: send that of the caller
            replaced -= {TIMESTAMP}
        mine = [each for each in request.headers if each[0].lower() not in replaced]
        # The stored bytes: a server that compares raw bodies must see the same ones.
        stored = Request(request.method, request.url, (*mine, *found.request.headers), found.request.body)
        end = self._jar.kept_until(found)
        return Begun(None, stored, found.form(form), None if end is None else end - now)

    def answered(self, answer: Answer) -> None:
        from oncekey.client.jar.jar import KEPT_OF_ANSWER

        headers = table.chosen(answer.headers, KEPT_OF_ANSWER)
        body = answer.body if len(answer.body) <= self._jar.longest_answer else None
        values = (self._jar.clock(), answer.status, json.dumps(headers), body, *self._place())
        self._note(lambda execute: execute(table.ANSWERED, values))

    def left_open(self, note: str, expires: float | None, not_before: float | None) -> None:
        values = (note, expires, not_before, *self._place())
        self._note(lambda execute: execute(table.LEFT_OPEN, values))

    def respelled(self, spelling: Spelling) -> None:
        values = (spelling, *self._place())
        self._note(lambda execute: execute(table.RESPELLED, values))

    @contextmanager
    def current(self) -> Iterator[None]:
        """For one request of this intent, in whatever thread it is sent."""
        if self.ended:
            raise ConfigurationError(f"the block of intent '{self.name}' is over: send in `with ….intent(…)`")
        token = CURRENT.set(self)
        try:
            yield
        finally:
            CURRENT.reset(token)

    def check_used(self) -> None:
        """Warn if the block ended without a request: perhaps a library sent one past oncekey, without a key."""
        if not self._used and self.answer is None:
            _log.warning(
                "intent '%s': nothing was sent under its key in its block. A request that a library or another thread "
                "sent there had no key, or a new one each time, so it can run twice: give that library a transport or "
                "an adapter of oncekey.client, and send in the thread of the block",
                self.name,
            )

    def check_same(self, found: Row, request: Request) -> None:
        if found.fingerprint == request.fingerprint():
            return
        first, now = f"{found.request.method} {found.request.url}", f"{request.method} {request.url}"
        what = f"its first request was {first}, this one is {now}" if first != now else "its body or type has changed"
        ended = f"; the first was answered {found.status}" if found.status is not None else ""
        raise IntentChanged(
            f"intent '{self.name}' stands for another request: {what}{ended}. Nothing was sent. A different operation "
            "needs an intent of its own; to replace one that certainly had no effect, forget it first: "
            "jar.forget(name), or `oncekey client forget`",
            key=found.key,
        )

    def _check_time(self, found: Row, now: float) -> bool:
        """Whether the key is past its time and is to be sent again all the same."""
        end = self._jar.kept_until(found)
        if end is None or now < end:
            return False
        if self.again:
            return True
        told = "the server said that it keeps its key"
        if found.expires_at is None:
            told = "the server never said how long it keeps its key, which is assumed (key_lifetime) to be"
        raise IntentExpired(
            f"intent '{self.name}' was first sent {_hours(now - (found.first_sent_at or now))} ago, and {told} until "
            f"{_hours(now - end)} ago: the server may run it as new. Nothing was sent. Look up at the server whether "
            "it happened; then forget the intent, or send it with again=True (--again)",
            key=found.key,
            names=(self.name,),
        )

    def _note(self, work: Callable[[Execute], object]) -> None:
        """After a try the answer counts more than the jar: if it cannot be stored, the intent only stays open."""
        try:
            self._jar.run(work, writes=True)
        except JarError as error:
            _log.warning(
                "intent '%s' was sent, but what came back cannot be put into the key jar (%s): it stays open, and "
                "resume asks again with the same key",
                self.name,
                error,
            )

    def _place(self) -> tuple[str, str, str]:
        return self._jar.account, self.name, self.key


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.0f} hours" if hours >= 2 else f"{max(0, seconds) / 60:.0f} minutes"
