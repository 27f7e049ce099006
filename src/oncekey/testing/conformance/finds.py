"""The part of the store suite about finding keys by what their steps sent, for webhooks."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from oncekey.core.record import Record
from oncekey.core.states import Actor, Event, State
from oncekey.core.steps import Step, StepKind, StepState
from oncekey.core.swaps import swap
from oncekey.stores.api import FOUND, Steps, Store
from oncekey.testing.conformance.base import SuiteBase, one

_STEP = Step("charge", StepKind.EFFECT, StepState.INTENDED, repeatable=True)


class FindSuite(SuiteBase):
    needs: ClassVar[type] = Steps

    def _sent(self, store: Store, key: str, scope: str = "tenant-1", **known: str) -> Record:
        """A row in progress with a step that called a provider."""
        record = self.drive(store, State.IN_PROGRESS, key, scope=scope)
        change = swap(record, Event.ADVANCE, Actor.OWNER, recovery_point="started", step=replace(_STEP, **known))  # type: ignore[arg-type]
        return one(store.swap([change])[0])

    def test_a_webhook_finds_its_key(self, store: Store) -> None:
        """It finds the key by the downstream key, or by the provider's id. Both are compared as bytes."""
        self._sent(store, "a", downstream_key="dk_1", provider_id="ch_1")
        self._sent(store, "b", downstream_key="dk_2", provider_id="ch_1")
        self._sent(store, "c", "tenant-2", downstream_key="DK_1", provider_id="dk_1")
        assert store.find(downstream_key="dk_1") == [("tenant-1", "a")]
        assert store.find(provider_id="ch_1") == [("tenant-1", "a"), ("tenant-1", "b")]
        assert store.find(downstream_key="dk_2", provider_id="dk_1") == [("tenant-1", "b"), ("tenant-2", "c")]
        for unknown in ("ch_2", "dk_1 ", "", "%"):
            assert store.find(downstream_key=unknown, provider_id=unknown) == []
        assert store.find() == []

    def test_a_key_with_several_steps_is_found_once(self, store: Store) -> None:
        """At most ``FOUND`` keys are returned, in the order of (scope, key)."""
        keys = [f"key-{number:02}" for number in range(FOUND + 2)]
        for key in reversed(keys):
            record = self._sent(store, key, downstream_key="dk", provider_id="ch")
            again = replace(_STEP, name="refund", downstream_key="dk")
            assert store.swap([swap(record, Event.ADVANCE, Actor.OWNER, step=again)]) != [None]
        found = [("tenant-1", key) for key in keys[:FOUND]]
        assert store.find(downstream_key="dk") == store.find(downstream_key="dk", provider_id="ch") == found
