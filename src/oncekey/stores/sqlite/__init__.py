"""The embedded default store: one file, nothing to install. See ``store.py``."""

from urllib.parse import unquote

from oncekey.errors import ConfigurationError
from oncekey.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore", "from_url"]


def from_url(url: str) -> SqliteStore:
    """As in SQLAlchemy: three slashes before a relative path, four before an absolute one."""
    path = url.removeprefix("sqlite://").removeprefix("/")
    if "?" in path or "#" in path:
        raise ConfigurationError(
            "the SQLite URL takes no options: use sqlite:///file.db, without '?' and '#' (%3F and %23 in a file's name)"
        )
    if not path:
        raise ConfigurationError("the SQLite URL names no file: use sqlite:///file.db, or memory:// to keep nothing")
    return SqliteStore(unquote(path))
