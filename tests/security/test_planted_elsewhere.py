"""Planted secrets of consumers, keyrings and key jars, which the full run does not have."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncekey import SINGLE_TENANT, OnceKey
from oncekey.client import KeyJar
from oncekey.client.calls import Request
from oncekey.client.spelling import KeyForm
from oncekey.consumers import AsyncConsumer
from oncekey.encryption import Keyring
from oncekey.errors import ConfigurationError
from tests.security.planted import MARK, Witness, listening, secret, sentence


@pytest.fixture
def witness() -> Iterator[Witness]:
    with listening() as made:
        yield made


# -- consumers, keyrings and jars --------------------------------------------------------------------------------------


class Inbox(AsyncConsumer[dict[str, Any]]):
    """A broker in memory: what it was told is in ``told``."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.told: list[str] = []

    def queue_of(self, raw: dict[str, Any]) -> str:
        return "payments"

    def id_of(self, raw: dict[str, Any]) -> object:
        return raw["id"]

    def body_of(self, raw: dict[str, Any]) -> bytes:
        return str(raw["body"]).encode()

    def header_of(self, raw: dict[str, Any], name: str) -> str | None:
        return None

    async def ack(self, raw: dict[str, Any]) -> None:
        self.told.append("ack")

    async def retry(self, raw: dict[str, Any], delay: float) -> None:
        self.told.append("retry")

    async def copy(self, raw: dict[str, Any], place: str, headers: dict[str, str]) -> None:
        raise RuntimeError(sentence("broker"))


async def test_consumer_does_not_show_its_messages(witness: Witness) -> None:
    def handle(raw: dict[str, Any]) -> None:
        raise RuntimeError(sentence("consumer"))

    def id_of(raw: dict[str, Any]) -> object:
        if raw["id"] == "":
            raise RuntimeError(sentence("message-id"))
        return raw["id"]

    with OnceKey("memory://", scope=SINGLE_TENANT, on_event=witness.on_event) as once:
        inbox = Inbox(once, handle, dead_letter="dead", message_id=id_of)
        for message_id in (f"{secret('key')}-inbox", ""):
            await inbox.on_message({"id": message_id, "body": secret("message")})
    said = str(witness.said)
    assert [word for word in ("could not be copied", "raised, so the message has no id") if word not in said] == []
    assert (inbox.told, witness.found()) == (["retry", "retry"], [])


MASTER = secret("master-key").encode()[:32].ljust(32, b"x")
WRONG_KEYS = [
    *(MARK, f"1:{MARK}", f"x:{MARK}", f"1:{b64encode(MASTER[:-1]).decode()}", f"999:{b64encode(MASTER).decode()}"),
    f"1:{b64encode(MASTER).decode()},1:{b64encode(MASTER).decode()}",
]


@pytest.mark.parametrize("text", WRONG_KEYS)
def test_keyring_that_cannot_be_read_is_not_quoted(
    witness: Witness, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("ONCEKEY_KEYS", text)
    with pytest.raises(ConfigurationError) as raised:
        Keyring.from_env()
    witness.hear("exception", f"{raised.value} {raised.value!r}")
    assert (witness.found(), witness.found(b64encode(MASTER[:24]).decode())) == ([], [])


def test_keyring_does_not_show_its_keys() -> None:
    shown = f"{Keyring({1: MASTER})!r} {Keyring({1: MASTER})}"
    assert (MARK in shown, b64encode(MASTER[:24]).decode() in shown, str(MASTER[:20]) in shown) == (False,) * 3


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_client_lists_requests_without_their_secrets(witness: Witness, tmp_path: Path, form: tuple[str, ...]) -> None:
    url = f"sqlite:///{tmp_path}/jar.db"
    jar = KeyJar(url)
    address = f"https://ann:{secret('password')}@api.test/payments?token={secret('query')}"
    headers = {"Authorization": f"Bearer {secret('authorization')}"}
    with jar.intent("order-42", key=f"{secret('key')}-client") as intent:
        request = Request("POST", address, tuple(headers.items()), secret("body").encode())
        intent.begin(request, KeyForm("Idempotency-Key", "bare"))
    jar.close()
    assert "api.test/payments" in witness.run("client", "list", "--jar", url, *form)
    assert witness.found() == []
    assert secret("query") in witness.run("client", "list", "--jar", url, "--reveal", *form)
