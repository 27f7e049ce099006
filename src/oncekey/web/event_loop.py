"""oncekey runs only on asyncio: it uses the futures, locks and threads of asyncio's event loop."""

from __future__ import annotations

import asyncio

from oncekey.errors import ConfigurationError

_ASYNCIO_ONLY = (
    "oncekey runs on asyncio, and this server runs the app without an asyncio event loop (under trio, probably): "
    "start the server with asyncio, which for Hypercorn is --worker-class asyncio"
)


def require_asyncio() -> None:
    """ConfigurationError if no asyncio event loop runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise ConfigurationError(_ASYNCIO_ONLY) from None
