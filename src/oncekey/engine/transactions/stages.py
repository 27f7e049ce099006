"""The stages of an enlisted transaction: what happened to it, and what that proves about the handler's writes.

Theory of operation
===================

The handler's transaction locks the key's row, and its last statement completes the key. So normally one commit stores
business writes, response and key, and no question is left. This table is for everything else: the answer to a commit
is lost, the handler ends the transaction itself, a cancelled task stops in the middle. A request may run again only if
it is **proven** that nothing was written. A rollback alone is no proof, because it may be the rollback of a later
transaction.

What each stage proves:

=================  ========================================================================  ===================
stage              meaning                                                                   proof
=================  ========================================================================  ===================
not_awaited        ``op.enlist(…)`` was called and not awaited; the handler went on          unknown
opening            the key's row is not locked yet, so the handler has not begun to write    nothing written
open               the row is locked, and the handler writes                                 unknown
written            the key is completed in it, and the app commits (``commit="caller"``)     the key's row tells
committing         the key is completed in it, and COMMIT was sent                           the key's row tells
cut_off_early      the task that ended it was cancelled, before the row was locked           the key's row tells
cut_off            the task that ended it was cancelled                                      the key's row tells
ended              it is over, and its link cannot tell how                                  the server tells
doomed             it can only be rolled back, but the app's own block has still to end it   the server tells
rolled_back        nothing of it is committed, and nothing was written after it              nothing written
committed          business writes, response and key are stored                              committed
may_be_committed   no row and no server can tell, or it was committed without the key        unknown
=================  ========================================================================  ===================

Two answers settle the stages in between:

1. *The key's row.* It is locked for as long as a commit may still happen. If it is completed, the transaction is
   committed. If it is in progress under the same owner, a transaction whose last statement completed it is not. For
   ``cut_off`` that proves nothing: its last statement may not have run, and the handler may have committed before.
2. *The server.* PostgreSQL knows by its number what became of a transaction. That counts only if the handler cannot
   have written in a later one (``Link.may_have_written_later``).

Threads of the handler can be late: they may open, commit or roll back a transaction that the end of the request has
given up. Rows from several stages are about them.
"""

from __future__ import annotations

from dataclasses import dataclass

from oncekey.core.values import Word
from oncekey.errors import IllegalTransition


class Stage(Word):
    NOT_AWAITED = "not_awaited"
    OPENING = "opening"
    OPEN = "open"
    WRITTEN = "written"
    COMMITTING = "committing"
    CUT_OFF_EARLY = "cut_off_early"
    CUT_OFF = "cut_off"
    ENDED = "ended"
    DOOMED = "doomed"
    ROLLED_BACK = "rolled_back"
    COMMITTED = "committed"
    MAY_BE_COMMITTED = "may_be_committed"


class Happened(Word):
    """What happened to the transaction, or what was learnt about it."""

    STARTED = "enlist() began to open it"
    LOCKED = "it locked the key's row"
    KEY_WRITTEN = "it completed the key, and the app commits it"
    COMMIT_SENT = "it completed the key, and COMMIT was sent"
    COMMIT_ANSWERED = "the database answered that it is committed"
    ROLLED_BACK = "its link rolled it back, and proved that it was this transaction"
    ENDED = "it is over, without such a proof"
    LEFT_TO_APP = "it is not over: only the app's own block can end it"
    CUT_OFF = "the task that was ending it was cancelled"
    ROW_COMPLETED = "the key's row is completed by this owner"
    ROW_IN_PROGRESS = "the key's row is in progress under this owner"
    SERVER_ABORTED = "the server says that it was rolled back"
    SERVER_COMMITTED = "the server says that it was committed"
    SERVER_CANNOT_TELL = "the server does not know it, or a later transaction may have written"


class Proof(Word):
    NOTHING_WRITTEN = "nothing written"
    COMMITTED = "committed"
    ROW_TELLS = "the key's row tells"
    SERVER_TELLS = "the server tells"
    UNKNOWN = "unknown"


PROVES: dict[Stage, Proof] = {
    Stage.NOT_AWAITED: Proof.UNKNOWN,
    Stage.OPENING: Proof.NOTHING_WRITTEN,
    Stage.OPEN: Proof.UNKNOWN,
    Stage.WRITTEN: Proof.ROW_TELLS,
    Stage.COMMITTING: Proof.ROW_TELLS,
    Stage.CUT_OFF_EARLY: Proof.ROW_TELLS,
    Stage.CUT_OFF: Proof.ROW_TELLS,
    Stage.ENDED: Proof.SERVER_TELLS,
    Stage.DOOMED: Proof.SERVER_TELLS,
    Stage.ROLLED_BACK: Proof.NOTHING_WRITTEN,
    Stage.COMMITTED: Proof.COMMITTED,
    Stage.MAY_BE_COMMITTED: Proof.UNKNOWN,
}

