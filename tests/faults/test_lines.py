"""Faults at lines and messages that were bugs once, and that the campaign notices where a guard is taken away."""

from __future__ import annotations

import dis
import inspect
import io
import threading
from pathlib import Path
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.core.decision import Busy
from oncekey.core.record import Found, Reservation
from oncekey.core.states import State
from oncekey.engine.batching.loop_lane import LoopLane
from oncekey.engine.batching.thread_lane import ThreadLane
from oncekey.engine.engine import Engine
from oncekey.engine.keeper import Keeper
from oncekey.engine.operation import Operation
from oncekey.engine.transactions import completion
from oncekey.stores.memory import MemoryStore
from oncekey.stores.sqlite.transactions import Hold
from oncekey.web import asgi, exchange, responses, wsgi
from oncekey.web.asgi_call import AsgiCall
from tests.faults import crowds, disconnects, lines, scenarios, scenes
from tests.faults.breakable_stores import BreakableMemory
from tests.faults.campaign import Run
from tests.faults.lines import Campaign, Injected, Place, Tracer

SCENARIOS = {scenario.name: scenario for scenario in scenarios.SCENARIOS}


def first_line(function: Any, thread: str) -> Place:
    """Where a function begins to do something."""
    code = inspect.unwrap(function).__code__
    return thread, code.co_filename, min(lines._lines(code) - {code.co_firstlineno})


def line_with(function: Any, text: str, thread: str = "loop") -> Place:
    source, start = inspect.getsourcelines(function)
    return thread, function.__code__.co_filename, start + next(n for n, line in enumerate(source) if text in line)


def inject(run: Run, *faults: tuple[str, Place, type[BaseException]]) -> list[tuple[str, str]]:
    """What is wrong after these faults."""
    campaign = Campaign(run, run.folder / "work")
    planned: list[Injected] = [(SCENARIOS[name], place, error) for name, place, error in faults]
    lines._in_its_loop(lambda: campaign.inject(planned))
    assert not campaign.missed
    return campaign.violations


BUGS = {
    "an unexpected error while storing: renewed for ever": (
        "first", "memory", line_with(AsgiCall._inner_send, "moved: float | Record | None ="),
    ),
    "the same on the general way": ("first, the general way", "memory", first_line(Engine.move, "loop")),
    "a thread lane that ends": ("first", "memory", first_line(ThreadLane._collect, "thread")),
    "a loop lane that ends: its callers hung": ("replay", "sqlite", first_line(LoopLane._send, "loop")),
    "an answer half handed over": (
        "replay", "sqlite", line_with(LoopLane._send, "future.set_result(there)"),
    ),
    "a handler's end that is not reported": (
        "first", "memory", line_with(AsgiCall._handle, "done.set_result(None)"),
    ),
    "a turn of the loop that never came": ("first", "memory", first_line(ThreadLane._flush, "loop")),
    "the file's gate, never given back": ("enlisted", "sqlite", first_line(completion.finish, "loop")),
    "a commit on a connection that its app is just closing": (
        "enlisted", "sqlite", first_line(completion._commit, "loop"),
    ),
    "the gate, not given back": ("enlisted", "sqlite", first_line(Hold.release, "loop")),
    "a keeper that ends": ("renewed", "memory", first_line(Keeper._renew_due, "thread")),
}  # fmt: skip


@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_fixed_bugs_stay_fixed(store: str, tmp_path: Path) -> None:
    """All of them, with both errors: their clients wait together."""
    faults = [(name, place, error) for name, on, place in BUGS.values() if on == store for error in lines.ERRORS]
    assert inject(Run(store, 1, 1, tmp_path), *faults) == []


async def test_keeper_thread_is_started_by_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper's thread cannot be started: the next request starts it, and leases are renewed."""
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == "oncekey-keeper":
            raise RuntimeError("can't start new thread")
        start(thread)

    scene = scenes.Scene(BreakableMemory())
    monkeypatch.setattr(threading.Thread, "start", fails)
    await scenes.Story("k-1", "plain", "out of threads").ask(scene.app)
    monkeypatch.undo()
    await scenes.Story("k-2", "plain", "").ask(scene.app)
    keeper = scene.once.engine.keeper._thread
    assert keeper is not None
    assert keeper.is_alive()
    await scene.close()


