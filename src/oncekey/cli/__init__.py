"""The command line. This module is the entry point, and works without the packages that the commands need.

Owns the exit codes: 0 for done, 1 for an error that the operator can correct (one sentence on stderr, never a
traceback), 2 for a wrong command line or a missing extra. Each group of commands is one file; ``cli/app.py`` joins
them. ``oncekey --version`` alone is answered here, because deploy scripts and health checks call it often, and the
commands take ten times as long to import.
"""

from __future__ import annotations

import sys

import oncekey
from oncekey.errors import OnceKeyError

_NEEDED = frozenset({"typer", "rich", "click", "shellingham"})


def main() -> None:
    """Run the command line of this process, and exit."""
    if sys.argv[1:] == ["--version"]:
        print_version()
        sys.exit(0)
    try:
        from oncekey.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        print("oncekey: the command line needs a few packages more: pip install 'oncekey[cli]'", file=sys.stderr)
        sys.exit(2)
    try:
        app(prog_name="oncekey")
    except OnceKeyError as error:
        print(f"oncekey: {error}", file=sys.stderr)
        sys.exit(1)


def print_version() -> None:
    """What ``--version`` prints, here and among the options of ``cli/app.py``."""
    print(f"oncekey {oncekey.__version__}")
