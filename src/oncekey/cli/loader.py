"""Imports the user's object that ``module:name`` on a command line names."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TypeVar

from oncekey.errors import ConfigurationError

_Kind = TypeVar("_Kind")


def load(path: str, kind: type[_Kind], example: str) -> _Kind:
    """The object at ``module:name``, which must be a ``kind``. An exception that the module itself raises passes."""
    module, colon, name = path.partition(":")
    if not (module and colon and name):
        raise ConfigurationError(f"'{path}' is not of the form module:name; give {example}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does: an installed command does not search the current folder
    try:
        found: object = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module exists, and one of its own imports is missing
        raise ConfigurationError(
            f"there is no module '{error.name}' here or on the Python path: run it where {module} can be imported"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"module '{module}' has no '{name}'; give {example}")
        found = getattr(found, part)
    if not isinstance(found, kind):
        raise ConfigurationError(f"'{path}' is of type {type(found).__name__}, not {kind.__name__}; give {example}")
    return found
