"""Real servers: gunicorn that forks, gunicorn with threads, uvicorn with two workers. Effects are lines in a file."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx
import pytest

from oncekey.core.record import Record
from oncekey.stores.registry import open_store
from oncekey.testing.http.flaky import ONE
from oncekey.testing.http.stack import until
from oncekey.testing.servers import PostgresServer, free_port

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[2]
START_SECONDS = 20.0
_databases = count(1)
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None

UVICORN = [
    *(sys.executable, "-m", "uvicorn", "--factory", "--app-dir", str(ROOT)),
    *("--workers", "2", "--timeout-graceful-shutdown", "15"),
]
GUNICORN = [sys.executable, "-m", "gunicorn", "--pythonpath", str(ROOT), "--graceful-timeout", "15", "--preload"]
COMMANDS = {
    "forked": [*GUNICORN, "--workers", "2", "tests.web.served_apps:serve_flask()"],
    "threads": [*GUNICORN, "--workers", "1", "--threads", "16", "tests.web.served_apps:serve_flask()"],
    "uvicorn": [*UVICORN, "tests.web.served_apps:serve_starlette"],
    "django": [*GUNICORN, "--workers", "2", "tests.web.served_apps:serve_django()"],
    "drf": [*GUNICORN, "--workers", "2", "tests.web.served_apps:serve_django(drf=True)"],
    "djangoasgi": [*UVICORN, "tests.web.served_apps:serve_django_asgi"],
}


class Server:
    """One server process and its workers, and a client that takes a new connection for every request."""

    def __init__(self, kind: str, store: str, folder: Path) -> None:
        self.kind = kind
        self.store = store
        self.folder = folder
        self.log = folder / "server.log"
        port = free_port()
        where = ["--port", str(port)] if "uvicorn" in COMMANDS[kind] else ["--bind", f"127.0.0.1:{port}"]
        folder.mkdir(exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMANDS[kind][:-1], *where, COMMANDS[kind][-1]],
                env=os.environ | {
                    "ONCEKEY_TEST_STORE": store, "ONCEKEY_TEST_FOLDER": str(folder), "ONCEKEY_TEST_WARM": "1",
                },
                cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, preexec_fn=_die_with_us,  # noqa: PLW1509
            )  # fmt: skip
        # One connection per request: a kept one would always lead to the same worker. Said in the request, since a pool
        # that keeps none may close one that it has just given to another thread (encode/httpcore#1110).
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"Connection": "close"}, timeout=30.0, trust_env=False,
            limits=httpx.Limits(max_connections=200), verify=False,  # noqa: S501 - of a server without TLS
        )  # fmt: skip
        self._threads = ThreadPoolExecutor(60)
        try:
            until(self._answers, f"{kind} starts", START_SECONDS)
        except BaseException:
            self.end()
            raise

    def _answers(self) -> bool:
        assert self.process.poll() is None, f"the server has ended: {self.said()}"
        try:
            return self.client.get("/").text == "up"
        except httpx.TransportError:
            return False

    def said(self) -> str:
        """The server's log."""
        return self.log.read_text(errors="replace")

    def post(self, name: str, key: str, path: str = "pay") -> httpx.Response:
        return self.client.post(f"/{path}/{name}", json={"name": name}, headers={"Idempotency-Key": key})

    def start(self, name: str, key: str, path: str = "pay") -> Future[httpx.Response]:
        return self._threads.submit(self.post, name, key, path)

    # what handlers did

    def close_gate(self, name: str) -> None:
        """Handlers of this name stop after their effect, until the gate is opened."""
        (self.folder / f"{name}.gate").touch()

    def open_gate(self, name: str) -> None:
        (self.folder / f"{name}.go").touch()

    def effects(self, name: str) -> list[list[str]]:
        """The effects so far: process id, key and attempt of each."""
        path = self.folder / f"{name}.effects"
        return [line.split(" ") for line in path.read_text().splitlines()] if path.exists() else []

    def records(self, *keys: str) -> list[Record | None]:
        """The rows of these keys, as another process sees them."""
        store = open_store(self.store)
        try:
            return store.read([(ONE, key) for key in keys])
        finally:
            store.close()

    # the end

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Gone, whatever it takes: by process id, workers first known."""
        workers = _children(self.process.pid)
        if self.process.poll() is None:
            self.terminate()
            try:
                self.process.wait(20.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5.0)
                for pid in workers:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self._threads.shutdown()
        self.client.close()


def _die_with_us() -> None:
    if _LIBC is not None:
        _LIBC.prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG: a killed test run leaves no server behind


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.fixture(scope="module")
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """Starts a server of a kind, such as "forked-postgres"; all of them have ended at the end."""
    made: list[Server] = []

    def make(name: str) -> Server:
        kind, _, store = name.partition("-")
        folder = tmp_path_factory.mktemp("served")
        url = f"sqlite:///{folder / 'keys.db'}"
        if store == "postgres":
            postgres: PostgresServer = request.getfixturevalue("postgres_server")
            url = postgres.database(f"real_servers_{next(_databases)}")
        made.append(Server(kind, url, folder))
        return made[-1]

    yield make
    for server in made:
        server.end()


KINDS = (
    *("forked-sqlite", "forked-postgres", "threads-sqlite", "uvicorn-postgres"),
    *("django-sqlite", "django-postgres", "djangoasgi-sqlite", "djangoasgi-postgres", "drf-sqlite", "drf-postgres"),
)


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, make: Callable[[str], Server]) -> Iterator[Server]:
    """One server of each kind for all tests of this module."""
    started = make(request.param)
    yield started
    started.end()


def test_50_at_once_on_one_key_have_one_effect(server: Server) -> None:
    """While one worker is in the handler, 49 duplicates through all workers get 409; then its answer is everybody's."""
    server.close_gate("busy")
    answers = [server.start("busy", "k-busy") for _ in range(50)]
    until(lambda: sum(answer.done() for answer in answers) == 49, "49 answers while the first still runs", 20.0)
    server.open_gate("busy")
    responses = [answer.result(20.0) for answer in answers]
    assert Counter(response.status_code for response in responses) == {201: 1, 409: 49}
    assert {response.headers["retry-after"] for response in responses if response.status_code == 409} == {"1"}
    winner = next(response for response in responses if response.status_code == 201)
    retries = [server.post("busy", "k-busy") for _ in range(4)]
    assert {(retry.status_code, retry.content) for retry in retries} == {(201, winner.content)}
    assert {retry.headers["idempotency-replayed"] for retry in retries} == {"true"}
    assert [effect[1:] for effect in server.effects("busy")] == [["k-busy", "1"]]


