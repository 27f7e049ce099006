"""What the parts of the suite stand on: the framework under test, and its apps, closed at the end of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oncekey.testing.http.stack import Framework, Stack

MakeStack = Callable[..., Stack]
"""Makes a protected app; its arguments are those of :class:`Stack`, without the framework."""


class SuiteBase:
    framework: Framework
    """The framework under test."""

    @pytest.fixture
    def under_test(self) -> Framework:
        """Override it to run the suite over several frameworks."""
        return self.framework

    @pytest.fixture
    def make_stack(self, under_test: Framework) -> Iterator[MakeStack]:
        made: list[Stack] = []

        def make(**options: Any) -> Stack:
            made.append(Stack(under_test, **options))
            return made[-1]

        yield make
        for stack in made:
            stack.close()

    @pytest.fixture
    def stack(self, make_stack: MakeStack) -> Stack:
        """The app as it is by default."""
        return make_stack()
