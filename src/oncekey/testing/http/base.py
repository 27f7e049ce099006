"""What the parts of the suite stand on: the framework under test, and its apps, closed at the end of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oncekey.testing.http.protected import Framework
from oncekey.testing.http.stack import Stack

MakeStack = Callable[..., Stack]
"""Makes a protected app; its arguments are the options of :class:`Stack`."""


class SuiteBase:
    framework: Framework
    """The framework under test."""

    @pytest.fixture
    def under_test(self) -> Framework:
        """Override it to run the suite over several frameworks."""
        return self.framework

    @pytest.fixture
    def stack_type(self) -> Callable[..., Stack]:
        """Where the app runs: in this process, unless a subclass overrides it."""
        return Stack

    @pytest.fixture
    def make_stack(self, under_test: Framework, stack_type: Callable[..., Stack]) -> Iterator[MakeStack]:
        made: list[Stack] = []

        def make(**options: Any) -> Stack:
            made.append(stack_type(under_test, **options))
            return made[-1]

        yield make
        for stack in made:
            stack.close()

    @pytest.fixture
    def stack(self, make_stack: MakeStack) -> Stack:
        """The app as it is by default."""
        return make_stack()
