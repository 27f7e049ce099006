"""Which options of ``Client`` are the inner transport's.

httpx gives ``verify``, ``proxy`` and the like to the transport that it makes itself. If a client has a transport of its
own, httpx ignores them, and ``proxy`` or ``mounts`` lead requests past it, which then have no key.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from oncekey.errors import ConfigurationError

_OF_THE_TRANSPORT: Final[tuple[str, ...]] = ("verify", "cert", "http1", "http2", "limits", "proxy", "trust_env")


def network_options(base_url: str, options: dict[str, Any], *, given: bool) -> dict[str, Any]:
    """Take the options of the transport out of ``options``. ``given``: the caller brings a transport."""
    if "mounts" in options:
        raise ConfigurationError("mounts= would send requests past the client, without a key: leave it out")
    network: dict[str, Any] = {name: options.pop(name) for name in _OF_THE_TRANSPORT if name in options}
    if given:
        if network:
            names = ", ".join(f"{name}=" for name in network)
            raise ConfigurationError(f"give {names} to the transport that you pass, since the client cannot")
        return {}
    trusts = network.get("trust_env", True)
    options["trust_env"] = trusts  # the client reads .netrc by it
    if "proxy" not in network and trusts and (proxy := _environment_proxy(base_url)) is not None:
        network["proxy"] = proxy
    return network


def _environment_proxy(base_url: str) -> str | None:
    """What HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY say about this address."""
    parts = urlsplit(base_url)
    proxies = getproxies()
    found = proxies.get(parts.scheme) or proxies.get("all")
    if not found or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return found if "://" in found else f"http://{found}"
