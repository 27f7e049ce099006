"""Options of a store's URL are checked when the store is made; ``oncekey doctor`` says the same."""

from __future__ import annotations

import json
import logging
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pymysql
import pytest

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.admin.doctor import examine
from oncekey.core.diagnosis import Level
from oncekey.errors import ConfigurationError, StoreUnavailable
from oncekey.stores.memory import MemoryStore
from oncekey.stores.mysql import address
from oncekey.stores.mysql.connection import check_options, explain
from oncekey.stores.redis import connection as redis_connection
from oncekey.stores.redis import urls
from oncekey.stores.redis.protocol import Refusal
from oncekey.stores.registry import cache_client
from oncekey.telemetry.redaction import describe
from tests.cli.key_table import Run, runner

pytestmark = pytest.mark.stores


def made(url: str) -> None:
    OnceKey(url, scope=SINGLE_TENANT).close()


# -- what the app does not start with ----------------------------------------------------------------------------------

SETS = "oncekey sets {} itself: leave it out of the URL"
REFUSED = [
    ("redis://h?socket_timeout=1", SETS.format("socket_timeout")),
    ("redis://h?socket_connect_timeout=1", SETS.format("socket_connect_timeout")),
    ("redis://h?timeout=abc", "timeout= takes a number"),
    ("redis://h?replicas=two", "replicas= takes a number"),
    ("redis://h?ssl_ca_certs=/nope.pem", "TLS begins with rediss"),
    ("redis://h?retry=3", SETS.format("retry")),
    ("rediss://h?ssl_cert_reqs=perhaps", "redis-py cannot use (RedisError): correct one of ssl_cert_reqs"),
    ("rediss://h?ssl_ca_certs=/nope.pem", "ssl_ca_certs=/nope.pem, and there is no such file"),
    ("rediss://h?ssl_certfile=/nope.pem", "ssl_certfile=/nope.pem, and there is no such file"),
    ("rediss://h?ssl_keyfile=/nope.pem", "ssl_keyfile=/nope.pem, and there is no such file"),
    ("rediss://h?ssl_ca_path=/nope", "ssl_ca_path=/nope, and there is no such file"),
    ("mysql://h/d?ssl_ca=/nope.pem", "ssl_ca=/nope.pem, and there is no such file"),
    ("mysql://h/d?ssl_capath=/nope", "ssl_capath=/nope, and there is no such file"),
    ("mysql://h/d?ssl_cert=/nope.pem", "ssl_cert=/nope.pem, and there is no such file"),
    (f"mysql://h/d?ssl_cert={__file__}&ssl_key=/nope.pem", "ssl_key=/nope.pem, and there is no such file"),
    (f"mysql://h/d?ssl_key={__file__}", "ssl_key= without ssl_cert="),
    (f"mysql://h/d?ssl_ca={__file__}", "the TLS files of the MySQL URL cannot be used (SSLError"),
    ("mysql://h/d?ssl_verify_cert=perhaps", "ssl_verify_cert= takes true or false"),
    ("mysql://h/d?sslmode=on", "does not know: sslmode; it takes ssl_ca,"),
    ("mysql://h/d?read_default_file=/etc/my.cnf", "has read_default_file=, and oncekey reads no file of settings"),
    ("mysql://me:п@h/d", "characters that PyMySQL cannot send"),
    ("postgresql://h/d?sslrootcert=/nope.pem", "sslrootcert=/nope.pem, and there is no such file"),
    ("postgresql://h/d?sslcert=/nope.pem", "sslcert=/nope.pem, and there is no such file"),
    ("postgresql://h/d?sslkey=/nope.pem", "sslkey=/nope.pem, and there is no such file"),
]


@pytest.mark.parametrize(("url", "sentence"), REFUSED)
def test_url_with_a_wrong_option_is_refused_when_the_app_is_made(url: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        made(url)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(("url", "sentence"), REFUSED)
def test_doctor_says_the_same_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str, sentence: str
) -> None:
    code, out, _ = runner(url, monkeypatch, capsys)("doctor", "--json")
    (line,) = json.loads(out)["checks"]
    assert (code, line["check"], line["level"]) == (2, "store", "fail")
    assert sentence in line["found"]


