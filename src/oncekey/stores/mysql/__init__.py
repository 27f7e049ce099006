"""MySQL and MariaDB, also as a Galera cluster."""

from oncekey.stores.mysql.store import MysqlStore

__all__ = ["MysqlStore", "from_url"]


def from_url(url: str) -> MysqlStore:
    return MysqlStore(url)
