"""However an endpoint is declared, its word is heard: a returned 402 commits its rows, a raised one does not.

Those two tell an endpoint that is wrapped from one that is not: behind one that is not, both roll back.
"""

from __future__ import annotations

import pytest

from tests.enlist.shop import Shop
from tests.web.verdicts import fastapi_declarations, other_declarations, starlette_declarations
from tests.web.verdicts.case_runner import CaseRunner, MakeBench, is_replay
from tests.web.verdicts.cases import NEVER_ENTERED, RETURNED_4XX, Case
from tests.web.verdicts.declared import DECLARATIONS, FOREIGN

REGISTERED_BY = (starlette_declarations, fastapi_declarations, other_declarations)
"""Imported for what they register."""


@pytest.mark.parametrize("effects", ["transactional", "external"])
@pytest.mark.parametrize(("does", "rows"), [("return 402", 1), ("raise 402", 0)])
@pytest.mark.parametrize("name", DECLARATIONS)
async def test_endpoint_is_heard_however_it_is_declared(
    name: str, does: str, rows: int, effects: str, sqlite_shop: Shop, make_runner: MakeBench
) -> None:
    shop = sqlite_shop if effects == "transactional" else None
    runner: CaseRunner = make_runner(Case(name, does, RETURNED_4XX, 402), effects, shop)
    app, asgi = DECLARATIONS[name](runner), not name.startswith("flask")
    first = await runner.send(app, asgi)
    again = await runner.send(app, asgi)
    assert (first.status_code, await runner.state()) == (402, "failed")
    assert runner.rows == (rows if shop else 0)
    assert is_replay(again)
    assert runner.runs == 1


@pytest.mark.parametrize("name", DECLARATIONS)
async def test_path_beside_a_declared_endpoint_leaves_its_key_unused(name: str, make_runner: MakeBench) -> None:
    runner: CaseRunner = make_runner(Case(name, "return 201", NEVER_ENTERED, 404, path="/nowhere"), "external")
    app, asgi = DECLARATIONS[name](runner), not name.startswith("flask")
    assert (await runner.send(app, asgi)).status_code == 404
    assert (await runner.state(), runner.runs) == (None, 0)


@pytest.mark.parametrize("effects", ["transactional", "external"])
@pytest.mark.parametrize("name", FOREIGN)
async def test_endpoint_that_is_not_wrapped_counts_as_entered(
    name: str, effects: str, sqlite_shop: Shop, make_runner: MakeBench
) -> None:
    """Its 402 is final, and rolled back; where it can be wrapped after all, its row may be committed. What it must not
    be is a request that never reached its endpoint: that would run again."""
    shop = sqlite_shop if effects == "transactional" else None
    runner: CaseRunner = make_runner(Case(name, "return 402", RETURNED_4XX, 402), effects, shop)
    app = FOREIGN[name](runner)
    first = await runner.send(app, True)
    again = await runner.send(app, True)
    assert (first.status_code, await runner.state(), runner.runs) == (402, "failed", 1)
    assert is_replay(again)
    assert runner.rows in (0, int(shop is not None))
