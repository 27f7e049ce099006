"""What ``resume`` does with the open intents of a jar, apart from sending them."""

from __future__ import annotations

from collections import Counter
from dataclasses import field

from oncekey.client.decisions import NOT_ALLOWED
from oncekey.client.jar import KeyJar, Row
from oncekey.client.reading import origin
from oncekey.core.values import Word, value
from oncekey.errors import ConfigurationError, IntentExpired, OutcomeUnsettled
from oncekey.telemetry.redaction import describe


class Ended(Word):
    """What became of one intent."""

    ANSWERED = "answered"
    OPEN = "open"
    UNSETTLED = "unsettled"
    EXPIRED = "expired"
    NOT_YET = "not yet"
    OTHER_SERVER = "other server"


@value
class Outcome:
    """One intent after ``resume``: its ``status`` if it has an answer, and a ``note`` if it has none."""

    name: str
    key: str = field(repr=False)
    ended: Ended
    status: int | None = None
    note: str = ""


class Silence:
    """Counts requests in a row that got no answer at all: after a few, the rest are not tried."""

    MOST = 3

    def __init__(self) -> None:
        self._in_a_row = 0

    def note(self, outcome: Outcome) -> None:
        silent = outcome.ended is Ended.OPEN and outcome.status is None
        self._in_a_row = self._in_a_row + 1 if silent else 0

    def skipped(self, name: str, key: str) -> Outcome | None:
        if self._in_a_row < self.MOST:
            return None
        note = f"not tried, since the server did not answer the last {self.MOST} requests"
        return Outcome(name, key, Ended.OPEN, note=note)


class Resumption:
    """The rows to finish, and what became of them."""

    def __init__(self, jar: KeyJar, base_url: str, name: str | None, *, again: bool, longest_wait: float) -> None:
        self._jar, self._origin, self._again = jar, origin(base_url), again
        self._longest_wait = longest_wait
        self.rows = jar.open_intents() if name is None else [_named(jar, name)]
        self.outcomes: list[Outcome] = []
        self.silence = Silence()

    def skipped(self, row: Row) -> Outcome | None:
        """Why this one is not sent now; None: send it."""
        now = self._jar.clock()
        end = self._jar.kept_until(row)
        if row.finished_at is not None:
            return Outcome(row.name, row.key, Ended.ANSWERED, row.status)
        if origin(row.request.url) != self._origin:
            scheme, host, port = origin(row.request.url)
            return Outcome(row.name, row.key, Ended.OTHER_SERVER, note=f"it goes to {scheme}://{host}:{port}")
        if end is not None and now >= end and not self._again:
            return Outcome(row.name, row.key, Ended.EXPIRED, note="the server may have forgotten its key")
        if (wait := self.wait(row)) > self._longest_wait:
            note = f"the server asked to come back in {wait:.0f} seconds"
            return Outcome(row.name, row.key, Ended.NOT_YET, note=note)
        return self.silence.skipped(row.name, row.key)

    def wait(self, row: Row) -> float:
        """The seconds until the time that the server last gave with Retry-After."""
        return max(0.0, (row.not_before or 0.0) - self._jar.clock())

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self.silence.note(outcome)

    def end(self) -> list[Outcome]:
        """What became of all of them. IntentExpired names those that were not sent because of their age."""
        expired = [outcome for outcome in self.outcomes if outcome.ended is Ended.EXPIRED]
        if expired:
            names = tuple([outcome.name for outcome in expired])
            shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
            raise IntentExpired(
                f"not sent, since the server may have forgotten their keys and would run them as new: {shown}. Look up "
                "at the server whether they happened; then forget them, or send them with again=True (--again)",
                key=expired[0].key,
                names=names,
                outcomes=self.outcomes,
            )
        return self.outcomes


def result_of(jar: KeyJar, row: Row, *, status: int | None = None, error: Exception | None = None) -> Outcome:
    """What became of an intent that was sent."""
    if isinstance(error, IntentExpired):
        return Outcome(row.name, row.key, Ended.EXPIRED, note="the server may have forgotten its key")
    if isinstance(error, OutcomeUnsettled):
        reference = f", reference {error.reference}" if error.reference else ""
        return Outcome(row.name, row.key, Ended.UNSETTLED, note=f"the server's operator must settle it{reference}")
    if error is not None:
        return Outcome(row.name, row.key, Ended.OPEN, note=describe(error))
    found = jar.read(row.name)
    if found is not None and found.finished_at is not None:
        return Outcome(row.name, row.key, Ended.ANSWERED, status)
    then = ", so correct the credentials first" if status in NOT_ALLOWED else ""
    return Outcome(row.name, row.key, Ended.OPEN, status, note=f"the server answered {status}{then}")


def counted(outcomes: list[Outcome]) -> dict[Ended, int]:
    return dict(Counter(outcome.ended for outcome in outcomes))


def _named(jar: KeyJar, name: str) -> Row:
    found = jar.read(name)
    if found is None:
        raise ConfigurationError(f"the jar has no intent '{name}' of this account")
    return found
