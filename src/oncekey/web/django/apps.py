"""The app for ``INSTALLED_APPS``."""

from __future__ import annotations

from django.apps import AppConfig, apps

from oncekey.web.django import reports


class OnceKeyConfig(AppConfig):
    name = "oncekey.web.django"
    label = "oncekey"
    verbose_name = "oncekey"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from oncekey.web.django import checks  # noqa: F401 - registers them

        reports.install()
        if apps.is_installed("rest_framework"):
            from oncekey.web import drf

            drf.install()
