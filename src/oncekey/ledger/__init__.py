"""Your ledger against the provider's: what is missing, doubled or different. It knows nothing of keys."""

from oncekey.ledger.comparison import Entry, compare

__all__ = ["Entry", "compare"]
