"""A deploy declares a route's effects anew between two attempts at one key: never a second charge."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

import pytest

from oncekey import Policy
from oncekey.core.states import Effects, State
from oncekey.engine.operation import Operation
from oncekey.stores.registry import open_store
from oncekey.upkeep.sweeper import Sweeper
from tests.engine.phased_api import PhasedApi, Serve

EffectsName = Literal["external", "transactional", "phased", "repeatable"]
EFFECTS: tuple[EffectsName, ...] = ("external", "transactional", "phased", "repeatable")


class Bank:
    """What happened outside: charges, of which those under one key are one."""

    def __init__(self) -> None:
        self.charges: list[str] = []
        self.paused = asyncio.Event()
        """The first attempt stands still, after what it has done outside."""
        self.go_on = asyncio.Event()

    def charge(self, key: str | None = None) -> str:
        if key is None or key not in self.charges:
            self.charges.append(key or f"charge {len(self.charges)}")
        return "charged"


def handler(bank: Bank, effects: EffectsName, *, ends: Literal["well", "raises", "pauses"]) -> Serve:
    """A handler that keeps to its declaration, and charges once."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        if effects == "external":
            bank.charge()
        elif effects == "phased":
            await op.effect("charge", bank.charge, repeatable=False)
        elif effects == "repeatable":
            bank.charge(op.downstream_key("charge"))
        if ends == "pauses":  # transactional: before it enlists; else its open transaction keeps the key
            bank.paused.set()
            await bank.go_on.wait()
        if effects == "transactional":
            await op.enlist(connection)
            await phased.pay(connection)
        if ends == "raises":
            raise RuntimeError("after the charge")

    return serve


def runs_again(before: EffectsName, now: EffectsName) -> bool:
    return before == now != "external" or before == "transactional"


@pytest.mark.parametrize("now", EFFECTS)
@pytest.mark.parametrize("before", EFFECTS)
async def test_deploy_with_other_effects_charges_no_second_time(
    phased: PhasedApi, before: EffectsName, now: EffectsName
) -> None:
    """The first attempt charged and failed. What it did is rolled back, remembered or repeatable under the new
    declaration too: the retry completes. Otherwise the key is unknown."""
    bank = Bank()
    first = await phased.api(handler(bank, before, ends="raises"), Policy(effects=before)).post()
    deployed = phased.api(handler(bank, now, ends="well"), Policy(effects=now))
    retries = [(await deployed.post()).status_code for _ in range(3)]

    assert first.status_code == 500
    assert len(bank.charges) + phased.shop.payments() == 1
    if runs_again(before, now):
        assert (retries, phased.state) == ([201, 201, 201], State.COMPLETED)
    else:
        assert (retries, phased.state) == ([409, 409, 409], State.UNKNOWN)
        assert phased.record.reconcile_at is not None


@pytest.mark.parametrize("swept", [False, True], ids=["retried", "swept"])
@pytest.mark.parametrize("now", EFFECTS)
@pytest.mark.parametrize("before", EFFECTS)
async def test_deploy_while_the_first_attempt_is_paused_charges_no_second_time(
    phased: PhasedApi, before: EffectsName, now: EffectsName, swept: bool
) -> None:
    """The lease ran out, and a process of the new version gets the retry, or its sweeper comes first. The paused owner
    wakes up at the end."""
    bank = Bank()
    old = phased.api(handler(bank, before, ends="pauses"), Policy(effects=before))
    paused = asyncio.create_task(old.post())
    await bank.paused.wait()
    phased.let_the_lease_end()
    if swept:
        store = open_store(phased.shop.url)
        await asyncio.to_thread(Sweeper(store).run)
        store.close()
    deployed = phased.api(handler(bank, now, ends="well"), Policy(effects=now))
    retries = [(await deployed.post()).status_code for _ in range(2)]
    state = phased.state
    bank.go_on.set()
    await paused

    assert len(bank.charges) + phased.shop.payments() == 1
    # A phased attempt that was paused after its step is resumed; all others are as after a failure.
    if runs_again(before, now):
        assert (retries, state) == ([201, 201], State.COMPLETED)
    else:
        assert (retries, state) == ([409, 409], State.UNKNOWN)


async def test_effect_that_was_only_intended_makes_key_unknown_under_other_effects(
    phased: PhasedApi, caplog: pytest.LogCaptureFixture
) -> None:
    """It raised, so it may have happened, and only its intent is in the row. The log says what to do."""

    async def serve(phased: PhasedApi, op: Operation, connection: Any) -> None:
        await op.effect("charge", lambda: phased.fail("charge", ConnectionError("cut")), repeatable=True)

    assert (await phased.post(serve)).status_code == 500
    assert (phased.state, phased.record.effects) == (State.FAILED_RETRYABLE, Effects.PHASED)

    async def charges(phased: PhasedApi, op: Operation, connection: Any) -> None:
        phased.call("charge")

    with caplog.at_level(logging.WARNING, "oncekey"):
        assert (await phased.post(charges, policy=Policy(effects="external"))).status_code == 409
    assert (phased.calls, phased.state) == ({"charge": 1}, State.UNKNOWN)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Doubted")]
    assert "effects='phased'" in line
    assert "effects='external' now" in line
    assert "oncekey keys resolve" in line
    assert "k-1" not in line, "keys are masked in logs"


async def test_key_is_resumed_when_the_declaration_is_rolled_back_before_the_retry(phased: PhasedApi) -> None:
    """No request came while the other declaration was deployed: nothing was lost."""
    bank = Bank()
    await phased.post(handler(bank, "phased", ends="raises"))
    assert (await phased.post(handler(bank, "phased", ends="well"))).status_code == 201
    assert len(bank.charges) == 1
