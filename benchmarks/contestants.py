"""Who runs against whom: the apps behind uvicorn, and the targets that the project has set itself.

Owns names, order and targets; ``__main__.py`` runs them, ``report.py`` prints what came out.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.load import Mode

FRAMEWORKS = ("starlette", "fastapi")
STORES = ("memory", "sqlite", "postgres")
WORDS = (*FRAMEWORKS, *STORES, "bare", "store")
"""What ``--only`` takes."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One app in one uvicorn process; its modes are measured one after the other."""

    framework: str
    store: str | None
    """None: bare."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        return ("bare",) if self.store is None else ("first", "replay")

    @property
    def name(self) -> str:
        return f"{self.framework} {self.store or 'bare'}"

    def row(self, mode: Mode) -> str:
        """The name of one line of the table."""
        return self.name if self.store is None else f"{self.name} {mode}"


PGBENCH_ROW = "store pgbench, 32 clients"
LANES_ROW = "store postgres lanes, 128 callers"
RAW_ROW = "store postgres raw, batches of 64"
SQLITE_LANES_ROW = "store sqlite lanes, 128 callers"

TARGETS: dict[str, float] = {
    "starlette postgres first": 0.40,
    "starlette sqlite first": 0.35,
    "starlette memory replay": 0.85,
    "starlette sqlite replay": 0.85,
    "starlette postgres replay": 0.85,
    LANES_ROW: 3.0,
}
"""Least ratio to the bare app (or to pgbench) of the same run. Rows that are not here are only reported."""


def chosen(only: set[str], quick: bool) -> list[Contestant]:
    """The apps to run, each framework's bare app with them.

    ``only`` names stores, frameworks, both, ``bare`` for the bare apps alone, or ``store`` for the part
    without HTTP.
    """
    if only == {"store"}:
        return []
    frameworks = only & set(FRAMEWORKS) or set(FRAMEWORKS[:1] if quick else FRAMEWORKS)
    stores = only & set(STORES) or (set() if "bare" in only else set(STORES))
    return [
        Contestant(framework, store)
        for framework in FRAMEWORKS
        for store in (None, *STORES)
        if framework in frameworks and (store is None or store in stores)
    ]


def order(contestants: list[Contestant], round_number: int) -> list[Contestant]:
    """Another order in every round, with the bare apps first and last: what drifts, drifts for all alike."""
    bare = [contestant for contestant in contestants if contestant.store is None]
    others = [contestant for contestant in contestants if contestant.store is not None]
    turn = round_number % len(others) if others else 0
    others = others[turn:] + others[:turn]
    return bare + (others[::-1] if round_number % 2 else others) + bare[::-1]
