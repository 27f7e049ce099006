"""Random moves against a store and the dictionary, every answer and every row compared: the long form.

SQL stores are compared with keys and jobs, Redis and DynamoDB with keys: they have no outbox. The short form is in
``tests/stores``: keys alone, with every ``make test``.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from oncekey.stores.registry import open_store
from tests.faults.campaign import Fault, Run
from tests.stores.outboxes_agree import PostgresOutboxAgrees, SqliteOutboxAgrees
from tests.stores.test_mysql_outbox import MysqlOutboxAgrees
from tests.stores.test_redis import RedisAgrees
from tests.stores.test_stores_agree import StoresAgree

STEPS = 40
SHORTENED: tuple[str, ...] = ("sqlite",)
"""On a server, making a failure short takes longer than all the rest: its seed finds it again."""
LONGEST = 200
"""Examples in one go: what hypothesis has seen it keeps, and comes back to."""


def agree(run: Run) -> None:
    machines: dict[str, Callable[[], type[StoresAgree]]] = {
        "sqlite": lambda: SqliteOutboxAgrees,
        "postgres": lambda: type("Agrees", (PostgresOutboxAgrees,), {"url": run.url()}),
        "mysql": lambda: type("Agrees", (MysqlOutboxAgrees,), {"url": _migrated(run.url())}),
        "redis": lambda: type("Agrees", (RedisAgrees,), {"url": run.url()}),
        "dynamodb": lambda: _on_dynalite(run),
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


def _on_dynalite(run: Run) -> type[StoresAgree]:
    from tests.stores.test_dynamodb import DynamoAgrees  # boto3 takes half a second, in each process of the campaign

    return type("Agrees", (DynamoAgrees,), {"server": run.own_dynalite})


def _migrated(url: str) -> str:
    """Each example empties the tables, so they must be there."""
    store = open_store(url)
    store.migrate()
    store.close()
    return url


FAULTS = (
    Fault(
        "stores agree with the model",
        agree,
        {"sqlite": 400, "postgres": 150, "mysql": 150, "redis": 150, "dynamodb": 40},
        short=2,
        promises=("I1", "I3", "I4", "I8"),
        unit="examples",
        seconds=300.0,
    ),
)
