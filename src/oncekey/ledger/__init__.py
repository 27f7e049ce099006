"""Compares your ledger with the provider's: entries that are missing, doubled or different. It knows no keys."""

from oncekey.ledger.comparison import Entry, compare

__all__ = ["Entry", "compare"]
