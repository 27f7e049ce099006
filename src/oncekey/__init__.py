"""oncekey: a retried request runs once. The public names, and nothing else."""

from oncekey.core.policy import Policy
from oncekey.core.verdicts import Confirmed, Happened, NotHappened, Refuted, StillUnknown
from oncekey.engine.once import OnceKey
from oncekey.engine.operation import Operation, current
from oncekey.engine.request import SINGLE_TENANT, Request
from oncekey.errors import NotAuthenticated, NotAuthorized, NotExecuted, OnceKeyError, OutcomeUnknown, Refused

__version__ = "0.2.0"

__all__ = [
    "SINGLE_TENANT",
    "Confirmed",
    "Happened",
    "NotAuthenticated",
    "NotAuthorized",
    "NotExecuted",
    "NotHappened",
    "OnceKey",
    "OnceKeyError",
    "Operation",
    "OutcomeUnknown",
    "Policy",
    "Refused",
    "Refuted",
    "Request",
    "StillUnknown",
    "current",
]
