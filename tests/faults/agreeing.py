"""Random moves against a store and the dictionary, every answer and every row compared: the long form.

The short form is in ``tests/stores``: keys alone, with every ``make test``.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.faults.campaign import Fault, Run
from tests.stores.outboxes_agree import OutboxesAgree, PostgresOutboxAgrees, SqliteOutboxAgrees

STEPS = 40
SHORTENED: tuple[str, ...] = ("sqlite",)
"""On a server, making a failure short takes longer than all the rest: its seed finds it again."""
LONGEST = 200
"""Examples in one go: what hypothesis has seen it keeps, and comes back to."""


def agree(run: Run) -> None:
    machines: dict[str, Callable[[], type[OutboxesAgree]]] = {
        "sqlite": lambda: SqliteOutboxAgrees,
        "postgres": lambda: type("Agrees", (PostgresOutboxAgrees,), {"url": run.url()}),
    }
    machine = machines[run.store]()

    class Counted(machine):  # type: ignore[misc, valid-type]  # chosen at run time
        def teardown(self) -> None:
            super().teardown()
            run.hit()

    while run.wanting and not run.violations:
        limits = settings(
            max_examples=min(run.count - run.hits, LONGEST),
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink) if run.store in SHORTENED else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        try:
            run_state_machine_as_test(seed(run.random.randrange(2**32))(Counted), settings=limits)
        except Exception as error:
            run.violated("I3", "\n".join([repr(error), *getattr(error, "__notes__", [])]))


FAULTS = (
    Fault(
        "stores agree with the model",
        agree,
        {"sqlite": 400, "postgres": 150},
        short=2,
        promises=("I1", "I3", "I4", "I8"),
        unit="examples",
        seconds=150.0,
    ),
)
