"""Compares what clients saw, what the provider did, and what the tables say with the promises I1 to I8.

To be asked when the fault is over and every lease as well: what then still is in progress, is stuck. Each function
checks one promise for one key, and yields what is wrong; ``check`` tells the run, with the whole history of the key.
``tests/faults/test_checker.py`` plants a violation of each.

What it takes I1 to say of an effect at a provider that does not honour keys: never two, whatever the key says. The
one residue that docs/guarantees.md states (an owner paused between its last lease check and the call) is for the fault
that pauses to name, in ``residue``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from oncekey.core.jobs import JobState
from oncekey.core.record import Record
from oncekey.core.states import FINAL, State
from tests.faults.app import KINDS, Kind
from tests.faults.campaign import Run
from tests.faults.clients import Attempt, Name
from tests.faults.evidence import Evidence

_SHOWN = 5
"""Violations of one promise that are printed with their history; the others are counted."""


class Case:
    """One key, and all that there is of it."""

    def __init__(self, evidence: Evidence, name: Name) -> None:
        self.evidence = evidence
        self.name = name
        self.attempts: list[Attempt] = evidence.history.attempts.get(name, [])
        self.ask = self.attempts[0].ask
        self.kind: Kind = KINDS[self.ask.kind]
        self.record: Record | None = evidence.tables.records.get(name)
        self.outcome = evidence.history.outcomes.get(name, "open")
        self.charges = Counter(call.what for call in evidence.calls_of.get(name, []) if call.new)
        self.rows = Counter(row.what for row in evidence.rows_of.get(name, []))
        self.seen = [attempt for attempt in self.attempts if attempt.ask == self.ask and attempt.final]
        """Final answers to the request that came first under this key."""

    @property
    def state(self) -> State | None:
        return self.record.state if self.record else None

    @property
    def wanted_rows(self) -> tuple[str, ...]:
        return self.kind.rows if self.evidence.has_rows else ()

    @property
    def settled(self) -> bool:
        """By the reconciler, from the ledger: what comes after the charge was never run."""
        return bool(self.evidence.tables.audit.get(self.name))


def one_effect(case: Case) -> Iterator[str]:
    """I1: at most one effect; exactly one where the client was told that it is done; none where nothing is."""
    for what, count in (case.charges + case.rows).items():
        if count > 1:
            yield f"'{what}' happened {count} times"
    if case.state is State.COMPLETED:
        if case.kind.charges and not case.charges["charge"]:
            yield "completed, and never charged"
        for what in case.wanted_rows:
            if not case.rows[what] and not (case.settled and what == "closed"):
                yield f"completed, and row '{what}' is missing"
    if case.state in (None, State.FAILED_RETRYABLE) and case.kind.effects == "transactional" and case.rows:
        yield f"rolled back, and its rows are there: {dict(case.rows)}"
    if case.record is None and (case.charges or case.rows):
        yield "it had an effect, and there is no record of it"


def same_answer(case: Case) -> Iterator[str]:
    """I2: an answer that was seen stays: every later one is the same, and it is what is stored."""
    answers = {(attempt.status, attempt.body) for attempt in case.seen}
    if len(answers) > 1:
        yield f"{len(answers)} different answers"
    if not answers:
        return
    if case.record is None or case.record.state not in FINAL or case.record.response is None:
        yield f"answered, and the key is {case.state or 'gone'}"
    elif (case.record.response.status, case.record.response.body) not in answers:
        yield "what is stored is not what was answered"
    first = case.seen[0]
    for attempt in case.attempts[first.number :]:
        if (
            attempt.ask == case.ask
            and not attempt.final
            and attempt.status not in (None, 503)
            and attempt.sent_at > (first.answered_at or 0)
        ):
            yield f"answered, and then {attempt.status} in attempt {attempt.number}"


def owner_only(case: Case) -> Iterator[str]:
    """I3: what is stored was written by the attempt that has the key, and so was every row of its transaction."""
    record = case.record
    if record is None:
        return
    if record.state is State.COMPLETED and record.response is not None and record.response.body:
        wrote = _told(record.response.body).get("attempt", record.attempt)
        if wrote != record.attempt:
            yield f"attempt {wrote} wrote the response, and the key is attempt {record.attempt}'s"
    if case.kind.effects == "transactional" and record.state in (State.COMPLETED, State.PENDING):
        for row in case.evidence.rows_of.get(case.name, []):
            if row.attempt != record.attempt:
                yield f"attempt {row.attempt} wrote row '{row.what}', and the key is attempt {record.attempt}'s"


def not_stuck(case: Case) -> Iterator[str]:
    """I4: final, retryable, or unknown and on the reconciler's list; and no client waited past its patience."""
    record = case.record
    if case.outcome == "stuck":
        last = case.attempts[-1]
        yield f"the client gave up after {last.number} attempts; the last one: {last.error or last.status}"
    if record is None:
        return
    if record.state is State.IN_PROGRESS:
        yield "in progress, and no process works on it"
    if record.state is State.UNKNOWN and record.reconcile_at is None and not record.reconcile_tries:
        yield "unknown, and not on the reconciler's list"
    if record.state is State.PENDING:
        jobs = [job for job in case.evidence.jobs_of.get(case.name, []) if job.settles]
        if not any(job.state in (JobState.READY, JobState.RUNNING) for job in jobs):
            yield "pending, and no job will settle it"


