"""What ``oncekey doctor`` says about one thing: how it is, and what to do about it."""

from __future__ import annotations

from enum import StrEnum

from oncekey.core.values import value


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"  # a promise holds, and somebody should look
    FAIL = "fail"  # a promise is broken, or will be


@value
class Diagnosis:
    check: str
    """What was looked at, in a word or two."""
    level: Level
    found: str
    advice: str = ""
    """What to do; nothing, where all is well."""


def worst(diagnoses: list[Diagnosis]) -> Level:
    """The level of the worst of them."""
    order = list(Level)
    return max((diagnosis.level for diagnosis in diagnoses), key=order.index, default=Level.OK)
