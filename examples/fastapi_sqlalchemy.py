"""Orders in PostgreSQL: the order, the stored response and the key are one commit.

    export DATABASE_URL=postgresql://localhost/shop
    uvicorn examples.fastapi_sqlalchemy:app

    curl -i localhost:8000/orders -H 'Idempotency-Key: order-1' --json '{"item": "tea", "quantity": 2}'

Kill the server between the two, as often as you like: there is one order, or none and the retry makes it. The session
comes enlisted (``enlisted_session``): no ``commit()`` in the handler. What is returned commits, what is raised rolls
back; an item that is out of stock is a 409, stored for retries, and leaves no order behind.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel, Field
from sqlalchemy import CheckConstraint, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from oncekey import SINGLE_TENANT, OnceKey, Policy
from oncekey.web.fastapi import enlisted_session, protect

URL = os.environ.get("DATABASE_URL", "postgresql://localhost/shop")

engine = create_async_engine(URL.replace("postgresql:", "postgresql+psycopg:"))
Sessions = async_sessionmaker(engine, expire_on_commit=False)


class Base(DeclarativeBase):
    pass


class Stock(Base):
    __tablename__ = "stock"
    item: Mapped[str] = mapped_column(primary_key=True)
    left: Mapped[int]
    __table_args__ = (CheckConstraint('"left" >= 0'),)


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]
    quantity: Mapped[int]


class Wanted(BaseModel):
    item: str
    quantity: Annotated[int, Field(gt=0)]


class Ordered(BaseModel):
    id: int
    left: int


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with Sessions.begin() as session:
        if await session.get(Stock, "tea") is None:
            session.add(Stock(item="tea", left=3))
    yield
    await engine.dispose()


app = FastAPI(title="Orders", lifespan=lifespan)
once = OnceKey(URL, scope=SINGLE_TENANT, migrate=True, policy=Policy(effects="transactional"))
protect(app, once)

OrderSession = Annotated[AsyncSession, Depends(enlisted_session(Sessions))]


@app.post("/orders", status_code=201)
async def order(wanted: Wanted, session: OrderSession) -> Ordered:
    """Order something. Runs once per Idempotency-Key. The order exists if and only if the key is completed."""
    stock = await session.scalar(select(Stock).where(Stock.item == wanted.item).with_for_update())
    if stock is None or stock.left < wanted.quantity:
        raise HTTPException(409, f"there is not enough {wanted.item}")
    stock.left -= wanted.quantity
    made = Order(item=wanted.item, quantity=wanted.quantity)
    session.add(made)
    await session.flush()  # to get its number; oncekey commits
    return Ordered(id=made.id, left=stock.left)
