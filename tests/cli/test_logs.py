"""The log of long commands: JSON lines that stay whole, and lines about how it goes that no level hides."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

from oncekey.cli.logs import JsonLines

SAY = "from oncekey.cli.logs import Format, Level, set_up; set_up(Level.ERROR, Format('{form}'))('how it goes')"


def test_json_line_escapes_line_breaks_and_keeps_values_that_json_has_no_word_for() -> None:
    record = logging.LogRecord("app", logging.WARNING, __file__, 1, "two\nlines of %s", (Path("x"),), None)
    line = JsonLines().format(record)
    assert "\n" not in line
    assert json.loads(line) | {"time": ""} == {
        "time": "",
        "level": "WARNING",
        "logger": "app",
        "message": "two\nlines of x",
    }


def _said(form: str) -> str:
    command = [sys.executable, "-c", SAY.format(form=form)]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stderr


def test_lines_about_progress_follow_the_format_and_ignore_the_level() -> None:
    assert _said("text") == "how it goes\n"
    line = json.loads(_said("json"))
    assert (line["level"], line["message"]) == ("INFO", "how it goes")
