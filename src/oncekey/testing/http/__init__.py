"""The parts of the public suite for frameworks; ``oncekey.testing.framework_suite`` puts them together."""

from __future__ import annotations

import pkgutil

import pytest

# Registered before the first of them is imported, so that a failing assert in them shows its values.
for _part in pkgutil.iter_modules(__path__):
    pytest.register_assert_rewrite(f"{__name__}.{_part.name}")
