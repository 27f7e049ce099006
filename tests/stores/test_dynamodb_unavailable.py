"""A DynamoDB that hangs, is slow, refuses, goes away, or cannot be used as it is set up. The faults are real."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.core.diagnosis import Level
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import ConfigurationError, SchemaError, StoreUnavailable
from oncekey.stores import dynamodb
from oncekey.stores.dynamodb import DynamoStore, checks, from_url
from oncekey.stores.dynamodb.settings import settings_of
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import HOST, DynaliteServer, ServerUnavailable, free_port
from tests.engine.doubles import RESPONSE, eventually, reservation
from tests.stores.dynamo_rows import opened, port_of, through
from tests.stores.postgres import VERBS

pytestmark = pytest.mark.stores

LIMIT = 1.0


@pytest.fixture
def url(ready_dynamodb_url: str) -> str:
    return ready_dynamodb_url


@pytest.fixture
def proxy(url: str) -> Iterator[TcpProxy]:
    with TcpProxy(HOST, port_of(url)) as proxy:
        yield proxy


def refuse(proxy: TcpProxy) -> None:
    proxy.refuse()


def hang(proxy: TcpProxy) -> None:
    proxy.hang()


def mute(proxy: TcpProxy) -> None:
    proxy.hang("to_client")


def crawl(proxy: TcpProxy) -> None:
    proxy.delay(3 * LIMIT)


SHORT = ("reserve", "swap", "counts")
_CASES = [
    pytest.param(verb, fault, marks=[] if fault in (hang, refuse) and verb in SHORT else [pytest.mark.stores])
    for verb in VERBS
    for fault in (refuse, hang, mute, crawl)
]


@pytest.mark.parametrize(("verb", "fault"), _CASES)
def test_every_verb_ends_in_time(url: str, proxy: TcpProxy, verb: str, fault: Callable[[TcpProxy], None]) -> None:
    """Within its limit it raises StoreUnavailable; when the server is back, it works."""
    call: Callable[[Any], Any] = VERBS[verb]
    with opened(through(proxy, url), timeout=LIMIT) as store:
        store.check()
        fault(proxy)
        start = time.monotonic()
        with pytest.raises(StoreUnavailable):
            call(store)
        assert time.monotonic() - start < LIMIT + 4.0
        proxy.pass_through()
        eventually(lambda: answers(call, store))


def answers(call: Callable[[Any], Any], store: DynamoStore) -> bool:
    """Whether it works again: at first the server is busy with what the network held back."""
    try:
        call(store)
    except StoreUnavailable:
        return False
    return True


def test_batch_ends_in_time_however_many_keys_it_has(url: str, proxy: TcpProxy) -> None:
    with opened(through(proxy, url), timeout=LIMIT) as store:
        store.check()
        proxy.hang()
        start = time.monotonic()
        with pytest.raises(StoreUnavailable):
            store.reserve([reservation(f"key-{number}") for number in range(1000)])
        assert time.monotonic() - start < 2 * LIMIT + 4.0
        proxy.pass_through()


@pytest.mark.usefixtures("_sdk")
def test_rows_survive_a_killed_server() -> None:
    """The server is killed right after reserve and swap returned: while it is away, verbs fail; then the rows are
    there (I1, I2)."""
    try:
        server = DynaliteServer(durable=True)
        server.start()
    except ServerUnavailable as missing:
        pytest.skip(str(missing))
    with server, opened(server.url, timeout=LIMIT) as store:
        store.migrate()
        first, second = (each.record for each in store.reserve([reservation("first"), reservation("second")]))
        assert first is not None
        assert second is not None
        assert store.swap([swap(second, Event.COMPLETE, Actor.OWNER, response=RESPONSE)]) != [None]
        server.kill()
        with pytest.raises(StoreUnavailable):
            store.reserve([reservation("first")])
        server.start()
        found = store.read([("tenant-1", "first"), ("tenant-1", "second")])
        assert [row and row.owner for row in found] == [first.owner, second.owner]
        assert [row and row.state for row in found] == [State.IN_PROGRESS, State.COMPLETED]


# ---------------------------------------------------------------- set up in a wrong way


def test_table_that_is_not_there_is_named_with_what_to_run(dynalite_server: DynaliteServer) -> None:
    with opened(dynalite_server.new_url()) as store:
        for verb in ("reserve", "swap", "read", "steps", "find", "due", "listing", "check"):
            with pytest.raises(SchemaError, match=r"table test_\d+_\d+ .*run `oncekey migrate`"):
                VERBS[verb](store)  # type: ignore[arg-type]
        assert [(each.check, each.level) for each in store.diagnose()] == [("schema", Level.FAIL)]


def test_table_of_another_program_is_refused(url: str) -> None:
    with opened(url) as store:
        other = settings_of(url).table + "_other"
        store._client.made().create_table(
            TableName=other,
            KeySchema=[{"AttributeName": "id", "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": "id", "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
    with opened(url.replace(settings_of(url).table, other)) as store:
        for call in (store.check, store.migrate):
            with pytest.raises(SchemaError, match="is not a table of oncekey"):
                call()


def test_server_that_is_not_there_is_unavailable() -> None:
    url = f"dynamodb://table?region=eu-central-1&endpoint=http://{HOST}:{free_port()}"
    says = "DynamoDB table table in eu-central-1 is unavailable"
    with opened(url, timeout=0.5) as store, pytest.raises(StoreUnavailable, match=says):
        store.reserve([reservation("key")])


def test_process_without_credentials_is_told_so(
    dynalite_server: DynaliteServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with (
        opened(dynalite_server.new_url(), timeout=0.77) as store,
        pytest.raises(StoreUnavailable, match="no credentials"),
    ):
        store.reserve([reservation("key")])


def test_region_that_is_not_known_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    with opened("dynamodb://table") as store, pytest.raises(ConfigurationError, match=r"add \?region="):
        store.check()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("dynamodb://", "names no table"),
        ("dynamodb://a", "a table name that DynamoDB does not take: .* 3 to 255 letters"),
        ("dynamodb://key:secret@table", "credentials are not part of the URL"),
        ("dynamodb://table/more", "more than the name of one table"),
        ("dynamodb://table?reguon=eu", "'reguon'"),
        ("dynamodb://table?timeout=soon", "timeout= in the DynamoDB URL must be seconds"),
        ("dynamodb://table?margin=-1", "margin= in the DynamoDB URL must be seconds"),
    ],
)
def test_url_that_cannot_be_right_is_refused(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        from_url(url)
    assert "secret" not in str(caught.value)


def test_url_has_all_settings() -> None:
    found = settings_of("dynamodb://my.table_1?region=eu-west-1&endpoint=http://x:1&timeout=2&margin=1.5")
    assert (found.table, found.region, found.endpoint) == ("my.table_1", "eu-west-1", "http://x:1")
    assert (found.timeout, found.margin) == (2.0, 1.5)


# ---------------------------------------------------------------- what doctor says


def levels(store: DynamoStore) -> dict[str, Level]:
    return {each.check: each.level for each in store.diagnose()}


def test_doctor_finds_nothing_wrong(url: str) -> None:
    with opened(url) as store:
        assert set(levels(store).values()) == {Level.OK} or levels(store)["time to live"] is Level.WARN
        assert {"schema", "clock", "capacity", "regions"} <= levels(store).keys()
        assert levels(store)["clock"] is Level.OK


@pytest.mark.parametrize("off", [3600.0, -3600.0, 5.0])
def test_doctor_fails_on_a_host_whose_clock_is_off(url: str, monkeypatch: pytest.MonkeyPatch, off: float) -> None:
    """Leases are measured on it. The server's clock is the Date of its answer."""
    monkeypatch.setattr(checks, "host_clock", lambda: time.time() + off)
    with opened(url) as store:
        assert levels(store)["clock"] is Level.FAIL


