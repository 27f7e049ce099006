"""The key jar: what is on disk and when, what is never there, and that nothing is sent without it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import psycopg
import pytest
import sqlalchemy

from oncekey.client import (
    Answer,
    AsyncClient,
    Budget,
    Client,
    Ended,
    IntentChanged,
    IntentExpired,
    JarError,
    KeyJar,
    Outcome,
)
from oncekey.client.calls import Request
from oncekey.client.jar.table import TABLE
from oncekey.errors import ConfigurationError
from oncekey.testing.servers import free_port
from tests.client.server import Reply, Server, problem, serving

OK = Reply(201, b'{"id": 1}', (("Content-Type", "application/json"),))
DAY = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server(OK)) as running:
        yield running


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "intents.db"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, file: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{file}"
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def jar(url: str, clock: Clock) -> Iterator[KeyJar]:
    opened = KeyJar(url, clock=clock)
    yield opened
    opened.close()


def client_of(server: Server, jar: KeyJar, **options: Any) -> Client:
    transport = httpx.HTTPTransport(verify=False)
    return Client(server.url, jar=jar, transport=transport, budget=Budget(tries=1, seconds=5), **options)


def test_row_is_on_disk_before_the_first_byte_is_sent(server: Server, jar: KeyJar, url: str) -> None:
    """Another connection reads it when the request arrives."""
    seen = []

    def answer(asked: Any) -> Reply:
        beside = KeyJar(url)
        seen.append((beside.read("order-1"), asked.key))
        beside.close()
        return OK

    server.answer = answer  # type: ignore[method-assign]
    with client_of(server, jar) as client, client.intent("order-1") as intent:
        intent.post("/pay", json={"amount": 5})
    ((row, key),) = seen
    assert row is not None
    assert (row.key, row.request.body, row.finished_at) == (key, b'{"amount":5}', None)
    assert row.first_sent_at is not None


def test_answer_is_kept_with_its_headers(server: Server, jar: KeyJar) -> None:
    cookies = (("Set-Cookie", "session=secret"), ("Location", "/pay/1"), ("Content-Type", "application/json"))
    server.replies = [Reply(201, b'{"id": 1}', cookies)]
    with client_of(server, jar) as client:
        for _ in range(2):
            with client.intent("order-1") as intent:
                response = intent.post("/pay", json={})
            assert (response.status_code, response.json(), response.headers["location"]) == (201, {"id": 1}, "/pay/1")
    assert len(server.asked) == 1
    row = jar.read("order-1")
    assert row is not None
    assert isinstance(row.answer, Answer)
    assert row.answer.header("set-cookie") is None


def test_credentials_are_never_on_disk(server: Server, file: Path) -> None:
    secrets = {"Authorization": "Bearer s3cret-1", "Cookie": "sid=s3cret-2", "X-API-Key": "s3cret-3"}
    server.replies = [Reply(503)]
    with Client(server.url, jar=f"sqlite:///{file}", headers=secrets, budget=Budget(tries=1)) as client:
        with client.intent("order-1") as intent:
            intent.post("/pay", json={"amount": 5}, headers={"X-Trace": "s3cret-4"})
        assert server.asked[0].headers["authorization"] == "Bearer s3cret-1"
        data = b"".join(path.read_bytes() for path in file.parent.glob("intents.db*"))
    assert b"order-1" in data
    assert b"s3cret" not in data
    with pytest.raises(ConfigurationError, match="authorization"):
        KeyJar(f"sqlite:///{file}", keep_headers=["Authorization"])


def test_new_jar_is_readable_by_its_owner_only(file: Path) -> None:
    KeyJar(f"sqlite:///{file}").close()
    assert file.stat().st_mode & 0o777 == 0o600


def test_bytes_of_the_first_request_are_sent_again_though_json_is_in_another_order(server: Server, jar: KeyJar) -> None:
    server.replies = [Reply(503), OK]
    with client_of(server, jar) as client:
        for body in (b'{"a": 1, "b": 2}', b'{"b":2,"a":1}'):
            with client.intent("order-1") as intent:
                intent.post("/pay", content=body, headers={"Content-Type": "application/json"})
    assert [asked.body for asked in server.asked] == [b'{"a": 1, "b": 2}'] * 2


def test_two_processes_that_open_an_intent_at_once_send_one_key(server: Server, jar: KeyJar) -> None:
    request = Request("POST", f"{server.url}/pay", (), b"{}")
    first, second = jar.find("order-1"), jar.find("order-1")
    assert first.key != second.key
    for intent in (first, second):
        intent.begin(request)
    assert first.key == second.key == jar.find("order-1").key


def test_final_refusal_closes_the_intent_and_a_corrected_body_needs_another(server: Server, jar: KeyJar) -> None:
    server.replies = [Reply(422, b"no")]
    with client_of(server, jar) as client:
        with client.intent("order-1") as intent:
            assert intent.post("/pay", json={"amount": -5}).status_code == 422
        with client.intent("order-1") as intent, pytest.raises(IntentChanged, match="answered 422"):
            intent.post("/pay", json={"amount": 5})
        assert client.resume() == []
        assert jar.forget("order-1")
        with client.intent("order-1") as intent:
            intent.post("/pay", json={"amount": 5})
    assert len(set(server.keys)) == 2


@pytest.mark.parametrize("reply", [Reply(401), Reply(403), Reply(503), Reply(520), problem(422, "mismatch")])
def test_status_that_does_not_prove_the_outcome_leaves_the_intent_open(
    server: Server, jar: KeyJar, reply: Reply
) -> None:
    server.replies = [reply, OK]
    with client_of(server, jar) as client:
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
        assert [row.name for row in jar.open_intents()] == ["order-1"]
        (outcome,) = client.resume()
    assert (outcome.ended, outcome.status) == (Ended.ANSWERED, 201)
    assert len(set(server.keys)) == 1


def test_answer_too_large_to_keep_is_asked_for_again(server: Server, url: str, clock: Clock) -> None:
    server.replies = [Reply(200, b"x" * 100)]
    jar = KeyJar(url, longest_answer=10, clock=clock)
    with client_of(server, jar) as client:
        for _ in range(2):
            with client.intent("order-1") as intent:
                assert intent.post("/pay").content == b"x" * 100
        assert client.resume() == []
        clock.now += 2 * DAY
        with client.intent("order-1") as intent, pytest.raises(IntentExpired):
            intent.post("/pay")
    jar.close()
    assert len(server.asked) == 2
    assert len(set(server.keys)) == 1


# -- expiry ----------------------------------------------------------------------------------------------------------


def test_intent_without_a_word_of_expiry_is_not_resumed_after_a_day(server: Server, jar: KeyJar, clock: Clock) -> None:
    server.replies = [Reply(503), OK]
    with client_of(server, jar) as client:
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
        clock.now += DAY + 1
        with pytest.raises(IntentExpired, match="order-1") as raised:
            client.resume()
        assert raised.value.names == ("order-1",)
        with client.intent("order-1") as intent, pytest.raises(IntentExpired):
            intent.post("/pay", json={})
        assert len(server.asked) == 1
        (outcome,) = client.resume(again=True)
    assert outcome.ended is Ended.ANSWERED
    assert len(set(server.keys)) == 1


def test_last_expiry_that_the_server_named_counts(server: Server, jar: KeyJar, clock: Clock) -> None:
    def told(moment: str) -> Reply:
        return Reply(503, headers=(("Idempotency-Expires", moment), ("Date", "Fri, 15 Jan 2027 08:00:00 GMT")))

    server.replies = [told("Fri, 15 Jan 2027 10:00:00 GMT"), told("Mon, 18 Jan 2027 08:00:00 GMT"), OK]
    with client_of(server, jar) as client:
        client.rules.wall_clock = clock
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
        clock.now += 3 * 3600  # over two hours, so the first word would forbid it
        with pytest.raises(IntentExpired, match="the server said"), client.intent("order-1") as intent:
            intent.post("/pay", json={})
        clock.now -= 2 * 3600
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
        clock.now += 2.5 * DAY
        (outcome,) = client.resume()
    assert outcome.ended is Ended.ANSWERED


def test_expired_intent_does_not_keep_the_others(server: Server, jar: KeyJar, clock: Clock) -> None:
    with client_of(server, jar) as client:
        server.replies = [Reply(503)]
        with client.intent("old") as intent:
            intent.post("/pay", json={})
        clock.now += DAY + 1
        with client.intent("new") as intent:
            intent.post("/pay", json={})
        server.replies = [OK]
        outcomes: list[Outcome] = []
        with pytest.raises(IntentExpired):
            client.resume(on_outcome=outcomes.append)
    assert [(each.name, each.ended) for each in outcomes] == [("old", Ended.EXPIRED), ("new", Ended.ANSWERED)]


def test_sent_again_after_its_time_an_intent_has_a_new_time(server: Server, jar: KeyJar, clock: Clock) -> None:
    server.replies = [Reply(503)]
    with client_of(server, jar) as client:
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
        clock.now += 2 * DAY
        client.resume(again=True)
        clock.now += 3600
        (outcome,) = client.resume()
    assert outcome.ended is Ended.OPEN
    assert len(server.asked) == 3


def test_prepared_intent_that_was_never_sent_does_not_expire(server: Server, jar: KeyJar, clock: Clock) -> None:
    key = jar.prepare("order-1", "POST", f"{server.url}/pay", json={"amount": 5})
    clock.now += 30 * DAY
    with client_of(server, jar) as client:
        (outcome,) = client.resume()
    assert (outcome.ended, server.keys) == (Ended.ANSWERED, [key])
    assert server.asked[0].headers["content-type"] == "application/json"


def test_server_that_asked_to_come_back_later_is_left_in_peace_by_resume(
    server: Server, jar: KeyJar, clock: Clock
) -> None:
    server.replies = [Reply(429, headers=(("Retry-After", "3600"),)), OK]
    with client_of(server, jar) as client:
        client.rules.wall_clock = clock
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
        assert [each.ended for each in client.resume()] == [Ended.NOT_YET]
        clock.now += 3601
        assert [each.ended for each in client.resume()] == [Ended.ANSWERED]


# -- whose intents ---------------------------------------------------------------------------------------------------


def test_resume_sends_credentials_to_its_own_server_only(server: Server, jar: KeyJar) -> None:
    with serving(Server(OK)) as other:
        jar.prepare("theirs", "POST", f"{other.url}/pay")
        jar.prepare("ours", "POST", f"{server.url}/pay")
        with client_of(server, jar, headers={"Authorization": "Bearer ours"}) as client:
            ended = {each.name: each.ended for each in client.resume()}
        assert ended == {"theirs": Ended.OTHER_SERVER, "ours": Ended.ANSWERED}
        assert other.asked == []
    assert server.asked[0].headers["authorization"] == "Bearer ours"


def test_accounts_do_not_see_each_others_intents(server: Server, url: str) -> None:
    ada, eve = KeyJar(url, account="ada"), KeyJar(url, account="eve")
    ada.prepare("order-1", "POST", f"{server.url}/pay", json={"for": "ada"})
    with client_of(server, eve) as client:
        assert client.resume() == []
        with client.intent("order-1") as intent:
            intent.post("/pay", json={"for": "eve"})
    assert len(ada.open_intents()) == 1
    ada.close()
    eve.close()


# -- the app's own transaction ---------------------------------------------------------------------------------------


def _engine(url: str) -> sqlalchemy.Engine:
    return sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))


def test_intent_exists_if_and_only_if_the_transaction_of_the_app_commits(server: Server, jar: KeyJar, url: str) -> None:
    from sqlalchemy.orm import Session

    engine = _engine(url)
    with Session(engine) as session:
        jar.prepare("kept", "POST", f"{server.url}/pay", json={"amount": 5}, on=session)
        session.commit()
        jar.prepare("gone", "POST", f"{server.url}/pay", json={"amount": 6}, on=session)
        session.rollback()
    with engine.begin() as connection:
        jar.prepare("by-connection", "POST", f"{server.url}/pay", on=connection)
    engine.dispose()
    with client_of(server, jar) as client:
        assert sorted(each.name for each in client.resume()) == ["by-connection", "kept"]
    assert len(server.asked) == 2


def test_intent_is_written_on_a_plain_connection(server: Server, jar: KeyJar, url: str, file: Path) -> None:
    opened: Any = sqlite3.connect(file) if url.startswith("sqlite") else psycopg.connect(url)
    with closing(opened) as connection:
        jar.prepare("gone", "POST", f"{server.url}/pay", on=connection)
        connection.rollback()
        jar.prepare("kept", "POST", f"{server.url}/pay", on=connection)
        connection.commit()
    assert [row.name for row in jar.open_intents()] == ["kept"]


def test_intent_of_an_open_transaction_is_not_sent(server: Server, url: str) -> None:
    from sqlalchemy.orm import Session

    jar = KeyJar(url, timeout=0.3)
    engine = _engine(url)
    with client_of(server, jar) as client, Session(engine) as session:
        jar.prepare("order-1", "POST", f"{server.url}/pay", json={}, on=session)
        with pytest.raises(JarError), client.intent("order-1") as intent:
            intent.post("/pay", json={})
        session.commit()
        with client.intent("order-1") as intent:
            intent.post("/pay", json={})
    engine.dispose()
    jar.close()
    assert len(server.asked) == 1


def test_prepared_twice_is_one_intent_and_changed_is_refused(server: Server, jar: KeyJar) -> None:
    first, second = (jar.prepare("order-1", "POST", f"{server.url}/pay", json={"a": 1}) for _ in range(2))
    assert first == second
    with pytest.raises(IntentChanged):
        jar.prepare("order-1", "POST", f"{server.url}/pay", json={"a": 2})


# -- a jar that cannot be used ---------------------------------------------------------------------------------------


def test_locked_jar_sends_nothing_and_says_so(server: Server, file: Path) -> None:
    jar = KeyJar(f"sqlite:///{file}", timeout=0.2)
    with client_of(server, jar) as client, closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(JarError, match="locked by another writer"), client.intent("order-1") as intent:
            intent.post("/pay", json={})
        assert server.asked == []
        other.execute("ROLLBACK")
        with client.intent("order-1") as intent:
            assert intent.post("/pay", json={}).status_code == 201
    jar.close()


def test_damaged_jar_sends_nothing_and_says_so(server: Server, file: Path) -> None:
    KeyJar(f"sqlite:///{file}").close()
    file.write_bytes(b"SQLite format 3\0" + os.urandom(8000))
    with pytest.raises(JarError, match=r"damaged|not an SQLite database") as raised:
        client_of(server, KeyJar(f"sqlite:///{file}"))
    assert "Do not delete" in str(raised.value)
    assert server.asked == []


def test_jar_that_is_removed_while_in_use_sends_nothing(server: Server, file: Path) -> None:
    jar = KeyJar(f"sqlite:///{file}")
    with client_of(server, jar) as client:
        for path in file.parent.glob("intents.db*"):
            path.unlink()
        with pytest.raises(JarError, match="removed or replaced"), client.intent("order-1") as intent:
            intent.post("/pay", json={})
    jar.close()
    assert server.asked == []


def test_full_disk_sends_nothing_and_says_so(server: Server, file: Path) -> None:
    """A limit on the size of files stands for the disk: the same error reaches SQLite."""
    program = textwrap.dedent(f"""
        import resource, signal
        from oncekey.client import Client, JarError
        client = Client({server.url!r}, jar="sqlite:///{file}")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, resource.RLIM_INFINITY))
        try:
            with client.intent("order-1") as intent:
                intent.post("/pay", content=b"x" * 200_000)
        except JarError as error:
            print("refused:", error)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout.startswith("refused: the key jar cannot be used"), done.stderr
    assert server.asked == []


