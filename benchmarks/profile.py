"""Where the time of a protected app goes: ``python -m benchmarks.profile --store postgres --mode first``.

Puts the same load on the same app as the benchmark, samples it with py-spy (which must be installed) and prints
functions by their own time, as shares of the samples in which any thread held the GIL: on one uvicorn process that is
what bounds the rate. ``--all`` counts threads that wait in C code as well. ``--keep FILE`` keeps py-spy's raw stacks,
for a flame graph.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from benchmarks import load
from benchmarks.contestants import FRAMEWORKS, STORES
from benchmarks.places import places
from benchmarks.serving import serving

RATE = 500
"""Samples per second: py-spy takes a noticeable part of a core beyond this."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--framework", choices=FRAMEWORKS, default="starlette")
    parser.add_argument("--store", choices=(*STORES, "bare"), default="postgres")
    parser.add_argument("--mode", choices=("first", "replay"), default="first")
    parser.add_argument("--seconds", type=int, choices=range(1, 61), default=8, metavar="1..60")
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    py_spy = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if py_spy is None:
        raise SystemExit("py-spy is not installed: pip install py-spy")
    mode: load.Mode = "bare" if options.store == "bare" else options.mode
    with places({options.store}) as at, tempfile.TemporaryDirectory() as folder:
        generator = load.compile_generator(at.folder)
        raw = options.keep or Path(folder) / "raw"
        with serving(options.framework, at.urls.get(options.store)) as served:
            load.run(generator, served.port, mode, seconds=1.0)
            sampling = subprocess.Popen(
                [
                    *(py_spy, "record", "--pid", str(served.pid), "--duration", str(options.seconds)),
                    *("--rate", str(RATE), "--format", "raw", "--output", str(raw)),
                    *([] if options.all else ["--gil"]),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            measured = load.run(generator, served.port, mode, seconds=options.seconds + 1.0, warmup=0.5)
            sampling.wait(60)
        show(raw.read_text().splitlines(), options.top)
        print(f"{measured.rps:,.0f} requests/s while being sampled")


def show(stacks: Iterable[str], top: int) -> None:
    """Print own and whole time by function, and own time by package."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    rooms: Counter[str] = Counter()
    for line in stacks:
        stack, _, seen = line.rpartition(" ")
        frames = [_without_line(frame) for frame in stack.split(";")]
        own[frames[-1]] += int(seen)
        rooms[_room(frames[-1])] += int(seen)
        for frame in set(frames):
            whole[frame] += int(seen)
    total = sum(own.values()) or 1
    print(f"{total} samples\n\n  own  whole")
    for frame, count in own.most_common(top):
        print(f"{count / total:5.1%}  {whole[frame] / total:5.1%}  {frame}")
    print("\n  own  package")
    for room, count in rooms.most_common(15):
        print(f"{count / total:5.1%}  {room}")
    print("\nwhole  of oncekey")
    for frame, count in whole.most_common():
        if "oncekey/" in frame and count / total >= 0.01:
            print(f"{count / total:5.1%}  {frame}")


def _without_line(frame: str) -> str:
    name, _, _ = frame.rpartition(":")
    return f"{name})" if name else frame


def _room(frame: str) -> str:
    """The package of a frame "function (some/path/module.py)"."""
    _, _, path = frame.rpartition("(")
    parts = path.rstrip(")").split("/")
    if "oncekey" in parts:
        return "/".join(parts[parts.index("oncekey") :][:2])
    return parts[0] if len(parts) > 1 else f"standard library: {parts[0]}"


if __name__ == "__main__":
    main()
