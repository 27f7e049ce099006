"""What ``Client`` and ``AsyncClient`` are made of: the server that they send to, the jar and the rules."""

from __future__ import annotations

from datetime import timedelta

import httpx

from oncekey.client.attempts import Rules
from oncekey.client.budget import Budget
from oncekey.client.jar import KeyJar
from oncekey.client.jar.jar import KNOWN
from oncekey.client.reading import origin
from oncekey.client.resumption import Resumption
from oncekey.client.spelling import Spelling
from oncekey.errors import ConfigurationError


class ClientBase:
    """The options are those of ``Client``."""

    def __init__(
        self,
        base_url: str,
        *,
        jar: str | KeyJar | None = None,
        account: str = "",
        key_lifetime: timedelta | None = None,
        budget: Budget | None = None,
        spelling: Spelling = "bare",
        header: str = "Idempotency-Key",
        rules: Rules | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"Client('{base_url}'): it takes the API's address, such as https://api.example.com"
            )
        self.base_url = base_url
        if isinstance(jar, KeyJar) and account:
            raise ConfigurationError("give account= to the KeyJar, not to the client")
        if not isinstance(jar, str) and key_lifetime is not None:
            raise ConfigurationError("key_lifetime= is about intents: give it to the KeyJar, or with jar=URL")
        self._opened_jar = isinstance(jar, str)
        self._jar = KeyJar(jar, account=account, key_lifetime=key_lifetime) if isinstance(jar, str) else jar
        self.rules = rules or Rules(budget=budget, spelling=spelling, header=header)

    @property
    def jar(self) -> KeyJar:
        if self._jar is None:
            raise ConfigurationError(f"an intent needs a key jar: Client(…, jar=URL), with one of {KNOWN}")
        return self._jar

    def check_origin(self, url: str | httpx.URL) -> None:
        """ConfigurationError if this is a whole URL of another server: the client's credentials would go there."""
        given = httpx.URL(url)
        if given.is_absolute_url and origin(str(given)) != origin(self.base_url):
            scheme, host, port = origin(str(given))
            raise ConfigurationError(
                f"this client is for {self.base_url}, and its headers, cookies and credentials must not go to "
                f"{scheme}://{host}:{port}. Nothing was sent: make another Client for that server"
            )

    def _resumption(self, name: str | None, again: bool) -> Resumption:
        longest = self.rules.budget.longest_wait
        return Resumption(self.jar, self.base_url, name, again=again, longest_wait=longest)

    def _close_jar(self) -> None:
        if self._opened_jar:
            self.jar.close()