def test_jar_that_fails_after_the_answer_does_not_hide_the_answer(
    server: Server, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jar = KeyJar(f"sqlite:///{file}", timeout=0.2)
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)

    def answer(asked: Any) -> Reply:
        other.execute("BEGIN IMMEDIATE")
        return OK

    server.answer = answer  # type: ignore[method-assign]
    with client_of(server, jar) as client, client.intent("order-1") as intent:
        assert intent.post("/pay", json={}).status_code == 201
    other.execute("ROLLBACK")
    other.close()
    assert "it stays open" in caplog.text
    assert [row.name for row in jar.open_intents()] == ["order-1"]
    jar.close()


def test_file_with_another_table_of_that_name_is_refused(file: Path) -> None:
    with closing(sqlite3.connect(file)) as other:
        other.execute(f"CREATE TABLE {TABLE} (name TEXT)")
    with pytest.raises(JarError):
        KeyJar(f"sqlite:///{file}").read("order-1")


def test_database_that_does_not_answer_sends_nothing() -> None:
    with pytest.raises(JarError, match="nothing is sent"):
        KeyJar("postgresql://127.0.0.1:1/none?connect_timeout=2")


@pytest.mark.parametrize("url", ["memory://", "intents.db", "mysql://localhost/x", "sqlite://", "sqlite:///:memory:"])
def test_url_that_is_no_jar_is_refused_with_what_is(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"sqlite:///intents\.db"):
        KeyJar(url)


