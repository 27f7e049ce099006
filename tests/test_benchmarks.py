"""The benchmark's own parts: the generator counts right and refuses what it must; ratios are paired; an app that
does not do its work is not measured."""

from __future__ import annotations

import asyncio
import http.server
import itertools
import json
import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psycopg
import pytest

pytest.importorskip("uvicorn", reason="the benchmark serves its apps with uvicorn")
pytest.importorskip("starlette", reason="the benchmarked app is a Starlette app")

from benchmarks import by_hand, load, peers, plot, proof, queues, report, start, targets
from benchmarks.__main__ import read_options, verdict
from benchmarks.apps import BUSINESS_TABLE
from benchmarks.contestants import (
    ALL,
    ASYNCPG_BY_HAND,
    BARE,
    BY_HAND,
    DBOS_POSTGRES,
    IDEMKIT_POSTGRES,
    ONCEKEY_MEMORY,
    ONCEKEY_POSTGRES,
    PEERS,
    Contestant,
    order,
)
from benchmarks.places import Places
from benchmarks.progress import Progress
from benchmarks.quiet import Patience
from benchmarks.report import Sample
from benchmarks.rounds import Lengths, Run
from benchmarks.serving import Served, serving
from benchmarks.workloads import WORKLOADS, chosen

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
def test_generator_counts_the_responses_of_the_server(generator: Path, bare: Served, mode: load.Mode) -> None:
    measured = load.run(generator, bare.port, mode, connections=8, seconds=0.5, warmup=0.1)
    assert measured.requests > 0
    assert measured.replayed == 0
    assert measured.rps == pytest.approx(measured.requests / 0.5, rel=0.5)
    assert 0 < measured.p50_ms <= measured.p90_ms <= measured.p99_ms <= measured.max_ms


@needs_compiler
@pytest.mark.parametrize("mode", ["replay", "mix"])
def test_generator_says_when_replays_are_none(generator: Path, bare: Served, mode: load.Mode) -> None:
    with pytest.raises(load.LoadFailed, match=r"0 of .* answers were replays"):
        load.run(generator, bare.port, mode, connections=4, seconds=0.2, warmup=0.1, keys=10)


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
        (["--port", "80", "--mode", "replays"], "bare, first, replay or mix"),
        (["--port", "80", "--path", "/a b"], "no spaces"),
        (["--mode", "bare"], "--port is needed"),
        (["--port"], "needs a value"),
    ],
)
def test_generator_refuses_wrong_options(generator: Path, arguments: list[str], words: str) -> None:
    ended = subprocess.run([generator, *arguments], check=False, capture_output=True, text=True, timeout=10)
    assert ended.returncode == 2
    assert words in ended.stderr


