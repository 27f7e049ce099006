"""A migration operation, so that ``manage.py migrate`` also creates and upgrades oncekey's tables.

::

    from oncekey.web.django.operations import MigrateOnceKey

    class Migration(migrations.Migration):
        atomic = False
        operations = [MigrateOnceKey()]

oncekey has migrations of its own, which are safe to run twice and from several processes at once. The operation runs
those that are missing. When a new version of oncekey brings one, ``manage.py oncekey migrate`` runs it, or a further
migration of yours with the same operation.
"""

from __future__ import annotations

from typing import Any

from django.db.migrations.operations.base import Operation

from oncekey.stores.registry import open_store
from oncekey.web.django import conf


class MigrateOnceKey(Operation):
    """Runs oncekey's own migrations on the database with the alias ``STORE``, and on no other."""

    reversible = True
    """Going back leaves the tables: keys are not thrown away."""
    reduces_to_sql = False
    atomic = False

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Django's models do not change."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        alias = conf.database_alias()
        connection = schema_editor.connection
        if alias is not None and connection.alias != alias:
            return
        if alias is not None and connection.vendor == "sqlite" and connection.is_in_memory_db():
            return  # Django's test database: oncekey cannot open it, and says so to the first request that needs a key
        store = open_store(conf.store_url(conf.read().get("STORE")))
        try:
            store.migrate()
        finally:
            store.disconnect()
            store.close()

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Leave the tables."""

    def describe(self) -> str:
        return "Create or upgrade oncekey's tables"
