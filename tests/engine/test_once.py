"""OnceKey: what it refuses to be made of, what it makes of a request, and how it ends."""

from __future__ import annotations

import asyncio
import copy
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.core.fingerprint import FINGERPRINT_VERSION, fingerprint
from oncekey.core.policy import Policy
from oncekey.core.record import Reservation
from oncekey.core.routes import Route
from oncekey.core.states import Effects
from oncekey.errors import ConfigurationError, SchemaError
from oncekey.stores.memory import MemoryStore
from oncekey.stores.registry import Entry, load, open_store
from oncekey.stores.sqlite import SqliteStore
from tests.engine.doubles import PATIENCE, FakeStore, reservation

# ---------------------------------------------------------------- making one


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("mongodb://localhost/x", "no store is known for a URL that starts with 'mongodb'"),
        ("postgresql+pg8000://h/x", "starts with 'postgresql+pg8000'"),
        ("", "no store is known"),
        ("app.db", "no store is known"),
        ("sqlite://", "names no file"),
        ("sqlite:///", "names no file"),
    ],
)
def test_a_url_that_names_no_store_is_refused(url: str, sentence: str) -> None:
    """One sentence that says what was wrong; for an unknown kind also what there is."""
    with pytest.raises(ConfigurationError) as caught:
        OnceKey(url, scope=SINGLE_TENANT)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_url_without_a_scheme_does_not_show_its_password() -> None:
    """The message about a mistyped URL must not quote what may be a password (hazard 28)."""
    with pytest.raises(ConfigurationError) as caught:
        OnceKey("bob:hunter2@db.example/app", scope=SINGLE_TENANT)
    assert "hunt" not in str(caught.value)


def test_a_postgres_url_that_cannot_be_read_does_not_show_its_password() -> None:
    """A half-escaped password makes the URL unreadable: neither the message nor its cause may quote it."""
    with pytest.raises(ConfigurationError) as caught:
        OnceKey("postgresql://bob:hun%zzter@db.example/app", scope=SINGLE_TENANT)
    shown = f"{caught.value} {caught.value.__cause__ or ''} {caught.value.__context__ or ''}"
    if caught.value.__suppress_context__ and caught.value.__cause__ is None:
        shown = str(caught.value)
    assert "hun" not in shown


@pytest.mark.parametrize(
    ("url", "kind"),
    [("memory://", "MemoryStore"), ("postgresql://h/x", "PostgresStore"), ("postgres://h/x", "PostgresStore")],
)
def test_a_url_opens_its_store_and_no_connection(url: str, kind: str) -> None:
    """The store is the one that the scheme names; nothing is asked of it yet."""
    assert type(OnceKey(url, scope=SINGLE_TENANT).store).__name__ == kind


