"""What the optional part of a search looks at, and in which order (G-1, G-8, G-10).

Owns: the strategy. Each candidate is pictured from both ends, combinations are read from the pictures, then
the best targets are changed, undone and exchanged until nothing gets better or a budget ends. Owns neither
the incumbent nor a budget: `search_session` has both, and assesses everything exactly.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from ninfer_jax.planner.cost import SATURATED
from ninfer_jax.planner.search_model import (
    Picture,
    attainable_price,
    best_multiplier,
    core,
    forced,
    make_picture,
    num_combinations,
    sweep,
)
from ninfer_jax.planner.search_session import BLOCK, CandidateNotes, Session
from ninfer_jax.planner.search_types import Assessment
from ninfer_jax.planner.search_values import Found, SearchPhase, found_at
from ninfer_jax.planner.target import ABSENT, EVICT, TargetBatch, concatenate, make_targets, take

CORE_COMBINATIONS: Final = 2048
CORE_TARGETS: Final = 256
DEEP_COMBINATIONS: Final = 65_536
MAX_ROUNDS: Final = 6
MAX_FORCED: Final = 12


def improve(session: Session, expandable: list[int]) -> None:
    """Looks for better targets of the expandable candidates until nothing is left to try.

    Raises:
        SearchStopped: when a budget ends; the incumbent is valid at any time.
    """
    if not session.num_victims:
        return
    notes = [session.notes[d] for d in expandable]
    order = sorted(notes, key=lambda n: (n.identity.price_ns, n.index))
    session.phase = SearchPhase.CONSTRUCTION
    for n, candidate in enumerate(order):
        _construct(session, candidate, len(order) - n)
    session.phase = SearchPhase.REFINEMENT
    _refine(session, order)
    _transfer(session, order)
    _refine(session, order)
    session.phase = SearchPhase.EXPANSION
    _exchange(session, order)
    _refine(session, order)
    _diversify(session, order)
    for candidate in order:
        _deepen(session, candidate)
    _refine(session, order)
    _exchange(session, order)


def _construct(session: Session, candidate: CandidateNotes, num_left: int) -> None:
    """Builds pictures of the candidate from both ends and tries what they suggest.

    From identity, degradations add up: value first, then as much as feasibility needs. From the strongest
    target, which has released every shared object, what can be taken back adds up.
    """
    guess = num_left * (2 * session.num_victims * session.round.num_options + CORE_TARGETS)
    moves = session.functions.successors(
        candidate.identity.target,
        residual=candidate.identity.assessment.residual[0],
        licensed=session.licensed,
    )
    assessment, prices = session.evaluate(moves, guess, is_known=False)
    candidate.moves, candidate.moves_assessment, candidate.moves_prices = moves, assessment, prices
    candidate.picture = _picture(session, candidate.identity, moves, assessment, prices)
    candidate.attainable = SATURATED  # from here on the picture says what can still be had
    if candidate.identity.price_ns >= session.price_ns and not session.round.improvable[candidate.index]:
        return  # its domain was built (G-2); losing something cannot make it cheaper than losing nothing
    for around in _starts(session, candidate):
        _read(session, around, CORE_COMBINATIONS, CORE_TARGETS, guess)
    strongest = _strongest(session, candidate)
    around = concatenate([strongest, _around(strongest, candidate)])
    assessment, prices = session.evaluate(around, guess)
    if bool(assessment.fits[0]):
        centre = found_at(around, assessment, int(prices[0]), 0)
        picture = _picture(session, centre, around, assessment, prices)
        _read(session, picture, CORE_COMBINATIONS, CORE_TARGETS, guess)


def _picture(
    session: Session, centre: Found, moves: TargetBatch, assessment: Assessment, prices: np.ndarray
) -> Picture:
    return make_picture(
        centre.target,
        centre.assessment,
        centre.price_ns,
        moves,
        assessment,
        prices,
        session.round.capacity,
        session.round.num_options,
    )


def _strongest(session: Session, candidate: CandidateNotes) -> TargetBatch:
    """Returns the target in which every owner goes, or is demoted where the licence forbids that."""
    assert candidate.picture is not None
    is_open, codes = candidate.picture.is_open, candidate.identity.target.codes[0]
    preserve = session.domain.preserve_codes
    preserved = np.where(is_open[np.arange(len(codes)), preserve], preserve, codes)
    return make_targets(candidate.index, np.where(is_open[:, EVICT], EVICT, preserved))


def _starts(session: Session, candidate: CandidateNotes) -> list[Picture]:
    """Returns the pictures to read: around identity, and around moves that no single owner can make.

    Those are joint releases of shared objects, and evictions that make room for the publication.
    """
    picture, moves, assessment = candidate.picture, candidate.moves, candidate.moves_assessment
    assert picture is not None and moves is not None and assessment is not None
    starts = []
    differs = moves.codes != picture.codes
    wanted = differs.sum(1) > 1
    if bool(session.functions.adoptable(candidate.identity.target)[0]):
        starts.append(picture)
    else:
        wanted |= session.functions.adoptable(moves)
    rows = np.flatnonzero(wanted & (candidate.moves_prices < session.price_ns))
    rows = rows[np.argsort(candidate.moves_prices[rows], kind="stable")[:MAX_FORCED]]
    s, r = picture.columns
    for row in rows:
        change = (assessment.used[row] - candidate.identity.assessment.used[0])[s, r].astype(np.float64)
        starts.append(forced(picture, moves.codes[row], change, int(candidate.moves_prices[row])))
    return starts


def _read(session: Session, picture: Picture, combinations: int, limit: int, completion_targets: int) -> None:
    """Assesses the combinations that a picture suggests."""
    swept = sweep(picture)
    row = best_multiplier(swept)
    candidate = session.notes[picture.candidate]
    candidate.attainable = min(candidate.attainable, attainable_price(picture, swept))
    suggested = core(
        picture,
        swept.codes[row],
        swept.multipliers[row],
        max_combinations=combinations,
        limit=limit,
    )
    both = make_targets(picture.candidate, np.concatenate([swept.codes, suggested]))
    session.attempt(both, completion_targets)


def _refine(session: Session, order: list[CandidateNotes]) -> None:
    """Changes, adds and undoes actions of every candidate's best target until nothing gets better."""
    for candidate in order:
        for _ in range(MAX_ROUNDS):
            centre = candidate.best.found
            incumbent = session.best
            if incumbent is not None and int(incumbent.target.candidate[0]) == candidate.index:
                # the cheapest by numbers may have no place in the arena
                centre = centre if candidate.is_new(centre.target) else incumbent
            if not candidate.can_run or not candidate.is_new(centre.target):
                break
            if candidate.identity.price_ns >= session.price_ns:
                break
            _refine_around(session, candidate, centre)


