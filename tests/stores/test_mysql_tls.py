"""TLS to MariaDB: with ``ssl_ca`` alone the server's certificate and its host are verified."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.stores.mysql import MysqlStore
from oncekey.testing.servers import HOST, MysqlServer
from tests.running import running
from tests.stores.mysql import opened
from tests.stores.test_redis_tls import Authority

pytestmark = pytest.mark.stores
REFUSED = "its certificate is not trusted, or is for another host: ssl_ca= names the authority"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """One that MariaDB can read: it runs as another user if the tests run as root."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


def server_of(authority: Authority, name: str, hosts: list[x509.GeneralName]) -> MysqlServer:
    certificate, key = authority.certificate(name, hosts)
    return MysqlServer(fsync=False, settings={"ssl-cert": str(certificate), "ssl-key": str(key)})


@pytest.fixture(scope="module")
def url(authority: Authority) -> Iterator[str]:
    with running(server_of(authority, "here", [x509.IPAddress(ip_address(HOST))])) as server:
        yield server.database("keys")


@pytest.fixture(scope="module")
def elsewhere(authority: Authority) -> Iterator[str]:
    """The same, with a certificate for another host."""
    with running(server_of(authority, "elsewhere", [x509.DNSName("elsewhere.example")])) as server:
        yield server.database("keys")


def test_certificate_of_the_authority_is_taken(url: str, authority: Authority) -> None:
    with opened(f"{url}?ssl_ca={authority.file}") as store:
        store.migrate()


def test_certificate_of_another_authority_is_refused(url: str, folder: Path) -> None:
    other = Authority(folder, "other")
    with opened(f"{url}?ssl_ca={other.file}") as store, pytest.raises(StoreUnavailable, match=REFUSED):
        store.migrate()
    with opened(f"{url}?ssl_ca={other.file}&ssl_verify_cert=false") as store:
        store.migrate()


def test_certificate_of_another_host_is_refused(elsewhere: str, authority: Authority) -> None:
    with opened(f"{elsewhere}?ssl_ca={authority.file}") as store, pytest.raises(StoreUnavailable, match=REFUSED):
        store.migrate()
    with opened(f"{elsewhere}?ssl_ca={authority.file}&ssl_check_hostname=false") as store:
        store.migrate()


def test_key_with_a_password_needs_it_in_the_url(authority: Authority, folder: Path) -> None:
    """Without ``ssl_key_password`` OpenSSL would ask for it at the terminal of the app."""
    certificate, plain = authority.certificate("client", [])
    key = serialization.load_pem_private_key(plain.read_bytes(), None)
    locked = folder / "locked.key"
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"hunter2"),
        )
    )
    url = f"mysql://h/d?ssl_cert={certificate}&ssl_key={locked}"
    with opened(f"{url}&ssl_key_password=hunter2"):
        pass
    for wrong in (url, f"{url}&ssl_key_password=hunter3"):
        with pytest.raises(ConfigurationError, match="ssl_key_password= the password of the key") as caught:
            MysqlStore(wrong)
        assert "hunter" not in str(caught.value)
