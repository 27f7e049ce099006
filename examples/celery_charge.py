"""A Celery worker that charges each order once, also if it is killed with ``kill -9`` in the middle.

    python -m oncekey.demo.provider 127.0.0.1:9100 charges.jsonl     # a payment provider to try it with
    celery -A examples.celery_charge worker --concurrency 2          # BROKER_URL names a Redis or RabbitMQ
    oncekey upkeep examples.celery_charge:once                       # deletes keys that have expired
    python -m examples.celery_charge order-42 500                    # sends the task twice

Kill the worker, or one of its processes, wherever you like: Celery delivers the task again, and charges.jsonl has one
charge for each order.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

from celery import Celery
from celery.signals import worker_process_shutdown

from oncekey import SINGLE_TENANT, InProgress, OnceKey, current
from oncekey.demo.provider import Provider

app = Celery("shop", broker=os.environ.get("BROKER_URL", "redis://127.0.0.1:6379/0"))
once = OnceKey(os.environ.get("ONCEKEY_STORE", "sqlite:///shop.db"), scope=SINGLE_TENANT)
provider = Provider(os.environ.get("PROVIDER_URL", "http://127.0.0.1:9100"), honours=True)
worker_process_shutdown.connect(lambda **_: once.close(), weak=False)


# Celery's decorator above, oncekey's below: Celery must call the protected function.
# acks_late and reject_on_worker_lost: a task whose process was killed is delivered again.
# autoretry_for=InProgress: until the lease of the killed task is over, a retry raises InProgress.
@app.task(
    acks_late=True,
    reject_on_worker_lost=True,
    autoretry_for=(InProgress, OSError),
    retry_backoff=True,
    retry_backoff_max=10,
    max_retries=None,
)
@once.function(
    "charge",
    key="order_id",
    effects="repeatable",  # the provider honours our key, so a second call to it is harmless
    lease=timedelta(seconds=float(os.environ.get("LEASE_SECONDS", "60"))),
    ttl=timedelta(days=7),  # longer than the longest retry of Celery
)
def charge(order_id: str, cents: int) -> dict[str, Any]:
    made = provider.charge(current().downstream_key("charge"), order_id, cents, "EUR")
    return {"charge": made["id"], "cents": cents}


if __name__ == "__main__":
    for _ in range(2):
        charge.delay(sys.argv[1], int(sys.argv[2]))
