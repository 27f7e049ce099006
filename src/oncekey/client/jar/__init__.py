"""The key jar. See ``jar.py``."""

from oncekey.client.jar.intent import Intent
from oncekey.client.jar.jar import KeyJar
from oncekey.client.jar.table import Row

__all__ = ["Intent", "KeyJar", "Row"]