def test_50_at_once_that_wait_all_get_the_answer_of_one_effect(server: Server) -> None:
    """With ``in_flight="wait"`` duplicates in every worker are held until the one effect is done."""
    server.close_gate("wait")
    answers = [server.start("wait", "k-wait", "wait") for _ in range(50)]
    until(lambda: server.effects("wait"), "one handler has begun")
    server.open_gate("wait")
    responses = [answer.result(20.0) for answer in answers]
    assert len({(response.status_code, response.content) for response in responses}) == 1
    assert responses[0].status_code == 201
    assert sum("idempotency-replayed" in response.headers for response in responses) == 49
    assert len(server.effects("wait")) == 1


def test_distinct_keys_all_succeed(server: Server) -> None:
    """60 different keys at the same time are 60 effects and 60 completed rows: none is refused or mixed up."""
    keys = [f"k-{number}" for number in range(60)]
    answers = [server.start(f"many-{key}", key) for key in keys]
    responses = {key: answer.result(20.0) for key, answer in zip(keys, answers, strict=True)}
    assert {response.status_code for response in responses.values()} == {201}
    assert all(response.json()["paid"] == f"many-{key}" for key, response in responses.items())
    assert [[effect[1:] for effect in server.effects(f"many-{key}")] for key in keys] == [[[key, "1"]] for key in keys]
    assert {record.state.value for record in server.records(*keys) if record} == {"completed"}