def _refine_around(session: Session, candidate: CandidateNotes, centre: Found) -> None:
    """Assesses all single changes of a target and the combinations that they suggest."""
    candidate.refined.add(centre.target.codes.tobytes())
    around = _around(centre.target, candidate)
    if not len(around):
        return
    assessment, prices = session.evaluate(around, 2 * len(around))
    picture = _picture(session, centre, around, assessment, prices)
    _read(session, picture, CORE_COMBINATIONS, CORE_TARGETS, CORE_TARGETS)


def _diversify(session: Session, order: list[CandidateNotes]) -> None:
    """Refines around the best target known for every option of every owner, cheapest first.

    What the incumbent's neighbourhood hides, the best target with one owner kept or gone often shows.
    """
    while True:
        pool = [
            (found.price_ns, c.index, cell)
            for c in order
            for cell, found in c.elite.items()
            if c.identity.price_ns < session.price_ns and c.is_new(found.target)
        ]
        if not pool:
            return
        _, d, cell = min(pool)
        candidate = session.notes[d]
        _refine_around(session, candidate, candidate.elite[cell])


def _around(target: TargetBatch, candidate: CandidateNotes) -> TargetBatch:
    """Returns all single changes of a target to options that the candidate's identity may take."""
    if candidate.picture is None:
        return take(target, np.zeros(0, np.int64))
    is_open = candidate.picture.is_open.copy()
    codes = target.codes[0]
    is_open[np.arange(len(codes)), codes] = False
    owner, code = np.nonzero(is_open)
    out = np.repeat(codes[None], len(owner), 0)
    out[np.arange(len(owner)), owner] = code
    return make_targets(candidate.index, out)


def _deepen(session: Session, candidate: CandidateNotes) -> None:
    """Enumerates further combinations: all of them if the budget allows, else the likeliest."""
    picture = candidate.picture
    if picture is None:
        return
    total = num_combinations(picture)
    if total - candidate.num_seen <= session.targets_left:
        options = [np.flatnonzero(row) for row in picture.is_open]
        grid = np.stack(np.meshgrid(*options, indexing="ij"), -1).reshape(total, session.num_victims)
        session.attempt(make_targets(candidate.index, grid))
        return
    for around in _starts(session, candidate):
        session.ask_time(BLOCK * session.num_victims, BLOCK * session.num_victims)
        _read(session, around, DEEP_COMBINATIONS, BLOCK, BLOCK)


def _transfer(session: Session, order: list[CandidateNotes]) -> None:
    """Tries the victims of each candidate's best target under every other candidate."""
    targets = []
    for to in order:
        assert to.picture is not None
        is_source = to.identity.target.codes[0] == ABSENT
        for other in order:
            if other is to or not other.can_run:
                continue
            codes = np.where(is_source, ABSENT, other.best.found.target.codes[0])
            freed = np.flatnonzero((codes == ABSENT) & ~is_source)  # the other's source is a victim here
            if not len(freed):
                targets.append(make_targets(to.index, codes))
                continue
            options = np.flatnonzero(to.picture.is_open[freed[0]])
            varied = np.repeat(codes[None], len(options), 0)
            varied[:, freed[0]] = options
            targets.append(make_targets(to.index, varied))
    if targets:
        session.attempt(concatenate(targets))


def _exchange(session: Session, order: list[CandidateNotes]) -> None:
    """Changes two owners of each candidate's best target at once, all pairs, while that is affordable.

    Two changes that share an object do not add up, so no picture predicts them.
    """
    for candidate in sorted(order, key=lambda n: n.best_key):
        centre = None
        while candidate.can_run and candidate.best.found is not centre:
            centre = candidate.best.found
            if candidate.identity.price_ns >= session.price_ns:
                break
            codes = centre.target.codes
            single = _around(centre.target, candidate).codes
            owner = (single != codes).argmax(1)
            num_pairs = (len(owner) ** 2 - int((np.bincount(owner) ** 2).sum())) // 2
            if not 0 < num_pairs <= session.targets_left:
                break
            first, second = np.nonzero(owner[:, None] < owner[None, :])
            pairs = single[first]
            pairs[np.arange(len(first)), owner[second]] = single[second, owner[second]]
            session.attempt(make_targets(candidate.index, pairs))
