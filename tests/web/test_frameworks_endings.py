"""The public suite over every framework, endings: what becomes of a key, and what a retry gets."""

from __future__ import annotations

import pytest

from oncekey.testing.http.endings import EndingSuite
from oncekey.testing.http.protected import Framework
from tests.web.frameworks import framework_of


class TestEndings(EndingSuite):
    @pytest.fixture
    def under_test(self, name: str) -> Framework:
        return framework_of(name)