# -- misuse ----------------------------------------------------------------------------------------------------------


def test_intent_needs_a_jar_a_name_and_no_intent_around_it(server: Server, jar: KeyJar) -> None:
    with Client(server.url) as bare, pytest.raises(ConfigurationError, match="needs a key jar"), bare.intent("x"):
        pass
    with client_of(server, jar) as client:
        with pytest.raises(ConfigurationError, match="name of your own"), client.intent(" "):
            pass
        with pytest.raises(ConfigurationError, match="inside an intent"), client.intent("a"), client.intent("b"):
            pass
        with client.intent("c") as intent:  # the errors above have left no intent behind
            intent.post("/pay")
        client.post("/pay")
    assert len(set(server.keys)) == 2


def test_second_request_in_one_intent_is_refused(server: Server, jar: KeyJar) -> None:
    with client_of(server, jar) as client, client.intent("order-1") as intent:
        intent.post("/orders", json={})
        with pytest.raises(IntentChanged, match="intent of its own"):
            intent.post("/payments", json={})
    assert len(server.asked) == 1


def test_reads_in_an_intent_are_not_part_of_it(server: Server, jar: KeyJar) -> None:
    with client_of(server, jar) as client, client.intent("order-1") as intent:
        client.get("/orders")
        assert intent.post("/pay", json={}).status_code == 201
    assert server.keys[0] is None


