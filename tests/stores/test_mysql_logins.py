"""Logins to MySQL itself, whose default (caching_sha2_password) sends a password by TLS or encrypted with RSA."""

from __future__ import annotations

from collections.abc import Iterator

import pymysql._auth
import pytest

from oncekey.errors import StoreUnavailable
from oncekey.testing.servers import HOST, OracleMysqlServer
from tests.running import running
from tests.stores.mysql import opened, put

pytestmark = pytest.mark.stores
SETTINGS = {"plain": {}, "tls": {"tls-version": "TLSv1.2,TLSv1.3"}}


@pytest.fixture(scope="module", params=SETTINGS)
def server(request: pytest.FixtureRequest) -> Iterator[OracleMysqlServer]:
    with running(OracleMysqlServer(fsync=False, settings=SETTINGS[request.param])) as server:
        with opened(server.database("keys")) as store:
            store.migrate()
        yield server


@pytest.fixture
def url(server: OracleMysqlServer) -> str:
    """Of a user whose password the server has not seen yet: the second login is shorter."""
    server.execute("DROP USER IF EXISTS app")
    server.execute("CREATE USER app IDENTIFIED BY 'se%cret'")
    server.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON `keys`.* TO app")
    return f"mysql://app:se%25cret@{HOST}:{server.port}/keys"


def test_user_with_a_password_logs_in_twice(server: OracleMysqlServer, url: str) -> None:
    for number in range(2):
        with opened(url) as store:
            assert put(store, f"key-{server.port}-{number}")


def test_wrong_password_says_what_to_correct(url: str) -> None:
    with opened(url.replace("se%25cret", "wrong")) as store, pytest.raises(StoreUnavailable, match="name or password"):
        store.check()


def test_login_without_tls_and_without_cryptography_names_the_package(
    server: OracleMysqlServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pymysql._auth, "_have_cryptography", False)
    has_tls = bool(server.execute("SELECT @@tls_version")[0][0])
    with opened(url) as store:
        if has_tls:
            store.check()
        else:
            with pytest.raises(StoreUnavailable, match=r"pip install 'oncekey\[mysql\]'"):
                store.check()
