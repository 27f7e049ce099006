"""Entries of Django's admin, without tables of Django's own: the admin shows what the store has (``admin.py``)."""

from __future__ import annotations

from django.db import models


class Key(models.Model):
    """An idempotency key. Django gives users the permission to view it."""

    id: models.CharField[str, str] = models.CharField(primary_key=True, max_length=600)

    class Meta:
        managed = False
        default_permissions = ("view",)
        verbose_name = "key"


class DeadLetter(models.Model):
    """A job after its last attempt, or a key that upkeep leaves alone."""

    id: models.CharField[str, str] = models.CharField(primary_key=True, max_length=600)

    class Meta:
        managed = False
        default_permissions = ("view",)
        verbose_name = "dead letter"