def test_key_that_the_app_has_already_is_used(server: Server, jar: KeyJar) -> None:
    with client_of(server, jar) as client:
        with client.intent("order-1", key="my-key-42") as intent:
            intent.post("/pay", json={})
        with pytest.raises(ConfigurationError, match="another key"), client.intent("order-1", key="other"):
            pass
        with pytest.raises(ConfigurationError), client.intent("order-2", key="two words"):
            pass
    assert server.keys == ["my-key-42"]


async def test_async_client_keeps_intents_and_resumes(server: Server, jar: KeyJar) -> None:
    server.replies = [Reply(401), OK]
    async with AsyncClient(server.url, jar=jar, transport=httpx.AsyncHTTPTransport(verify=False)) as client:
        async with client.intent("order-1") as intent:
            assert (await intent.post("/pay", json={"a": 1})).status_code == 401
        (outcome,) = await client.resume()
        assert outcome.ended is Ended.ANSWERED
        async with client.intent("order-1") as intent:
            assert (await intent.post("/pay", json={"a": 1})).json() == {"id": 1}
    assert len(server.asked) == 2
    assert len(set(server.keys)) == 1


def test_printed_intents_and_outcomes_show_no_key_and_no_body(server: Server, jar: KeyJar) -> None:
    key = jar.prepare("order-1", "POST", f"{server.url}/pay", json={"card": "4242"})
    with client_of(server, jar) as client:
        printed = repr((jar.open_intents(), client.resume(), jar.read("order-1")))
    assert "order-1" in printed
    assert key not in printed
    assert "4242" not in printed


