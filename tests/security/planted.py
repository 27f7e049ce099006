"""Planted secrets, and everything that oncekey says: log lines, events, metrics, spans and commands."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from functools import cache
from typing import Any
from unittest.mock import patch

import typer
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from oncekey.cli import main
from oncekey.cli.app import app
from oncekey.cli.logs import JsonLines
from oncekey.telemetry.events import Event
from oncekey.telemetry.exporter import Exporter
from oncekey.telemetry.otel import OpenTelemetry
from oncekey.telemetry.prometheus import Prometheus

MARK = "7f3a9c21e0planted"
"""A part of every secret. Made of letters and digits, as tokens are: what it stands in is never a word."""

WORD = "plantedAbcdef"
"""A secret that looks like a word: only the place where it stands tells that it is one."""
HEADERS = (
    f"Authorization: Bearer sk_live_{WORD}",
    f"Cookie: session=a; csrf={WORD}",
    f"Proxy-Authorization: Digest username={WORD}, response={WORD}",
)


PERSONAL: dict[str, tuple[str, ...]] = {
    "ann.planted@example.com": ("ann.planted",),
    "bob.planted%40example.com": ("bob.planted",),
    "+49.151.000.4242": ("+49.151", "000.4242"),
    "(555) 200-4242": ("(555)", "200-4242"),
    "0151/0004242": ("0151/", "/0004242"),
    "4242.4242.4242.4242": ("4242.4242",),
    "eyJhbGciOiJub25lIn0.eyJwbGFudGVkIjoxfQ.cGxhbnRlZA": ("eyJhbGciOiJub25lIn0", "eyJwbGFudGVkIjoxfQ", "cGxhbnRlZA"),
}
"""E-mail addresses, phone numbers, a card number and a token, as ``Policy(pii=…)`` knows them; and parts of each, none
of which may be shown."""
SECRETS = (MARK, WORD, *(part for parts in PERSONAL.values() for part in parts))


def secret(name: str) -> str:
    return f"sk-{MARK}-{name}"


def shown(name: str) -> str:
    """A value that the design shows on purpose: SHOWN_ON_PURPOSE has the list."""
    return f"shown-{name}"


def sentence(name: str) -> str:
    """The message of an exception, with a secret at every place where messages have one."""
    return (
        f"{name}: no customer {', '.join(PERSONAL)}: "
        f"the provider said '{secret(name)}' and \"{secret(name)}\" about {secret(name)}, password={MARK}, "
        f"token: {MARK}, Bearer {MARK}, {MARK}@example.com, https://u:{MARK}@host/{MARK}, (a)=({MARK}), it's so, "
        f"mail 'joe@example.com' password '{WORD}', {HEADERS[len(name) % len(HEADERS)]}\n"
        f"DETAIL: Key (key)=({MARK}) exists for {WORD}"
    )


class Witness:
    """Collects what oncekey says. ``found`` has the places in which a secret is."""

    def __init__(self) -> None:
        self.commands: set[str] = set()
        """The commands that were run."""
        self.said: list[tuple[str, str]] = []
        self.registry = CollectorRegistry()
        self.spans = InMemorySpanExporter()
        self.numbers = InMemoryMetricReader()
        traces = TracerProvider()
        traces.add_span_processor(SimpleSpanProcessor(self.spans))
        self.telemetry: list[Exporter] = [
            Prometheus(registry=self.registry, tenants=5),
            OpenTelemetry(tracer_provider=traces, meter_provider=MeterProvider([self.numbers]), tenants=5),
        ]

    def hear(self, place: str, text: str) -> None:
        self.said.append((place, text))

    def on_event(self, event: Event) -> None:
        self.hear("event", repr(event))
        self.hear("event", str({item.name: getattr(event, item.name) for item in fields(event)}))

    def places(self) -> set[str]:
        return {place.partition(" ")[0] for place, _ in self.said}

    def found(self, *words: str) -> list[tuple[str, str]]:
        """Every place with a secret, and what stands around it."""
        return [
            (place, text[max(0, at - 100) : at + 100])
            for word in words or SECRETS
            for place, text in self.said
            if (at := text.find(word)) >= 0
        ]

    def read_telemetry(self) -> None:
        self.hear("prometheus", generate_latest(self.registry).decode())
        for span in self.spans.get_finished_spans():
            self.hear("span", span.to_json())
        data = self.numbers.get_metrics_data()
        self.hear("otel", data.to_json() if data is not None else "")

    def run(self, *arguments: str, code: int | None = 0) -> str:
        """One command. What it prints and how it ends is heard."""
        name = next(each for each in (" ".join(arguments[:2]), arguments[0]) if each in every_command())
        self.commands.add(name)
        out, ended = io.StringIO(), 0
        with (
            redirect_stdout(out),
            redirect_stderr(out),
            _own_logging(),
            patch.object(sys, "argv", ["oncekey", *arguments]),
        ):
            try:
                main()
            except SystemExit as error:
                ended = int(error.code or 0)
        self.hear(f"command {name}", out.getvalue())
        assert code is None or ended == code, out.getvalue()
        return out.getvalue()


@contextmanager
def _own_logging() -> Iterator[None]:
    """The root logger as a new process has it, so that a command's log goes to its standard error."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@cache
def every_command() -> frozenset[str]:
    """The commands of ``oncekey``, as Typer lists them: ``worker``, ``keys show``."""

    def below(command: Any, name: str) -> Iterator[str]:
        if not hasattr(command, "commands"):
            yield name
            return
        for each, found in command.commands.items():
            yield from below(found, f"{name} {each}".strip())

    return frozenset(below(typer.main.get_command(app), ""))


class _Listener(logging.Handler):
    """Writes every record down in text, as JSON, and with all its parts."""

    def __init__(self, witness: Witness) -> None:
        super().__init__(logging.DEBUG)
        self.witness = witness
        self.text = logging.Formatter("%(levelname)s %(name)s %(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        hear = self.witness.hear
        hear("log", self.text.format(record))
        hear("log", JsonLines().format(record))
        hear("log", repr({name: value for name, value in vars(record).items() if name != "event"}))
        error = record.exc_info[1] if record.exc_info else None
        hear("log", repr(error))


@contextmanager
def listening() -> Iterator[Witness]:
    witness = Witness()
    logger = logging.getLogger("oncekey")
    listener, level = _Listener(witness), logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    try:
        yield witness
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


def as_json(text: str) -> Any:
    return json.loads(text)
