"""Loads Django's backend of MySQL once more, with PyMySQL as ``MySQLdb``. So both drivers work in one process."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pymysql

_REPLACED = ("MySQLdb", "_mysql", "django.db.backends.mysql")


def _take_away() -> dict[str, Any]:
    """The modules of the driver and of the backend, which are no longer imported then."""
    names = [name for name in sys.modules if name.startswith(_REPLACED)]
    return {name: sys.modules.pop(name) for name in names}


def _load() -> Any:
    from django.db import backends

    before, attribute = _take_away(), getattr(backends, "mysql", None)
    try:
        pymysql.install_as_MySQLdb()
        return import_module("django.db.backends.mysql.base").DatabaseWrapper
    finally:
        _take_away()
        sys.modules.update(before)
        if attribute is not None:
            backends.mysql = attribute  # type: ignore[attr-defined]


DatabaseWrapper = _load()
