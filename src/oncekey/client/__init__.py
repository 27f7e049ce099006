"""A client that keeps its key: retries that cannot run twice, also across a crash of the client.

``Client`` and ``AsyncClient`` need httpx (``pip install 'oncekey[client]'``). ``oncekey.client.httpx`` has transports
for other clients on httpx, ``oncekey.client.requests`` an adapter, ``oncekey.client.aiohttp`` a session. All obey the
table in ``decisions.py``. ``jar/`` keeps keys on disk. A name is imported when it is first used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oncekey.client.attempts import Rules
    from oncekey.client.budget import Budget
    from oncekey.client.client import AsyncClient, Client
    from oncekey.client.jar import Intent, KeyJar
    from oncekey.client.reading import Answer
    from oncekey.client.resumption import Ended, Outcome
    from oncekey.errors import (
        ClientError,
        IntentChanged,
        IntentExpired,
        JarError,
        OutcomeUnsettled,
        RedirectRefused,
    )

__all__ = [
    "Answer",
    "AsyncClient",
    "Budget",
    "Client",
    "ClientError",
    "Ended",
    "Intent",
    "IntentChanged",
    "IntentExpired",
    "JarError",
    "KeyJar",
    "Outcome",
    "OutcomeUnsettled",
    "RedirectRefused",
    "Rules",
]

_MODULES = {
    "client.attempts": ("Rules",),
    "client.budget": ("Budget",),
    "client.client": ("AsyncClient", "Client"),
    "client.jar": ("Intent", "KeyJar"),
    "client.reading": ("Answer",),
    "client.resumption": ("Ended", "Outcome"),
    "errors": ("ClientError", "IntentChanged", "IntentExpired", "JarError", "OutcomeUnsettled", "RedirectRefused"),
}
"""The imports above, for run time."""

if not TYPE_CHECKING:  # a type checker that sees `__getattr__` accepts every misspelled name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        for module, names in _MODULES.items():
            if name in names:
                try:
                    value = globals()[name] = getattr(import_module(f"oncekey.{module}"), name)
                except ModuleNotFoundError as error:
                    if error.name not in ("httpx", "anyio"):
                        raise
                    from oncekey.errors import ConfigurationError

                    raise ConfigurationError(f"{name} needs httpx: pip install 'oncekey[client]'") from error
                return value
        raise AttributeError(f"module 'oncekey.client' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
