"""The public HTTP suite with encryption on: clients of an app notice nothing."""

from __future__ import annotations

from functools import partial

import pytest

from oncekey import OnceKey
from oncekey.testing.framework_suite import FrameworkSuite
from oncekey.testing.http import stack
from tests.encryption.rings import ring
from tests.web.frameworks import framework_of


class Encrypted(FrameworkSuite):
    @pytest.fixture(autouse=True)
    def _keyring(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stack, "OnceKey", partial(OnceKey, encryption=ring(2, 1)))


class TestStarlette(Encrypted):
    framework = framework_of("starlette-async")


@pytest.mark.frameworks
class TestFlask(Encrypted):
    framework = framework_of("flask")


@pytest.mark.frameworks
class TestFastapi(Encrypted):
    framework = framework_of("fastapi-sync")


@pytest.mark.frameworks
class TestDjango(Encrypted):
    framework = framework_of("django")
