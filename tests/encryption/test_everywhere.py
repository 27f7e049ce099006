"""The plugin that runs other tests with encryption on: it gives each OnceKey a keyring, and skips tests that exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.encryption.everywhere import NOT_HERE

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", NOT_HERE)
def test_test_that_is_skipped_exists(name: str) -> None:
    """A test that was renamed would fail with the keyring, and its old entry would be left over."""
    path, _, test = name.partition("::")
    assert f"def {test}" in (ROOT / path).read_text("utf-8")


def test_plugin_gives_a_keyring_unless_the_test_gives_one(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from oncekey import SINGLE_TENANT, OnceKey\n"
        "def test_it():\n"
        "    assert OnceKey('memory://', scope=SINGLE_TENANT).keyring.current == 2\n"
        "    assert OnceKey('memory://', scope=SINGLE_TENANT, encryption=None).keyring is None\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.encryption.everywhere"]
    ended = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout
    assert "1 passed" in ended.stdout


def test_page_names_the_command() -> None:
    assert "`make encrypted`" in (ROOT / "docs/encryption.md").read_text("utf-8")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "-p tests.encryption.everywhere tests/web tests/engine" in makefile
