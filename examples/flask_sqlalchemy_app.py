"""Flask and Flask-SQLAlchemy: a transfer between accounts, the stored response and the key are one commit.

    flask --app examples.flask_sqlalchemy_app run

    curl -i localhost:5000/transfers -H 'Idempotency-Key: t-1' --json '{"from": "ann", "to": "bob", "cents": 500}'

Send it twice: the money moves once. It needs nothing but a file, and works the same on PostgreSQL (DATABASE_URL).
"""

from __future__ import annotations

import os
from typing import Any

from flask import Flask, abort, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from oncekey import SINGLE_TENANT, OnceKey, Policy, current
from oncekey.web.flask import protect

URL = os.environ.get("DATABASE_URL", f"sqlite:///{os.path.abspath('bank.db')}")  # noqa: PTH100


class Base(DeclarativeBase):
    pass


app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = URL.replace("postgresql:", "postgresql+psycopg:")
db = SQLAlchemy(app, model_class=Base)
once = OnceKey(URL, scope=SINGLE_TENANT, migrate=True, policy=Policy(effects="transactional"))
protect(app, once)


class Account(db.Model):  # type: ignore[name-defined, misc]
    name: Mapped[str] = mapped_column(primary_key=True)
    cents: Mapped[int]


with app.app_context():
    db.create_all()
    for name in ("ann", "bob"):
        if db.session.get(Account, name) is None:
            db.session.add(Account(name=name, cents=1000))
    db.session.commit()


@app.post("/transfers")
def transfer() -> Any:
    current().blocking.enlist(db.session)  # before the first statement; do not commit yourself
    wanted = request.get_json()
    giver, taker = (
        db.session.get(Account, wanted[side], with_for_update=True) or abort(404) for side in ("from", "to")
    )
    giver.cents -= wanted["cents"]
    taker.cents += wanted["cents"]
    if giver.cents < 0:
        abort(409, "not enough money")  # rolled back, and the 409 is stored
    return {giver.name: giver.cents, taker.name: taker.cents}, 201
