"""TX-06, TX-07: a victim's final summary is its former set minus the claimed set, whatever the counts say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ninfer_jax.context_cache.catalog import CellId, Entry, make_catalog, publish
from ninfer_jax.context_cache.losses import checked_losses, rows_by_owner
from ninfer_jax.errors import InvariantError
from ninfer_jax.planner import CheckpointKind, CheckpointRef, OwnerKind
from ninfer_jax.planner.plan import Aborted, VictimClaim
from ninfer_jax.reuse import CheckpointSummary, OwnerSummary, PrefixKey, zero_stage_result

ENDPOINT, CLOSURE, ANCHOR = (
    CheckpointKind.SESSION_ENDPOINT,
    CheckpointKind.TURN_CLOSURE,
    CheckpointKind.LONG_ANCHOR,
)


def checkpoint(kind, ordinal, frontier, generation=4):
    ref = CheckpointRef(3, generation, kind, ordinal)
    return CheckpointSummary(ref, frontier, frontier, PrefixKey(frontier, 0, frontier, "text"))


def owner(*checkpoints, generation=4):
    return OwnerSummary(3, generation, OwnerKind.PRIVATE, checkpoints)


A, C, E = checkpoint(ANCHOR, 1, 128), checkpoint(CLOSURE, 0, 256), checkpoint(ENDPOINT, 0, 320)
CATALOG = publish(make_catalog(1, 0), CellId(OwnerKind.PRIVATE, 0), Entry(owner(A, C, E)))
DROP = VictimClaim(3, 4, False, (A.ref,))
EVICT = VictimClaim(3, 4, True, (A.ref, C.ref, E.ref))


def judge(claim, rows, *, deleted=(), evicted=(), committed=True):
    result = zero_stage_result(7, rows, deleted=[c.ref for c in deleted], evicted=evicted)
    if not committed:
        outcome = Aborted("", 7, "stopped", result.outcome.deleted, result.outcome.evicted)
        result = replace(result, outcome=outcome)
    return checked_losses(CATALOG, (claim,), result, rows_by_owner(result))


def test_the_right_set_is_taken_over():
    losses = judge(DROP, [owner(C, E)], deleted=[A])
    assert losses.shrunk == (owner(C, E),) and losses.evicted == ()
    assert judge(EVICT, [], deleted=[A, C, E], evicted=[3]).evicted == (owner().owner_key,)
    # the evicted owner's row has its next occupant already
    new = owner(checkpoint(ENDPOINT, 0, 64, generation=5), generation=5)
    assert judge(EVICT, [new], deleted=[A, C, E], evicted=[3]).shrunk == ()


@pytest.mark.parametrize(
    ("claim", "rows", "deleted", "evicted"),
    [
        (DROP, [owner(A, E)], [C], ()),  # another checkpoint went
        (DROP, [owner(A, E)], [A], ()),  # said the right one, kept it, dropped another
        (DROP, [owner(C, E)], [], ()),  # said nothing
        (DROP, [owner(A, C, E)], [], ()),  # did nothing
        (DROP, [owner(C, E, checkpoint(ANCHOR, 2, 300))], [A], ()),  # one more than it may have
        (DROP, [], [A], ()),  # no final summary
        (DROP, [owner(C, E, generation=5)], [A], ()),  # somebody else's
        (DROP, [], [A, C, E], (3,)),  # more than was claimed
        (EVICT, [owner(E)], [A, C], ()),  # less than was claimed
        (EVICT, [], [A, C], (3,)),
        (EVICT, [owner(E)], [A, C, E], (3,)),  # gone, and still there
    ],
)
def test_anything_else_is_refused(claim, rows, deleted, evicted):
    with pytest.raises(InvariantError):
        judge(claim, rows, deleted=deleted, evicted=evicted)


def test_an_abort_may_have_lost_less_but_nothing_else():
    assert judge(DROP, [], committed=False).shrunk == ()
    assert judge(DROP, [owner(A, C, E)], committed=False).shrunk == (owner(A, C, E),)
    assert judge(EVICT, [owner(E)], deleted=[A, C], committed=False).shrunk == (owner(E),)
    for rows, deleted in (([owner(A, E)], [C]), ([owner(C, E)], []), ([], [A])):
        with pytest.raises(InvariantError):
            judge(DROP, rows, deleted=deleted, committed=False)
