"""Keyrings for tests, and what a planted secret looks like."""

from __future__ import annotations

from oncekey.encryption import Keyring

ONE, TWO, THREE = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))


def ring(*numbers: int) -> Keyring:
    """A ring with these keys, the first one current."""
    masters = {1: ONE, 2: TWO, 3: THREE}
    return Keyring({number: masters[number] for number in numbers or (1,)})
