"""DynamoDB: one item per key, one conditional write per move. See ``store.py``."""

from oncekey.stores.dynamodb.settings import settings_of
from oncekey.stores.dynamodb.store import DynamoStore

__all__ = ["DynamoStore", "from_url"]


def from_url(url: str) -> DynamoStore:
    return DynamoStore(settings_of(url))
