"""The last move of an attempt outside of HTTP: that of a function, a message, or a resumed request.

``core/judgment.py`` has decided the move. The web's shells have their own way, because they also send a response.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from oncekey.engine.transactions import finishers
from oncekey.errors import OperatorError

if TYPE_CHECKING:
    from oncekey.engine.engine import Engine
    from oncekey.engine.flows import Finished
    from oncekey.engine.keeper import Unfinished


async def make(engine: Engine, item: Unfinished, seconds: float, *, app_has_returned: bool) -> Finished | None:
    """Make the owner's move; None: the store did not take it, and the keeper retries.

    ``app_has_returned``: the code that had to commit an enlisted transaction has returned. The row then tells whether
    it did.
    """
    operation = item.operation
    try:
        if operation.enlisted is None:
            flow = engine.finish(operation, item.event, item.response, item.reason)
            finished = await engine.run(flow, seconds)
        else:
            finished = await finishers.run(engine, item, seconds)
            if app_has_returned and operation.enlisted is not None:
                finished = await finishers.run(engine, item, seconds)
    except OperatorError:
        engine.adopt(item)
        return None
    except asyncio.CancelledError:  # the loop is being closed: the keeper retries, if the process lives
        if operation.enlisted is None:
            engine.keeper.adopt(item)
        raise
    except BaseException:
        engine.keeper.unwatch(operation)  # the lease runs out, and ``effects`` says what that means
        raise
    finally:
        if operation.enlisted is not None:
            operation.enlisted.release()
    engine.keeper.unwatch(operation)
    return finished
