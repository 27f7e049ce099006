"""Looks for the files that a store's URL names, when the store is made.

A driver opens them when it connects. That is in the middle of a request, and its error often does not name the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oncekey.errors import ConfigurationError


def require_files(options: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Raise ConfigurationError for the first of these options whose file is missing or cannot be read."""
    for name in names:
        path = options.get(name)
        if not path:
            continue
        if not Path(path).exists():
            raise ConfigurationError(f"the URL has {name}={path}, and there is no such file")
        if not os.access(path, os.R_OK):
            raise ConfigurationError(f"the URL has {name}={path}, and this process may not read that file")
