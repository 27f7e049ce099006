"""The checks of ``oncekey doctor``: first the store's setup, then what its rows say about upkeep and workers."""

from __future__ import annotations

from collections.abc import Callable

from oncekey.admin.encryption_check import examine_encryption
from oncekey.core.diagnosis import Diagnosis, Level
from oncekey.core.health import COUNTED, WAITING_SECONDS
from oncekey.core.states import State
from oncekey.errors import SchemaError, StoreError
from oncekey.stores.api import Outbox, Store
from oncekey.telemetry.redaction import describe, redact
from oncekey.upkeep import health, waiting
from oncekey.upkeep.health import Health
from oncekey.upkeep.unasked import advice, no_resolver

RUNNING_SECONDS = 3_600.0
"""A handler that takes longer than this hangs, or should be a job of the outbox."""
ASKED_SECONDS = 60.0
"""How long an unknown outcome may be due before upkeep has asked a resolver. Upkeep looks every few seconds."""
WITH_THE_APP = "run `oncekey upkeep MODULE:ONCE` with the app (or Upkeep inside it), and look at its log"
NAMED = 3
"""How many such keys the message names."""


def examine(store: Store) -> list[Diagnosis]:
    """One line for each check. A check that fails to run is a line too, never an exception."""
    found = _ask(store.diagnose)
    if any(line.check in ("store", "schema") and line.level is Level.FAIL for line in found):
        return found  # without a store or its tables there are no rows to check
    return found + _ask(lambda: _of_the_rows(store))


def _ask(asked: Callable[[], list[Diagnosis]]) -> list[Diagnosis]:
    try:
        return asked()
    except (StoreError, SchemaError) as error:
        return [Diagnosis("store", Level.FAIL, str(error), "docs/stores.md says what each store needs")]
    except Exception as error:  # noqa: BLE001 - of a driver, and its store has no words for it
        advice = "correct the options of the URL; if they are right, report this as a bug of oncekey"
        return [Diagnosis("store", Level.FAIL, f"its driver raised {describe(error)}", advice)]


def _of_the_rows(store: Store) -> list[Diagnosis]:
    seen = health.look(store)
    found = [_upkeep(seen), _running(store), _unknown(seen), _resolvers(seen), _half_done(seen), _dead_keys(seen)]
    found = [*examine_encryption(store), *found]
    return [*found, _outbox(seen), _dead_jobs(seen)] if isinstance(store, Outbox) else found


def _upkeep(seen: Health) -> Diagnosis:
    """Whether upkeep runs, on any host. It writes no heartbeat, so only overdue rows show that it does not."""
    leases, expired = seen.keys.lease_over_seconds, seen.expired_over_seconds
    advice = "run `oncekey upkeep` (or Upkeep inside the app), and look at its log"
    if leases > health.UNDONE_SECONDS:
        found = f"a lease has been over for {span(leases)} and was not swept: upkeep does not run, or fails"
        return Diagnosis("upkeep", Level.WARN, found, advice)
    if seen.reconcile_over_seconds > ASKED_SECONDS:
        found = f"an unknown outcome has been due for {span(seen.reconcile_over_seconds)} and no resolver was asked: "
        return Diagnosis("upkeep", Level.WARN, f"{found}no upkeep of the app runs, or it fails", WITH_THE_APP)
    if expired > health.REAPED_SECONDS:
        found = f"a key expired {span(expired)} ago and is still there: upkeep does not run, or does not keep up"
        return Diagnosis("upkeep", Level.WARN, found, advice)
    return Diagnosis("upkeep", Level.OK, "nothing is overdue: it runs, or there is nothing to do")


def _running(store: Store) -> Diagnosis:
    """Handlers that do not end. Their leases are renewed, so the sweeper does not see their keys."""
    old = store.listing(state=State.IN_PROGRESS, older_than=RUNNING_SECONDS, limit=COUNTED)
    held = [record for record in old if not record.lease_over]  # ``_upkeep`` reports the others
    if not held:
        return Diagnosis("running", Level.OK, f"no key has been in progress for over {span(RUNNING_SECONDS)}")
    held.sort(key=lambda record: record.created_at)
    named = ", ".join(f"{record.operation} {redact(record.key)}" for record in held[:NAMED])
    return Diagnosis(
        "running",
        Level.WARN,
        f"{counted(len(held), 'key')} in progress for over {span(RUNNING_SECONDS)}, the oldest for "
        f"{span(held[0].now - held[0].created_at)}; their clients get 409: {named}{', …' if len(held) > NAMED else ''}",
        "look for handlers that hang (a call without a time-out), and restart their processes; then give the route "
        "Policy(max_run=…), which ends such a handler",
    )


