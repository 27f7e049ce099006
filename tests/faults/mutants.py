"""Each guard of the product taken away, one at a time: the test that is there for it must fail.

    python -m tests.faults.mutants                 all of them, two at a time
    python -m tests.faults.mutants "owner"         those whose guard, hazard or test contains this
    python -m tests.faults.mutants --markdown      the table for the docs

A mutant is a change of the product's text as it is loaded (``mutating/sitecustomize.py``): nothing is switched in the
product, and no file changes. It is caught when its test, which passes without it, fails by what it checks; a test that
fails because the mutant is no valid program says nothing, and neither does a mutant whose text is no longer there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.faults.campaign import Fault, Run
from tests.faults.mutant import Edit, Mutant
from tests.faults.mutant_table import MUTANTS, NOT_HERE

ROOT = Path(__file__).parents[2]
MUTATING = Path(__file__).parent / "mutating"
WARM = (
    *("hypothesis.stateful", "pytest_asyncio", "xdist.plugin", "httpx", "starlette.applications", "fastapi", "flask"),
    *("sqlalchemy.ext.asyncio", "psycopg", "asyncpg", "aiosqlite", "uvicorn", "orjson", "rfc8785", "http_sfv"),
)
"""What the tests import beside oncekey: once, and not for every mutant."""
AT_ONCE = 2
SECONDS = 300
PLAIN_SECONDS = 1800
"""For all tests without a mutant, one after the other: five minutes, and three times as long on a busy machine."""
NO_PROGRAM = re.compile(
    r"^E +(?:SyntaxError|ImportError|ModuleNotFoundError|NameError|UnboundLocalError|AttributeError: '(?!NoneType))",
    re.MULTILINE,
)
RUNNABLE = tuple(mutant for mutant in MUTANTS if mutant.can_run)
SHORT = (
    "a swap compares the owner (memory)",
    "the fingerprint is compared before the state",
    "a failed batch is tried row by row",
)


@dataclass(frozen=True)
class Outcome:
    mutant: Mutant
    caught: bool
    why: str
    """What the test said; or what is wrong with the mutant."""
    seconds: float


class Trial:
    """Pytest on a few tests with a mutant, or without: a fork of this process, which has imported everything else."""

    def __init__(self, nodes: Iterable[str], edits: tuple[Edit, ...], mutant: Mutant | None = None) -> None:
        self.mutant = mutant
        self.began = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="oncekey-mutant-")
        self.folder = Path(self._folder.name)
        self.folder.chmod(0o755)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            code = 70
            try:
                code = self._child(list(nodes), [list(edit) for edit in edits])
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def _child(self, nodes: list[str], edits: list[list[str]]) -> int:
        os.setsid()
        said = os.open(self.folder / "said", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        paths = [str(MUTATING), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "ONCEKEY_MUTANT": json.dumps(edits),
            "ONCEKEY_MUTANT_APPLIED": str(self.folder / "applied"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self.folder / "hypothesis"),
        }
        for name in [name for name in sys.modules if name.split(".")[0] in ("oncekey", "tests", "sitecustomize")]:
            del sys.modules[name]  # to be loaded again, edited
        sys.path.insert(0, str(MUTATING))
        importlib.import_module("sitecustomize")
        options = [
            "-q",
            *("-m", "not faults"),  # a mutant may name a test in depth
            *(["-x"] if edits else []),
            "-n",
            "0",
            "--tb=short",
            "--timeout=60",
            f"--basetemp={self.folder / 'tmp'}",
        ]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        return int(pytest.main([*options, "-p", "no:cacheprovider", "-p", "no:schemathesis", *nodes]))

    def over(self) -> bool:
        """Whether it has ended; it is ended after its time, with all that it started."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and time.monotonic() - self.began > (SECONDS if self.mutant else PLAIN_SECONDS):
            os.killpg(self.pid, signal.SIGKILL)
            pid, status = os.waitpid(self.pid, 0)
        if pid:
            self.code = os.waitstatus_to_exitcode(status)
            self.said = self._read("said")
            self.applied = self._read("applied")
            self._folder.cleanup()
        return bool(pid)

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text("utf-8", "replace") if path.exists() else ""


def judged(trial: Trial) -> Outcome:
    mutant = trial.mutant
    assert mutant is not None
    seconds = time.monotonic() - trial.began
    stale = [line for line in trial.applied.splitlines() if line.startswith("stale")]
    missing = [where for where, _, _ in mutant.edits if f"applied: {where}" not in trial.applied]
    if stale or missing:
        return Outcome(mutant, False, stale[0] if stale else f"never loaded: {missing[0]}", seconds)
    if trial.code == 0:
        return Outcome(mutant, False, "survived", seconds)
    if trial.code != 1 or NO_PROGRAM.search(trial.said):
        return Outcome(mutant, False, f"no verdict (exit {trial.code}):\n{trial.said[-2000:]}", seconds)
    failed = re.findall(r"^FAILED (.+)$", trial.said, re.MULTILINE)
    return Outcome(mutant, bool(failed), failed[0] if failed else f"no test failed:\n{trial.said[-2000:]}", seconds)


