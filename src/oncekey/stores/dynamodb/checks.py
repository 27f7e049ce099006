"""What ``oncekey doctor`` asks: the table, its capacity, its copies, and how far this host's clock is off."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

from oncekey.core.diagnosis import Diagnosis, Level
from oncekey.errors import SchemaError
from oncekey.stores.dynamodb import schema
from oncekey.stores.dynamodb.client import Client, Verb
from oncekey.stores.dynamodb.settings import Settings

SLACK_SECONDS = 1.0
"""The ``Date`` of an answer has whole seconds."""


class Checks:
    """A part of :class:`oncekey.stores.dynamodb.store.DynamoStore`."""

    _client: Client
    _settings: Settings

    def diagnose(self) -> list[Diagnosis]:
        ask = self._client.verb(long=True)
        before = host_clock()
        try:
            answer = ask("describe_table")
        except SchemaError as missing:
            return [Diagnosis("schema", Level.FAIL, str(missing).partition(": ")[0], "run `oncekey migrate`")]
        after = host_clock()
        return list(self._findings(ask, answer, before, after))

    def _findings(self, ask: Verb, answer: dict[str, Any], before: float, after: float) -> Iterator[Diagnosis]:
        where = self._settings.where
        if (sentence := schema.outdated(ask, self._settings)) is None:
            yield Diagnosis("schema", Level.OK, f"{where} is as this version wants it")
        else:
            found, _, advice = sentence.rpartition(": ")
            yield Diagnosis("schema", Level.FAIL, found, advice)
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        yield clock(date, before, after, self._settings.margin)
        yield from table(answer["Table"])
        yield time_to_live(schema.time_to_live(ask))


def host_clock() -> float:
    return time.time()


def clock(date: str | None, before: float, after: float, margin: float) -> Diagnosis:
    """Judges this host's clock by the ``Date`` of an answer. Leases are on hosts' clocks, so they depend on it."""
    if date is None:
        return Diagnosis("clock", Level.WARN, "the server does not tell its time", "compare this host's clock by hand")
    there = parsedate_to_datetime(date).timestamp()
    apart = max(before - there - SLACK_SECONDS, there - after, 0.0)
    limit = max(margin, 0.0)
    if apart <= limit:
        return Diagnosis("clock", Level.OK, "this host's agrees with DynamoDB's, as far as whole seconds show")
    side = "ahead of" if before > there else "behind"
    return Diagnosis(
        "clock",
        Level.FAIL,
        f"this host's is {apart:,.1f} s {side} DynamoDB's, and leases have a margin of {margin:g} s: a host that is "
        "ahead ends the leases of others too early",
        "synchronise this host's clock (NTP), or raise margin= in the URL",
    )


def table(found: dict[str, Any]) -> Iterator[Diagnosis]:
    """Judges how the table is set up."""
    mode = found.get("BillingModeSummary", {}).get("BillingMode", "PROVISIONED")
    if mode == "PAY_PER_REQUEST":
        yield Diagnosis("capacity", Level.OK, "on demand")
    else:
        yield Diagnosis(
            "capacity",
            Level.WARN,
            "provisioned: requests above it are throttled, and get 503",
            "use on-demand capacity, or scale the table and both of its indexes",
        )
    copies = [copy.get("RegionName", "?") for copy in found.get("Replicas", [])]
    if copies:
        yield Diagnosis(
            "regions",
            Level.FAIL,
            f"this is a global table (also in {', '.join(copies)}): two regions can both reserve the same key",
            "send all requests of a key to one region, or use a table of one region",
        )
    else:
        yield Diagnosis("regions", Level.OK, "the table is in one region")


def time_to_live(enabled: bool | None) -> Diagnosis:
    if enabled is None:
        return Diagnosis("time to live", Level.OK, "cannot be asked here; upkeep deletes keys without it")
    if enabled:
        return Diagnosis("time to live", Level.OK, "on, as a second way after upkeep")
    return Diagnosis(
        "time to live",
        Level.WARN,
        "off: parts of large responses that a killed process left are never deleted",
        "run `oncekey migrate`",
    )