def own_answer(case: Case) -> Iterator[str]:
    """I5: an answer tells of the request that was sent; another request under the same key is a mismatch."""
    for attempt in case.attempts:
        if attempt.status is None or attempt.status >= 300:
            continue
        told = _told(attempt.body)
        if told.get("key", attempt.ask.key) != attempt.ask.key:
            yield f"attempt {attempt.number} was told of key {told['key']}"
        if told.get("cents", attempt.ask.cents) != attempt.ask.cents:
            yield f"attempt {attempt.number} asked for {attempt.ask.cents} and was told {told['cents']}"
        if attempt.ask != case.ask and case.seen:
            yield f"attempt {attempt.number} is another request, and got {attempt.status}"


def own_tenant(case: Case) -> Iterator[str]:
    """I6: no tenant learns of another tenant's request, or is kept waiting by it."""
    first, others = case.attempts[0], case.attempts[1:]
    if first.status in (409, 422) and first.answered_at is not None:
        asked = any(other.sent_at < first.answered_at for other in others)
        ran = any(run.at < first.answered_at for run in case.evidence.runs_of.get(case.name, []))
        if not asked and not ran:
            yield f"no client of {first.ask.scope} had used the key before, and the first request got {first.status}"
    for attempt in case.attempts:
        if attempt.status is not None and attempt.status < 300:
            told = _told(attempt.body)
            if told.get("scope", attempt.ask.scope) != attempt.ask.scope:
                yield f"attempt {attempt.number} of {attempt.ask.scope} was told of {told['scope']}"


def never_open(case: Case) -> Iterator[str]:
    """I7: a handler runs only for an attempt that the store has written down, and once for each."""
    runs = case.evidence.runs_of.get(case.name, [])
    for attempt, count in Counter(run.attempt for run in runs).items():
        if count > 1:
            yield f"the handler ran {count} times for attempt {attempt}"
    if runs and case.record is None:
        yield "the handler ran, and the store has no record"
    elif case.record is not None and (late := [run.attempt for run in runs if run.attempt > case.record.attempt]):
        yield f"the handler ran for attempts {late}, and the store knows of {case.record.attempt}"


def delivered(case: Case) -> Iterator[str]:
    """I8: what was enqueued with the write is delivered, is on its way, or is a dead letter with its reason."""
    jobs = case.evidence.jobs_of.get(case.name, [])
    if case.kind.receipt and case.evidence.has_rows and case.rows["written"] and not jobs:
        yield "committed, and its job is not in the outbox"
    delivered = {call.downstream_key for call in case.evidence.calls_of.get(case.name, [])}
    for job in jobs:
        if job.state is JobState.DONE and job.downstream_key not in delivered:
            yield f"job '{job.task}' is done, and the provider never heard of it"
        if job.state is JobState.DEAD and not job.last_error:
            yield f"job '{job.task}' is a dead letter without a reason"
        if job.state is JobState.CANCELLED:
            yield f"job '{job.task}' was cancelled, and no operator asked for it"


PROMISES: Mapping[str, Callable[[Case], Iterator[str]]] = {
    "I1": one_effect,
    "I2": same_answer,
    "I3": owner_only,
    "I4": not_stuck,
    "I5": own_answer,
    "I6": own_tenant,
    "I7": never_open,
    "I8": delivered,
}


def check(
    run: Run,
    evidence: Evidence,
    *,
    promises: Collection[str] = tuple(PROMISES),
    residue: Collection[Name] = (),
    drained: bool = False,
) -> None:
    """Tell the run of every violation. ``residue``: keys for which two effects are the stated residue. ``drained``:
    workers ran to the end, and no job may be left."""
    found: Counter[str] = Counter()

    def tell(promise: str, what: str, name: Name) -> None:
        found[promise] += 1
        run.violated(promise, f"{what}\n{evidence.text(name)}" if found[promise] <= _SHOWN else f"{what}: {name}")

    for name in evidence.history.attempts:
        case = Case(evidence, name)
        for promise in promises:
            if promise == "I1" and name in residue:
                continue
            for what in PROMISES[promise](case):
                tell(promise, what, name)
    for name in evidence.tables.records.keys() | evidence.calls_of.keys() | evidence.rows_of.keys():
        if name not in evidence.history.attempts:
            tell("I1", "no client asked for it", name)
    if drained:
        for job in evidence.tables.jobs:
            if job.state in (JobState.READY, JobState.RUNNING):
                tell("I8", f"job '{job.task}' is still {job.state}", (job.scope, job.key))


def check_doubt(run: Run, evidence: Evidence, name: Name, *, doubtful: bool, what: str) -> None:
    """Whether the key came to be unknown to its clients exactly where the fault (``what``) left it in doubt."""
    outcome, wanted = evidence.history.outcomes[name], "unknown" if doubtful else "final"
    if outcome not in (wanted, "stuck"):  # stuck: that is told already
        promise = "I1" if doubtful else "I4"
        run.violated(promise, f"{what}: {outcome}, and it should be {wanted}\n{evidence.text(name)}")


def _told(body: bytes) -> dict[str, Any]:
    try:
        told = json.loads(body)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