def test_an_unexpected_error_while_storing_under_wsgi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease is not renewed any more."""

    def app(environ: Any, start_response: Any) -> list[bytes]:
        start_response("201 Created", [])
        return [b"done"]

    def fails(*_: Any) -> Any:
        raise RuntimeError("a bug of ours")

    once = OnceKey("memory://", scope=SINGLE_TENANT)
    monkeypatch.setattr(Engine, "move", fails)
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_IDEMPOTENCY_KEY": "k-1", "wsgi.input": io.BytesIO()}
    with pytest.raises(RuntimeError, match="a bug of ours"):
        wsgi.IdempotencyMiddleware(app, once=once)(environ, lambda *_: io.BytesIO().write)
    assert once.engine.keeper._live == {}
    once.close()


# ---------------------------------------------------------------- planted


def test_a_key_that_is_renewed_for_ever_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeper, "_given_up", lambda self, operation: False)
    monkeypatch.setattr(scenes, "PATIENCE", 1.5 * scenes.LEASE)  # its lease would be over, and its client told
    name, store, place = BUGS["an unexpected error while storing: renewed for ever"]
    ((promise, what),) = inject(Run(store, 1, 1, tmp_path), (name, place, RuntimeError))
    assert promise == "I4"
    assert "neither final nor unknown" in what


def test_a_dead_lane_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(lane: ThreadLane) -> None:
        tickets: list[Any] = []
        while lane._collect(tickets):
            lane._process(tickets)
            tickets = []

    monkeypatch.setattr(ThreadLane, "_run", run)
    monkeypatch.setattr(scenes, "PATIENCE", scenes.BEGIN)
    name, store, place = BUGS["a thread lane that ends"]
    found = inject(Run(store, 1, 1, tmp_path), (name, place, RuntimeError))
    assert any("another key is not served any more" in what for _, what in found)


def test_a_second_run_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outcome that could not be stored is given back as if nothing had happened."""
    unwatch = Keeper.unwatch

    def give_back(keeper: Keeper, operation: Operation) -> None:
        unwatch(keeper, operation)
        store: Any = keeper._engine.store
        store._rows.pop((operation.record.scope, operation.record.key), None)

    monkeypatch.setattr(Keeper, "unwatch", give_back)
    monkeypatch.setattr(scenes, "LEASE", scenes.LEASE / 2)  # of the slow handler, which need not be so slow
    found = inject(Run("memory", 1, 1, tmp_path), ("renewed", first_line(Keeper.look, "thread"), RuntimeError))
    assert any(promise == "I1" for promise, _ in found)


def test_lines_that_cannot_raise_are_no_places() -> None:
    def quietly(more: bool) -> None:
        while more:
            try:
                pass
            finally:
                more = False

    def loudly(items: list[int]) -> int:
        return items[0]

    assert lines._lines(quietly.__code__) == frozenset()
    assert lines._lines(loudly.__code__) == {loudly.__code__.co_firstlineno + 1}
    assert dis.opmap.keys() & lines.HARMLESS


def test_a_tracer_leaves_no_trace() -> None:
    before = threading.gettrace()  # set by a debugger, or by coverage
    with Tracer() as tracer:
        tracer.arm()
    assert threading.gettrace() is before


def test_a_crowd_that_shares_a_key_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request gets the key, as without a unique index."""

    def reserve(store: MemoryStore, batch: list[Reservation]) -> list[Found]:
        for wanted in batch:
            row = store._rows.get((wanted.scope, wanted.key))
            if row is None or row.state is State.IN_PROGRESS:
                store._rows[wanted.scope, wanted.key] = wanted.record(store._clock())
        return [Found(store._rows[wanted.scope, wanted.key]) for wanted in batch]

    monkeypatch.setattr(MemoryStore, "reserve", reserve)
    run = Run("memory", 2, 1, tmp_path)
    crowds.crowd(run)
    assert any(what.startswith("I1: key crowd-0") for what in run.violations)


def test_crowd_with_false_answers_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some replays say that the first is still in progress: no order of events explains that."""
    answer_to = responses.answer_to
    asked: list[None] = []

    def lies(decision: Any, policy: Any, once: Any) -> Any:
        asked.append(None)
        if type(decision).__name__ == "Replay" and len(asked) % 3 == 0:
            decision = Busy(decision.record)
        return answer_to(decision, policy, once)

    monkeypatch.setattr(asgi, "_is_replay", lambda *_: False)  # so that the general way answers them
    monkeypatch.setattr(exchange, "answer_to", lies)
    run = Run("memory", 4, 1, tmp_path)
    crowds.crowd(run)
    assert any("no order explains it" in what for what in run.violations)


def test_a_handler_that_dies_with_its_client_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the server's task, and is cancelled with it."""

    start = AsgiCall.__init__

    def cancelled_with_its_client(self: AsgiCall, *given: Any) -> None:
        start(self, *given)
        self.done = self.task

    monkeypatch.setattr(AsgiCall, "__init__", cancelled_with_its_client)
    monkeypatch.setattr(disconnects, "KINDS", {"large": scenes.KINDS["large"]})
    run = Run("sqlite", 40, 1, tmp_path)
    disconnects.every_message(run)
    assert any("made its key unknown" in what for what in run.violations)


async def test_a_fault_ends_with_its_scenario(tmp_path: Path) -> None:
    """A handler that runs later, for a client's retry, does not arm it again: it would strike the campaign itself."""
    scenario = next(each for each in scenarios.SCENARIOS if each.after)
    campaign, tracer = Campaign(Run("memory", 1, 1, tmp_path), tmp_path / "work"), Tracer(("loop", "nowhere", 0))
    case = await campaign.play(scenario, tracer, "a line that is never run")
    case.scene.entered()
    assert not tracer._armed
    await case.scene.close()