def try_all(mutants: Sequence[Mutant], told: Callable[[Outcome], None], *, plainly: bool = True) -> None:
    """Each mutant; and once all their tests without any, since a test that fails anyway has caught nothing. One that
    failed there is given a second chance: the machine is busy, and it may have been the clock."""
    for name in WARM:
        importlib.import_module(name)
    tests = sorted({mutant.test for mutant in mutants})
    plain = Trial(tests, ()) if plainly else None
    again = False
    running, waiting = [plain] if plain else [], list(mutants)
    outcomes: list[Outcome] = []
    fails = ""
    while running or waiting:
        while waiting and len(running) < AT_ONCE:
            mutant = waiting.pop(0)
            running.append(Trial([mutant.test], mutant.edits, mutant))
        for trial in [trial for trial in running if trial.over()]:
            running.remove(trial)
            if trial is not plain:
                outcomes.append(judged(trial))
            elif trial.code not in (0, 1):
                raise RuntimeError(f"without any mutant (exit {trial.code}):\n{trial.said[-3000:]}")
            else:
                fails = "\n".join(re.findall(r"^(?:FAILED|ERROR) (.+)$", trial.said, re.MULTILINE))
                if fails and not again:
                    again, plain = True, Trial([test for test in tests if test in fails], ())
                    running.append(plain)
        if plain not in running:
            for outcome in outcomes:
                anyway = outcome.mutant.test in fails
                told(replace(outcome, caught=False, why="its test fails without it") if anyway else outcome)
            outcomes = []
        time.sleep(0.02)


def fault(run: Run) -> None:
    """In a process of its own, since this one may be pytest already. Every survivor is a violation."""
    # The short form is part of `make test`, which runs the tests themselves.
    names = [] if run.count >= len(RUNNABLE) else ["--trusting", *SHORT[: run.count]]
    command = [sys.executable, "-m", "tests.faults.mutants", "--json", *names]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as trials:
        assert trials.stdout is not None
        assert trials.stderr is not None
        for line in trials.stdout:
            told = json.loads(line)
            run.hit()
            if not told["caught"]:
                run.violated(told["promise"], f"{told['guard']}: {told['why']} ({told['test']})")
        wrong = trials.stderr.read()
    assert trials.returncode in (0, 1), wrong


FAULTS = (
    Fault(
        "mutants: each guard removed",
        fault,
        {"-": len(RUNNABLE)},
        short=1,
        promises=tuple(sorted({mutant.promise for mutant in MUTANTS})),
        unit="mutants",
        seconds=240.0,
    ),
)


def markdown() -> str:
    lines = ["| hazard | guard | removed, this fails |", "|---|---|---|"]
    tests = [each.test.removeprefix("tests/").replace("|", "\\|") for each in MUTANTS]  # as a cell of a table has it
    lines += [f"| {each.hazard} | {each.guard} | `{test}` |" for each, test in zip(MUTANTS, tests, strict=True)]
    lines += [f"| {hazard} | - | {why} |" for hazard, why in NOT_HERE.items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.faults.mutants", description="Each guard removed.")
    parser.add_argument("words", nargs="*", help="only mutants whose guard, hazard or test contains one of these")
    parser.add_argument("--markdown", action="store_true", help="print the table for the docs, and try nothing")
    parser.add_argument("--trusting", action="store_true", help="do not run the tests without a mutant first")
    parser.add_argument("--json", action="store_true", help="a line for each, for a program")
    options = parser.parse_args()
    if options.markdown:
        print(markdown())
        return 0
    chosen = [
        each
        for each in RUNNABLE
        if not options.words or any(word in f"h{each.hazard} {each.guard} {each.test}" for word in options.words)
    ]
    if not chosen:
        parser.error("no mutant that can run here contains these words")  # pytest without a test would run all of them
    began, survivors = time.monotonic(), 0

    def told(outcome: Outcome) -> None:
        nonlocal survivors
        survivors += not outcome.caught
        mutant = outcome.mutant
        if options.json:
            line = {"caught": outcome.caught, "why": outcome.why, "promise": mutant.promise}
            print(json.dumps(line | {"guard": mutant.guard, "test": mutant.test}), flush=True)
            return
        mark = "caught  " if outcome.caught else "SURVIVED"
        print(f"{mark} {outcome.seconds:5.1f} s  {mutant.hazard:>2}  {mutant.guard}  <-  {mutant.test}", flush=True)
        if not outcome.caught:
            print(f"    {outcome.why}", flush=True)

    try_all(chosen, told, plainly=not options.trusting)
    if not options.json:
        print(f"{len(chosen)} mutants, {survivors} survivors, {time.monotonic() - began:.0f} s")
        for each in sorted({mutant.needs for mutant in MUTANTS if not mutant.can_run}):
            print(f"some were not tried: the module {each} is not installed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
