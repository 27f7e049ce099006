"""The world of the model, and every move that there is in it. What it is about is said in ``model.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, cast

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.decision import Claim, Execute, Mismatch, decide
from oncekey.core.doubts import in_doubt
from oncekey.core.judgment import Move
from oncekey.core.record import Record, Reservation
from oncekey.core.states import FINAL, Actor, Effects, Event, State
from oncekey.core.steps import Step, StepsOf, StepState
from oncekey.core.swaps import Swap, swap
from oncekey.core.verdicts import Confirmed, Happened, NotHappened, Refuted, Verdict
from oncekey.engine import settlement
from oncekey.engine.operation import Operation
from oncekey.engine.process import Owners
from oncekey.engine.resumption import Resumption
from oncekey.stores.api import Duty
from oncekey.stores.memory import MemoryStore
from oncekey.upkeep import reconciler, resumer, sweeper
from oncekey.web.endings import answer_instead
from oncekey.web.responses import answer_to
from tests.faults.model_flows import Ask, Began, Choose, Commit, Due, Enlist, Flow, Kind, Node, Outside, RollBack, Told

LEASE, QUARANTINE, RETENTION = 10.0, 20.0, 1000.0
AT = ("single-tenant", "key-1")
BODY, OTHER = b"b" * 32, b"o" * 32
SAME = (("a1", BODY), ("a2", BODY), ("b1", BODY))
OTHERS = (("c1", OTHER),)
"""Owner token and fingerprint: a gives up and sends again, b sends the same, c sends something else."""
CONFIRMED, REFUTED = Confirmed(201, body="confirmed"), Refuted("the provider has no such charge")
HAPPENED, NOT_HAPPENED = Happened("charged"), NotHappened("the provider has no such charge")
OF_THE_CHARGE = Happened("charged", "charge")
FINAL_WORD = Confirmed(201, body="confirmed", final=True)


class _OneToken(Owners):
    """The owner token of a settled effect. Nothing is written under it, so one is enough, and worlds stay equal."""

    def new(self) -> str:
        return "settled"


class Standing(NamedTuple):
    """One request."""

    node: Node
    generation: int
    """Of the key, when it began: after its expiry a key is another one."""


class World(NamedTuple):
    row: Record | None
    steps: tuple[Step, ...]
    lock: str | None
    generation: int
    requests: tuple[Standing | None, ...]
    """None: not sent yet, or dead."""
    sent: tuple[int, int]
    """How many were sent: of those with the same body, and of the others."""
    swept: Record | None
    """What the sweeper saw, and has not moved yet."""
    reaped: Record | None
    asked: Node
    outside: tuple[frozenset[str], ...]
    """What happened, for each generation."""
    told: tuple[tuple[int, bytes] | None, ...]
    """The final answer that a client has seen, for each generation."""


class Broken(Exception):
    """A promise."""

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(what)
        self.promise = promise


class Machine:
    """The moves of one kind of route."""

    def __init__(
        self, kind: Kind, *, held: bool = True, store: type[MemoryStore] = MemoryStore, same: int = 3, other: int = 1
    ) -> None:
        self.kind = kind
        self.senders = (*SAME[:same], *OTHERS[:other])
        self.held = held
        self.store = store(lambda: 0.0)
        self.once = OnceKey("memory://", scope=SINGLE_TENANT)
        self.engine = self.once.engine
        self.engine.owners = _OneToken()
        later = kind.deployed or kind
        self.roots = [
            Node(self._request(*who, later if number else kind), ()) for number, who in enumerate(self.senders)
        ]
        if kind.resumed:
            self.roots[same - 1] = Node(self._resumption(SAME[same - 1][0], kind), ())
        self.idle = Node(self._reconcile, ())
        self._healed: set[tuple[Record, tuple[Step, ...]]] = set()
        self._made: dict[Any, tuple[Any, Record | None, tuple[Step, ...]]] = {}

    def start(self) -> World:
        return World(
            None, (), None, 0, (None,) * len(self.senders), (0, 0), None, None, self.idle, (frozenset(),), (None,)
        )

    # -- the flows -----------------------------------------------------------------------------------------------------

    def _request(self, owner: str, fingerprint: bytes, kind: Kind) -> Callable[[], Flow]:
        policy = Policy(effects=kind.effects.value, lease=timedelta(seconds=LEASE))

        def flow() -> Flow:
            wanted = Reservation(
                *AT, "POST /payments", fingerprint, 1, kind.effects, owner, LEASE, RETENTION, None, QUARANTINE
            )
            decision = yield from self.engine.begin(wanted, policy)
            if not isinstance(decision, Execute):
                answer = answer_to(decision, policy, self.once)
                return Told(answer.status, answer.body, decision)
            operation = Operation(decision.record, policy, AT[0], self.engine)
            return (yield from self._attempt(kind, operation, wanted))

        return flow

    def _attempt(self, kind: Kind, operation: Operation, wanted: Reservation) -> Flow:
        yield Began(operation.record)
        move = yield from kind.handler(self, kind, operation)
        if not isinstance(move, Move):
            return move
        finished = yield from self.engine.finish(operation, move.event, move.response, move.reason)
        if finished.stored:
            kept = move.response
            return Told(kept.status, kept.body or b"", None) if kept else Told(500, b"", None)
        answer = answer_instead(finished, operation, wanted, self.once)
        return Told(answer.status, answer.body, None if finished.undone else decide(finished.record, wanted))

    def _resumption(self, owner: str, kind: Kind) -> Callable[[], Flow]:
        """Upkeep's attempt, in place of a client's."""
        policy = Policy(effects=kind.effects.value, lease=timedelta(seconds=LEASE))

        def flow() -> Flow:
            seen: Record | None = yield Due(Duty.RESUMABLE)
            record: Record | None = (yield AT) if seen else None
            if record is None or not resumer._is_due(record):
                return Told(0, b"", None)
            found: tuple[Step, ...] = yield StepsOf(*AT)
            claimed: Record | None = yield resumer.claim(record, policy, owner)
            if claimed is None:
                return Told(0, b"", None)
            wanted = Reservation(*AT, "POST /payments", BODY, 1, kind.effects, owner, LEASE, RETENTION)
            operation = Resumption(claimed, policy, AT[0], self.engine, None, found)
            return (yield from self._attempt(kind, operation, wanted))

        return flow

    def _reconcile(self) -> Flow:
        seen: Record | None = yield Due(Duty.UNKNOWNS)
        record: Record | None = (yield AT) if seen else None
        if record is not None and reconciler._is_due(record):
            verdict: Verdict = yield Ask()
            yield from settlement.settle(self.engine, record, verdict, who="reconciler")

    # -- the store -----------------------------------------------------------------------------------------------------

    def _make(
        self, work: Any, row: Record | None, kept: tuple[Step, ...]
    ) -> tuple[Any, Record | None, tuple[Step, ...]]:
        """One verb on a store that holds this and nothing else: the answer, and what it holds then."""
        at = (work, row, kept)
        if (made := self._made.get(at)) is not None:
            return made
        store = self.store
        store._rows = {} if row is None else {AT: row}
        store._steps = {AT: {step.name: step for step in kept}} if kept else {}
        answer: Any
        match work:
            case Reservation():
                answer = store.reserve([work])[0]
            case Swap():
                answer = store.swap([work])[0]
            case StepsOf():
                answer = tuple(store.steps([work])[0])
            case Due():
                answer = next(iter(store.due(work.duty, 1)), None)
            case "purge":
                answer = store.purge(1, expired_state_only=self.kind.soft)
            case _:
                answer = store.read([work])[0]
        then = store._rows.get(AT)
        made = answer, then and _timeless(then), tuple(store._steps.get(AT, {}).values())
        self._made[at] = made
        return made

    def _verb(self, world: World, work: Any, who: str) -> tuple[Any, World]:
        """The same in this world. No verb waits for a transaction that holds the row."""
        if isinstance(work, Swap) and world.lock not in (None, who):
            return None, world
        answer, row, kept = self._make(work, world.row, world.steps)
        before = world.row
        if isinstance(work, Swap) and answer is not None:
            if before is None or (before.state, before.owner) != (work.from_state, work.owner):
                raise Broken("I3", f"{who} moved a row that is not as it saw it: {work.event}")
            if work.lease_over_by is not None and before.lease_until + work.lease_over_by > 0.0:
                raise Broken("I3", f"{who} moved a row whose lease is not over: {work.event}")
        if row == before and kept == world.steps:
            return answer, world
        if work == "purge" and before is not None and before.state in (State.IN_PROGRESS, State.UNKNOWN):
            raise Broken("I1", f"the reaper deleted a key that is {before.state}")
        anew = row is not None and (before is None or (isinstance(work, Swap) and work.restart is not None))
        if anew:
            world = world._replace(
                generation=world.generation + 1, outside=(*world.outside, frozenset()), told=(*world.told, None)
            )
        return answer, world._replace(row=row, steps=kept)

    # -- every move there is -------------------------------------------------------------------------------------------

    def moves(self, world: World) -> Iterator[tuple[str, World]]:
        same, others = world.sent
        for number, (name, body) in enumerate(self.senders):
            standing = world.requests[number]
            if standing is not None:
                yield from self._move(world, number, name, standing)
                yield (
                    f"{name} crashes",
                    self._place(world, number, None, lock=None if world.lock == name else world.lock),
                )
            elif number == (same if body is BODY else len(self.senders) - len(OTHERS) + others):
                sent = (same + 1, others) if body is BODY else (same, others + 1)
                placed = self._place(world, number, Standing(self.roots[number], 0))
                yield f"{name} is sent", placed._replace(sent=sent)
        yield from self._upkeep(world)
        yield from self._time(world)

    def _place(self, world: World, number: int, standing: Standing | None, **more: Any) -> World:
        requests = (*world.requests[:number], standing, *world.requests[number + 1 :])
        return world._replace(requests=requests, **more)

    def _move(self, world: World, number: int, name: str, standing: Standing) -> Iterator[tuple[str, World]]:
        node, want = standing.node, standing.node.wants
        if node.began is not None:
            renewal = swap(node.began, Event.RENEW, Actor.OWNER, lease_seconds=LEASE)
            _, renewed = self._verb(world, renewal, name)
            if renewed is not world:
                yield f"{name} renews", renewed
        if isinstance(want, Choose):
            for way in want.ways:
                yield f"{name} goes on with {way}", self._goes_on(world, number, standing, way)
            return
        lock, done = world.lock, False
        answer: Any
        match want:
            case Outside():
                answer, then, done = None, world, True
            case Enlist():
                mine = world.row is not None and (world.row.state, world.row.owner) == (State.IN_PROGRESS, name)
                answer, then = mine and lock is None, world
                lock = name if answer else lock
            case Commit():
                answer, then = self._verb(world, want.change, name)
                done, lock = answer is not None, None
            case RollBack():
                answer, then, lock = None, world, None
            case _:
                answer, then = self._verb(world, want, name)
        if done:
            key = want.key if isinstance(want, Outside) and want.key else name
            then = self._happens(then, key, standing.generation)
        yield f"{name}: {_words(want, answer)}", self._goes_on(then._replace(lock=lock), number, standing, answer)

    def _goes_on(self, world: World, number: int, standing: Standing, answer: Any) -> World:
        node = standing.node.then(answer)
        if node.over:
            return self._told(self._place(world, number, None), number, node.ended)
        if node.began is not None and standing.node.began is None:
            if node.began.fingerprint != self.senders[number][1]:
                raise Broken("I5", "a request runs under another one's fingerprint")
            return self._place(world, number, Standing(node, world.generation))
        return self._place(world, number, Standing(node, standing.generation))

    def _upkeep(self, world: World) -> Iterator[tuple[str, World]]:
        if world.swept is not None:
            _, then = self._verb(world, sweeper._move(world.swept), "sweeper")
            yield "the sweeper moves what it saw", then._replace(swept=None)
        elif (seen := self._make(Due(Duty.LEASES), world.row, world.steps)[0]) is not None:
            yield "the sweeper looks", world._replace(swept=seen)
        if world.reaped is not None:
            seen = world.reaped
            lapsed = seen.state is State.FAILED_RETRYABLE and seen.has_steps
            event, target = (Event.DOUBT, State.UNKNOWN) if lapsed else (Event.EXPIRE, State.EXPIRED)
            _, then = self._verb(world, swap(seen, event, Actor.REAPER, to_state=target), "reaper")
            yield "the reaper moves what it saw", then._replace(reaped=None)
        else:
            for duty in (Duty.LAPSED, Duty.EXPIRED) if self.kind.soft else (Duty.LAPSED,):
                if (seen := self._make(Due(duty), world.row, world.steps)[0]) is not None:
                    yield "the reaper looks", world._replace(reaped=seen)
        answer, then = self._verb(world, "purge", "reaper")
        if answer:
            yield "the reaper deletes", then
        yield from self._asks(world)

    def _asks(self, world: World) -> Iterator[tuple[str, World]]:
        node, want = world.asked, world.asked.wants
        if isinstance(want, Ask):
            happened = world.outside[world.generation]
            verdicts: tuple[Verdict, ...] = (CONFIRMED,) if happened else (REFUTED,)
            if world.row is not None and in_doubt(world.row, world.steps):
                verdicts = (CONFIRMED, FINAL_WORD, HAPPENED) if happened else (REFUTED, NOT_HAPPENED)
            elif world.row is not None and world.row.has_steps and happened:
                verdicts = (CONFIRMED, FINAL_WORD, OF_THE_CHARGE)
            for verdict in verdicts:
                name = "Confirmed, final" if verdict is FINAL_WORD else type(verdict).__name__
                yield f"the resolver says {name}", world._replace(asked=node.then(verdict))
            return
        answer, then = self._verb(world, want, "reconciler")
        node = node.then(answer)
        if answer is not None or not isinstance(want, Due):
            after = then._replace(asked=self.idle if node.over else node)
            if after != world:
                yield f"the reconciler: {_words(want, answer)}", after

    def _time(self, world: World) -> Iterator[tuple[str, World]]:
        row = world.row
        if row is None:
            return
        if row.lease_until > 0.0:
            yield "the lease runs out", world._replace(row=replace(row, lease_until=0.0))
        elif row.lease_until > -QUARANTINE and not (self.held and self._before_a_call(world)):
            yield "the quarantine is over", world._replace(row=replace(row, lease_until=-QUARANTINE))
        if row.expires_at > 0.0 and row.state in (*FINAL, State.FAILED_RETRYABLE):
            yield "the retention is over", world._replace(row=replace(row, expires_at=0.0))
        elif row.expires_at == 0.0 and row.state is State.EXPIRED:
            yield "the second retention is over", world._replace(row=replace(row, expires_at=-RETENTION))

    def _before_a_call(self, world: World) -> bool:
        return any(at is not None and at.node.began is not None and not at.node.called for at in world.requests)

    # -- what must hold ------------------------------------------------------------------------------------------------

    def _happens(self, world: World, key: str, generation: int) -> World:
        there = world.outside[generation] | {key}
        if len(there) > 1:
            raise Broken("I1", f"a second effect: {', '.join(sorted(there))}")
        return world._replace(outside=(*world.outside[:generation], there, *world.outside[generation + 1 :]))

    def _told(self, world: World, number: int, told: Told) -> World:
        row, body = world.row, self.senders[number][1]
        decision = told.decision
        seen = getattr(decision, "record", None)
        free = isinstance(decision, Claim) and decision.event is Event.RESERVE
        if seen is not None and not free and isinstance(decision, Mismatch) != (seen.fingerprint != body):
            whose = "another" if seen.fingerprint != body else "the same"
            raise Broken("I5", f"{type(decision).__name__} for a row of {whose} request")
        if told.status not in (201, 422) or isinstance(decision, Mismatch) or told.body == b"refused":
            return world
        if row is None or row.state not in FINAL or row.response is None:
            raise Broken("I2", f"a client was told {told.status}, and the row says {row and row.state}")
        if row.fingerprint != body:
            raise Broken("I5", "a client was told the answer to another request")
        final = (told.status, told.body)
        first = world.told[world.generation]
        if first is not None and first != final:
            raise Broken("I2", f"one client was told {first}, and another {final}")
        if (told.status == 201) != bool(world.outside[world.generation]):
            raise Broken(
                "I1", f"a client was told {told.status}, and outside there is {set(world.outside[world.generation])}"
            )
        return world._replace(told=(*world.told[:-1], final))

    def check(self, world: World) -> None:
        """What must hold in every state."""
        row = world.row
        if row is None:
            return
        happened = world.outside[world.generation]
        # Of an effect that may not be repeated, ``repeatable`` says that it is proven not to have happened.
        remembered = row.effects is Effects.REPEATABLE or any(
            (step.repeatable and self.kind.honours) or step.state is StepState.DONE for step in world.steps
        )
        if row.state is State.FAILED_RETRYABLE and happened and not remembered:
            raise Broken("I1", f"it can be retried, and it has happened: {set(happened)}")
        if (row, world.steps) not in self._healed:
            self._heals(row, world.steps)
            self._healed.add((row, world.steps))

    def _heals(self, row: Record, kept: tuple[Step, ...]) -> None:
        """I4: when every request is dead, upkeep leaves the key final, retryable, or unknown and on its list."""
        row = replace(row, lease_until=min(row.lease_until, 0.0))
        seen = self._make(Due(Duty.LEASES), row, kept)[0]
        swept = self._make(sweeper._move(seen), row, kept)[1] if seen is not None else row
        if swept is None or swept.state in (*FINAL, State.EXPIRED):
            return
        if swept.state is State.UNKNOWN:
            if self._make(Due(Duty.UNKNOWNS), swept, kept)[0] is None:
                raise Broken("I4", "unknown, and not on the reconciler's list")
            return
        # After a deploy, the retry runs, or it does so once the declaration is put back.
        ended = [self._retried(kind, swept, kept) for kind in (self.kind, self.kind.deployed) if kind is not None]
        if None not in ended:
            raise Broken("I4", f"a retry after upkeep gets {ended[0]}")

    def _retried(self, kind: Kind, row: Record, kept: tuple[Step, ...]) -> Told | None:
        """What a retry gets; None: it runs."""
        node, there = Node(self._request("z1", row.fingerprint, kind), ()), cast("Record | None", row)
        while not node.over and node.began is None:
            answer, there, kept = self._make(node.wants, there, kept)
            node = node.then(answer)
        return node.ended if node.began is None else None


def _timeless(row: Record) -> Record:
    """The row with only those times that something is compared with, each on its grid."""
    return replace(
        row,
        lease_until=min(max(row.lease_until, -QUARANTINE), LEASE),
        expires_at=min(max(row.expires_at, -RETENTION), RETENTION),
        created_at=0.0,
        finished_at=None if row.finished_at is None else 0.0,
        reconcile_at=None if row.reconcile_at is None else 0.0,
        reconcile_tries=0,
        now=0.0,
    )


def _words(want: Any, answer: Any) -> str:
    match want:
        case Reservation():
            found = answer.record
            return f"reserve, finds {found.state} of {found.owner}"
        case Swap():
            return f"{want.event} as {want.owner}: {'refused' if answer is None else 'done'}"
        case Commit():
            return f"commits: {'refused' if answer is None else 'done'}"
        case tuple() if not hasattr(want, "_fields"):
            return f"reads {answer and answer.state}"
    return (
        f"{type(want).__name__.lower()} {'' if answer is None else answer if isinstance(answer, bool) else ''}".strip()
    )
