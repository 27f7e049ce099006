"""Reads the URL: ``dynamodb://table?region=eu-central-1``.

Credentials come from where the SDK looks for them (environment, profile, role), so no secret stands in the URL.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl, unquote, urlsplit

from oncekey.core.values import value
from oncekey.errors import ConfigurationError

TIMEOUT_SECONDS = 5.0
"""How long a verb may take, with all its attempts."""
MARGIN_SECONDS = 0.5
"""How much longer than its owner's clock says a lease counts for all others: their clocks may be ahead of the owner's.
Hosts that synchronise their clocks are some milliseconds apart."""

_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}").fullmatch
_USE = "use dynamodb://table?region=eu-central-1"


@value
class Settings:
    """Where the table is, and how patient the store is."""

    table: str
    region: str | None = None
    """None: what the SDK is set up with."""
    endpoint: str | None = None
    """Another address than Amazon's for the region: a server for tests, or a VPC endpoint."""
    timeout: float = TIMEOUT_SECONDS
    margin: float = MARGIN_SECONDS

    @property
    def where(self) -> str:
        """The name of the store in messages."""
        return f"DynamoDB table {self.table}" + (f" in {self.region}" if self.region else "")


def settings_of(url: str) -> Settings:
    parts = urlsplit(url)
    table = unquote(parts.netloc)
    if not _TABLE(table) or parts.path.strip("/"):
        found = "has a table name that DynamoDB does not take" if table else "names no table"
        if parts.path.strip("/"):
            found = "has more than the name of one table before the '?'"
        raise ConfigurationError(
            f"the DynamoDB URL {found}: {_USE}; a table's name has 3 to 255 letters, digits, '_', '-' and '.', "
            "and credentials are not part of the URL"
        )
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(given.keys() - {"region", "endpoint", "timeout", "margin"}):
        raise ConfigurationError(
            f"the DynamoDB URL has an option that is not known, '{unknown[0]}': {_USE}, with &endpoint=, &timeout= and "
            "&margin= (both in seconds)"
        )
    return Settings(
        table,
        given.get("region") or None,
        given.get("endpoint") or None,
        _seconds(given, "timeout", TIMEOUT_SECONDS, 0.1),
        _seconds(given, "margin", MARGIN_SECONDS, 0.0),
    )


def _seconds(given: dict[str, str], name: str, default: float, least: float) -> float:
    try:
        seconds = float(given.get(name, default))
    except ValueError:
        seconds = -1.0
    if not least <= seconds <= 3600.0:
        raise ConfigurationError(f"{name}= in the DynamoDB URL must be seconds, from {least:g} to 3600")
    return seconds
