"""Takes one guard out of oncekey as it is loaded: by its text, in memory, and no file is changed.

Python runs a module of this name at its start, so with this folder on ``PYTHONPATH`` it runs in every process
that is started from there, the children of a test included. ``ONCEKEY_MUTANT`` says what to change, as JSON: a list of
[where, old, new]. ``where`` is a module, or ``package/name`` for ``name.sql`` in it; ``old`` must stand there exactly
once. A line for each change that was made is added to the file named by ``ONCEKEY_MUTANT_APPLIED``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

EDITS: list[list[str]] = json.loads(os.environ.get("ONCEKEY_MUTANT", "[]"))
STATEMENTS = "oncekey.stores.sql.queries"


def edited(where: str, text: str) -> str:
    for at, old, new in EDITS:
        if at == where:
            if text.count(old) != 1:
                _tell(f"stale: {where} has this {text.count(old)} times: {old}")
            text = text.replace(old, new)
            _tell(f"applied: {where}")
    return text


def _tell(line: str) -> None:
    with Path(os.environ["ONCEKEY_MUTANT_APPLIED"]).open("a") as file:
        file.write(line + "\n")


class Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        """From the source, and never from or into a cache."""
        text = edited(fullname, Path(self.path).read_text("utf-8"))
        return compile(text, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == STATEMENTS:
            edit_statements(module)


def edit_statements(module: Any) -> None:
    statement, migrations = module.statement, module.migrations
    module.statement = lambda package, name: edited(f"{package}/{name}", statement(package, name))
    module.migrations = lambda package: [
        module.Migration(each.number, each.name, edited(f"{package}/{each.number:04d}_{each.name}", each.sql))
        for each in migrations(package)
    ]


class Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != STATEMENTS and not any(fullname == at for at, _, _ in EDITS):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(fullname, spec.origin)
        return spec


if EDITS:
    sys.meta_path.insert(0, Finder())