def test_old_answers_can_be_forgotten(server: Server, jar: KeyJar, clock: Clock) -> None:
    with client_of(server, jar) as client:
        for name in ("a", "b"):
            with client.intent(name) as intent:
                intent.post("/pay", json={})
            clock.now += 20 * DAY
        jar.prepare("open", "POST", f"{server.url}/pay")
        assert jar.forget_finished(older_than=30 * DAY) == 1
    assert jar.finished() == {"b": 201}
    assert len(jar.open_intents()) == 1


def test_intent_sends_in_another_thread_and_not_after_its_block(server: Server, jar: KeyJar) -> None:
    with client_of(server, jar) as client:
        with client.intent("order-1") as intent, ThreadPoolExecutor(1) as pool:
            assert pool.submit(intent.post, "/pay", json={}).result().status_code == 201
        with pytest.raises(ConfigurationError, match="is over"):
            intent.post("/pay", json={})
    assert server.keys == [intent.key]


def test_block_in_which_a_library_sends_past_oncekey_is_warned_about(
    server: Server, jar: KeyJar, caplog: pytest.LogCaptureFixture
) -> None:
    with jar.intent("order-1"), httpx.Client(verify=False) as plain:
        plain.post(f"{server.url}/pay", json={})
    assert "intent 'order-1': nothing was sent through oncekey" in caplog.text
    caplog.clear()
    with pytest.raises(ZeroDivisionError), jar.intent("order-2"):
        _ = 1 / 0
    assert caplog.text == ""


