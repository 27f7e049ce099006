"""Upkeep runs beside or inside the app, so that no key stays stuck: sweeper, reaper, reconciler and resumer."""

from oncekey.core.verdicts import (
    Confirmed,
    Happened,
    Inquiry,
    NotHappened,
    Outcome,
    Refuted,
    Settlement,
    StillUnknown,
    Verdict,
)
from oncekey.engine.resumption import Resumption
from oncekey.upkeep.health import Health
from oncekey.upkeep.reaper import Reaper
from oncekey.upkeep.reconciler import Reconciler
from oncekey.upkeep.resumer import Resumer
from oncekey.upkeep.service import Upkeep
from oncekey.upkeep.sweeper import Sweeper

__all__ = [
    "Confirmed",
    "Happened",
    "Health",
    "Inquiry",
    "NotHappened",
    "Outcome",
    "Reaper",
    "Reconciler",
    "Refuted",
    "Resumer",
    "Resumption",
    "Settlement",
    "StillUnknown",
    "Sweeper",
    "Upkeep",
    "Verdict",
]
