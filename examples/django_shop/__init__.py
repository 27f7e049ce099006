"""A shop in Django: orders and their stored responses in one commit. Run it from the root of the repository:

    pip install 'oncekey[django]' uvicorn
    export DJANGO_SETTINGS_MODULE=examples.django_shop.settings
    python -m django migrate
    uvicorn examples.django_shop.asgi:application     # or: gunicorn examples.django_shop.wsgi

    curl -X POST localhost:8000/orders -H 'Authorization: Bearer ann-secret' -H 'Idempotency-Key: order-1' \
         -H 'Content-Type: application/json' -d '{"item": "book"}'

Send it twice: one order, and one confirmation in the log. ``python -m django oncekey keys list`` shows the key.
"""