def test_resume_does_not_wait_for_a_server_that_is_down(jar: KeyJar) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    for number in range(10):
        jar.prepare(f"order-{number}", "POST", f"{url}/pay")
    transport = httpx.HTTPTransport(verify=False)
    with Client(url, jar=jar, budget=Budget(tries=1), transport=transport) as client:
        outcomes = client.resume()
    assert len(outcomes) == 10
    assert sum("not tried" in each.note for each in outcomes) == 7
    assert [row.first_sent_at is None for row in jar.open_intents()] == [False] * 3 + [True] * 7


def test_jar_waits_for_the_disk(url: str, file: Path) -> None:
    """Also if the database says that commits need not."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(file)) as other:
            other.execute("PRAGMA journal_mode = WAL")
        jar = KeyJar(url)
        assert jar.run(lambda execute: execute("PRAGMA synchronous", ()).fetchone(), writes=False) == (2,)
    else:
        with psycopg.connect(url, autocommit=True) as other:
            name = other.info.dbname
            other.execute(f"ALTER DATABASE {name} SET synchronous_commit = off".encode())
        jar = KeyJar(url)
        assert jar.run(lambda execute: execute("SHOW synchronous_commit", ()).fetchone(), writes=False) == ("on",)
    jar.close()


def test_role_that_may_not_create_tables_can_use_the_jar(postgres_url: str) -> None:
    KeyJar(postgres_url).close()
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        role = f"clerk_{os.getpid()}"
        owner.execute(f"CREATE ROLE {role} LOGIN".encode())
        owner.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {TABLE} TO {role}".encode())
        parts = urlsplit(postgres_url)
        netloc = f"{role}@{parts.netloc.rpartition('@')[2]}"
        jar = KeyJar(urlunsplit(parts._replace(netloc=netloc)))
        jar.prepare("order-1", "POST", "https://api.example.com/pay")
        assert len(jar.open_intents()) == 1
        jar.close()
        owner.execute(f"DROP OWNED BY {role}".encode())
        owner.execute(f"DROP ROLE {role}".encode())


# -- options that httpx would lead past the transport ------------------------------------------------------------------


def test_proxy_does_not_lead_requests_past_the_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server stands for the proxy: a proxy for http gets the whole URL."""
    with Client("http://api.example.com", proxy=server.url, budget=Budget(tries=1)) as client:
        assert client.post("/pay").status_code == 201
    monkeypatch.setenv("http_proxy", server.url)
    with Client("http://api.example.com", budget=Budget(tries=1)) as client:
        assert client.post("/pay").status_code == 201
    assert [asked.path for asked in server.asked] == ["http://api.example.com/pay"] * 2
    assert None not in server.keys
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Client(server.url, budget=Budget(tries=1)) as client:
        client.post("/pay")
    assert server.asked[2].path == "/pay"


def test_options_that_would_be_ignored_are_refused(server: Server) -> None:
    with pytest.raises(ConfigurationError, match="verify="):
        Client(server.url, transport=httpx.HTTPTransport(verify=False), verify=False)
    with pytest.raises(ConfigurationError, match="mounts="):
        Client(server.url, mounts={})
    with pytest.raises(ConfigurationError, match=r"https://api\.example\.com"):
        Client("api.example.com")
    with pytest.raises(TypeError, match="jarr"):
        Client(server.url, jarr="sqlite:///x.db")


def test_events_that_answer_an_intent_are_kept_whole(server: Server, jar: KeyJar) -> None:
    server.replies = [Reply(200, b"data: 1\n\n", (("Content-Type", "text/event-stream"),))]
    with client_of(server, jar) as client:
        for _ in range(2):
            with client.intent("order-1") as intent:
                assert intent.post("/pay", json={}).content == b"data: 1\n\n"
    assert len(server.asked) == 1
