"""Book a ride in steps that survive ``kill -9``: a row of our own, a charge at a provider, a receipt by the outbox.

    python -m oncekey.demo.provider 127.0.0.1:9100 charges.jsonl      # a payment provider to try it with
    uvicorn examples.rides:app
    oncekey worker examples.rides_worker:worker                       # sends the receipts
    oncekey upkeep examples.rides:once                                # ends rides whose client does not come back

    curl -i localhost:8000/rides -H 'X-User: ada' -H 'Idempotency-Key: ride-1' \\
         --json '{"from": "Cape Canaveral", "to": "the Moon", "cents": 2000}'

Kill the server wherever you like and send the request again: it goes on after the last step that is done. Or do not
send it again: upkeep goes on with it. There is one ride, one charge and one receipt for each key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
from fastapi import Depends, FastAPI, HTTPException, Response
from pydantic import BaseModel, Field
from sqlalchemy import ForeignKey, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from oncekey import NotAuthenticated, OnceKey, Operation, Policy, Request
from oncekey.outbox import Response as FinalResponse
from oncekey.upkeep import Resumption
from oncekey.web.fastapi import CurrentOperation, protect

STORE = os.environ.get("ONCEKEY_STORE", "sqlite:///rides.db")
PROVIDER = os.environ.get("RIDES_PROVIDER", "http://127.0.0.1:9100")


class Base(DeclarativeBase):
    pass


class Ride(Base):
    __tablename__ = "rides"
    id: Mapped[int] = mapped_column(primary_key=True)
    user: Mapped[str]
    origin: Mapped[str]
    target: Mapped[str]
    cents: Mapped[int]
    charge_id: Mapped[str | None]


class AuditLine(Base):
    __tablename__ = "audit_lines"
    id: Mapped[int] = mapped_column(primary_key=True)
    ride_id: Mapped[int] = mapped_column(ForeignKey("rides.id"))
    what: Mapped[str]


# The rides are in the database that keeps the keys, so a step and its stored result are one commit.
engine = create_engine(STORE.replace("postgresql://", "postgresql+psycopg://"))
Base.metadata.create_all(engine)


def session() -> Iterator[Session]:
    with Session(engine) as opened:
        yield opened


def user_of(request: Request) -> str:
    """The tenant of a request. In your app it comes from a token."""
    try:
        return request.headers["x-user"]
    except KeyError:
        raise NotAuthenticated("Send X-User.") from None


class Booking(BaseModel):
    origin: str = Field(alias="from")
    target: str = Field(alias="to")
    cents: int = Field(gt=0)


app = FastAPI(title="Rides")
once = OnceKey(STORE, scope=user_of, policy=Policy(effects="phased", keep_request=True), migrate=True)
protect(app, once)


def take_ride(op: Operation, booking: Booking, session: Session) -> dict[str, Any]:
    """Three steps. oncekey stores each done step with its result, and a later attempt does not repeat it."""
    steps = op.blocking  # the verbs for plain functions; in an async handler it is ``await op.phase(…)``

    def create_ride() -> int:
        ride = Ride(user=op.scope, origin=booking.origin, target=booking.target, cents=booking.cents)
        session.add(ride)
        session.flush()
        session.add(AuditLine(ride_id=ride.id, what="created"))
        session.flush()
        return ride.id

    def charge() -> str:
        # The provider honours our key, so a second call after a crash returns the first charge.
        asked = {"customerId": op.scope, "amountCents": booking.cents, "currency": "USD"}
        key = {"Idempotency-Key": op.downstream_key("charge_created")}
        answer = httpx.post(f"{PROVIDER}/charges", json=asked, headers=key)
        answer.raise_for_status()
        return str(answer.json()["id"])

    def stage_receipt(ride_id: int, charge_id: str) -> None:
        ride = session.get_one(Ride, ride_id)
        ride.charge_id = charge_id
        session.flush()
        # In the transaction of this step: the receipt is sent if, and only if, the ride is charged.
        steps.enqueue("send_receipt", {"to": op.scope, "ride": ride_id, "cents": booking.cents})

    ride_id = steps.phase("ride_created", create_ride, on=session)
    charge_id = steps.effect("charge_created", charge, repeatable=True, provider_id=str)
    steps.phase("receipt_staged", stage_receipt, ride_id, charge_id, on=session)
    return {"id": ride_id, "charge": charge_id}


@app.post("/rides", status_code=201)
def book(
    booking: Booking, op: CurrentOperation, session: Annotated[Session, Depends(session)], response: Response
) -> dict[str, Any]:
    try:
        ride = take_ride(op, booking, session)
    except httpx.HTTPError as error:
        raise HTTPException(502, "The payment provider does not answer: send it again, with the same key.") from error
    response.headers["Location"] = f"/rides/{ride['id']}"
    return ride


@once.resume("POST /rides")
def go_on(op: Resumption) -> FinalResponse:
    """Upkeep takes the same steps with the request that was kept, and the client's retry gets this response."""
    assert op.request is not None  # noqa: S101 - for the type checker: it was kept
    with Session(engine) as opened:
        ride = take_ride(op, Booking.model_validate(op.request.json()), opened)
    return FinalResponse(201, ride, headers={"Location": f"/rides/{ride['id']}"})


@app.get("/rides/{ride_id}")
def get_ride(ride_id: int, session: Annotated[Session, Depends(session)]) -> dict[str, Any]:
    ride = session.get(Ride, ride_id)
    if ride is None:
        raise HTTPException(404)
    return {"id": ride.id, "from": ride.origin, "to": ride.target, "cents": ride.cents, "charge": ride.charge_id}