def test_file_that_this_process_may_not_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ca.pem"
    file.touch()
    monkeypatch.setattr("os.access", lambda *_: False)  # the tests may run as root, who may read all files
    with pytest.raises(ConfigurationError, match=f"ssl_ca={file}, and this process may not read that file"):
        made(f"mysql://h/d?ssl_ca={file}")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("redis://h?socket_timeout=1", SETS.format("socket_timeout")),
        ("redis://h?decode_responses=true", SETS.format("decode_responses")),
        ("rediss://h?ssl_ca_certs=/nope.pem", "ssl_ca_certs=/nope.pem, and there is no such file"),
        ("redis://h?max_connections=few", "redis-py cannot read the URL (ValueError): correct one of max_connections"),
        ("rediss://h?ssl_cert_reqs=perhaps", "(RedisError): correct one of ssl_cert_reqs"),
        ("redis://me:hunter2:x@h:port/0", "(ValueError): correct one of host, port and login"),
    ],
)
def test_cache_with_a_wrong_option_is_refused(url: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        cache_client(url)
    assert sentence in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_cache_takes_the_size_of_redis_pys_pool() -> None:
    cache_client("redis://h?max_connections=3").close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://h/d?sslrootcert=system&sslmode=verify-full",
        "postgresql://h/d?sslrootcert=/nope.pem&sslmode=disable",
        "mysql://h/d?unix_socket=/nope",
        "mysql://h/d?ssl_disabled=true",
    ],
)
def test_url_that_names_no_file_or_needs_none_is_taken(url: str) -> None:
    """A socket comes and goes with its server."""
    made(url)


# -- what has no effect ------------------------------------------------------------------------------------------------

SESSION = "autocommit binary_prefix client_flag collation connect_timeout init_command local_infile max_allowed_packet "
SESSION += "program_name read_timeout sql_mode write_timeout"


def test_mysql_options_of_the_apps_own_sessions_are_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    given = "&".join(f"{name}=1" for name in SESSION.split())
    made(f"mysql://h/d?charset=utf8mb4&use_unicode=1&{given}")
    (line,) = caplog.records
    assert (line.levelno, line.getMessage().partition("oncekey's: ")[2]) == (
        logging.WARNING,
        SESSION.replace(" ", ", "),
    )


def test_redis_options_of_clients_are_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    made("redis://h?max_connections=10&decode_responses=true&protocol=3")
    (line,) = caplog.records
    assert line.getMessage().endswith("no effect on oncekey's connections: decode_responses, max_connections, protocol")


def test_url_with_charset_alone_gets_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    made("mysql://h/d?charset=utf8mb4")
    assert caplog.records == []


# -- TLS of MySQL ------------------------------------------------------------------------------------------------------

BOTH = {"check_hostname": True, "verify_mode": True}
CERTIFICATE = {"check_hostname": False, "verify_mode": True}
NEITHER = {"check_hostname": False, "verify_mode": False}


@pytest.mark.parametrize(
    ("options", "tls"),
    [
        ("", None),
        ("ssl_ca=a", {"ca": "a", **BOTH}),  # as SQLAlchemy does with that URL
        ("ssl_capath=a", {"capath": "a", **BOTH}),
        ("ssl_ca=a&ssl_check_hostname=false", {"ca": "a", **CERTIFICATE}),
        ("ssl_ca=a&ssl_check_hostname=true", {"ca": "a", **BOTH}),
        ("ssl_ca=a&ssl_verify_identity=no", {"ca": "a", **CERTIFICATE}),
        ("ssl_ca=a&ssl_verify_cert=true", {"ca": "a", **CERTIFICATE}),
        ("ssl_ca=a&ssl_verify_cert=false", {"ca": "a", **NEITHER}),
        ("ssl_verify_identity=true", BOTH),
        ("ssl_verify_cert=1", CERTIFICATE),
        ("ssl_verify_cert=0", None),
        ("ssl_cert=c&ssl_key=k", {"cert": "c", "key": "k", "password": "", **NEITHER}),
        ("ssl_cert=c&ssl_key=k&ssl_key_password=p", {"cert": "c", "key": "k", "password": "p", **NEITHER}),
        ("ssl_cipher=AES", {"cipher": "AES", **NEITHER}),
    ],
)
def test_tls_options_of_mysql_reach_the_driver(options: str, tls: Mapping[str, Any] | None) -> None:
    assert address.parse(f"mysql://h/d?{options}").driver_options().get("ssl") == tls


