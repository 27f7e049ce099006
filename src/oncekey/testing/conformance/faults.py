"""The part of the store suite about threads, processes, forks and a process that is killed.

A test asks ``Capabilities`` whether it applies. It never asks which store it is.
"""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from oncekey.core.record import Reservation
from oncekey.core.states import Actor, Event, State
from oncekey.core.steps import Step, StepKind, StepsOf, StepState
from oncekey.core.swaps import swap
from oncekey.stores.api import Store
from oncekey.testing.company import Child, Signal, in_threads
from oncekey.testing.conformance.base import RESPONSE, SuiteBase, one, stored

_THREADS = 16
_TRIES = 1000


def _needs_processes(store: Store) -> None:
    if not store.capabilities.shared:
        pytest.skip("this store is of one process")
    if not hasattr(os, "fork"):
        pytest.skip("this system does not fork")


def _owners(store: Store, batch: list[Reservation]) -> list[str]:
    """The owners of these keys. In a race a store may answer "busy". It may not give a key to two callers."""
    found = store.reserve(batch)
    for _ in range(_TRIES):
        if not any(answer.busy for answer in found):
            break
        found = store.reserve(batch)
    return [one(answer.record).owner for answer in found]


class FaultSuite(SuiteBase):
    # threads

    def test_of_many_threads_one_owns_the_key(self, store: Store) -> None:
        """16 threads reserve 20 keys at once: for each key all threads see the same owner, and it is one of theirs."""
        wanted = [[self.reservation(f"key-{key}") for key in range(20)] for _ in range(_THREADS)]

        def reserve(number: int) -> list[str]:
            return [owner for w in wanted[number] for owner in _owners(store, [w])]

        seen = in_threads(store, reserve, _THREADS)
        for key in range(20):
            owners = {owners[key] for owners in seen}
            assert len(owners) == 1
            assert owners <= {batch[key].owner for batch in wanted}

    def test_of_many_threads_one_retries(self, store: Store) -> None:
        """16 threads claim the same retryable key: one moves it, 15 are refused."""
        record = self.drive(store, State.FAILED_RETRYABLE)
        changes = [swap(record, Event.RETRY, Actor.REQUEST, reservation=self.reservation()) for _ in range(_THREADS)]
        moved = in_threads(store, lambda number: store.swap([changes[number]])[0], _THREADS)
        winners = [row for row in moved if row is not None]
        assert len(winners) == 1
        assert one(stored(store)).owner == winners[0].owner
        assert one(stored(store)).attempt == 2

    def test_a_thread_that_disconnected_connects_again(self, store: Store) -> None:
        """A thread may close its connection between two verbs, more than once."""
        self.drive(store, State.IN_PROGRESS)
        before = stored(store)
        store.disconnect()
        store.disconnect()
        assert stored(store) == before

    # migrations

    def test_migrating_twice_runs_nothing_twice(self, store: Store) -> None:
        """The fixture has migrated already: no migration runs, the check raises nothing, and rows stay."""
        self.drive(store, State.COMPLETED)
        before = stored(store)
        assert store.migrate() == []
        store.check()
        assert stored(store) == before

    def test_migrating_from_many_threads_runs_each_migration_once(self) -> None:
        """Eight threads migrate an empty store at once: no error, and no migration ran twice."""
        store = self.make_store()
        try:
            ran = [name for names in in_threads(store, lambda _: store.migrate(), 8) for name in names]
            assert len(ran) == len(set(ran))
            store.check()
            self.drive(store, State.COMPLETED)
        finally:
            store.close()

    def test_migrating_from_two_processes_runs_each_migration_once(self) -> None:
        """Two processes migrate an empty store at once: no error, and no migration ran twice."""
        _needs_processes(probe := self.make_store())
        probe.close()

        def migrate() -> list[str]:
            store = self.make_store()
            begin.wait()
            try:
                return store.migrate()
            finally:
                store.close()

        with Signal() as begin:
            children = [Child(migrate) for _ in range(2)]
            begin.give()
            begin.give()
            ran = [name for child in children for name in child.result()]
        assert len(ran) == len(set(ran))
        store = self.make_store()
        try:
            store.check()
            self.drive(store, State.COMPLETED)
        finally:
            store.close()

    # processes

    def test_of_two_processes_one_owns_each_key(self, store: Store) -> None:
        """Two processes reserve the same 200 keys in batches: each key has exactly one owner."""
        _needs_processes(store)

        def batches(process: int) -> list[list[Reservation]]:
            keys = [f"key-{number}" for number in range(200)]
            return [
                [self.reservation(key, owner=f"{process}-{key}") for key in keys[at : at + 10]]
                for at in range(0, 200, 10)
            ]

        def race(process: int) -> list[str]:
            store = self.make_store()
            begin.wait()
            try:
                owners = [owner for batch in batches(process) for owner in _owners(store, batch)]
                keys = [w.key for batch in batches(process) for w in batch]
                return [key for key, owner in zip(keys, owners, strict=True) if owner == f"{process}-{key}"]
            finally:
                store.close()

        with Signal() as begin:
            children = [Child(lambda process=process: race(process)) for process in range(2)]  # type: ignore[misc]
            begin.give()
            begin.give()
            mine, theirs = (child.result() for child in children)
        assert set(mine).isdisjoint(theirs)
        assert len(mine) + len(theirs) == 200

    def test_another_process_reads_the_committed_response(self, store: Store) -> None:
        """Another process reads the response that this process stored, byte for byte."""
        _needs_processes(store)
        self.drive(store, State.COMPLETED)

        def look() -> str:
            other = self.make_store()
            try:
                response = one(stored(other)).response
                assert response is not None
                assert response.body is not None
                return response.body.hex()
            finally:
                other.close()

        assert RESPONSE.body is not None
        assert Child(look).result() == RESPONSE.body.hex()

    # forks

    def test_a_forked_child_and_its_parent_both_go_on(self, store: Store) -> None:
        """Both sides use the same store object after a fork, in turns, and each sees what the other wrote."""
        _needs_processes(store)
        self.drive(store, State.IN_PROGRESS, "before")

        def work() -> list[bool]:
            self.drive(store, State.COMPLETED, "child-1")
            wrote.give()
            go_on.wait()
            self.drive(store, State.COMPLETED, "child-2")
            seen = [stored(store, key=key) is not None for key in ("before", "parent")]
            store.close()
            return seen

        with Signal() as wrote, Signal() as go_on:
            child = Child(work)
            wrote.wait()
            self.drive(store, State.COMPLETED, "parent")
            go_on.give()
            assert child.result() == [True, True]
        self.drive(store, State.COMPLETED, "after")
        for key in ("before", "child-1", "child-2", "parent", "after"):
            assert stored(store, key=key) is not None

    def test_a_child_loses_nothing_when_its_parent_closes(self, store: Store) -> None:
        """A server forks its workers and closes its own store: the worker's later commits are stored."""
        _needs_processes(store)
        self.drive(store, State.IN_PROGRESS, "before")

        def work() -> None:
            self.drive(store, State.COMPLETED, "child-1")
            wrote.give()
            closed.wait()
            self.drive(store, State.COMPLETED, "child-2")
            os._exit(0)  # as a worker that is killed: it closes nothing

        with Signal() as wrote, Signal() as closed:
            child = Child(work)
            wrote.wait()
            store.close()
            closed.give()
            assert child.end() == 0
        other = self.make_store()
        try:
            for key in ("before", "child-1", "child-2"):
                assert stored(other, key=key) is not None
        finally:
            other.close()

    def test_fork_while_threads_write_leaves_child_and_threads_working(self, store: Store) -> None:
        """Children that are forked while other threads use the store work, and so do the threads."""
        _needs_processes(store)
        stop = threading.Event()
        written: list[str] = []

        def write(number: int) -> None:
            for turn in range(10_000):
                if stop.is_set():
                    break
                key = f"thread-{number}-{turn}"
                self.drive(store, State.COMPLETED, key)
                written.append(key)
            store.disconnect()

        def child(number: int) -> str:
            self.drive(store, State.COMPLETED, f"child-{number}")
            return f"child-{number}"

        with ThreadPoolExecutor(2) as pool:
            threads = [pool.submit(write, number) for number in range(2)]
            try:
                written += [Child(lambda number=number: child(number)).result() for number in range(5)]  # type: ignore[misc]
            finally:
                stop.set()
            for thread in threads:
                thread.result()
        assert None not in [stored(store, key=key) for key in written]
        assert {f"child-{number}" for number in range(5)} <= set(written)

    # a process that is killed

    def test_a_reservation_survives_kill_9(self) -> None:
        """A process is killed right after ``reserve`` returned: its row is stored, and its lease still runs (I1)."""
        _needs_processes(probe := self.make_store())
        if not probe.capabilities.durable:
            pytest.skip("this store keeps nothing")
        probe.close()

        def reserve_and_die() -> None:
            store = self.make_store()
            store.migrate()
            store.reserve([self.reservation(f"key-{number}") for number in range(3)])
            os.kill(os.getpid(), signal.SIGKILL)

        assert Child(reserve_and_die).killed()
        store = self.make_store()
        try:
            found = store.read([("tenant-1", f"key-{number}") for number in range(3)])
            assert [one(row).state for row in found] == [State.IN_PROGRESS] * 3
            assert not one(found[0]).lease_over
        finally:
            store.close()

    def test_a_completion_survives_kill_9(self, store: Store) -> None:
        """A process is killed right after ``swap`` returned: the response is stored (I2)."""
        _needs_processes(store)
        if not store.capabilities.durable:
            pytest.skip("this store keeps nothing")
        record = self.drive(store, State.IN_PROGRESS)

        def complete_and_die() -> None:
            store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)])
            os.kill(os.getpid(), signal.SIGKILL)

        assert Child(complete_and_die).killed()
        assert one(stored(store)).response == RESPONSE

    def test_a_step_survives_kill_9_together_with_its_move(self, store: Store) -> None:
        """A process is killed right after it wrote an intent: another process sees the intent."""
        _needs_processes(store)
        if not store.capabilities.durable:
            pytest.skip("this store keeps nothing")
        record = self.drive(store, State.IN_PROGRESS)
        step = Step("charge", StepKind.EFFECT, StepState.INTENDED, repeatable=False, downstream_key="dk_1")

        def intend_and_die() -> None:
            store.swap([swap(record, Event.ADVANCE, Actor.OWNER, recovery_point="started", step=step)])
            os.kill(os.getpid(), signal.SIGKILL)

        assert Child(intend_and_die).killed()
        assert one(stored(store)).recovery_point == "started"
        assert store.steps([StepsOf(record.scope, record.key)]) == [[step]]
