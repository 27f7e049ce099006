"""The parts of the public suite; ``oncekey.testing.store_suite`` puts them together."""

from __future__ import annotations

import pytest

# Registered before the first of them is imported, so that a failing assert in them shows its values.
_PARTS = "base doubts moves rows steps lookups faults jobs_base jobs job_moves job_upkeep turns"
for _part in _PARTS.split():
    pytest.register_assert_rewrite(f"{__name__}.{_part}")
