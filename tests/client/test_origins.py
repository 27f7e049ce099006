"""Where a client sends its requests and its credentials: to its own server, and past no key."""

from __future__ import annotations

import aiohttp
import httpx
import pytest

from oncekey.client import AsyncClient, Budget, Client, Ended, KeyJar
from oncekey.client.aiohttp import IdempotentSession
from oncekey.errors import ConfigurationError
from tests.client.jars import OK, client_of
from tests.client.server import Server, serving


def test_resume_sends_credentials_to_its_own_server_only(server: Server, jar: KeyJar) -> None:
    with serving(Server(OK)) as other:
        jar.prepare("theirs", "POST", f"{other.url}/pay")
        jar.prepare("ours", "POST", f"{server.url}/pay")
        with client_of(server, jar, headers={"Authorization": "Bearer ours"}) as client:
            ended = {each.name: each.ended for each in client.resume()}
        assert ended == {"theirs": Ended.OTHER_SERVER, "ours": Ended.ANSWERED}
        assert other.asked == []
    assert server.asked[0].headers["authorization"] == "Bearer ours"


def test_url_of_another_origin_is_refused_and_gets_no_credentials(server: Server, jar: KeyJar) -> None:
    secrets = {"Authorization": "Bearer ours", "X-API-Key": "ours"}
    with serving(Server(OK)) as other, client_of(server, jar, headers=secrets, cookies={"sid": "ours"}) as client:
        with client.intent("order-1") as intent, pytest.raises(ConfigurationError, match="make another Client"):
            intent.post(f"{other.url}/pay", json={})
        for method in ("POST", "GET"):
            with pytest.raises(ConfigurationError, match="make another Client"):
                client.request(method, f"{other.url}/pay")
        assert other.asked == []
    assert jar.open_intents() == []


async def test_url_of_another_origin_is_refused_by_the_async_client_and_by_aiohttp(server: Server, jar: KeyJar) -> None:
    with serving(Server(OK)) as other:
        inner = httpx.AsyncHTTPTransport(verify=False)
        async with AsyncClient(server.url, jar=jar, transport=inner) as client, client.intent("order-1") as intent:
            with pytest.raises(ConfigurationError, match="make another Client"):
                await intent.post(f"{other.url}/pay", json={})
            assert (await intent.post(f"{server.url}/pay", json={})).status_code == 201
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer ours"}) as session:
            with pytest.raises(ConfigurationError, match="make another one"):
                await IdempotentSession(session, server.url).post(f"{other.url}/pay", json={})
            assert (await IdempotentSession(session).post(f"{server.url}/pay", json={})).status == 201
        assert other.asked == []


def test_url_in_a_query_and_a_path_with_two_slashes_stay_at_the_own_server(server: Server, jar: KeyJar) -> None:
    with client_of(server, jar) as client:
        client.post("/pay?back=https://shop.example.com/done")
        client.post("//shop.example.com/pay")
    assert [asked.path for asked in server.asked] == [
        "/pay?back=https://shop.example.com/done",
        "/pay",
    ]


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
