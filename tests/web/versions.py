"""What differs between the versions that we support, for tests that must know (docs/compatibility.md)."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version

MIDDLEWARE_WAITS = Version(version("starlette")) >= Version("1.7")
"""Whether BaseHTTPMiddleware waits until the last message of a response has been sent."""

ASYNC_OBJECTS = Version(version("fastapi")) >= Version("0.123.5")
"""Whether FastAPI awaits an endpoint that is an object with an ``async def __call__``."""

YIELDING_ENDPOINTS = Version(version("fastapi")) >= Version("0.134")
"""Whether FastAPI takes an endpoint with ``yield`` that is declared to return an AsyncIterable."""

ROUTE_IN_SCOPE = Version(version("starlette")) >= Version("1.7")
"""Whether Starlette's router writes the route into the ASGI scope, as FastAPI's does in every version."""
