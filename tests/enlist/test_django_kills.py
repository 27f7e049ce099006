"""kill -9 at every named point of a Django view that enlists on MySQL or MariaDB (``test_kills.py`` has the others)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.enlist.django_site import mysql_shops
from tests.enlist.killed_apps import POINTS
from tests.enlist.test_kills import test_process_killed_at_a_point_pays_once as pays_once

pytestmark = mysql_shops


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("toy", ["django", "django-asgi"])
async def test_process_of_django_killed_at_a_point_pays_once(shop: Any, toy: str, point: str) -> None:
    await pays_once(shop, f"{toy}:{shop.driver}", point)
