"""A guard of the product, taken away: what is edited, and the test that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

Edit = tuple[str, str, str]
"""Where, what stands there, and what is put in its place: see ``mutating/sitecustomize.py``."""


@dataclass(frozen=True)
class Mutant:
    hazard: int
    """Guards of one number are against the same thing that can go wrong."""
    promise: str
    guard: str
    edits: tuple[Edit, ...]
    test: str
    needs: str = ""
    """A module that is not in requirements/dev.txt, and that the test is skipped without."""

    @property
    def can_run(self) -> bool:
        return not self.needs or find_spec(self.needs) is not None


def mutant(hazard: int, promise: str, guard: str, test: str, *edits: Edit, needs: str = "") -> Mutant:
    return Mutant(hazard, promise, guard, edits, test, needs)
