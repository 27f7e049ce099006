"""Refuse files that carry something of the machine they were written on.

Two kinds: the address of a package index (a lock file or a script that names one works nowhere else), and a
path into somebody's checkout or home. What to look for comes from the machine itself (its pip settings, this
checkout), so this file names none; a few general shapes are added.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {
    "the address of a package index": r"https?://[^\s\"'<>]+/simple\b",
    "an option that names a package index": r"--(?:extra-)?index-url|--find-links|--trusted-host",
    "a path into a home folder": r"(?<![\w.])/(?:home|Users)/[a-z][\w.-]*/|(?<![\w.])/root/",
}
ALLOWED = {Path(".ci/check_tree.py")}


def tracked() -> list[Path]:
    """Every file that is, or would be, committed."""
    asked = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(asked, capture_output=True, check=False)
    if done.returncode != 0:
        sys.exit("check_tree: not a git checkout; it reads the list of files from git")
    return [Path(name) for name in done.stdout.decode().split("\0") if name]


def of_this_machine() -> dict[str, str]:
    """Literal strings of this machine, each with what it is."""
    found = {str(ROOT): "the path of this checkout"}
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, check=False)
    for value in re.findall(r"'([^']*)'", done.stdout.decode()):
        for word in value.split():
            if "://" in word or (word.startswith("/") and not word.startswith(("/etc/", "/usr/"))):
                found[word] = "from this machine's pip settings"
            if host := re.match(r"https?://(?:[^/@]*@)?([^/:]+\.[^/:]+)", word):
                found[host[1]] = "a package index's host"
    return found


def complaints(path: Path, text: str, literals: dict[str, str]) -> list[str]:
    """What is wrong with one file, a line each."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        reasons = [what for what, shape in SHAPES.items() if re.search(shape, line)]
        reasons += [what for literal, what in literals.items() if literal in line]
        found += [f"{path}:{number}: {reason}" for reason in reasons]
    return found


def main() -> int:
    literals = of_this_machine()
    found: list[str] = []
    for path in tracked():
        full = ROOT / path
        if path in ALLOWED or full.is_symlink() or not full.is_file():
            continue
        data = full.read_bytes()
        if b"\0" not in data[:8192]:
            found += complaints(path, data.decode("utf-8", "replace"), literals)
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
