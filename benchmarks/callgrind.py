"""Counts instructions with valgrind's callgrind, in all and by layer of Python code.

Owns the command line of valgrind, the compiling of ``frames.c`` and the names of the layers: a module of oncekey, or
another package. Only the measured part is counted, not the start of the process.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import string
import subprocess
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import in_process, load
from benchmarks.serving import ROOT, child_environment

SOURCE = Path(__file__).with_name("frames.c")
MOST_LAYERS = 128
SECONDS = 900.0
"""How long one count may take, on a machine that others use too."""
LOOP = "event loop, and what is in no layer"
REST = "other packages"
PACKAGES = ("starlette", "uvicorn", "psycopg", "psycopg_binary", "psycopg_c", "anyio", "asyncio", "uvloop", "json")
OURS = "oncekey/"

_COUNTED = re.compile(r"Collected : (\d+)")
_FUNCTION = re.compile(r"(c?)fn=\((\d+)\)(?: (?:Zlayer_(\d+))?)?")
_COST = tuple("+-*0123456789")
_SKIPPED = [f"--fn-skip={letter}*" for letter in string.ascii_letters + string.digits + "_(." if letter != "Z"]
"""Every function but those of ``frames.c`` counts as part of its caller."""


class CannotCount(Exception):
    """What is needed for counting is not on this machine; the message says what."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Instructions of one request, or of one document."""

    all: float
    layers: dict[str, float]


def build(folder: Path) -> Path:
    """Compile ``frames.c``: with the headers of this Python, and those of valgrind."""
    if shutil.which("valgrind") is None:
        raise CannotCount("valgrind is not installed: it is what counts. Install it with your system's packages")
    compiler = load.compiler()
    if compiler is None:
        raise CannotCount("no C compiler: frames.c needs cc, gcc or clang (or $CC)")
    library = folder / "frames.so"
    include = f"-I{sysconfig.get_path('include')}"
    # -O1 and real calls: a call that was turned into a jump has no place in callgrind's stack
    command = [compiler, "-O1", "-fno-optimize-sibling-calls", "-shared", "-fPIC", include]
    built = subprocess.run(
        [*command, "-o", str(library), str(SOURCE)], check=False, capture_output=True, text=True, timeout=60
    )
    if built.returncode != 0:
        raise CannotCount(f"{SOURCE.name} does not compile with this Python and valgrind:\n{built.stderr[-2000:]}")
    return library


def count(mode: str, number: int, url: str, library: Path, *, by_layer: bool, at_once: int) -> Counted:
    """Count ``number`` requests of a mode in a process of their own."""
    folder = library.parent
    costs, names = folder / "callgrind.out", folder / "layers.json"
    program = "from benchmarks.callgrind import counted_process as run; import sys; run(*sys.argv[1:])"
    arguments = [mode, str(number), url, str(library), str(names) if by_layer else "", str(at_once)]
    skipped = _SKIPPED if by_layer else []
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", "--dump-line=no", f"--callgrind-out-file={costs}"]
    ended = subprocess.run(
        [*valgrind, *skipped, sys.executable, "-c", program, *arguments],
        check=False,
        cwd=ROOT,
        env=child_environment() | {"PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    found = _COUNTED.search(ended.stderr)
    if ended.returncode or found is None:
        raise RuntimeError(f"the run under valgrind failed:\n{ended.stderr[-4000:]}")
    total = int(found[1])
    if not by_layer:
        return Counted(total / number, {})
    layers = read_costs(costs.read_text().splitlines(), json.loads(names.read_text()))
    layers[LOOP] += total - sum(layers.values())
    return Counted(total / number, {name: cost / number for name, cost in layers.items()})


def read_costs(lines: list[str], names: list[str]) -> Counter[str]:
    """What the functions of ``frames.c`` cost themselves, by the names of their layers."""
    found: Counter[str] = Counter()
    functions: dict[str, str] = {}
    """Callgrind names a function where it first speaks of it, and gives only its number from then on."""
    layer: str | None = None
    rest = iter(lines)
    for line in rest:
        if line.startswith("calls="):
            next(rest)  # the cost of the called function, which has lines of its own
        elif heading := _FUNCTION.match(line):
            called, number, place = heading.groups()
            if place:
                functions[number] = names[int(place, 8)]
            if not called:
                layer = functions.get(number)
        elif layer is not None and line.startswith(_COST):
            found[layer] += int(line.split()[1])
    return found


def counted_process(mode: str, number: str, url: str, library: str, names: str, at_once: str) -> None:
    """What runs under valgrind: the requests, counted between their beginning and their end."""
    counter = ctypes.PyDLL(library)
    counter.watch_frames.argtypes = [ctypes.py_object]
    layers = Layers()
    in_process.serve(
        mode,
        int(number),
        url,
        ready=partial(counter.watch_frames, layers.number) if names else lambda: None,
        begin=counter.count_from_here,
        end=counter.count_until_here,
        at_once=int(at_once),
    )
    if names:
        Path(names).write_text(json.dumps(layers.names))


class Layers:
    """Gives every file a layer, and every layer a number."""

    def __init__(self) -> None:
        self.names = [REST]

    def number(self, filename: str) -> int:
        name = layer(filename)
        if name not in self.names:
            if len(self.names) == MOST_LAYERS:
                return 0
            self.names.append(name)
        return self.names.index(name)


def layer(filename: str) -> str:
    """The layer of a file: our module, a package that is named, or the rest."""
    _, ours, module = filename.rpartition("/src/oncekey/")
    if ours:
        return OURS + module.removesuffix(".py")
    parts = set(Path(filename).parts)
    if "benchmarks" in parts:
        return "the app and its client"
    return next((package for package in PACKAGES if package in parts), REST)