def _unknown(seen: Health) -> Diagnosis:
    number, oldest = seen.keys.counts[State.UNKNOWN], seen.keys.oldest_unknown_seconds
    if number == 0:
        return Diagnosis("unknown", Level.OK, "no key has an unknown outcome")
    found = f"{counted(number, 'key')} with an unknown outcome, the oldest {span(oldest)} old; their clients get 409"
    if seen.reconcile_over_seconds > ASKED_SECONDS:
        found += f"; one should have been asked about {span(seen.reconcile_over_seconds)} ago"
    return Diagnosis(
        "unknown",
        Level.WARN,
        found,
        "run `oncekey upkeep MODULE:ONCE` with a resolver for the operation, or settle them by hand: "
        "`oncekey keys list --state unknown`, `oncekey keys resolve`",
    )


def _resolvers(seen: Health) -> Diagnosis:
    """What the app's own upkeep has written into the rows: this command does not know the app."""
    missing = [each for each in seen.keys.unknowns if each.unasked]
    if not missing:
        return Diagnosis("resolvers", Level.OK, "no unknown key waits for a resolver that is not registered")
    found = "; ".join(no_resolver(each.operation, each.unasked) for each in missing[:NAMED])
    more = f"; and {len(missing) - NAMED} more operations" if len(missing) > NAMED else ""
    return Diagnosis("resolvers", Level.WARN, found + more, advice(missing[0].operation))


def _half_done(seen: Health) -> Diagnosis:
    """Half-done keys that neither their clients nor upkeep go on with. At the end of their ttl they are unknown."""
    found = seen.keys.half_done
    if not found:
        return Diagnosis("half done", Level.OK, f"no key is half done and waits for over {span(WAITING_SECONDS)}")
    named = "; ".join(waiting.half_done(each) for each in found[:NAMED])
    more = f"; and {len(found) - NAMED} more operations" if len(found) > NAMED else ""
    oldest = span(max(each.oldest_seconds for each in found))
    words = f"{named}{more}; the oldest waits for {oldest}"
    return Diagnosis("half done", Level.WARN, words, waiting.advice(found[0].operation))


def _dead_keys(seen: Health) -> Diagnosis:
    if seen.keys.dead == 0:
        return Diagnosis("dead keys", Level.OK, "none")
    return Diagnosis(
        "dead keys",
        Level.WARN,
        f"{counted(seen.keys.dead, 'key')} that upkeep leaves alone after the last try: unknown or half done",
        "see `oncekey dead-letters list` and `oncekey keys show`, then `oncekey keys resolve` or `oncekey dead-letters "
        "retry`; where a job left the key unknown, retry the job",
    )


def _outbox(seen: Health) -> Diagnosis:
    lag = seen.outbox.lag_seconds
    found = f"{counted(seen.outbox.ready, 'job')} due, lag {span(lag)}"
    if lag <= health.LAG_SECONDS:
        return Diagnosis("outbox", Level.OK, found)
    return Diagnosis(
        "outbox",
        Level.WARN,
        f"{found}: no worker runs that task, or too few do",
        "run `oncekey worker MODULE:WORKER` with the task registered, or more of them",
    )


def _dead_jobs(seen: Health) -> Diagnosis:
    if seen.outbox.dead == 0:
        return Diagnosis("dead jobs", Level.OK, "none")
    found = f"{counted(seen.outbox.dead, 'job')} given up"
    return Diagnosis(
        "dead jobs",
        Level.WARN,
        found,
        "see `oncekey dead-letters list`, ask the provider what each has done, then retry or discard it",
    )


def counted(number: int, what: str) -> str:
    """A number from a health check, which stops counting at COUNTED."""
    if number >= COUNTED:
        return f"{COUNTED:,} {what}s or more"
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def span(seconds: float) -> str:
    """A length of time in its largest unit and the next: ``3 d 4 h``, ``2 h``, ``12 min 5 s``, ``45 s``."""
    left = round(max(0.0, seconds))
    counts = []
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        counts.append((left // size, unit))
        left %= size
    first = next((at for at, (count, _) in enumerate(counts) if count), len(counts) - 1)
    shown = counts[first : first + 2]
    return " ".join(f"{count} {unit}" for count, unit in shown if count) or "0 s"
