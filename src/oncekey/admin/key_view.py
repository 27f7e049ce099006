"""Reads all that the store has about one key."""

from __future__ import annotations

from oncekey.admin.encryption import SET_IT, response_not_opened
from oncekey.admin.outlook import Outlook, outlook
from oncekey.core.audit import AuditLine
from oncekey.core.jobs import DeferredTo, Job
from oncekey.core.record import Record
from oncekey.core.states import State
from oncekey.core.steps import Step, StepsOf
from oncekey.core.values import value
from oncekey.errors import KeyNotFound
from oncekey.stores.api import Outbox, Store
from oncekey.stores.kept_api import OPERATORS_LINE
from oncekey.telemetry.redaction import redact

OWN_KEYS = "oncekey:"
"""The audit of commands on the whole store has the scope "" and keys that begin so."""
SHOWN = 100
"""How many jobs, and how many lines of the history, are read."""


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
    return Sight(record, steps, jobs, history, _outlook(scope, key, record, not_opened), deferred_to, not_opened)


def _outlook(scope: str, key: str, record: Record | None, not_opened: str | None) -> Outlook:
    if record is None and scope == "" and key.startswith(OWN_KEYS):
        walk = "`oncekey keys re-encrypt`" if (scope, key) == OPERATORS_LINE else "a command on the whole store"
        return Outlook(False, None, None, f"nothing: this is no key of a client, but the audit of {walk}")
    found = outlook(record)
    if record is None or not_opened is None or found.runs:
        return found
    words = f"this cannot be told without the key: the answer is {not_opened.strip('()')}; {SET_IT}"
    return Outlook(False, None, None, words)


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
