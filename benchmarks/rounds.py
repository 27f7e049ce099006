"""Goes through the workloads, round after round, with the contestants of one workload right after each other.

The servers of one setting are started together and loaded one at a time: a server that is not loaded sleeps. If
one contestant fails, the failure is printed and costs it that measurement; the others go on, and the next round tries
it again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks import (
    load,
    pgbench,
    proof,
    queues,
    report,
    round_trips,
    serving,
    start,
    store_alone,
    targets,
)
from benchmarks.contestants import BARE, ONCEKEY_POSTGRES, Contestant, cannot_run, order
from benchmarks.one_load import one_load
from benchmarks.peers import PACKAGES, version
from benchmarks.places import Places
from benchmarks.progress import Progress
from benchmarks.quiet import NOISE, Patience
from benchmarks.report import Sample
from benchmarks.serving import Served
from benchmarks.workloads import Setting, Workload

START_SECONDS = 2.0
WARM_SECONDS = 0.3
BETWEEN_SECONDS = 0.4
PRIME_SECONDS = 0.5
START_COST = 0.3
OUTBOX_JOBS_PER_SECOND = 600
"""Only for the estimate of the time left: the slowest of the three takes most of it."""

FAILURES = (
    load.LoadFailed,
    serving.ServerFailed,
    proof.NotProven,
    pgbench.PgbenchFailed,
    queues.QueueFailed,
    store_alone.PairFailed,
)
Plan = list[tuple[Workload, list[Contestant]]]
Step = tuple[str, str, str | None, float, Callable[[], "Taken"]]
"""Workload, contestant, whom it is compared with, seconds that it takes, how it is measured."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One figure of a part without HTTP; ``also`` are figures of the same measurement for other workloads."""

    rate: float
    p50_ms: float | None = None
    also: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Lengths:
    """How long, how often and how much."""

    rounds: int
    seconds: float
    jobs: int
    only_targets: bool = False

    @property
    def warmup(self) -> float:
        return min(0.8, self.seconds / 2)