def test_doctor_fails_on_a_global_table_and_warns_of_provisioned_capacity() -> None:
    found = {each.check: each for each in checks.table({"Replicas": [{"RegionName": "us-east-1"}]})}
    assert (found["regions"].level, found["capacity"].level) == (Level.FAIL, Level.WARN)
    assert "us-east-1" in found["regions"].found


def test_transactional_route_is_a_configuration_error_that_names_the_stores_that_can() -> None:
    with pytest.raises(ConfigurationError, match=r"none to share: .*postgresql://.*'phased' or 'repeatable'"):
        OnceKey(from_url("dynamodb://table"), scope=SINGLE_TENANT, policy=Policy(effects="transactional"))


def test_documented_permissions_are_those_of_the_requests_that_the_store_sends() -> None:
    """An operator copies the IAM policy of docs/stores.md. Each request of the SDK needs the action of its name."""
    page = (Path(__file__).parents[2] / "docs" / "stores.md").read_text("utf-8")
    client = boto3.session.Session(region_name="eu-central-1").client("dynamodb")
    actions = client.meta.method_to_api_mapping
    sources = [path.read_text("utf-8") for path in Path(dynamodb.__file__).parent.glob("*.py")]
    asked = {word for text in sources for word in re.findall(r'"([a-z_]+)"', text) if word in actions}
    documented = set(re.findall(r"dynamodb:([A-Z][a-z]\w+)", page))
    assert {"update_item", "query", "create_table"} <= asked
    assert documented == {actions[word] for word in asked}
