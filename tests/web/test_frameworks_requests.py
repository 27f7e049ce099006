"""The public suite over every framework, requests: tenants, keys, and the operation that a handler sees."""

from __future__ import annotations

import pytest

from oncekey.testing.http.protected import Framework
from oncekey.testing.http.requests import RequestSuite
from tests.web.frameworks import framework_of


class TestRequests(RequestSuite):
    @pytest.fixture
    def under_test(self, name: str) -> Framework:
        return framework_of(name)
