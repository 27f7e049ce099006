"""A process that forks beside running lanes and a keeper: what it runs, on the store of its argument, and prints."""

from __future__ import annotations

FORK_SCRIPT = """
import json, os, signal, sys, warnings
from oncekey import OnceKey, SINGLE_TENANT
from oncekey.core.decision import Execute, Replay
from oncekey.core.record import Reservation, StoredResponse
from oncekey.core.states import Effects, Event
from oncekey.engine.operation import Operation

warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forks beside threads; servers do just that
signal.alarm(25)
once = OnceKey(sys.argv[1], scope=SINGLE_TENANT, migrate=True)
engine, policy = once.engine, once.default_policy

def pay(key, owner):
    wanted = Reservation("t", key, "POST /", b"f" * 32, 1, Effects.EXTERNAL, owner, 60.0, 3600.0)
    decision = engine.run_blocking(engine.begin(wanted, policy), 5.0)
    if not isinstance(decision, Execute):
        return type(decision).__name__ + " of " + decision.record.owner
    operation = Operation(decision.record, policy, "t")
    engine.keeper.watch(operation)
    answer = StoredResponse(200, (), owner.encode())
    stored = engine.run_blocking(engine.finish(operation, Event.COMPLETE, answer), 5.0).stored
    engine.keeper.unwatch(operation)
    return f"{owner} {'stored' if stored else 'lost'}"

said = [pay("a", "parent-1")]
read, write = os.pipe()
child = os.fork()
if child == 0:
    signal.alarm(25)  # not inherited
    heard = [pay("a", "child-1"), pay("b", "child-2")]
    heard.append(once.close())
    os.write(write, json.dumps(heard).encode())
    os._exit(0)
os.close(write)
said.append(pay("c", "parent-2"))
with os.fdopen(read) as pipe:
    said.append(json.load(pipe))
said.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
said += [pay("b", "parent-3"), pay("d", "parent-4"), once.close()]
print(json.dumps(said))
"""
FORK_RESULT = (
    '["parent-1 stored", "parent-2 stored", ["Replay of parent-1", "child-2 stored", true], 0, '
    '"Replay of child-2", "parent-4 stored", true]'
)
