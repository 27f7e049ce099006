"""Redis over TLS: the store, an app and the cache by ``rediss://``, and what is said if the certificate is refused.

The redis-server of the wheel is built without TLS; Debian's has it (``make servers``). Certificates are made here.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlencode

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncekey import SINGLE_TENANT, OnceKey, current
from oncekey.core.states import Actor, Event, State
from oncekey.core.swaps import swap
from oncekey.errors import StoreUnavailable
from oncekey.stores.redis import RedisStore
from oncekey.stores.redis.cache import RedisCache
from oncekey.testing.conformance.base import RESPONSE, one
from oncekey.testing.proxy import TcpProxy
from oncekey.testing.servers import HOST, RedisServer, ServerFailed, ServerUnavailable, free_port
from oncekey.testing.servers.packages import unpacked
from oncekey.web.asgi import IdempotencyMiddleware
from tests.engine.doubles import reservation

pytestmark = pytest.mark.stores

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


class Authority:
    """Signs certificates, and writes them to files."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._signed(name, self._key, [], DAY, authority=True))

    def certificate(
        self, name: str, hosts: list[x509.GeneralName], valid: datetime.timedelta = DAY
    ) -> tuple[Path, Path]:
        """The files of a new certificate and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        files = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        files[0].write_bytes(self._signed(name, key, hosts, valid))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files

    def _signed(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        hosts: list[x509.GeneralName],
        valid: datetime.timedelta,
        *,
        authority: bool = False,
    ) -> bytes:
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - 2 * DAY)
            .not_valid_after(NOW + valid)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if hosts:
            made = made.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        return made.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


class TlsRedis(RedisServer):
    """A server with a port for TLS beside the plain one."""

    def __init__(self, authority: Authority, certificate: tuple[Path, Path], clients: str = "no") -> None:
        self.tls_port = free_port()
        super().__init__(
            settings={
                "tls-port": str(self.tls_port),
                "tls-cert-file": str(certificate[0]),
                "tls-key-file": str(certificate[1]),
                "tls-ca-cert-file": str(authority.file),
                "tls-auth-clients": clients,
            }
        )

    def tls(self, **options: str | Path) -> str:
        return f"rediss://{HOST}:{self.tls_port}/0?{urlencode(options)}"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module", autouse=True)
def with_tls() -> Iterator[None]:
    """Chooses Debian's server if ``make servers`` has fetched it."""
    root = unpacked("redis")
    with pytest.MonkeyPatch.context() as patched:
        if root is not None:
            patched.setenv("ONCEKEY_REDIS_BIN", str(root / "usr/bin/redis-server"))
        yield


def started(server: TlsRedis) -> TlsRedis:
    try:
        server.start()
    except ServerUnavailable as error:
        pytest.skip(str(error))
    except ServerFailed as error:
        if "tls-" not in str(error):
            raise
        pytest.skip("this redis-server is built without TLS: run `make servers`")
    return server


@pytest.fixture(scope="module")
def server(authority: Authority) -> Iterator[TlsRedis]:
    made = TlsRedis(authority, authority.certificate("here", [x509.IPAddress(ip_address(HOST))]))
    with suppress(ServerFailed):
        yield started(made)
    made.stop()


def refusal(url: str) -> str:
    with closing(RedisStore(url)) as store, pytest.raises(StoreUnavailable) as refused:
        store.check()
    return str(refused.value)


def test_keys_are_stored_over_tls(server: TlsRedis, authority: Authority) -> None:
    server.flush()
    with closing(RedisStore(server.tls(ssl_ca_certs=authority.file))) as store:
        store.init()
        record = one(store.reserve([reservation("k")])[0].record)
        assert store.swap([swap(record, Event.COMPLETE, Actor.OWNER, response=RESPONSE)])[0] is not None
        found = one(store.read([(record.scope, "k")])[0])
    assert (found.state, found.response) == (State.COMPLETED, RESPONSE)


async def test_app_replays_over_tls(server: TlsRedis, authority: Authority) -> None:
    server.flush()
    url = server.tls(ssl_ca_certs=authority.file)
    with closing(RedisStore(url)) as store:
        store.init()
    answers, runs = await ask_twice(url)
    assert [(each.status_code, each.headers.get("idempotency-replayed")) for each in answers] == [
        (201, None),
        (201, "true"),
    ]
    assert runs == 1