def test_tls_that_is_disabled_is_not_asked_for() -> None:
    found = address.parse("mysql://h/d?ssl_disabled=true&ssl_ca=a&unix_socket=/s")
    assert found.driver_options() == {"unix_socket": "/s", "ssl_disabled": True}


def test_host_is_verified_without_a_file_of_the_authority(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyMySQL alone would not check the host then."""
    contexts: dict[Any, ssl.SSLContext] = {}
    monkeypatch.setattr("oncekey.stores.mysql.connection._tls_contexts", contexts)
    check_options(address.parse("mysql://h/d?ssl_verify_identity=true"))
    (context,) = contexts.values()
    assert (context.check_hostname, context.verify_mode) == (True, ssl.CERT_REQUIRED)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (ssl.SSLCertVerificationError(), "not trusted, or is for another host: ssl_ca="),
        (ssl.SSLError(), "correct the ssl_… options"),
        (ConnectionRefusedError(), "start it, or correct the address"),
    ],
)
def test_connection_that_failed_in_tls_says_so(cause: Exception, words: str) -> None:
    error = pymysql.OperationalError(2003, "Can't connect")
    error.original_exception = cause  # type: ignore[attr-defined]
    assert words in str(explain(error, "MySQL"))


def test_socket_is_named_in_place_of_host_and_port() -> None:
    where = address.parse("mysql://u@h:3307/d?unix_socket=/nope").where
    assert where == "MySQL database d at the socket /nope"


# -- the doctor, and Redis's sentences ---------------------------------------------------------------------------------


def test_exception_that_a_store_does_not_explain_is_a_line_of_the_doctor() -> None:
    class Odd(MemoryStore):
        def diagnose(self) -> Any:
            raise TypeError("got multiple values, password=hunter2")

    (line,) = examine(Odd())
    assert (line.check, line.level) == ("store", Level.FAIL)
    assert line.found == "its driver raised TypeError: got multiple values, …"


@pytest.mark.parametrize("code", redis_connection._REFUSED)
def test_sentence_for_a_refusal_is_whole_in_the_log(code: str) -> None:
    error = redis_connection.explain(Refusal(f"{code} so"), "Redis at h:6379")
    assert describe(error) == f"StoreUnavailable: {error}"


@pytest.mark.parametrize(
    "words",
    [
        "ERR AUTH <password> called without any password configured for the default user. Are you sure?",
        "ERR Client sent AUTH, but no password is set",
    ],
)
def test_password_for_a_server_without_one_is_named(words: str) -> None:
    error = redis_connection.explain(Refusal(words), "Redis at h:6379")
    assert isinstance(error, StoreUnavailable)
    assert "the URL has a password, and this server has none" in str(error)


def test_log_in_with_a_password_to_a_real_server_without_one(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: Run = runner(redis_url.replace("://", "://:hunter2@"), monkeypatch, capsys)
    code, out, _ = run("doctor")
    assert (code, "this server has none: take it out of the URL" in " ".join(out.split())) == (2, True)


def test_option_that_fails_in_the_handshake_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: object) -> None:
        raise ValueError("check_hostname requires server_hostname")

    options = urls.read("rediss://h?ssl_ciphers=x").options
    monkeypatch.setattr(options["connection_class"], "connect", fails)
    with pytest.raises(redis_connection.Lost, match="correct the options of the URL"):
        redis_connection.connect(("127.0.0.1", 1), options, time.monotonic() + 1)
