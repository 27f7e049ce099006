"""The parts that an OnceKey is made of: its store, the cache in front of it, and the class of its engine.

What is optional is imported here, and only where the app asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from oncekey.core.record import Reservation
from oncekey.core.routes import Routes
from oncekey.engine.engine import Engine
from oncekey.errors import ConfigurationError
from oncekey.stores.api import Store
from oncekey.stores.cache import open_cache
from oncekey.stores.cache.front import Cache
from oncekey.stores.registry import open_store

if TYPE_CHECKING:
    from oncekey.encryption import Keyring
    from oncekey.telemetry.registry import Telemetry


def keyring_of(given: Any, taker: str = "OnceKey") -> Keyring | None:
    """The app's keyring; ConfigurationError if it is something else, such as the text that a keyring is made of."""
    if given is None:
        return None
    from oncekey.encryption import Keyring

    if not isinstance(given, Keyring):
        raise ConfigurationError(f"{taker}(encryption=…): it takes a keyring, such as Keyring.from_env('ONCEKEY_KEYS')")
    return given


def keyed_by(keyring: Keyring | None) -> Callable[[Reservation], Reservation] | None:
    if keyring is None:
        return None
    from oncekey.encryption.fingerprints import KeyedFingerprints

    return KeyedFingerprints(keyring)


def store_of(url: str | Store, encryption: Keyring | None) -> Store:
    """The store, around which everything is encrypted if the app has a keyring."""
    store = open_store(url) if isinstance(url, str) else url
    if encryption is None:
        return store
    from oncekey.encryption.store import sealed

    return sealed(store, encryption)


def cache_of(
    url: str | None, secret: str | bytes | None, ttl: float, store: Store, encryption: Keyring | None
) -> Cache | None:
    """The cache in front of the store, if the app has one. It gets sealed rows where the store does."""
    if url is None:
        return None
    if encryption is None:
        return open_cache(url, secret, ttl, store)
    from oncekey.encryption.cache import SealedEntries

    return open_cache(url, secret, ttl, store, partial(SealedEntries, encryption))


def engine_of(telemetry: Telemetry, routes: Routes) -> Callable[..., Engine]:
    """Makes the engine. Without exporters, neither they nor the engine that measures for them are imported."""
    if telemetry is None:
        return Engine
    from oncekey.engine.observed import ObservedEngine
    from oncekey.telemetry.exporter import tell
    from oncekey.telemetry.registry import exporters_of

    exporters = exporters_of(telemetry)
    if not exporters:
        return Engine
    tell(exporters, "expect", [operation for operation, policy in routes.listed.items() if policy is not None])
    return partial(ObservedEngine, exporters)
