"""One request and all its tries, without any I/O of its own: a library's adapter sends, sleeps and asks this module.

An adapter does this, sync or async::

    attempts = rules.attempts(method, url, headers, body)
    attempts.begin()                         # with an intent: its key is on disk when this returns
    while attempts.kept is None:             # else the jar has the answer already
        try: … send attempts.request …
        except its errors: step = attempts.failed(Seen.LOST, error)
        else: step = attempts.answered(answer)
        attempts.save()                      # with an intent: what was learned is on disk
        if step.error: raise it
        if not step.again: hand back the answer, or raise the library's error
        sleep(step.wait)

``begin`` and ``save`` are the only methods that block, and only for an intent.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Final

from oncekey.client import reading
from oncekey.client.budget import Budget
from oncekey.client.calls import Call, Request
from oncekey.client.decisions import IDEMPOTENT, SAFE, TABLE, Act, Kind, Seen
from oncekey.client.decisions import Intent as Then
from oncekey.client.reading import Answer
from oncekey.client.spelling import KeyForm, Spelling, checked_header, checked_spelling, new_key, other, spelled
from oncekey.core.values import value
from oncekey.errors import ConfigurationError, OutcomeUnsettled, RedirectRefused

_MOST_REDIRECTS: Final = 5
_LATEST_RETURN: Final = 86_400.0
"""A Retry-After of more than a day is taken for a day."""

CURRENT: ContextVar[Call | None] = ContextVar("oncekey_intent", default=None)
"""The intent of the running ``with … .intent(…)`` block. Every request in it that changes state belongs to it."""


@value
class Step:
    """What the adapter does after a try."""

    again: bool
    wait: float = 0.0
    error: Exception | None = None


_DONE: Final = Step(False)


class Rules:
    """How a client sends: the same for all its requests. One object may serve many threads."""

    def __init__(
        self,
        *,
        budget: Budget | None = None,
        methods: Iterable[str] = ("POST", "PATCH"),
        header: str = "Idempotency-Key",
        spelling: Spelling = "bare",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        if isinstance(methods, str):
            raise ConfigurationError(f"methods={methods!r}: it takes several names, such as ('POST', 'PATCH')")
        self.budget = budget or Budget()
        self.methods = frozenset(method.upper() for method in methods)
        self.header = checked_header(header)
        self.clock, self.wall_clock, self.chance = clock, wall_clock, chance
        self._spelling = checked_spelling(spelling)
        self._learned: dict[tuple[str, str, int | None], Spelling] = {}

    def attempts(self, method: str, url: str, headers: Iterable[tuple[str, str]], body: bytes) -> Attempts:
        return Attempts(self, Request(method.upper(), url, tuple(headers), body), CURRENT.get())

    def form_for(self, url: str) -> KeyForm:
        return KeyForm(self.header, self._learned.get(reading.origin(url), self._spelling))

    def learn(self, url: str, spelling: Spelling) -> None:
        self._learned[reading.origin(url)] = spelling


class Attempts:
    """``request`` is what to send next, with its key."""

    def __init__(self, rules: Rules, request: Request, call: Call | None) -> None:
        self.rules = rules
        self.call = call if request.method not in SAFE else None
        given = request.header(rules.header)
        self._own_spelling = given is None or self.call is not None
        self.key: str | None
        if self.call is not None:
            self.key = self.call.key
        elif given is not None:
            self.key = given
        else:
            self.key = new_key() if request.method in rules.methods else None
        if self.key is not None:
            self.kind = Kind.KEYED
        else:
            self.kind = Kind.IDEMPOTENT if request.method in IDEMPOTENT else Kind.NEITHER
        self._bare = request
        self.form = rules.form_for(request.url)
        self._respelled = False
        self._redirects = 0
        self._tries = self._asked = 0
        self._budget_end = rules.clock() + rules.budget.seconds
        self._key_end = math.inf
        """Until when the server keeps the key. It would run a later try as new."""
        self._ending: Callable[[], None] | None = None
        self.kept: Answer | None = None
        """The answer that the jar has: nothing is sent."""

    def begin(self) -> None:
        """With an intent: put key and request on disk. JarError, IntentChanged or IntentExpired: do not send."""
        if self.call is not None:
            begun = self.call.begin(self._bare, self.form)
            self.kept, self._bare, self.form = begun.kept, begun.request, begun.form
            if begun.key_seconds is not None:
                self._key_end = self.rules.clock() + begun.key_seconds
            self.key = self.call.key

    def save(self) -> None:
        """With an intent: put what the last try brought on disk, if it matters."""
        if self._ending is not None:
            ending, self._ending = self._ending, None
            ending()

    @property
    def request(self) -> Request:
        """What to send now."""
        if self.key is None or not self._own_spelling:
            return self._bare
        return self._bare.with_header(self.form.header, spelled(self.key, self.form.spelling))

    @property
    def seconds_left(self) -> float:
        """For one try: of the budget, and of the time that the server keeps the key. At least a moment: a try that
        starts may end."""
        return max(0.05, min(self._budget_end, self._key_end) - self.rules.clock())

    def failed(self, seen: Seen, error: BaseException) -> Step:
        """A try brought no answer. If it was the last one of an intent, the error gets a note on how to go on."""
        step = self._step(seen, None, error)
        if self.call is not None and not step.again:
            error.add_note(
                f"intent '{self.call.name}' is open, and its key is in the key jar: send the same request under the "
                "same name again, or run `oncekey client resume`"
            )
        return step

    def answered(self, answer: Answer) -> Step:
        """A try brought this answer."""
        return self._step(reading.seen(answer, self._bare.method, self._bare.url), answer, None)

    def _step(self, seen: Seen, answer: Answer | None, error: BaseException | None) -> Step:
        row = TABLE[seen]
        act = row.act(self.kind)
        now = self.rules.wall_clock()
        after = None if answer is None else reading.retry_after(answer, now)
        expires = None if answer is None or self.key is None else reading.key_expires(answer, now)
        if expires is not None:
            self._key_end = self.rules.clock() + expires - now
        form = self.form
        step = self._after(act, answer, after)
        if self.call is not None:
            call, note = self.call, _note(seen, answer, error)
            if answer is not None and row.intent is Then.ANSWERED:
                self._ending = lambda: call.answered(answer)
            elif self.form != form:
                spelling = self.form.spelling
                self._ending = lambda: call.respelled(spelling)
            else:
                not_before = None if after is None or step.again else now + min(after, _LATEST_RETURN)
                if not step.again or expires is not None:
                    self._ending = lambda: call.left_open(note, expires, not_before)
        return step

    def _after(self, act: Act, answer: Answer | None, after: float | None) -> Step:
        if act is Act.AGAIN:
            self._tries += 1
            return self._later(self._tries, after) if self._tries < self.rules.budget.tries else _DONE
        if act is Act.ASK:
            self._asked += 1
            return self._later(self._asked, after)
        if answer is None or self.key is None:
            return _DONE
        if act in (Act.SPELL, Act.FOLLOW) and self.rules.clock() >= self._key_end:
            return _DONE
        if act is Act.SPELL and self._own_spelling and not self._respelled:
            self._respelled = True
            self.form = KeyForm(self.form.header, other(self.form.spelling))
            self.rules.learn(self._bare.url, self.form.spelling)
            return Step(True)
        if act is Act.FOLLOW and (target := reading.target_of(answer, self._bare.url)) is not None:
            self._redirects += 1
            if self._redirects > _MOST_REDIRECTS:
                return _DONE
            self._bare = self._bare.to(target)
            return Step(True)
        if act is Act.REFUSE:
            return Step(False, error=_refused(self.key, answer, self._bare.url))
        if act is Act.UNSETTLED:
            return Step(False, error=_unsettled(self.key, answer, after))
        return _DONE

    def _later(self, number: int, after: float | None) -> Step:
        wait = self.rules.budget.wait(number, after, self.rules.chance())
        if wait is None or self.rules.clock() + wait >= min(self._budget_end, self._key_end):
            return _DONE
        return Step(True, wait)


def _note(seen: Seen, answer: Answer | None, error: BaseException | None) -> str:
    """What the jar keeps of a try that brought no result."""
    if error is not None:
        return f"{seen}: {type(error).__name__}"
    several = seen in (Seen.TRY_LATER, Seen.NOT_ALLOWED)
    return f"{answer.status}" if answer is not None and several else f"{seen}"


def _unsettled(key: str, answer: Answer, after: float | None) -> OutcomeUnsettled:
    reference = reading.reference_of(answer)
    named = f" (reference {reference})" if reference else ""
    return OutcomeUnsettled(
        f"the server does not know whether this request took effect{named}: its operator settles it. Keep the key "
        "(error.key) and ask again later with the same request. A new key could do the operation twice",
        key=key,
        reference=reference,
        retry_after=after,
    )


def _refused(key: str, answer: Answer, url: str) -> RedirectRefused:
    location = reading.target_of(answer, url) or ""
    scheme, host, port = reading.origin(url)
    return RedirectRefused(
        f"{scheme}://{host}:{port} answered {answer.status} and names another address (error.location). A key goes "
        "only with 307 or 308, and only to the same origin; without its key a repeated request could run twice. If the "
        "address is right, send the request there yourself",
        key=key,
        location=location,
    )
