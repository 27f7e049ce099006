"""Reads all that the store has about one key."""

from __future__ import annotations

from collections.abc import Sequence

from oncekey.admin.encryption import response_not_opened, under_key_of
from oncekey.admin.outlook import NO_KEY, Outlook, outlook
from oncekey.core.audit import AuditLine
from oncekey.core.jobs import DeferredTo, Job
from oncekey.core.record import Record
from oncekey.core.states import Event, State
from oncekey.core.steps import Step, StepsOf
from oncekey.core.values import value
from oncekey.errors import KeyNotFound
from oncekey.stores.api import Outbox, Store
from oncekey.stores.cache.client import Identified
from oncekey.stores.kept_api import OPERATORS_LINE
from oncekey.telemetry.redaction import redact

OWN_KEYS = "oncekey:"
"""The audit of commands on the whole store has the scope "" and keys that begin so."""
SHOWN = 100
"""How many jobs, and how many lines of the history, are read."""
MAY_BE_CACHED = "; an app with cache= may replay the forgotten answer for up to its cache_ttl"


@value
class Sight:
    record: Record | None
    """None: the row was deleted, and only its jobs and history are left."""
    steps: list[Step]
    jobs: list[Job]
    history: list[AuditLine]
    """Newest first."""
    outlook: Outlook
    deferred_to: Job | None = None
    """The job that an unknown key was deferred to: its request is done, and is not run again."""
    not_opened: str | None = None
    """The words in the place of an encrypted response that this process cannot open."""


def look(store: Store, scope: str, key: str) -> Sight:
    """Look up a key; KeyNotFound if the store has nothing about it."""
    (record,) = store.read([(scope, key)])
    (steps,) = store.steps([StepsOf(scope, key)])
    jobs = store.jobs_of(scope, key, SHOWN) if isinstance(store, Outbox) else []
    history = store.audit(scope, key, SHOWN)
    if record is None and not jobs and not history:
        raise not_found(key)
    deferred_to = None
    if record is not None and record.state is State.UNKNOWN and isinstance(store, Outbox):
        deferred_to = store.deferred_to(DeferredTo(scope, key, record.owner))
    not_opened = response_not_opened(store, record)
    seen = _outlook(store, scope, key, record, steps, history, not_opened)
    return Sight(record, steps, jobs, history, seen, deferred_to, not_opened)


def _outlook(
    store: Store,
    scope: str,
    key: str,
    record: Record | None,
    steps: Sequence[Step],
    history: Sequence[AuditLine],
    not_opened: str | None,
) -> Outlook:
    if record is not None:
        return outlook(record, steps, under_key_of(store), not_opened)
    if scope == "" and key.startswith(OWN_KEYS):
        walk = "`oncekey keys re-encrypt`" if (scope, key) == OPERATORS_LINE else "a command on the whole store"
        return Outlook(False, None, None, f"nothing: this is no key of a client, but the audit of {walk}")
    forgotten = bool(history) and history[0].event == Event.FORGET and isinstance(store, Identified)
    return Outlook(True, None, None, f"{NO_KEY}{MAY_BE_CACHED if forgotten else ''}")


def look_at(store: Store, scope: str, key: str) -> Record:
    """The row alone; KeyNotFound if there is none."""
    (record,) = store.read([(scope, key)])
    if record is None:
        raise not_found(key)
    return record


def not_found(key: str) -> KeyNotFound:
    return KeyNotFound(
        f"there is no key {redact(key)} in this scope: it was never seen, has expired, or belongs to another scope; "
        "give its scope with --scope, or look with `oncekey keys list --reveal`"
    )
