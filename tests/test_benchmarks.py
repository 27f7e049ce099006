"""The benchmark's own parts: the generator counts right and refuses what it must; ratios are paired."""

from __future__ import annotations

import http.server
import itertools
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="the benchmark serves its apps with uvicorn")
pytest.importorskip("starlette", reason="the benchmarked app is a Starlette app")

from benchmarks import load, report
from benchmarks.__main__ import read_options, verdict
from benchmarks.contestants import chosen, order
from benchmarks.quiet import Patience
from benchmarks.serving import Served, serving

needs_compiler = pytest.mark.skipif(load.compiler() is None, reason="no C compiler for benchmarks/load.c")


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return load.compile_generator(tmp_path_factory.mktemp("load"))


@pytest.fixture(scope="module")
def bare() -> Iterator[Served]:
    with serving() as served:
        yield served


@needs_compiler
@pytest.mark.parametrize("mode", ["bare", "first"])
def test_generator_counts_what_the_server_answers(generator: Path, bare: Served, mode: load.Mode) -> None:
    measured = load.run(generator, bare.port, mode, connections=8, seconds=0.5, warmup=0.1)
    assert measured.requests > 0
    assert measured.replayed == 0
    assert measured.rps == pytest.approx(measured.requests / 0.5, rel=0.5)
    assert 0 < measured.p50_ms <= measured.p90_ms <= measured.p99_ms <= measured.max_ms


@needs_compiler
def test_generator_says_when_replays_are_none(generator: Path, bare: Served) -> None:
    with pytest.raises(load.LoadFailed, match=r"0 of .* answers were replays"):
        load.run(generator, bare.port, "replay", connections=4, seconds=0.2, warmup=0.1, keys=10)


@needs_compiler
def test_generator_fails_loudly_on_anything_but_2xx(generator: Path, bare: Served) -> None:
    with pytest.raises(load.LoadFailed, match="404"):
        load.run(generator, bare.port, "bare", connections=2, seconds=0.2, warmup=0, path="/nowhere")


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "80", "--host", "192.0.2.1"], "only loads 127.0.0.0/8"),
        (["--port", "80", "--host", "localhost.example"], "only loads 127.0.0.0/8"),
        (["--port", "80", "--seconds", "1000"], "from 0.1 to 120"),
        (["--port", "80", "--connections", "many"], "from 1 to 1024"),
        (["--port", "80", "--mode", "replays"], "bare, first or replay"),
        (["--port", "80", "--path", "/a b"], "no spaces"),
        (["--mode", "bare"], "--port is needed"),
        (["--port"], "needs a value"),
    ],
)
def test_generator_refuses(generator: Path, arguments: list[str], words: str) -> None:
    ended = subprocess.run([generator, *arguments], check=False, capture_output=True, text=True, timeout=10)
    assert ended.returncode == 2
    assert words in ended.stderr


@needs_compiler
def test_keys_are_unique_uuids_with_one_prefix_and_replays_repeat_them(generator: Path) -> None:
    seen: list[str] = []

    class Recorder(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Authorization"] == "Bearer tenant-a"
            seen.append(self.headers["Idempotency-Key"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        for mode in ("first", "replay"):
            options = f"--mode {mode} --port {server.server_port} --run 0123456789ab --keys 5 --connections 3"
            command = [str(generator), *options.split(), "--seconds", "0.2", "--warmup", "0"]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
            answer = json.loads(ended.stdout)
            assert answer["statuses"] == {"204": answer["requests"]}
            keys, seen[:] = [key.strip('"') for key in seen], []
            assert all(key.startswith("01234567-89ab-4") and len(key) == 36 for key in keys)
            assert len(set(keys)) == (len(keys) if mode == "first" else 5)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_ratios_are_taken_inside_a_round() -> None:
    samples = [
        report.Sample("starlette bare", 0, 1000.0),
        report.Sample("starlette postgres first", 0, 500.0, "starlette bare"),
        report.Sample("starlette bare", 0, 1000.0),
        report.Sample("starlette bare", 1, 100.0),
        report.Sample("starlette postgres first", 1, 30.0, "starlette bare"),
    ]
    bare, first = report.summary(samples)
    assert (bare.ratio, bare.verdict) == (None, "")
    assert first.ratio == pytest.approx(0.4)
    assert (first.ratio_least, first.ratio_most, first.verdict) == (0.3, 0.5, "PASS")
    assert verdict([bare, first], strict=False) == 0
    assert verdict([bare, first], strict=True) == 1  # the other targets were not measured


def test_every_round_measures_everyone_with_the_bare_apps_around_them() -> None:
    apps = chosen(set(), quick=False)
    for number in range(4):
        names = [app.name for app in order(apps, number)]
        assert set(names) == {app.name for app in apps}
        assert names[0] == names[-1] == "starlette bare"
    assert {app.name for app in chosen({"sqlite"}, quick=True)} == {"starlette bare", "starlette sqlite"}
    assert chosen({"store"}, quick=False) == []


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    noise, now = itertools.count(0, 1000), itertools.count()
    monkeypatch.setattr("benchmarks.quiet.others_seconds", lambda: next(noise))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("time.monotonic", lambda: float(next(now)))
    said: list[str] = []
    result, others = Patience(30.0, said.append).measure(lambda: "measured")
    assert result == "measured"
    assert others > 1
    assert 1 <= len(said) < 30


def test_options_are_bounded() -> None:
    assert read_options(["--quick"]).rounds == 2
    with pytest.raises(SystemExit):
        read_options(["--seconds", "100000"])
