"""The pump: the one thread of a worker that talks to the store. It claims, renews and concludes, in batches.

Tasks run elsewhere and give their conclusions to the pump. While the pump commits one batch, the next one gathers: the
busier a worker is, the more jobs share a commit. If the store can (``SharedTurn``), conclusions and the next claim are
one statement and one commit. After quick attempts the next jobs are claimed ahead of free places (``places.py``), so
that tasks run while the store commits. The pump is a thread and not a task of the event loop, so that a task that
blocks the loop does not make all jobs of the worker lose their leases.

Every claim has an owner token of its own. A worker that was paused past its leases may claim its own jobs again, and
the store must be able to tell the two attempts apart.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Literal

from oncekey.core.jobs import Conclusion, Job, JobEnd, JobState
from oncekey.engine.process import Owners
from oncekey.errors import OperatorError, StoreError, StoreUnavailable
from oncekey.outbox.attempts import Attempt, Counts
from oncekey.outbox.tasks import Task, buried
from oncekey.stores.api import Outbox, SharedTurn
from oncekey.telemetry import events
from oncekey.telemetry.emitter import Emitter
from oncekey.telemetry.redaction import describe

_log = logging.getLogger("oncekey")

Until = Literal["stopped", "drained", "once"]

LOOKS_PER_LEASE = 12
LONGEST_PAUSE_SECONDS = 10.0
"""The longest pause between two tries while the store is down."""
AHEAD = 3
"""How many jobs are claimed ahead for each place. While the store commits one batch, tasks run the next. With 3, each
batch is twice the number of places, so that twice as many jobs share the fixed cost of a turn."""
QUICK_SECONDS = 0.05
"""After attempts that were all shorter than this, the pump claims the next jobs ahead of free places."""
_RECOVERED = 1_000


class Pump:
    """``begin``, ``lose`` and ``over`` are called in the pump's thread. They schedule a call in the event loop."""

    def __init__(
        self,
        store: Outbox,
        tasks: Mapping[str, Task],
        *,
        concurrency: int,
        lease: float,
        poll: float,
        until: Until,
        emitter: Emitter,
        begin: Callable[[Sequence[Attempt]], None],
        lose: Callable[[Attempt], None],
        over: Callable[[], None],
    ) -> None:
        self.counts = Counts()
        self._store = store
        self._shared_turn = store if isinstance(store, SharedTurn) else None
        self._tasks = tasks
        self._names = list(tasks)
        self._concurrency = concurrency
        # A claim counts as an attempt. A task with one attempt would lose it if the worker died before it began.
        self._most_ahead = AHEAD * concurrency if all(task.max_attempts > 1 for task in tasks.values()) else 0
        self._ahead = 0
        self._lease = lease
        self._poll = poll
        self._until = until
        self._emitter = emitter
        self._begin, self._lose, self._tell_over = begin, lose, over
        self._owners = Owners()
        self._live: dict[str, Attempt] = {}  # by owner and id; only the pump's thread touches it
        self._ended: deque[Attempt] = deque()
        self._left: deque[Attempt] = deque()
        self._notes: deque[tuple[Attempt, str, Future[bool]]] = deque()
        self._unsaved: list[Attempt] = []
        self._unheard: set[str] = set()
        self._doubtful = False
        self._claim_at = 0.0
        self._look_at = 0.0
        self._failures = 0
        self._claims = True
        self._ending = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="oncekey-outbox", daemon=True)

    # -- called by the worker, from any thread ---------------------------------------------------------------------

    def start(self) -> None:
        self._wake.set()
        self._thread.start()

    def conclude(self, attempt: Attempt, conclusion: Conclusion | None) -> None:
        """An attempt ended. ``conclusion`` is None if its lease was lost: then nothing is written."""
        attempt.conclusion = conclusion
        self._ended.append(attempt)
        if not self._wake.is_set():  # if it is, the pump clears it before it looks at what ended
            self._wake.set()

    def note(self, attempt: Attempt, provider_id: str) -> Future[bool]:
        future: Future[bool] = Future()
        self._notes.append((attempt, provider_id, future))
        self._wake.set()
        return future

    def stop(self) -> None:
        """Claim no more jobs. The pump ends when the last attempt is concluded."""
        self._claims = False
        self._wake.set()

    def abandon(self, attempts: Sequence[Attempt]) -> None:
        """Stop waiting for these attempts. Their threads cannot be stopped, and their leases run out."""
        self._left.extend(attempts)
        self._wake.set()

    def end(self) -> None:
        """End now, also if some conclusions are not stored."""
        self._ending = True
        self._wake.set()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._finished():
            self._wake.wait(max(0.0, self._next_turn() - time.monotonic()))
            self._wake.clear()
            try:
                self._turn()
            except OperatorError as error:
                self._trouble(describe(error))
            except Exception:
                _log.exception("the outbox worker failed unexpectedly; it goes on")
                self._trouble("")
            else:
                self._failures = 0
        self._store.disconnect()
        self._tell_over()

    def _turn(self) -> None:
        self._save_notes()
        self._gather_ended()
        if self._unheard:
            self._give_back_unheard()
        if time.monotonic() >= self._look_at:
            self._look()
        wanted = self._wanted()
        if wanted and self._unsaved and self._shared_turn is not None and not self._doubtful:
            self._save_and_claim(self._shared_turn, wanted)
            return
        if self._unsaved:
            self._save_ended()
        if wanted := self._wanted():
            self._claim(wanted)

    def _finished(self) -> bool:
        return self._ending or not (self._claims or self._live)

    def _next_turn(self) -> float:
        if self._unsaved or self._unheard:  # after a failure; _trouble has waited already
            return time.monotonic()
        at = self._look_at if self._live else float("inf")
        if self._claims and len(self._live) < self._concurrency:
            at = min(at, self._claim_at)
        return min(at, time.monotonic() + self._lease)

    def _trouble(self, words: str) -> None:
        """Wait, longer after each failure. Tasks that end do not shorten the wait. Leases are checked meanwhile."""
        self._failures += 1
        if self._failures == 1 and words:
            self._emitter.emit(events.StoreFailed("outbox", words))
        pause = min(LONGEST_PAUSE_SECONDS, 0.1 * 2.0 ** min(self._failures, 10)) * random.uniform(0.5, 1.0)
        end = time.monotonic() + pause
        while not self._finished() and (left := end - time.monotonic()) > 0:
            self._expire()
            time.sleep(min(left, 0.05))

    # -- claims ----------------------------------------------------------------------------------------------------

    def _wanted(self) -> int:
        """How many jobs to claim now. An attempt that has ended does not run any more, so its place is free."""
        if not self._claims or time.monotonic() < self._claim_at:
            return 0
        return max(0, self._concurrency + self._ahead - len(self._live) + len(self._unsaved))

    def _claim(self, wanted: int) -> None:
        owner = self._owners.new()
        asked_at = time.monotonic()
        self._unheard.add(owner)  # until the answer: a claim whose answer is lost may have happened
        jobs = self._store.claim(owner, self._names, wanted, self._lease)
        self._unheard.discard(owner)
        self._claimed(jobs, owner, asked_at, wanted)

    def _save_and_claim(self, store: SharedTurn, wanted: int) -> None:
        """Conclusions and a claim in one commit. After an error, ``_save_ended`` and ``_give_back_unheard`` find out
        what of it is stored."""
        owner = self._owners.new()
        asked_at = time.monotonic()
        self._unheard.add(owner)
        self._doubtful = True
        ended = [each.conclusion for each in self._unsaved if each.conclusion]
        try:
            answers, jobs = store.turn(ended, owner, self._names, wanted, self._lease)
        except StoreUnavailable:
            raise
        except StoreError:
            # The store refused one of the rows, so it committed nothing.
            self._unheard.discard(owner)
            self._doubtful = False
            self._save_ended()
            return
        self._unheard.discard(owner)
        self._doubtful = False
        self._all_saved(answers)
        self._claimed(jobs, owner, asked_at, wanted, sees_all=False)

    def _claimed(self, jobs: Sequence[Job], owner: str, asked_at: float, wanted: int, *, sees_all: bool = True) -> None:
        fresh = []
        for job in jobs:
            attempt = Attempt(job, self._tasks[job.task], owner, asked_at, self._lease)
            self._live[owner + job.id] = attempt
            if job.attempt > attempt.task.max_attempts:
                attempt.failure = f"all {attempt.task.max_attempts} attempts are used up, and the last one never ended"
                self.conclude(attempt, buried(job, owner, attempt.failure))
            else:
                fresh.append(attempt)
        if jobs:
            self.counts.lag_seconds = jobs[-1].lag
        if fresh:
            self._begin(fresh)
        if len(jobs) < wanted:  # nothing more is due at the moment
            self._claim_at = time.monotonic() + self._poll * random.uniform(0.75, 1.25)
        if self._until == "once":
            self._claims = False
        elif self._until == "drained" and not jobs and not self._live:
            # A claim in the commit of ends takes none of the ended jobs, and one that failed may be due again at once.
            self._claims, self._claim_at = not sees_all, 0.0

    def _give_back_unheard(self) -> None:
        """Release jobs of claims whose answer was lost, so that they need not wait for the end of their leases."""
        running = self._store.jobs(JobState.RUNNING, _RECOVERED)
        mine = [job for job in running if job.owner in self._unheard]
        if mine:
            self._store.conclude([Conclusion(job.id, job.owner or "", JobEnd.RELEASE) for job in mine])
        self._unheard.clear()

    # -- leases ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Renew the leases that are due, one statement per claim. A lease that the store does not renew is lost."""
        now = time.monotonic()
        due: dict[str, list[Attempt]] = {}
        for attempt in self._live.values():
            if attempt.renews and not attempt.lost and attempt.renew_at <= now:
                due.setdefault(attempt.owner, []).append(attempt)
        for owner, attempts in due.items():
            asked_at = time.monotonic()
            kept = set(self._store.renew_jobs(owner, [attempt.job.id for attempt in attempts], self._lease))
            for attempt in attempts:
                if attempt.job.id in kept:
                    attempt.leased(asked_at, self._lease)
                else:
                    attempt.lost = True
                    self._lose(attempt)
        self._expire()
        self._look_at = now + self._lease / LOOKS_PER_LEASE

    def _expire(self) -> None:
        """Stop attempts whose lease is over because the store did not answer for a whole lease."""
        now = time.monotonic()
        for attempt in self._live.values():
            if attempt.renews and not attempt.expired and not attempt.lost and attempt.leased_until <= now:
                attempt.expired = True
                self._lose(attempt)

    # -- ends ------------------------------------------------------------------------------------------------------

    def _save_notes(self) -> None:
        while self._notes:
            attempt, provider_id, future = self._notes.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                kept = not attempt.lost and self._store.note_provider(attempt.job.id, attempt.owner, provider_id)
            except Exception as error:
                future.set_exception(error)  # the task decides whether it can go on without it
            else:
                future.set_result(kept)

    def _gather_ended(self) -> None:
        while self._left:
            self._forget(self._left.popleft())
        if self._ended:
            self._ahead = self._most_ahead
        while self._ended:
            attempt = self._ended.popleft()
            if attempt.seconds > QUICK_SECONDS:
                self._ahead = 0
            if attempt.conclusion is None or attempt.lost:
                self._saved(attempt, None)
            else:
                self._unsaved.append(attempt)

    def _save_ended(self) -> None:
        doubtful, self._doubtful = self._doubtful, True
        try:
            answers = self._store.conclude([each.conclusion for each in self._unsaved if each.conclusion])
        except StoreUnavailable:
            raise
        except StoreError:
            answers = [self._conclude_alone(attempt) for attempt in self._unsaved]
        pairs = zip(self._unsaved, answers, strict=True)
        mine = [answer or (doubtful and self._was_mine(attempt)) for attempt, answer in pairs]
        self._doubtful = False  # only now: after an error they stay unsaved, and may be stored or not
        self._all_saved(mine)

    def _all_saved(self, mine: Sequence[bool]) -> None:
        saved, self._unsaved = self._unsaved, []
        for attempt, is_mine in zip(saved, mine, strict=True):
            self._saved(attempt, attempt.conclusion if is_mine else None)

    def _conclude_alone(self, attempt: Attempt) -> bool:
        """One bad row must not block the others (hazard 25). A job with a refused conclusion is a dead letter."""
        conclusion = attempt.conclusion
        assert conclusion is not None  # noqa: S101 - every unsaved attempt has one
        try:
            return self._store.conclude([conclusion])[0]
        except StoreUnavailable:
            raise
        except StoreError as error:
            attempt.failure = f"the store refused the result of the task: {describe(error)}"
            attempt.conclusion = buried(attempt.job, attempt.owner, attempt.failure)
        return self._store.conclude([attempt.conclusion])[0]

    def _was_mine(self, attempt: Attempt) -> bool:
        """After a lost answer: whether the row is as this attempt wanted it (hazard 9)."""
        row, wanted = self._store.job(attempt.job.id), attempt.conclusion
        return bool(row and wanted and row.owner == attempt.owner and row.state is wanted.end.target)

    def _saved(self, attempt: Attempt, conclusion: Conclusion | None) -> None:
        self._forget(attempt)
        self.counts.report(attempt, conclusion, self._emitter)

    def _forget(self, attempt: Attempt) -> None:
        self._live.pop(self._key(attempt), None)
        if self._until == "drained" and not self._live:
            self._claim_at = 0.0  # the next claim shows whether more jobs are due

    @staticmethod
    def _key(attempt: Attempt) -> str:
        return attempt.owner + attempt.job.id