def test_a_sqlite_url_names_a_file_as_sqlalchemy_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slashes and a relative path, four and an absolute one, percent signs decoded."""
    opened: list[str] = []

    def open_file(path: str, *, writer: str) -> SqliteStore:
        assert writer == "thread"
        opened.append(path)
        return SqliteStore(tmp_path / "keys.db")

    monkeypatch.setattr("oncekey.stores.sqlite.SqliteStore", open_file)
    for url in ("sqlite:///app.db", "sqlite:////var/app.db", "sqlite:///my%20app.db"):
        open_store(url)
    assert opened == ["app.db", "/var/app.db", "my app.db"]


def test_a_store_may_be_given_instead_of_a_url() -> None:
    """Any store will do."""
    store = MemoryStore()
    assert OnceKey(store, scope=SINGLE_TENANT).store is store


def test_the_scope_has_no_default() -> None:
    """Replaying to any caller that has the key is a leak, so leaving it out is an error of the call."""
    with pytest.raises(TypeError, match="scope"):
        OnceKey("memory://")  # type: ignore[call-arg]


@pytest.mark.parametrize("scope", [None, "tenant", 1])
def test_a_scope_that_is_no_function_is_refused(scope: Any) -> None:
    """A name is not a function of the request."""
    with pytest.raises(ConfigurationError, match="a function of the request, or SINGLE_TENANT"):
        OnceKey("memory://", scope=scope)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("on_event", 5),
        ("grace", "5s"),
        ("max_queued", "x"),
        ("docs_url", 5),
        ("status_url", "idempotency"),
        ("migrate", "no"),
        ("cache", 5),
        ("cache_secret", 5),
        ("cache_ttl", "60"),
        ("bind_secret", 5),
    ],
)
def test_option_of_a_wrong_type_is_named(option: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"OnceKey\({option}=.*it takes "):
        OnceKey("memory://", scope=SINGLE_TENANT, **{option: value})


def test_an_unknown_profile_is_refused() -> None:
    """The message says which there are."""
    with pytest.raises(ConfigurationError, match="'ietf', 'stripe' or 'governance'"):
        OnceKey("memory://", scope=SINGLE_TENANT, profile="paypal")  # type: ignore[arg-type]


def test_a_route_that_is_none_is_refused() -> None:
    """Method and path, nothing else."""
    with pytest.raises(ConfigurationError, match="not of the form"):
        OnceKey("memory://", scope=SINGLE_TENANT, routes={"payments": Policy()})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"url": None}, "the URL of a store"),
        ({"policy": {"effects": "repeatable"}}, "it takes a Policy"),
        ({"routes": ["POST /x"]}, "it takes a mapping"),
        ({"routes": {"POST /x": False}}, "takes a Policy, or None, which exempts it"),
        ({"routes": {"POST /x": "repeatable"}}, "takes a Policy, or None"),
    ],
)
def test_argument_of_a_wrong_type_is_refused_at_once(given: dict[str, Any], sentence: str) -> None:
    """Not by an AttributeError at the first request."""
    with pytest.raises(ConfigurationError, match=sentence):
        OnceKey(**{"url": "memory://", "scope": SINGLE_TENANT, **given})


def test_missing_driver_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without psycopg the message names the extra, not the module."""
    for name in [name for name in sys.modules if name.startswith("oncekey.stores.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'oncekey\[postgres\]'"):
        OnceKey("postgresql://h/x", scope=SINGLE_TENANT)


def test_a_missing_module_of_our_own_is_not_blamed_on_a_driver() -> None:
    """A broken installation of oncekey shows as what it is."""
    with pytest.raises(ModuleNotFoundError, match=r"oncekey\.stores\.nowhere"):
        load(Entry("nowhere", "nowhere://", "oncekey.stores.nowhere", "nowhere"), "nowhere://")


# ---------------------------------------------------------------- a request as a reservation


def ask(once: OnceKey, tenant: Any = "acme", policy: Policy | None = None, **changed: Any) -> Reservation:
    body = changed.pop("body", b'{"amount":1}')
    sent = changed.pop("headers", [])

    def read(names: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
        return [line for line in sent if line[0] in names]

    values: dict[str, Any] = {
        "tenant": tenant,
        "key": "key-1",
        "owner": "owner-1",
        "parts": ("POST", "/payments", b"a=1", "application/json", body, read),
    }
    used = policy or once.default_policy
    values["lines"] = read(used.recipe.headers)
    return once.reservation(Route("POST /payments", used), **(values | changed))


@pytest.fixture
def once() -> OnceKey:
    return OnceKey("memory://", scope=SINGLE_TENANT)


def test_a_request_becomes_a_reservation(once: OnceKey) -> None:
    """Everything that the row needs, from the policy and from the request."""
    policy = Policy(effects="phased")
    asked = {"method": "POST", "path": "/payments", "query": b"a=1", "content_type": "application/json"}
    digest = fingerprint(**asked, body=b'{"amount":1}', fields=None)  # type: ignore[arg-type]
    assert ask(once, policy=policy) == Reservation(
        "acme",
        "key-1",
        "POST /payments",
        digest,
        FINGERPRINT_VERSION,
        Effects.PHASED,
        "owner-1",
        60.0,
        86_400.0,
    )


def test_fingerprint_fields_choose_the_compared_members(once: OnceKey) -> None:
    """With ``fingerprint_fields`` a member that was not chosen makes no difference."""
    policy = Policy(fingerprint_fields=("amount",))
    one = ask(once, policy=policy, body=b'{"amount":1,"at":1}')
    two = ask(once, policy=policy, body=b'{"at":2,"amount":1}')
    assert one.fingerprint == two.fingerprint
    assert ask(once, body=b'{"amount":1,"at":1}').fingerprint != ask(once, body=b'{"amount":1,"at":2}').fingerprint


def test_row_has_the_recipe_of_its_fingerprint(once: OnceKey) -> None:
    """Nothing for the default; else fields and headers, in one order and one spelling."""
    assert ask(once).fingerprint_recipe is None
    assert ask(once, policy=Policy(fingerprint_headers=("If-None-Match", "IF-MATCH"))).fingerprint_recipe is None
    policy = Policy(fingerprint_fields=("b", "a.c"), fingerprint_headers=("Stripe-Account", "accept"))
    assert ask(once, policy=policy).fingerprint_recipe == '{"fields":["a.c","b"],"headers":["accept","stripe-account"]}'
    assert ask(once, policy=Policy(fingerprint_headers=())).fingerprint_recipe == '{"headers":[]}'


def test_row_says_the_quarantine_of_the_route_where_it_is_not_the_default(once: OnceKey) -> None:
    """Upkeep and the command line take it from there, without the app's code."""
    assert ask(once).quarantine_seconds is None
    assert ask(once, policy=Policy(quarantine=timedelta(minutes=5))).quarantine_seconds is None
    assert ask(once, policy=Policy(quarantine=timedelta(milliseconds=1500))).quarantine_seconds == 1.5


def test_headers_of_the_policy_make_another_request(once: OnceKey) -> None:
    def fingerprint_of(*lines: tuple[bytes, bytes], policy: Policy | None = None) -> bytes:
        return ask(once, policy=policy, headers=list(lines)).fingerprint

    assert fingerprint_of((b"if-match", b'"1"')) != fingerprint_of((b"if-match", b'"2"'))
    assert fingerprint_of((b"accept", b"a/b")) == fingerprint_of()
    accept = Policy(fingerprint_headers=("Accept",))
    assert fingerprint_of((b"accept", b"a/b"), policy=accept) != fingerprint_of(policy=accept)
    off = Policy(fingerprint_headers=())
    assert fingerprint_of((b"if-match", b'"1"'), policy=off) == fingerprint_of(policy=off)


def test_key_per_endpoint_puts_the_operation_into_the_scope(once: OnceKey) -> None:
    """With key_per="endpoint" the scope holds the operation too, behind a mark that no tenant can contain."""
    policy = Policy(key_per="endpoint")
    assert ask(once, policy=policy).scope == "acme\x1fPOST /payments"
    with pytest.raises(ConfigurationError):
        ask(once, "acme\x1fPOST /payments")


@pytest.mark.parametrize("tenant", ["", "a\nb", "a\x00", "\ud800", "x" * 256, None])
def test_invalid_scope_is_refused(once: OnceKey, tenant: Any) -> None:
    """Empty, unprintable or too long: an error of the app, before any look-up."""
    with pytest.raises(ConfigurationError, match="1 to 255 printable characters"):
        ask(once, tenant)
    of_many = OnceKey("memory://", scope=lambda request: "acme")
    with of_many, pytest.raises(ConfigurationError, match="1 to 255 printable characters"):
        ask(of_many, tenant)


@pytest.mark.parametrize("tenant", [7, b"acme", object()])
def test_a_scope_that_is_no_text_is_refused_in_words(once: OnceKey, tenant: Any) -> None:
    """An id that is a number or a UUID is the likeliest mistake: a sentence, not an AttributeError."""
    with pytest.raises(ConfigurationError):
        ask(once, tenant)


@pytest.mark.parametrize("tenant", ["a", "x" * 255, "Ünïcödé 日本", "a:b/c"])
def test_a_scope_may_be_any_printable_name(once: OnceKey, tenant: str) -> None:
    """Printable in any script, up to 255 characters."""
    assert ask(once, tenant).scope == tenant


def test_single_tenant_has_one_scope(once: OnceKey) -> None:
    """SINGLE_TENANT has one scope; a function has none of its own."""
    assert once.single_tenant == "single-tenant"
    assert OnceKey("memory://", scope=lambda request: "x").single_tenant is None


# ---------------------------------------------------------------- the start and the end


def test_starting_checks_the_tables_and_keeps_no_connection() -> None:
    """Without ``migrate`` they are only checked, in the calling thread."""
    store = FakeStore()
    OnceKey(store, scope=SINGLE_TENANT).start()
    assert [verb for verb, _ in store.batches] == ["check"]
    assert store.disconnects == 1


def test_start_with_migrate_migrates_first() -> None:
    """With ``migrate`` they are brought up to date first."""
    store = FakeStore()
    OnceKey(store, scope=SINGLE_TENANT, migrate=True).start()
    assert [verb for verb, _ in store.batches] == ["migrate", "check"]


def test_start_with_wrong_tables_names_the_command_to_run() -> None:
    """The error comes at the start, not at the first request."""
    store = FakeStore()
    store.break_("check", lambda: SchemaError("run `oncekey migrate`"))
    with pytest.raises(SchemaError, match="oncekey migrate"):
        OnceKey(store, scope=SINGLE_TENANT).start()


def test_with_block_closes_the_store() -> None:
    """``with OnceKey(...)`` closes the store, also when the block raised."""
    store = FakeStore()

    def use() -> None:
        with OnceKey(store, scope=SINGLE_TENANT) as once:
            assert isinstance(once, OnceKey)
            raise KeyError("in the block")

    with pytest.raises(KeyError):
        use()
    assert store.closed


def test_events_reach_the_hook() -> None:
    """``on_event`` is called with what happened."""
    heard: list[Any] = []
    with OnceKey("memory://", scope=SINGLE_TENANT, on_event=heard.append) as once:
        once.engine.run_blocking(once.engine.begin(reservation(), once.default_policy), PATIENCE)
    assert [type(event).__name__ for event in heard] == ["Reserved"]


def test_closing_waits_for_the_handlers_that_run() -> None:
    """``aclose`` lets tasks end first, so that their outcomes can still be stored."""
    store = FakeStore()
    once = OnceKey(store, scope=SINGLE_TENANT)

    async def main() -> list[str]:
        order: list[str] = []
        go_on = asyncio.Event()

        async def handler() -> None:
            await go_on.wait()
            order.append(f"handler ended, closed: {store.closed}")

        task = asyncio.create_task(handler())
        once.engine.tasks.add(task)
        task.add_done_callback(once.engine.tasks.discard)
        closing = asyncio.create_task(once.aclose(PATIENCE))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not closing.done()
        go_on.set()
        order.append(f"closed in time: {await closing}")
        return order

    assert asyncio.run(main()) == ["handler ended, closed: False", "closed in time: True"]
    assert store.closed


def test_closing_does_not_wait_for_ever() -> None:
    """A handler that outlives the grace is left, and the store is closed."""
    store = FakeStore()
    once = OnceKey(store, scope=SINGLE_TENANT)

    async def main() -> None:
        task = asyncio.create_task(asyncio.Event().wait())
        once.engine.tasks.add(task)  # type: ignore[arg-type]
        assert await once.aclose(0.01)
        assert not task.done()
        task.cancel()

    asyncio.run(main())
    assert store.closed


def test_closing_does_not_wait_for_the_handlers_of_a_loop_that_is_gone() -> None:
    """They never end; and one that runs in another loop is that loop's affair."""
    once = OnceKey("memory://", scope=SINGLE_TENANT)
    gone = asyncio.new_event_loop()
    task = gone.create_task(asyncio.Event().wait())
    once.engine.tasks.add(task)  # type: ignore[arg-type]
    gone.run_until_complete(asyncio.sleep(0))
    gone.close()
    assert asyncio.run(asyncio.wait_for(once.aclose(3600.0), PATIENCE))
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_close_by_a_handler_does_not_wait_for_itself() -> None:
    """A task that closes does not wait for itself."""
    once = OnceKey(FakeStore(), scope=SINGLE_TENANT)

    async def main() -> bool:
        task = asyncio.create_task(once.aclose(PATIENCE))
        once.engine.tasks.add(task)  # type: ignore[arg-type]
        return await asyncio.wait_for(task, PATIENCE / 2)

    assert asyncio.run(main())


def test_a_framework_that_copies_its_arguments_gets_the_same_one() -> None:
    """Litestar deep-copies what a controller's middleware is made with: two would be two engines on one store."""
    once = OnceKey("memory://", scope=SINGLE_TENANT)
    assert copy.deepcopy({"once": once})["once"] is once
    once.close()
