"""A guard of the product, taken away: what is edited, and the test that must notice."""

from __future__ import annotations

from dataclasses import dataclass

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


def mutant(hazard: int, promise: str, guard: str, test: str, *edits: Edit) -> Mutant:
    return Mutant(hazard, promise, guard, edits, test)
