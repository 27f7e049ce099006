"""Which requests reach DynamoDB, as a server in between records them: how many there are, and which key signs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.testing.servers import HOST, DynaliteServer, DynamoServer
from tests.engine.doubles import RESPONSE, reservation
from tests.stores.dynamo_between import Between, between
from tests.stores.dynamo_rows import opened
from tests.stores.test_dynamodb_races import SERVERS

pytestmark = pytest.mark.stores

ROOT = Path(__file__).parents[2]
SUITE = "tests/stores/test_dynamodb.py"
TESTS = (
    "TestDynamoStore::test_reading_says_none_where_there_is_no_row",
    "TestDynamoStoreOnAmazon::test_reading_says_none_where_there_is_no_row",
    "TestDynamoStoreOnAmazon::test_store_has_keys_steps_and_inspect",  # makes no table
)
GETS = {"dynalite": 1, "moto": 0}
"""How many GetItem a refused reservation costs: none where the server returns the old item with the refusal."""

# ---------------------------------------------------------------- how many


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> DynamoServer:
    found: DynamoServer = request.getfixturevalue(request.param)
    return found


def counted(shim: Between) -> dict[str, int]:
    """What was asked since the last call."""
    asked, shim.asked = shim.asked, []
    return dict(Counter(operation for operation, _ in asked))


def test_reservation_is_one_write_and_at_most_one_read(server: DynamoServer) -> None:
    """docs/stores.md: two conditional writes for a first request, and one that fails for a replay."""
    url = server.new_url()
    refused = {"UpdateItem": 1, "GetItem": GETS[server.kind]} if GETS[server.kind] else {"UpdateItem": 1}
    with between(url) as shim, opened(shim.url_of(url), timeout=20.0) as store:
        store.migrate()
        counted(shim)
        (first,) = store.reserve([reservation("key")])
        assert counted(shim) == {"UpdateItem": 1}
        (duplicate,) = store.reserve([reservation("key")])
        assert duplicate.record is not None
        assert duplicate.record.state is State.IN_PROGRESS
        assert counted(shim) == refused
        assert first.record is not None
        assert store.swap([swap(first.record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)]) != [None]
        assert counted(shim) == {"UpdateItem": 1}
        (replay,) = store.reserve([reservation("key")])
        assert replay.record is not None
        assert replay.record.response == RESPONSE
        assert counted(shim) == refused


# ---------------------------------------------------------------- whose


_CREDENTIALS = {
    "Code": "Success",
    "Type": "AWS-HMAC",
    "AccessKeyId": "KEY-OF-THE-ROLE",
    "SecretAccessKey": "secret",
    "Token": "token",
    "LastUpdated": "2026-01-01T00:00:00Z",
    "Expiration": "2099-01-01T00:00:00Z",
}


class _Metadata(BaseHTTPRequestHandler):
    """The metadata of an EC2 instance, which has a role with credentials."""

    def do_PUT(self) -> None:
        self._answer("token")

    def do_GET(self) -> None:
        self._answer("role" if self.path.endswith("/") else json.dumps(_CREDENTIALS))

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@contextmanager
def instance_metadata() -> Iterator[str]:
    server = ThreadingHTTPServer((HOST, 0), _Metadata)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("signer", ["KEY-OF-THE-USER", "KEY-OF-THE-ROLE"])
def test_tests_on_amazon_sign_with_the_credentials_that_pytest_was_started_with(
    dynalite_server: DynaliteServer, tmp_path: Path, signer: str
) -> None:
    """Also in a worker that has run tests on dynalite before, which get credentials that are made up (``_sdk``)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {f"AWS_{name}_FILE": str(tmp_path / "none") for name in ("CONFIG", "SHARED_CREDENTIALS")}
    with between(dynalite_server.url) as shim, instance_metadata() as metadata:
        if signer == "KEY-OF-THE-USER":
            environment |= {"AWS_ACCESS_KEY_ID": signer, "AWS_SECRET_ACCESS_KEY": "secret"}
        else:
            environment |= {"AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata}
        url = shim.url_of("dynamodb://dynamo?region=eu-central-1")
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "stores", "--no-header"]
            + [f"{SUITE}::{test}" for test in TESTS],
            cwd=ROOT,
            env=environment | {"ONCEKEY_DYNAMODB_URL": url},
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
        )
    assert (ran.returncode, "3 passed" in ran.stdout) == (0, True), ran.stdout + ran.stderr
    assert {key for _, key in shim.asked} == {signer}
    operations = [operation for operation, _ in shim.asked]
    assert operations.index("CreateTable") < operations.index("DeleteTable"), "its table is deleted"
