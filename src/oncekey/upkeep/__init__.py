"""Upkeep runs beside the app: no key stays stuck, and the app's and the provider's ledgers can be compared."""

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
