"""Django: an app for ``INSTALLED_APPS``, one middleware for WSGI and ASGI, and settings (docs/django.md).

::

    INSTALLED_APPS = [..., "oncekey.web.django"]
    MIDDLEWARE = [..., "oncekey.web.django.OnceKeyMiddleware"]  # after AuthenticationMiddleware
    ONCEKEY = {"STORE": "default", "SCOPE": "shop.api.tenant_of"}

``once`` is the OnceKey of these settings. Declare policies with it, next to the views: ``@once.policy(…)``.
"""

from __future__ import annotations

from oncekey.web.django.conf import once
from oncekey.web.django.middleware import OnceKeyMiddleware

__all__ = ["OnceKeyMiddleware", "once"]