TO_BE_ENDED: frozenset[Stage] = frozenset({Stage.NOT_AWAITED, Stage.OPENING, Stage.OPEN})
"""Stages in which the request's end must still end the transaction."""


@dataclass(frozen=True, slots=True)
class Row:
    source: Stage
    happened: Happened
    target: Stage


def _rows(sources: set[Stage], happened: Happened, target: Stage) -> tuple[Row, ...]:
    return tuple(Row(source, happened, target) for source in Stage if source in sources)


def _stays(sources: set[Stage], happened: Happened) -> tuple[Row, ...]:
    return tuple(Row(source, happened, source) for source in Stage if source in sources)


_S, _H = Stage, Happened
_UNLOCKED = {_S.NOT_AWAITED, _S.OPENING, _S.CUT_OFF_EARLY}
"""The handler has not begun to write in it."""
_LOCKED = {_S.OPEN, _S.WRITTEN, _S.COMMITTING, _S.CUT_OFF, _S.ENDED, _S.DOOMED}
"""The handler may have written in it."""
_KEY_WRITTEN = {_S.WRITTEN, _S.COMMITTING}
_OVER = {_S.ENDED, _S.DOOMED}

# fmt: off
TABLE: tuple[Row, ...] = (
    # op.enlist(…) opens it. The handler's thread may do so late, after the request has ended without it.
    *_rows({_S.NOT_AWAITED, _S.ROLLED_BACK},     _H.STARTED,            _S.OPENING),
    *_rows({_S.OPENING, _S.CUT_OFF_EARLY, _S.ROLLED_BACK}, _H.LOCKED,   _S.OPEN),
    # The request's end, or a phase's, completes the key in it.
    *_rows(_LOCKED | {_S.ROLLED_BACK},           _H.KEY_WRITTEN,        _S.WRITTEN),
    *_rows(_LOCKED | {_S.ROLLED_BACK},           _H.COMMIT_SENT,        _S.COMMITTING),
    *_rows(_LOCKED | {_S.ROLLED_BACK},           _H.COMMIT_ANSWERED,    _S.COMMITTED),
    # Or rolls it back. Before the row was locked the handler wrote nothing, so no other proof is needed.
    *_rows(_UNLOCKED | _LOCKED | {_S.ROLLED_BACK}, _H.ROLLED_BACK,      _S.ROLLED_BACK),
    *_rows(_UNLOCKED | {_S.ROLLED_BACK},         _H.ENDED,              _S.ROLLED_BACK),
    *_rows(_LOCKED,                              _H.ENDED,              _S.ENDED),
    *_rows(_OVER,                                _H.LEFT_TO_APP,        _S.DOOMED),
    # Or is cut off. What was known before that is still known.
    *_rows({_S.OPENING},                         _H.CUT_OFF,            _S.CUT_OFF_EARLY),
    *_rows({_S.OPEN},                            _H.CUT_OFF,            _S.CUT_OFF),
    *_stays({_S.NOT_AWAITED},                    _H.CUT_OFF),
    *_stays({_S.CUT_OFF_EARLY, _S.CUT_OFF, _S.ROLLED_BACK} | _KEY_WRITTEN | _OVER, _H.CUT_OFF),
    # The key's row.
    *_rows({_S.CUT_OFF_EARLY, _S.CUT_OFF} | _KEY_WRITTEN, _H.ROW_COMPLETED, _S.COMMITTED),
    *_rows({_S.CUT_OFF_EARLY} | _KEY_WRITTEN,    _H.ROW_IN_PROGRESS,    _S.ROLLED_BACK),
    *_rows({_S.CUT_OFF},                         _H.ROW_IN_PROGRESS,    _S.ENDED),
    # The server.
    *_rows(_OVER,                                _H.SERVER_ABORTED,     _S.ROLLED_BACK),
    *_rows(_OVER,                                _H.SERVER_COMMITTED,   _S.MAY_BE_COMMITTED),
    *_rows(_OVER,                                _H.SERVER_CANNOT_TELL, _S.MAY_BE_COMMITTED),
)
# fmt: on

_NEXT: dict[tuple[Stage, Happened], Stage] = {(row.source, row.happened): row.target for row in TABLE}


def after(stage: Stage, happened: Happened) -> Stage:
    """The stage that follows. IllegalTransition: ``TABLE`` has no such row."""
    following = _NEXT.get((stage, happened))
    if following is None:
        raise IllegalTransition(f"an enlisted transaction that is '{stage}' cannot see that {happened}")
    return following
