"""A newcomer's existing Flask app: one route is protected, the others come later."""

from flask import Flask, g, jsonify, request
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from oncekey import SINGLE_TENANT, OnceKey, current
from oncekey.outbox import Worker
from oncekey.web.flask import protect

app = Flask(__name__)
engine = create_engine("sqlite:///orders.db")
once = OnceKey("sqlite:///orders.db", scope=SINGLE_TENANT)
protect(app, once, only="declared")
worker = Worker(once)

with engine.begin() as setup:
    setup.execute(text("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, item TEXT)"))


@app.teardown_request
def close_session(_):
    if "session" in g:
        g.session.close()


@app.post("/orders")
@once.policy(effects="transactional")
def order():
    g.session = Session(engine)
    return insert(g.session)


@app.post("/closing")
@once.policy(effects="transactional")
def closing():
    with Session(engine) as session:  # closed before the response is stored
        return insert(session)


def insert(session):
    op = current().blocking
    op.enlist(session)
    session.execute(text("INSERT INTO orders (item) VALUES (:item)"), request.get_json())
    op.enqueue("send_receipt", {"to": "ann"})
    return jsonify(ordered=True), 201


@app.post("/search")
def search():
    return jsonify(found=[])


@worker.task("send_receipt")
def send_receipt(ctx, payload):
    raise ConnectionError("the mail server refused the connection")
