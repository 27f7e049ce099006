"""oncekey: a retried request runs once. The public names, and nothing else.

A public name is imported when it is first used. So ``import oncekey`` and ``oncekey --version`` load neither the engine
nor asyncio, and a module that needs only ``oncekey.errors`` pays only for that.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oncekey.core.policy import Policy
    from oncekey.core.verdicts import Confirmed, Happened, NotHappened, Refuted, StillUnknown
    from oncekey.engine.once import OnceKey
    from oncekey.engine.operation import Operation, current
    from oncekey.engine.request import SINGLE_TENANT, Request
    from oncekey.errors import (
        CallFailed,
        InProgress,
        KeyReused,
        NotAuthenticated,
        NotAuthorized,
        NotExecuted,
        OnceKeyError,
        OutcomeUnknown,
        PersonalKey,
        Refused,
        ResultNotKept,
    )

__version__ = "0.2.0"

__all__ = [
    "SINGLE_TENANT",
    "CallFailed",
    "Confirmed",
    "Happened",
    "InProgress",
    "KeyReused",
    "NotAuthenticated",
    "NotAuthorized",
    "NotExecuted",
    "NotHappened",
    "OnceKey",
    "OnceKeyError",
    "Operation",
    "OutcomeUnknown",
    "PersonalKey",
    "Policy",
    "Refused",
    "Refuted",
    "Request",
    "ResultNotKept",
    "StillUnknown",
    "current",
]

_MODULES = {
    "core.policy": ("Policy",),
    "core.verdicts": ("Confirmed", "Happened", "NotHappened", "Refuted", "StillUnknown"),
    "engine.once": ("OnceKey",),
    "engine.operation": ("Operation", "current"),
    "engine.request": ("SINGLE_TENANT", "Request"),
    "errors": (
        *("CallFailed", "InProgress", "KeyReused", "NotAuthenticated", "NotAuthorized", "NotExecuted"),
        *("OnceKeyError", "OutcomeUnknown", "PersonalKey", "Refused", "ResultNotKept"),
    ),
}
"""The imports above, for run time."""

if not TYPE_CHECKING:  # a type checker that sees `__getattr__` accepts every misspelled name

    def __getattr__(name: str) -> object:
        """Import a public name on its first use. Later uses find it in the module and do not come here."""
        from importlib import import_module

        for module, names in _MODULES.items():
            if name in names:
                value = globals()[name] = getattr(import_module(f"oncekey.{module}"), name)
                return value
        raise AttributeError(f"module 'oncekey' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