@contextmanager
def answering(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[int]:
    """A server that reads every request and answers as it is told."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answer(self)

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@needs_compiler
def test_keys_are_unique_uuids_with_one_prefix_and_replays_repeat_them(generator: Path) -> None:
    seen: list[str] = []

    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        assert request.headers["Authorization"] == "Bearer tenant-a"
        seen.append(request.headers["Idempotency-Key"])
        request.send_response(204)
        request.end_headers()

    with answering(answer) as port:
        for mode in ("first", "replay", "mix"):
            options = f"--mode {mode} --port {port} --run 0123456789ab --keys 5 --connections 3"
            command = [str(generator), *options.split(), "--seconds", "0.2", "--warmup", "0"]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
            told = json.loads(ended.stdout)
            assert told["statuses"] == {"204": told["requests"]}
            keys, seen[:] = [key.strip('"') for key in seen], []
            assert all(key.startswith("01234567-89ab-4") and len(key) == 36 for key in keys)
            repeated = Counter(keys)
            if mode == "mix":  # every tenth is one of the five that were primed
                assert sum(count > 1 for count in repeated.values()) <= 5
                assert (len(keys) - len(repeated)) / len(keys) == pytest.approx(0.1, abs=0.05)
            else:
                assert len(repeated) == (len(keys) if mode == "first" else 5)


@needs_compiler
@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (b"5\r\nhello\r\n1A;name=value\r\n" + b"x" * 26 + b"\r\n0\r\nTrailer: yes\r\n\r\n", None),
        (b"5\r\nhello\r\nzz\r\n", "a chunk's size cannot be read"),
        (b"5\r\nhello\r\n0\r\n\r\nmore", "more bytes came than the chunks said"),
    ],
)
def test_generator_reads_chunked_answers_and_nothing_else_for_one(
    generator: Path, body: bytes, wrong: str | None
) -> None:
    def answer(request: http.server.BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        step = len(body) if wrong else 7  # in pieces that end anywhere
        for at in range(0, len(body), step):
            request.wfile.write(body[at : at + step])

    with answering(answer) as port:
        if wrong is None:
            assert load.run(generator, port, "bare", connections=2, seconds=0.2, warmup=0).requests > 0
        else:
            with pytest.raises(load.LoadFailed, match=wrong):
                load.run(generator, port, "bare", connections=1, seconds=0.2, warmup=0)


def test_contestant_is_measured_only_if_it_runs_once_and_answers_alike(
    bare: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "8 answers" in proof.prove(BARE, bare, "uvicorn")
    with pytest.raises(proof.NotProven, match="8 different answers"):
        proof.prove(ONCEKEY_MEMORY, bare, "uvicorn")
    with serving(store="memory://") as served:
        assert "one answer, 1 execution" in proof.prove(ONCEKEY_MEMORY, served, "uvicorn")
        with pytest.raises(proof.NotProven, match="the bare app gave 1 answers"):
            proof.prove(BARE, served, "uvicorn")
        counts = itertools.count(0, 2)
        monkeypatch.setattr(proof, "executions", lambda served: next(counts))
        with pytest.raises(proof.NotProven, match="executed 2 times"):
            proof.prove(ONCEKEY_MEMORY, served, "uvicorn")


@pytest.mark.stores
@pytest.mark.parametrize("inserts", [False, True], ids=["plain", "inserts"])
@pytest.mark.parametrize("contestant", BY_HAND, ids=lambda contestant: contestant.guard)
def test_way_by_hand_replays_refuses_another_request_and_inserts_once(
    contestant: Contestant, inserts: bool, postgres_url: str
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(by_hand.TABLE)
        connection.execute(BUSINESS_TABLE)
        with serving(store=postgres_url, guard=contestant.guard, insert=postgres_url if inserts else None) as served:
            assert "one answer, 1 execution" in proof.prove(contestant, served, "uvicorn")
            key = {"Idempotency-Key": "other", "Content-Type": "application/json"}
            asked = [json.dumps({"amount": amount, "currency": "EUR"}) for amount in (1, 1, 2)]
            answers = [proof._ask(served, "POST", "/payments", body, key) for body in asked]
        assert [status for status, _ in answers] == [201, 201, 422]
        [(rows,)] = connection.execute("SELECT count(*) FROM payments").fetchall()
        assert rows == (2 if inserts else 0)


def test_start_is_the_time_of_one_program_beside_pythons() -> None:
    samples = [
        Sample(targets.START, targets.PYTHON, 0, 100.0),
        Sample(targets.START, targets.VERSION, 0, 50.0, targets.PYTHON),
    ]
    reached = {outcome.title: outcome for outcome in targets.outcomes(samples)}
    assert reached["time of `oncekey --version` / of `python -c pass`"].ratio == 2.0
    assert set(start.PROGRAMS) >= {targets.PYTHON, targets.IMPORT, targets.VERSION}
    assert start.seconds(targets.PYTHON, 1) > 0
    assert 1 < start.memory(os.getpid(), "VmRSS") <= start.memory(os.getpid(), "VmHWM")


class Losing(queues.Queue):
    """A queue that forgets one job."""

    async def prepare(self) -> None:
        self.jobs = 0

    async def producer(self) -> Callable[[int], Awaitable[Any]]:
        async def add(number: int) -> None:
            self.jobs += 1

        return add

    async def execute(self) -> None:
        self.ran = self.jobs - 1

    async def close(self) -> None:
        pass


def test_a_queue_that_loses_a_job_has_no_figure() -> None:
    with pytest.raises(queues.QueueFailed, match="99 jobs were executed, and 100 were added"):
        asyncio.run(queues.measure(Losing(""), 100))


def first(contestant: str, number: int, rate: float) -> Sample:
    return Sample("first@64", contestant, number, rate, None if contestant == "bare" else "bare")


def test_ratios_are_taken_inside_a_round() -> None:
    samples = [
        first("bare", 0, 1000.0),
        first("oncekey postgres", 0, 800.0),
        first("bare", 0, 1000.0),
        first("bare", 1, 100.0),
        first("oncekey postgres", 1, 60.0),
    ]
    bare, ours = report.summary(samples)
    assert bare.ratio is None
    assert ours.ratio == pytest.approx(0.7)
    assert (ours.ratio_least, ours.ratio_most) == (0.6, 0.8)
    reached = {outcome.title: outcome for outcome in targets.outcomes(samples)}
    assert reached["first request, PostgreSQL / bare app"].reached == "yes"
    assert reached["first request, SQLite / bare app"].reached == "not measured"
    assert verdict(list(reached.values()), set(), strict=False) == 0
    assert verdict(list(reached.values()), set(), strict=True) == 1  # the other targets were not measured
    assert verdict([], {("first@64", "idemkit redis")}, strict=False) == 0
    assert verdict([], {("first@64", "oncekey sqlite")}, strict=False) == 1


def test_best_peer_is_taken_per_round_and_latency_is_the_added_one() -> None:
    samples = [
        *(first("oncekey postgres", number, 1000.0) for number in (0, 1)),
        *(first("idemkit redis", number, rate) for number, rate in enumerate((250.0, 100.0))),
        *(first("dbos postgres", number, rate) for number, rate in enumerate((100.0, 500.0))),
        Sample("first@1", "bare", 0, 1.0, p50_ms=0.5),
        Sample("first@1", "oncekey postgres", 0, 1.0, p50_ms=3.5),
        Sample(targets.ROUND_TRIPS, targets.TWO_COMMITS, 0, 1.0, p50_ms=2.0),
    ]
    reached = {outcome.title: outcome for outcome in targets.outcomes(samples)}
    peer = reached["first request / best peer on any store"]
    assert (peer.least, peer.most, peer.reached) == (2.0, 4.0, "no")
    latency = reached["one connection: added median latency / two raw round trips with commit"]
    assert (latency.ratio, latency.wanted, latency.reached) == (1.5, "≤ 1.25", "no")


def test_every_round_measures_everyone_with_the_bare_app_around_them() -> None:
    for number in range(4):
        names = [app.name for app in order(ALL, number)]
        assert set(names) == {app.name for app in ALL}
        assert names[0] == names[-1] == "bare"
    assert len({tuple(order(ALL, number)) for number in range(4)}) == 4


def test_only_chooses_workloads_and_contestants() -> None:
    assert [workload.id for workload, _ in chosen(set())] == [workload.id for workload in WORKLOADS]
    [(workload, contestants)] = chosen({"first@64", "idemkit postgres"})
    assert (workload.id, contestants) == ("first@64", [BARE, IDEMKIT_POSTGRES])
    assert {c for _, cs in chosen({"dbos"}) for c in cs if c is not BARE} == {DBOS_POSTGRES}
    assert chosen({"store"}) == chosen({"store", "outbox"}) == []
    assert chosen({"first@64", "outbox"}) == chosen({"first@64"})
    needed = {workload.id: set(cs) for workload, cs in chosen(set(), targets=True)}
    assert needed["first@64"] >= {BARE, ONCEKEY_POSTGRES, *PEERS}
    assert set(needed) == {targets.FIRST, targets.FIRST_ALONE, targets.REPLAY, targets.INSERT}
    assert needed["insert@64"] >= {BARE, ONCEKEY_POSTGRES, ASYNCPG_BY_HAND}


def test_a_peer_that_is_not_installed_is_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "version", lambda peer: None)
    at = Places(tmp_path, {"postgres": "postgresql://"}, {"redis": "no redis-server found"})
    run = Run(chosen({"first@64"}), set(), Lengths(1, 1.0, 100), at, tmp_path, 0.0)
    [(_, able)] = run.plan
    assert {contestant.name for contestant in able} == {"bare", "oncekey postgres"}
    assert run.left_out["first@64", "idemkit redis"] == "not installed"
    report.tables([], run.left_out, {})
    assert re.search(r"dbos postgres\W+not installed", capsys.readouterr().out)


def test_every_peer_is_pinned_by_name_and_version_alone() -> None:
    folder = Path(__file__).parent.parent / "requirements"
    lines = [line for line in (folder / "bench.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert {line.partition("==")[0] for line in lines} >= set(peers.PACKAGES.values())


def test_the_plot_is_a_picture_with_everyone_in_it(tmp_path: Path) -> None:
    lines = report.summary([first("bare", 0, 900.0), first("oncekey postgres", 0, 450.0)])
    drawn = ElementTree.fromstring(plot.write(lines, 'all & "all"', tmp_path / "plot.svg").read_text())  # noqa: S314 - ours
    words = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "oncekey postgres" in words
    assert "450  (0.50 of bare)" in words
    widths = [float(bar.attrib["width"]) for bar in drawn.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.01)


def test_the_time_left_follows_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress(100.0)
    assert progress.left_seconds == 100.0
    now[0] += 40.0
    progress.spent(20.0)
    assert progress.left_seconds == pytest.approx(160.0)
    assert progress.prefix() == "[ 20%,  2:40 left]  "


def test_waiting_for_a_server_ends_after_its_patience(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert read_options(["--quick"]).rounds == 1
    assert read_options(["--targets"]).rounds > read_options([]).rounds > 1
    with pytest.raises(SystemExit):
        read_options(["--seconds", "100000"])
