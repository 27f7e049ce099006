"""``python -m oncekey.testing.servers``: fetch servers for tests (``make servers``): all, or those that are named."""

from __future__ import annotations

import sys

from oncekey.testing.servers.packages import main


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


sys.exit(main(say, sys.argv[1:]))
