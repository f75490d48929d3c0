"""The recency ladder: the least sacrifice of the longest unused owners that lets a request start (G-7).

Owns: the rungs, the search for the lowest adoptable one, the sparing of owners that turn out unneeded, and
the licence that follows. Runs outside of every budget and only with `recency_eviction`.
"""

from __future__ import annotations

import numpy as np
from ninfer_jax.planner.search_session import Session
from ninfer_jax.planner.search_values import Found
from ninfer_jax.planner.target import EVICT, KEEP, concatenate, make_targets


def climb_ladder(session: Session) -> None:
    """Makes the lowest adoptable rung the incumbent and licenses exactly what it sacrifices.

    Rung k evicts the k oldest owners and keeps the others, on Host where that helps; owners without a rank
    are always sacrificed. If no rung is adoptable everything stays licensed, for the liveness backstop.
    """
    recency = session.round.recency
    assert recency is not None, "the ladder needs recency_eviction"
    oldest_first = np.argsort(recency, kind="stable")
    low, high = int(np.count_nonzero(recency < 0)), session.num_victims
    chosen: Found | None = None
    while low < high:  # a further sacrifice never makes a rung infeasible
        middle = (low + high) // 2
        found = _rung(session, oldest_first, middle)
        if found is None:
            low = middle + 1
        else:
            chosen, high = found, middle
    chosen = chosen or _rung(session, oldest_first, high)
    if chosen is None:
        return
    for victim in oldest_first[:high][::-1]:
        chosen = _spared(session, chosen, int(victim))
    session.best, session.best_tie = chosen, None
    session.licensed = chosen.target.codes[0] == EVICT


def _rung(session: Session, oldest_first: np.ndarray, sacrificed: int) -> Found | None:
    """Returns the best target that evicts just the oldest, or None; the oldest kept ones may be demoted."""
    kept = oldest_first[sacrificed:]
    demoted = np.tri(len(kept) + 1, len(kept), -1, dtype=bool)  # row i demotes the i oldest kept ones
    codes = np.full((len(demoted), session.num_victims), KEEP, np.int32)
    codes[:, oldest_first[:sacrificed]] = EVICT
    codes[:, kept] = np.where(demoted, session.domain.preserve_codes[kept], KEEP)
    identities = session.round.identities.codes
    batches = [make_targets(d, np.where(own != KEEP, own, codes)) for d, own in enumerate(identities)]
    return session.best_of(concatenate(batches))


def _spared(session: Session, chosen: Found, victim: int) -> Found:
    """Returns the target with one sacrificed owner kept after all, if it stays feasible and adoptable."""
    codes = chosen.target.codes[0]
    if codes[victim] != EVICT:
        return chosen
    trial = np.repeat(codes[None], 2, 0)
    trial[:, victim] = KEEP, session.domain.preserve_codes[victim]
    return session.best_of(make_targets(int(chosen.target.candidate[0]), trial)) or chosen
