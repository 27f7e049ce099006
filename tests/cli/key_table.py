"""A table of keys for the operator's commands: a real store of either kind, keys in any state, a way to age them."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from oncekey.cli import main
from oncekey.core.jobs import Conclusion, JobEnd
from oncekey.core.record import Record, Reservation, StoredResponse
from oncekey.core.states import Actor, Effects, Event, State
from oncekey.core.steps import Step, StepKind, StepState
from oncekey.core.swaps import swap
from oncekey.upkeep.reaper import Reaper
from tests.outbox.outbox_table import OutboxTable

RESPONSE = StoredResponse(201, (("content-type", "application/json"),), b'{"id":"pay_1","card":"4242"}')
LEASE = 60.0
RETENTION = 86_400.0
_TIMES = ("created_at", "lease_until", "expires_at", "finished_at", "reconcile_at")

Run = Callable[..., tuple[int, str, str]]


class KeyTable(OutboxTable):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._keys = count(1)

    def reserve(
        self,
        key: str,
        *,
        scope: str = "acme",
        operation: str = "POST /payments",
        effects: Effects = Effects.EXTERNAL,
        quarantine: float | None = None,
    ) -> Record:
        number = next(self._keys)
        fingerprint = number.to_bytes(32, "big")
        owner = f"owner-{number}"
        wanted = Reservation(
            scope, key, operation, fingerprint, 1, effects, owner, LEASE, RETENTION, quarantine_seconds=quarantine
        )
        (found,) = self.store.reserve([wanted])
        assert found.record is not None
        return found.record

    def move(self, record: Record, event: Event, by: Actor = Actor.OWNER, **what: Any) -> Record:
        (moved,) = self.store.swap([swap(record, event, by, **what)])
        assert moved is not None
        return moved

    def put(self, key: str, state: State, *, age: float = 0.0, **of: Any) -> Record:
        """A key in this state, that was created ``age`` seconds ago."""
        record = self.reserve(key, **of)
        match state:
            case State.PENDING:
                self.move(record, Event.DEFER)
            case State.COMPLETED:
                self.move(record, Event.COMPLETE, response=RESPONSE)
            case State.FAILED:
                self.move(record, Event.FAIL, response=replace(RESPONSE, status=402))
            case State.FAILED_RETRYABLE:
                self.move(record, Event.RELEASE, last_error="the provider was away")
            case State.UNKNOWN:
                self.move(record, Event.DOUBT, last_error="TimeoutError")
        self.age(record, age)
        return self.key(record)

    def dead_key(self, key: str, **of: Any) -> Record:
        """An unknown outcome after the reconciler's last try."""
        record = self.put(key, State.UNKNOWN, **of)
        return self.move(record, Event.POSTPONE, Actor.RECONCILER, last_error="the provider does not know it")

    def half_done(self, key: str, **of: Any) -> Record:
        """Retryable, with a step behind it."""
        record = self.reserve(key, effects=Effects.PHASED, **of)
        step = Step("charge", StepKind.EFFECT, StepState.DONE, True, b'{"id":"ch_1"}')
        record = self.move(record, Event.ADVANCE, recovery_point="charge", step=step)
        return self.move(record, Event.RELEASE, last_error="the provider was away")

    def expired_half_done(self, key: str, **of: Any) -> Record:
        """Unknown, with an effect that is done and none in doubt: its client did not retry before the key expired."""
        record = self.half_done(key, **of)
        self.age(record, RETENTION + 1)
        Reaper(self.store).run()
        return self.key(record)

    def dead_half_done(self, key: str, **of: Any) -> Record:
        """A half-done request after the resumer's second try, which was the last."""
        record = self.half_done(key, **of)
        for number in (1, 2):
            wanted = Reservation(
                *(record.scope, record.key, record.operation, record.fingerprint, record.fingerprint_version),
                *(record.effects, f"upkeep-{number}", 60.0, record.retention_seconds),
            )
            record = self.move(record, Event.RETRY, Actor.RESUMER, reservation=wanted)
            record = self.move(record, Event.RELEASE, Actor.OWNER, last_error="the resume function raised ValueError")
        return self.move(record, Event.POSTPONE, Actor.RESUMER, last_error=record.last_error)

    def dead_job(self, task: str = "send_receipt", *, of: Record | None = None, age: float = 0.0) -> str:
        job_id = self.add(task, {"to": "ada@example.com"}, of=of)
        (job,) = self.store.claim("a-worker", [task], 1, 30.0)
        settle = State.UNKNOWN if of else None
        end = Conclusion(job.id, "a-worker", JobEnd.DEAD, error="SMTPError: 550 no such user", settle=settle)
        assert self.store.conclude([end]) == [True]
        if age:
            self._back("idempotency_outbox", f"id = '{job_id}'", ("created_at", "run_at", "finished_at"), age)
        return job_id

    def step(self, record: Record, name: str, result: bytes = b'{"card":"4242"}') -> Record:
        step = Step(name, StepKind.EFFECT, StepState.DONE, True, result, f"down-{name}", f"ch_{name}")
        return self.move(record, Event.ADVANCE, recovery_point=name, step=step)

    def in_doubt(self, key: str, *effects: str, age: float = 0.0) -> Record:
        """A phased request that is unknown, with these effects called and not over."""
        record = self.step(self.reserve(key, effects=Effects.PHASED), "ride")
        for name in effects:
            step = Step(name, StepKind.EFFECT, StepState.INTENDED, False, None, f"down-{name}")
            record = self.move(record, Event.ADVANCE, effects=Effects.EXTERNAL, step=step)
        self.move(record, Event.DOUBT, last_error="TimeoutError")
        self.age(record, age)
        return self.key(record)

    def age(self, record: Record, seconds: float) -> None:
        if seconds:
            self._back("idempotency_keys", f"scope = '{record.scope}' AND key = '{record.key}'", _TIMES, seconds)

    def _back(self, table: str, where: str, columns: tuple[str, ...], seconds: float) -> None:
        less = f"{seconds}" if self.is_sqlite else f"interval '{seconds} seconds'"
        self.execute(f"UPDATE {table} SET {', '.join(f'{name} = {name} - {less}' for name in columns)} WHERE {where}")

    def there(self, key: str, scope: str = "acme") -> Record | None:
        (record,) = self.store.read([(scope, key)])
        return None if record is None else replace(record, now=0.0)

    def audit(self, key: str, scope: str = "acme") -> list[tuple[str, str, str, str | None, str]]:
        lines = self.store.audit(scope, key, 100)
        return [(line.who, line.event, line.before, line.after, line.why) for line in lines]


def runner(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``oncekey`` on this store, with ``said`` at standard input: exit code, output, errors."""
    monkeypatch.setenv("ONCEKEY_STORE", url)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: str, said: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["oncekey", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(said.encode())))
        with pytest.raises(SystemExit) as ended:
            main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run
