"""What becomes of a key that looks like personal data, for requests, functions and messages: ``Policy(pii=…)``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncekey.core.decision import TurnedAway
from oncekey.core.personal_data import Personal, personal_data
from oncekey.core.problem_texts import Situation
from oncekey.core.routes import Route
from oncekey.telemetry import events

if TYPE_CHECKING:
    from oncekey.engine.once import OnceKey

FOUND = (
    "%s got a key that looks like %s. A key is kept in plain text, and operators see it: it must not be personal "
    "data or a credential. Let clients make a random UUID, and keep it for every retry. Policy(pii='refuse') refuses "
    "such keys, and pii=None does not look for them (docs/limits.md). This is said once per route and kind of data"
)


def refused(once: OnceKey, route: Route, tenant: str, key: str) -> TurnedAway | None:
    """Look at a key. If it looks like personal data, report it, or return the refusal for ``Policy(pii="refuse")``.

    The refusal is for a key that is not known: a retry of a key from before the option is answered as always. Nothing
    here shows the key.
    """
    found = personal_data(key)
    if found is None:
        return None
    if route.policy.pii == "refuse":
        return TurnedAway(Situation.KEY_PERSONAL, why(found), personal=found)
    engine = once.engine
    engine.emitter.emit(events.PersonalKeyFound(tenant, route.operation, kind=found, answer="taken"))
    engine.tell_once(route.operation, FOUND, found.words, kind=found)
    return None


def why(found: Personal) -> str:
    """The first sentence for the client."""
    return (
        f"The Idempotency-Key looks like {found.words}. Keys are kept and may be logged, so this operation takes none "
        "that may be personal data or a credential."
    )
