"""``python -m oncekey.testing.servers``: fetch the servers that tests can use (``make servers``)."""

from __future__ import annotations

import sys

from oncekey.testing.servers.packages import main


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


sys.exit(main(say))