def test_every_worker_has_lanes_of_its_own(server: Server) -> None:
    """Each worker stores and replays by itself; those that were forked do not use what their parent had opened."""
    if server.kind == "threads":
        # One process, 16 handlers at the same moment, each with a key of its own.
        server.close_gate("crowd")
        answers = [server.start("crowd", f"c-{number}") for number in range(16)]
        until(lambda: len(server.effects("crowd")) == 16, "16 handlers run at once")
        server.open_gate("crowd")
        assert {answer.result(20.0).status_code for answer in answers} == {201}
    elif server.kind == "forked":
        # One worker is held in its handler, so that the other has to take what comes.
        server.close_gate("one")
        held = server.start("one", "k-one")
        until(lambda: server.effects("one"), "one worker is busy")
        other = server.post("two", "k-two").json()["by"]
        server.open_gate("one")
        assert len({held.result(20.0).json()["by"], other, server.process.pid}) == 3
    else:
        pids: set[int] = set()
        numbers = count()

        def both() -> bool:
            number = next(numbers)
            pids.add(server.post(f"each-{number}", f"e-{number}").json()["by"])
            return len(pids) == 2

        until(both, "both workers have answered")


def test_every_worker_keeps_its_leases(server: Server) -> None:
    """A handler that outlives its lease of one second is renewed by its own process, and still completes its key."""
    server.close_gate("long")
    held = server.start("long", "k-long", "lease")
    until(lambda: server.effects("long"), "the handler has begun")

    def lease() -> float:
        (record,) = server.records("k-long")
        assert record is not None
        return record.lease_until

    first = lease()
    until(lambda: lease() > first, "the lease is renewed")
    assert server.post("long", "k-long", "lease").status_code == 409
    server.open_gate("long")
    assert held.result(20.0).status_code == 201
    assert len(server.effects("long")) == 1


@pytest.mark.parametrize("kind", ["forked-sqlite", "forked-postgres"])
def test_the_parent_had_lanes_before_it_forked(kind: str, make: Callable[[str], Server]) -> None:
    """What the parent completed before the fork replays from the workers, which then stop gracefully themselves."""
    server = make(kind)
    assert (server.folder / "warm.pid").read_text() == f"{server.process.pid} 201\n"
    warm = server.client.post("/pay/warm", json={}, headers={"Idempotency-Key": "warm"})
    assert (warm.status_code, warm.json()["by"]) == (201, server.process.pid)
    assert warm.headers["idempotency-replayed"] == "true"
    assert server.effects("warm") == [[str(server.process.pid), "warm", "1"]]
    _stops_gracefully(server)


@pytest.mark.parametrize("kind", ["threads-sqlite", "uvicorn-sqlite"])
def test_a_graceful_stop_drains(kind: str, make: Callable[[str], Server]) -> None:
    """A request that runs when the server is told to stop is answered and its key completed, with a quiet log."""
    _stops_gracefully(make(kind))


def _stops_gracefully(server: Server) -> None:
    server.close_gate("last")
    last = server.start("last", "k-last")
    until(lambda: server.effects("last"), "the last request runs")
    if server.kind == "forked":  # a worker that gunicorn has just forked loses a signal: let the idle one answer first
        assert server.post("idle", "k-idle").status_code == 201
    server.terminate()
    # What shows that the workers know: an idle one has left, or says that it is about to.
    sign, times = {
        "forked": ("Worker exiting", 1),
        "threads": ("Handling signal: term", 1),
        "uvicorn": ("Shutting down", 2),
    }[server.kind]
    until(lambda: server.said().count(sign) >= times, f"the log says '{sign}'")
    assert not last.done()
    assert server.process.poll() is None
    server.open_gate("last")
    answer = last.result(20.0)
    assert (answer.status_code, answer.json()["paid"]) == (201, "last")
    assert server.process.wait(20.0) == 0, server.said()
    (record,) = server.records("k-last")
    assert record is not None
    assert (record.state.value, record.attempt) == ("completed", 1)
    assert len(server.effects("last")) == 1
    assert "Traceback" not in server.said()
