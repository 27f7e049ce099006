"""What handlers declare, the list of routes, and late endpoints: the public suite over every framework."""

from __future__ import annotations

import pytest

from oncekey.testing.http.declarations import DeclarationSuite
from oncekey.testing.http.protected import Framework
from tests.web.frameworks import framework_of


class TestDeclarations(DeclarationSuite):
    @pytest.fixture
    def under_test(self, name: str) -> Framework:
        return framework_of(name)
