"""Runs inside a cell: says which versions are imported there, and refuses a cell that is not what its pins say.

    python -m tests.matrix.inside '{"starlette": "0.40.0"}' '["starlette", "fastapi"]'

The pins are installed without their dependencies, so what pip would have checked is checked here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MODULES = {"djangorestframework": "rest_framework"}
"""Packages whose module has another name."""
NOT_TRIED = frozenset({"sse-starlette"})
"""Packages of features that no test of a cell imports (it comes with ``mcp``)."""


def complaints(pins: Mapping[str, str]) -> Iterator[str]:
    for name, pinned in pins.items():
        spec = find_spec(MODULES.get(name, name.replace("-", "_")))
        if spec is None or spec.origin is None or not Path(spec.origin).is_relative_to(sys.prefix):
            yield f"{name} is imported from {spec and spec.origin}, which is not in {sys.prefix}"
        if version(name) != pinned:
            yield f"{name} is {version(name)}, and {pinned} is pinned"
    yield from _unmet(pins)


def installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def _unmet(pins: Mapping[str, str]) -> Iterator[str]:
    """What a pinned package needs of others, and what others need of a pinned package."""
    first_found = {canonicalize_name(found.name): found for found in reversed(list(distributions()))}
    for name, found in first_found.items():
        if name in NOT_TRIED:
            continue
        for text in found.requires or ():
            needed = Requirement(text)
            other = canonicalize_name(needed.name)
            if not {name, other} & set(pins) or (needed.marker and not needed.marker.evaluate({"extra": ""})):
                continue
            if other not in first_found:
                yield f"{name} {found.version} needs {text}, which is not installed"
            elif not needed.specifier.contains(first_found[other].version, prereleases=True):
                yield f"{name} {found.version} needs {text}, and {first_found[other].version} is installed"


def main() -> int:
    pins, asked = (json.loads(argument) for argument in sys.argv[1:])
    if found := list(complaints(pins)):
        print("\n".join(found))
        return 1
    print(json.dumps({name: installed(name) for name in asked}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
