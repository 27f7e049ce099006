"""The tasks of docs/outbox.md, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from oncekey.core.jobs import JobState
from oncekey.core.states import State
from oncekey.outbox import Worker
from tests.outbox.outbox_table import OutboxTable

PAGE = Path(__file__).parents[2] / "docs" / "outbox.md"


class Mail:
    """Both services that the page calls: they note the key they were given."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    async def send(self, to: str, *, idempotency_key: str) -> Any:
        self.keys.append(idempotency_key)
        return SimpleNamespace(id=f"mail to {to}")

    async def charge(self, cents: int, *, idempotency_key: str) -> Any:
        self.keys.append(idempotency_key)
        return SimpleNamespace(id=f"ch_{cents}", declined=cents > 1000)


async def test_tasks_of_the_page_run_as_described(outbox: OutboxTable) -> None:
    mail = Mail()
    names: dict[str, Any] = {"mail": mail, "provider": mail}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if "worker" in block:
            exec(block, names)
    worker: Worker = names["worker"]
    small, large = outbox.pending(2)
    receipt = outbox.add("send_receipt", {"to": "ada@example.com", "cents": 500})
    outbox.add("pay", {"cents": 500}, of=small)
    outbox.add("pay", {"cents": 5000}, of=large)
    counts = await worker.serve(store=outbox.store, until="drained")
    assert (counts.done, len(set(mail.keys))) == (3, 3)
    assert (outbox.get(receipt).state, outbox.get(receipt).provider_id) == (JobState.DONE, "mail to ada@example.com")
    assert [(outbox.key(key).state) for key in (small, large)] == [State.COMPLETED, State.FAILED]
    response = outbox.key(small).response
    assert response is not None
    assert (response.status, response.body) == (201, b'{"charge":"ch_500"}')
    assert ("location", "/payments/ch_500") in response.headers
