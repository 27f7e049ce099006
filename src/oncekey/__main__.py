"""``python -m oncekey`` is ``oncekey``."""

from oncekey.cli import main

main()
