"""The worker of examples/celery_charge.py, which forgets a killed worker soon, and one task more.

``pay`` writes a row of its own, without a provider that honours keys: one commit for the row and the key.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import sqlalchemy as sa

from examples.celery_charge import app, once
from oncekey import InProgress, current

app.conf.update(
    broker_transport_options={
        "visibility_timeout": 2,
        "unacked_restore_limit": None,
        "unacked_restore_interval": 1,  # look for the messages of a dead worker every second, and not every 100
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 2,  # a worker may be killed while it looks
    },
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
)
# Redis keeps what a killed worker had until the visibility timeout, and looks for it this often.
app.conf.broker_transport_options["polling_interval"] = 0.2

URL = os.environ["ONCEKEY_STORE"].replace("postgresql://", "postgresql+psycopg://")
STRUCK = os.environ["STRUCK"].split(",")
"""The orders whose process the test kills once."""
KILLED = Path(os.environ["KILLED"])
"""The folder with a file for each of them that was struck."""
engine = sa.create_engine(URL, poolclass=sa.NullPool)


@app.task(
    acks_late=True,
    reject_on_worker_lost=True,
    autoretry_for=(InProgress,),
    retry_kwargs={"countdown": 0.3},
    max_retries=None,
)
def pay(order_id: str, cents: int) -> None:
    with engine.connect() as connection:
        pay_once(connection, order_id, cents)


@once.function("pay", key="order_id", effects="transactional", ignore=["connection"], lease=timedelta(seconds=2))
def pay_once(connection: sa.Connection, order_id: str, cents: int) -> int:
    op = current()
    op.enlist(connection)
    connection.execute(sa.text("INSERT INTO payments VALUES (:key, :cents)"), {"key": order_id, "cents": cents})
    if order_id in STRUCK and not (KILLED / order_id).exists():
        os.write(int(os.environ["TOLD"]), f"{os.getpid()} {order_id}\n".encode())
        while not (KILLED / order_id).exists():  # the test kills this process here, in the middle of its transaction
            time.sleep(0.01)
    return op.attempt