class Run:
    """One run of the benchmark: what is measured, in which order, and what has come out so far."""

    def __init__(
        self, plan: Plan, parts: set[str], lengths: Lengths, at: Places, generator: Path, patience: float
    ) -> None:
        self.lengths = lengths
        self.at = at
        self.generator = generator
        self.samples: list[Sample] = []
        self.left_out: dict[tuple[str, str], str] = {}
        self.failed: dict[tuple[str, str], str] = {}
        """Who could have run, and went wrong at least once."""
        self.progress = Progress(0.0)
        self.patience = Patience(patience, self._say)
        self.plan = [(workload, self._able(workload, contestants)) for workload, contestants in plan]
        self._steps = list(self._other_steps(parts))
        self._beside = dict(self._steps_beside())
        self.progress = Progress(self._costs() * lengths.rounds)

    def all_rounds(self) -> None:
        for number in range(self.lengths.rounds):
            for setting in dict.fromkeys(workload.setting for workload, _ in self.plan):
                self._setting(setting, number)
            for step in self._steps[::-1] if number % 2 else self._steps:
                self._other(step, number)

    def _able(self, workload: Workload, contestants: list[Contestant]) -> list[Contestant]:
        """Those that can run here. The reason for each of the others becomes its row."""
        no_server = serving.missing(workload.setting.server)
        able = []
        for contestant in contestants:
            if reason := no_server or cannot_run(contestant, self.at):
                self.left_out[workload.id, contestant.name] = reason
            else:
                able.append(contestant)
        return able

    def _costs(self) -> int:
        """Seconds of one round, roughly."""
        servers = {(w.setting, c) for w, contestants in self.plan for c in contestants}
        loads = sum(self._cost(w) * len(order(cs, 0)) for w, cs in self.plan)
        return round(
            len(servers) * START_SECONDS + loads + sum(step[3] for step in (*self._steps, *self._beside.values()))
        )

    def _cost(self, workload: Workload) -> float:
        each = self.lengths.seconds + self.lengths.warmup + BETWEEN_SECONDS
        return each + (PRIME_SECONDS if workload.mode in {"replay", "mix"} else 0)

    # -- behind a web server ---------------------------------------------------------------------------------------

    def _setting(self, setting: Setting, number: int) -> None:
        mine = [(workload, cs) for workload, cs in self.plan if workload.setting == setting]
        with ExitStack() as stack:
            served: dict[Contestant, Served] = {}
            for contestant in dict.fromkeys(c for _, cs in mine for c in cs):
                try:
                    served[contestant] = self._serve(stack, setting, contestant, first=number == 0)
                    self._warm(contestant, served[contestant], max(w.connections for w, cs in mine if contestant in cs))
                except FAILURES as problem:
                    for workload, contestants in mine:
                        if contestant in contestants:
                            self._leave_out(workload.id, contestant.name, problem)
                self.progress.spent(START_SECONDS)
            for workload, contestants in mine:
                for contestant in order(contestants, number):
                    if contestant in served:
                        self._measure(workload, contestant, served[contestant], number)
                if workload.id in self._beside:
                    self._other(self._beside[workload.id], number)

    def _serve(self, stack: ExitStack, setting: Setting, contestant: Contestant, *, first: bool) -> Served:
        url = self.at.urls[contestant.place] if contestant.place else None
        insert = self.at.urls[contestant.place or "postgres-bare"] if setting.inserts else None
        server, cache = setting.server, self.at.urls["cache"] if contestant.cached else None
        served = stack.enter_context(
            serving.serving(setting.framework, url, guard=contestant.guard, insert=insert, cache=cache, server=server)
        )
        if first:
            seen = proof.prove(contestant, served, server)
            words = [server, setting.framework if server != "gunicorn" else "wsgi", "insert" * setting.inserts]
            self._say(f"proven: {contestant.name} ({', '.join(filter(None, words))}): {seen}")
        return served

    def _warm(self, contestant: Contestant, served: Served, connections: int) -> None:
        """Let it open all the connections to its store that it will need: with some drivers that takes a second."""
        mode: load.Mode = "bare" if contestant is BARE else "first"
        with contextlib.suppress(load.LoadFailed):  # too slow for one answer, perhaps: then it is as warm as it gets
            load.run(self.generator, served.port, mode, connections=connections, seconds=WARM_SECONDS, warmup=0)

    def _measure(self, workload: Workload, contestant: Contestant, served: Served, number: int) -> None:
        try:
            take = partial(one_load, self.at, self.generator, workload, contestant, served)
            lengths = {"seconds": self.lengths.seconds, "warmup": self.lengths.warmup}
            loaded, others = self.patience.measure(partial(take, **lengths))
        except FAILURES as problem:
            self._leave_out(workload.id, contestant.name, problem)
            return
        finally:
            self.progress.spent(self._cost(workload))
        self._took(
            Sample(
                workload=workload.id,
                contestant=contestant.name,
                round=number,
                rate=loaded.measured.rps,
                against=None if contestant is BARE else BARE.name,
                p50_ms=loaded.measured.p50_ms,
                p99_ms=loaded.measured.p99_ms,
                app_us=loaded.app_us,
                store_us=loaded.store_us,
                statements=loaded.statements,
                generator_cpu=loaded.measured.generator_cpu,
                others_cpu=others,
            )
        )

    # -- without HTTP ----------------------------------------------------------------------------------------------

    def _other(self, step: Step, number: int) -> None:
        workload, contestant, against, cost, measurement = step
        try:
            taken, others = self.patience.measure(measurement)
        except FAILURES as problem:
            self._leave_out(workload, contestant, problem)
            return
        finally:
            self.progress.spent(cost)
        for name, rate in {workload: taken.rate, **taken.also}.items():
            self._took(Sample(name, contestant, number, rate, against, p50_ms=taken.p50_ms, others_cpu=others))

    def _steps_beside(self) -> Iterator[tuple[str, Step]]:
        """What is measured right after a workload, because it is what that workload is compared with."""
        url, cost = self.at.urls.get("postgres-pgbench"), self.lengths.seconds + 1.0
        if url and any(w.id == targets.FIRST_ALONE and ONCEKEY_POSTGRES in cs for w, cs in self.plan):
            store_alone.prepare(url)
            take = partial(_pair, url, self.lengths.seconds)
            yield targets.FIRST_ALONE, (targets.ROUND_TRIPS, targets.TWO_COMMITS, None, cost, take)

    def _other_steps(self, parts: set[str]) -> Iterator[Step]:
        if "store" in parts:
            yield from self._store()
        if "outbox" in parts and "postgres" in self.at.urls:
            yield from self._outbox()
        if "start" in parts:
            for name in (targets.PYTHON, targets.IMPORT, targets.VERSION):
                against = None if name == targets.PYTHON else targets.PYTHON
                yield targets.START, name, against, START_COST, partial(_rate, start.rate, name)

    def _store(self) -> Iterator[Step]:
        urls, seconds = self.at.urls, self.lengths.seconds
        cost, brief = seconds + 1.0, self.lengths.only_targets
        if "postgres-store" in urls:
            url, other = urls["postgres-store"], urls["postgres-pgbench"]
            for database in (url, other):
                store_alone.prepare(database)
            if program := pgbench.find(self.at.postgres_bin):
                whole = max(1, round(seconds))  # pgbench counts in whole seconds
                take = partial(_rate, pgbench.run, program, other, self.at.folder, whole)
                yield targets.STORE, targets.PGBENCH, None, cost, take
            else:
                self.left_out[targets.STORE, targets.PGBENCH] = "no pgbench beside the server or on PATH"
            for name, way in {targets.LANES: "lanes", **({} if brief else {targets.RAW: "raw"})}.items():
                yield targets.STORE, name, targets.PGBENCH, cost, partial(_rate, store_alone.run, url, way, seconds)
        if "mysql-store" in urls:
            yield from self._mysql_store(urls["mysql-store"], seconds, cost)
        if "sqlite" in urls and not brief:
            file = f"sqlite:///{self.at.folder / 'store.db'}"
            yield (
                targets.STORE,
                targets.SQLITE_LANES,
                None,
                cost,
                partial(_rate, store_alone.run, file, "lanes", seconds),
            )

    def _mysql_store(self, url: str, seconds: float, cost: float) -> Iterator[Step]:
        from benchmarks import mysql_rows  # needs PyMySQL

        store_alone.prepare(url)
        rows = partial(_rate, mysql_rows.rate_of_rows, url, seconds)
        yield targets.STORE, targets.MYSQL_ROWS, None, cost, rows
        lanes = partial(_rate, store_alone.run, url, "lanes", seconds)
        yield targets.STORE, targets.MYSQL_LANES, targets.MYSQL_ROWS, cost, lanes

    def _outbox(self) -> Iterator[Step]:
        jobs = self.lengths.jobs
        for name in queues.QUEUES:
            if name in PACKAGES and version(name) is None:
                self.left_out[targets.EXECUTE, name] = self.left_out[targets.ENQUEUE, name] = "not installed"
                continue
            place = f"postgres-{name}" if name in PACKAGES else "postgres-oncekey-outbox"
            against = None if name in PACKAGES else targets.QUEUES[-1]
            take = partial(_executed, name, self.at.urls[place], jobs)
            yield targets.EXECUTE, name, against, jobs / OUTBOX_JOBS_PER_SECOND, take

    # -- said ------------------------------------------------------------------------------------------------------

    def _leave_out(self, workload: str, contestant: str, problem: Exception) -> None:
        words = str(problem).strip().splitlines() or [type(problem).__name__]
        self.left_out[workload, contestant] = self.failed[workload, contestant] = f"failed: {words[0]}"
        self._say(f"FAILED: {workload}, {contestant}: {problem}")

    def _took(self, sample: Sample) -> None:
        self.samples.append(sample)
        ratio = report.ratio_so_far(sample, self.samples)
        latency = "" if sample.p50_ms is None else f"  p50 {sample.p50_ms:6.2f} ms"
        latency += "" if sample.p99_ms is None else f"  p99 {sample.p99_ms:7.2f} ms"
        spent = "" if sample.app_us is None else f"  app {sample.app_us:4.0f} µs"
        spent += "" if sample.statements is None else f"  {sample.statements} statements"
        noise = f"  (others {sample.others_cpu:.2f} cores)" if sample.others_cpu > NOISE else ""
        compared = "" if ratio is None else f"  {ratio:.2f} of {sample.against}"
        row = f"{sample.workload:15} {sample.contestant:32}"
        self._say(f"round {sample.round + 1}  {row} {sample.rate:9,.0f}/s{latency}{spent}{compared}{noise}")

    def _say(self, text: str) -> None:
        print(f"{self.progress.prefix()}{text}", flush=True)


def _rate(measure: Callable[..., float], *arguments: object) -> Taken:
    return Taken(measure(*arguments))


def _pair(url: str, seconds: float) -> Taken:
    rate, p50_ms = round_trips.run(url, seconds)
    return Taken(rate, p50_ms)


def _executed(name: str, url: str, jobs: int) -> Taken:
    executed = queues.run(name, url, jobs)
    return Taken(executed.executed_per_second, also={targets.ENQUEUE: executed.enqueued_per_second})