async def test_certificate_that_is_not_trusted_is_503_and_no_handler_runs(server: TlsRedis) -> None:
    answers, runs = await ask_twice(server.tls())
    assert [each.status_code for each in answers] == [503, 503]
    assert runs == 0


async def ask_twice(url: str) -> tuple[list[httpx.Response], int]:
    runs = 0

    async def pay(request: Request) -> JSONResponse:
        nonlocal runs
        runs += 1
        return JSONResponse({"paid": current().key}, 201)

    once = OnceKey(url, scope=SINGLE_TENANT)
    app = Starlette(routes=[Route("/payments", pay, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, once=once)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            return [
                await client.post("/payments", json={}, headers={"idempotency-key": "key-1"}) for _ in range(2)
            ], runs
    finally:
        await once.aclose()


def test_refused_certificate_is_unavailable_and_the_sentence_says_what_to_do(
    server: TlsRedis, authority: Authority, tmp_path: Path
) -> None:
    where = f"Redis at {HOST}:{server.tls_port} is unavailable (SSLCertVerificationError): "
    untrusted = where + "its certificate is not trusted: ssl_ca_certs= names the authority"
    assert refusal(server.tls()) == untrusted
    assert refusal(server.tls(ssl_ca_certs=Authority(tmp_path, "another").file)) == untrusted
    with closing(RedisStore(server.tls(ssl_cert_reqs="none"))) as store:
        store.init()


@pytest.mark.parametrize(
    ("name", "hosts", "valid", "sentence"),
    [
        ("elsewhere", [x509.DNSName("redis.example")], DAY, "its certificate is for another host: use a name"),
        ("old", [x509.IPAddress(ip_address(HOST))], -DAY, "its certificate has expired, or is not valid yet"),
    ],
)
def test_certificate_of_another_host_or_time_has_a_sentence_of_its_own(
    authority: Authority, name: str, hosts: list[x509.GeneralName], valid: datetime.timedelta, sentence: str
) -> None:
    with started(TlsRedis(authority, authority.certificate(name, hosts, valid))) as server:
        assert sentence in refusal(server.tls(ssl_ca_certs=authority.file))


def test_missing_certificate_of_the_client_is_unavailable(authority: Authority) -> None:
    mine = authority.certificate("client", [])
    here = authority.certificate("mutual", [x509.IPAddress(ip_address(HOST))])
    with started(TlsRedis(authority, here, clients="yes")) as server:
        assert "ssl_certfile=" in refusal(server.tls(ssl_ca_certs=authority.file))
        whole = server.tls(ssl_ca_certs=authority.file, ssl_certfile=mine[0], ssl_keyfile=mine[1])
        with closing(RedisStore(whole)) as store:
            store.init()


def test_file_of_the_authority_that_goes_away_is_named_as_a_mistake(server: TlsRedis, tmp_path: Path) -> None:
    here = tmp_path / "ca.pem"
    here.touch()
    with closing(RedisStore(server.tls(ssl_ca_certs=here))) as store:
        here.unlink()
        with pytest.raises(StoreUnavailable, match="a file that the URL names"):
            store.check()


def test_tls_and_plain_mixed_up_is_unavailable(server: TlsRedis, authority: Authority) -> None:
    plain = f"rediss://{HOST}:{server.port}/0?{urlencode({'ssl_ca_certs': authority.file, 'timeout': 1})}"
    assert "if this port speaks no TLS, use redis://" in refusal(plain)
    assert "is unavailable" in refusal(f"redis://{HOST}:{server.tls_port}/0?timeout=1")


def test_handshake_that_hangs_ends_in_time(server: TlsRedis, authority: Authority) -> None:
    with TcpProxy(HOST, server.tls_port) as proxy:
        proxy.hang()
        begun = time.monotonic()
        url = f"rediss://{HOST}:{proxy.port}/0?{urlencode({'ssl_ca_certs': authority.file, 'timeout': 0.5})}"
        assert "did not answer in time" in refusal(url)
        assert time.monotonic() - begun < 5.0


async def test_cache_is_read_and_written_over_tls(server: TlsRedis, authority: Authority) -> None:
    server.flush()
    cache = RedisCache(server.tls(ssl_ca_certs=authority.file, timeout="2"))
    with closing(cache):
        cache.add({b"name": b"entry"}, {b"name": 60.0})
        assert cache.get([b"name"]) == [b"entry"]
        in_loop = cache.in_loop()
        assert await in_loop.get([b"name"]) == [b"entry"]
        in_loop.abandon()
        await asyncio.sleep(0)  # it closes its connection in a task
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
