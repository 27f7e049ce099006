"""Settings of the shop: the last two are what oncekey needs, and the line in each list."""

import os
from pathlib import Path

BASE_DIR = Path(__file__).parent
SECRET_KEY = os.environ.get("SHOP_SECRET_KEY", "only for this example")
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "examples.django_shop.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "oncekey.web.django",
    "examples.django_shop.apps.ShopConfig",
]
MIDDLEWARE = [
    "django.middleware.common.CommonMiddleware",
    "oncekey.web.django.OnceKeyMiddleware",
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("SHOP_DATABASE", BASE_DIR / "shop.sqlite3"),
    }
}
ONCEKEY = {
    "STORE": "default",  # the keys are in the shop's own database
    "SCOPE": "examples.django_shop.views.customer_of",
}
