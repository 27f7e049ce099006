"""A OnceKey on each store that consumers are tested with."""

from __future__ import annotations

from tests.each_store import once, url

__all__ = ["once", "url"]
