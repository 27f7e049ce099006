"""What ``import oncekey`` and ``oncekey --version`` load: modules, because times depend on the machine."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import oncekey

COMMANDS = {"typer", "rich", "click", "shellingham"}
FRAMEWORKS = {"starlette", "fastapi", "litestar", "flask", "uvicorn", "pydantic"}
DRIVERS = {"sqlite3", "psycopg", "asyncpg", "sqlalchemy"}
ENGINE = {"asyncio", "ssl", "logging", "dataclasses", "inspect", "orjson", "rfc8785", "http_sfv"}


def _loaded(program: str) -> set[str]:
    """The modules that are loaded when ``program`` has ended, in a fresh interpreter that coverage does not measure."""
    report = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    command = [sys.executable, "-c", f"{report}\n{program}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    return set(ended.stderr.split())


_VERSION = "sys.argv = ['oncekey', '--version']; from oncekey.cli import main; main()"


@pytest.mark.parametrize("program", ["import oncekey", "import oncekey.errors", _VERSION])
def test_import_and_version_load_no_command_framework_driver_or_engine(program: str) -> None:
    loaded = _loaded(program)
    assert loaded & {"oncekey"}
    assert not loaded & (COMMANDS | FRAMEWORKS | DRIVERS | ENGINE)
    assert {name for name in loaded if name.startswith("oncekey.")} <= {"oncekey.errors", "oncekey.cli"}


def test_import_of_the_engine_loads_no_command_framework_or_driver() -> None:
    loaded = _loaded("from oncekey import OnceKey, SINGLE_TENANT, Policy, current")
    assert loaded & {"oncekey.engine.once"}
    assert not loaded & (COMMANDS | FRAMEWORKS | DRIVERS)


def test_every_public_name_is_the_object_of_the_module_that_type_checkers_see() -> None:
    tree = ast.parse(Path(oncekey.__file__).read_text())
    seen = {
        alias.name: statement.module
        for block in tree.body
        if isinstance(block, ast.If)
        for statement in ast.walk(block)
        if isinstance(statement, ast.ImportFrom) and statement.module != "importlib"
        for alias in statement.names
    }
    assert set(seen) == set(oncekey.__all__)
    assert set(oncekey.__all__) <= set(dir(oncekey))
    for name, module in seen.items():
        assert module is not None
        assert getattr(oncekey, name) is getattr(sys.modules[module], name)


def test_unknown_name_is_an_attribute_error_and_an_import_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Oncekey'"):
        oncekey.Oncekey  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Oncekey'"):
        from oncekey import Oncekey  # type: ignore[attr-defined]  # noqa: F401
