"""The log of ``oncekey worker`` and ``oncekey upkeep``: its level, and text or one JSON object per line.

It is set up on the root logger, so that the app's own loggers are written too, and before the app's module is imported,
so that a module that configures logging itself overrides it. The log goes to standard error; the result of a command
goes to standard output.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

import typer

from oncekey.telemetry.events import Event


class Level(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Format(StrEnum):
    TEXT = "text"
    JSON = "json"


LogLevel = Annotated[Level, typer.Option("--log-level", help="The least that is logged, to standard error.")]
LogFormat = Annotated[Format, typer.Option("--log-format", help="How: lines of text, or one JSON object per line.")]


class JsonLines(logging.Formatter):
    """One JSON object per line. Line breaks of a message or a traceback are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        event = getattr(record, "event", None)
        if isinstance(event, Event):
            line["event"] = type(event).__name__
            line["fields"] = {item.name: getattr(event, item.name) for item in fields(event)}
        if record.exc_text:  # of oncekey's own loggers: its values are masked
            line["traceback"] = record.exc_text
        elif record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str)


def set_up(level: Level, form: Format) -> Callable[[str], None]:
    """Log to standard error. Returns a function for a command's own messages, which are shown at every level."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonLines() if form is Format.JSON else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])

    def say(message: str) -> None:
        if form is Format.JSON:
            record = logging.LogRecord("oncekey.cli", logging.INFO, __file__, 0, message, None, None)
            message = JsonLines().format(record)
        print(message, file=sys.stderr, flush=True)

    return say
