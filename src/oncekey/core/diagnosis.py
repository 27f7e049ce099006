"""One line of ``oncekey doctor``: what it found, and what to do about it."""

from __future__ import annotations

from enum import StrEnum

from oncekey.core.values import value


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"  # every promise holds, and an operator should look
    FAIL = "fail"  # a promise is broken, or will be


@value
class Diagnosis:
    check: str
    """The name of the check, in a word or two."""
    level: Level
    found: str
    advice: str = ""
    """What to do; empty if all is well."""


def worst(diagnoses: list[Diagnosis]) -> Level:
    """The worst level of all diagnoses."""
    order = list(Level)
    return max((diagnosis.level for diagnosis in diagnoses), key=order.index, default=Level.OK)
