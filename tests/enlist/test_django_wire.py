"""A Django view that enlists, whose connection is cut at its COMMIT: the key's row tells what happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.db import connections

from oncekey.core.states import State
from oncekey.testing.proxy import TcpProxy
from tests.enlist.django_site import Site, every_shop
from tests.enlist.django_views import VIEWS
from tests.enlist.shop import Shop

pytestmark = every_shop


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("view", VIEWS)
def test_commit_cut_on_the_wire(make: Callable[..., Site], shop: Shop, view: Any, when: Any) -> None:
    """Hazard 9: the same error whether it happened or not."""
    if shop.kind == "sqlite":
        pytest.skip("SQLite has no wire")
    site = make(view)
    with TcpProxy("127.0.0.1", urlsplit(shop.url).port or 0) as proxy:
        connections.settings[site.alias] |= {"HOST": proxy.host, "PORT": str(proxy.port)}  # the store's is direct
        text = b"\x03COMMIT" if shop.kind == "mysql" else b"COMMIT"  # 3 is a query: Django also says READ COMMITTED
        cut = proxy.cut_on("to_server", text, when=when)
        answer = site.post()
        assert cut.wait(5)
        happened = when == "after"
        assert answer.status_code == (201 if happened else 503)
        assert shop.payments() == happened
        assert shop.state() is (State.COMPLETED if happened else State.FAILED_RETRYABLE)
        assert site.post().status_code == 201
        assert (shop.payments(), shop.state()) == (1, State.COMPLETED)
        site.connection.close()
