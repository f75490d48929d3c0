"""What the victims of a transition lost: compared with the claim, then taken over (X-8, TX-07, TX-08).

Owns the checks on victims and the change that follows for them, the same for every kind of transition. A
result that contradicts its claim is a broken invariant of the engine, never a cache miss (Q-7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ninfer_jax.context_cache.catalog import (
    Catalog,
    Entry,
    entry_at,
    find,
    remove,
    summarised,
    update,
)
from ninfer_jax.context_cache.lost import remember
from ninfer_jax.context_cache.records import (
    CacheState,
)
from ninfer_jax.context_cache.sessions import unbind
from ninfer_jax.errors import InvariantError
from ninfer_jax.planner.demand import without_owner
from ninfer_jax.planner.ids import OwnerId
from ninfer_jax.planner.plan import Committed, VictimClaim
from ninfer_jax.reuse import OwnerKey, OwnerSummary, TransitionResult


@dataclass(frozen=True)
class Losses:
    """What the victims of one transition lost, checked against the claim."""

    evicted: tuple[OwnerKey, ...]
    shrunk: tuple[OwnerSummary, ...]  # final summaries of victims that stay


def rows_by_owner(result: TransitionResult) -> dict[OwnerId, OwnerSummary]:
    """Returns the rows by owner: their order means nothing, but each owner is reported once (TX-08)."""
    rows = {row.owner: row for row in result.owners}
    if len(rows) != len(result.owners):
        raise InvariantError("result: an owner is reported twice")
    return rows


def refuse_strangers(rows: Iterable[OwnerId], expected: set[OwnerId]) -> None:
    """Returns None, or raises InvariantError if an owner was touched that the claim does not name."""
    strangers = sorted(set(rows) - expected)
    if strangers:
        raise InvariantError(f"result: owner {strangers[0]} was touched, but the claim does not name it")


def checked_losses(
    catalog: Catalog,
    victims: Sequence[VictimClaim],
    result: TransitionResult,
    rows: Mapping[OwnerId, OwnerSummary],
) -> Losses:
    """Returns what the victims lost; a committed result loses exactly what was claimed, an aborted one at
    most that.
    """
    is_committed = isinstance(result.outcome, Committed)
    evicted, deleted = set(result.outcome.evicted), set(result.outcome.deleted)
    claimed = {v.owner for v in victims if v.evicted}
    if not evicted <= claimed or (is_committed and evicted != claimed):
        raise InvariantError(f"result: evicted {sorted(evicted)}, claimed were {sorted(claimed)}")
    gone, shrunk = [], []
    for victim in victims:
        key = OwnerKey(victim.owner, victim.generation)
        summary = entry_of(catalog, key).summary
        mine = {ref for ref in deleted if ref.owner == victim.owner}
        may_lose = summary.refs if victim.evicted else frozenset(victim.dropped)
        if not mine <= may_lose or (is_committed and mine != may_lose):
            raise InvariantError(f"result: owner {victim.owner} lost other checkpoints than were claimed")
        row = rows.get(victim.owner)
        if victim.owner in evicted:
            # the row may already have its next occupant, of another generation
            if mine != summary.refs or (row is not None and row.owner_key == key):
                raise InvariantError(f"result: owner {victim.owner} was evicted and still has checkpoints")
            gone.append(key)
            continue
        if row is None:
            if is_committed or mine:
                raise InvariantError(f"result: no final summary of victim {victim.owner}")
            continue
        if row.owner_key != key or row.refs != summary.refs - mine:
            raise InvariantError(f"result: the summary of owner {victim.owner} is not what it must be now")
        shrunk.append(row)
    return Losses(tuple(gone), tuple(shrunk))


def with_losses(state: CacheState, losses: Losses) -> CacheState:
    """Returns the state after the victims lost what they lost: cells, bindings, credits, keys."""
    catalog, sessions, portfolio, lost = state.catalog, state.sessions, state.portfolio, state.lost
    dropped = 0
    for summary in losses.shrunk:
        at = find(catalog, summary.owner_key)
        assert at is not None, "checked before"
        entry = entry_at(catalog, at)
        gone = [c for c in entry.summary.checkpoints if c.ref not in summary.refs]
        dropped += len(gone)
        lost = remember(lost, [(summary.owner_key, c) for c in gone])
        catalog = update(catalog, at, summarised(entry, summary))
    for key in losses.evicted:
        at = find(catalog, key)
        assert at is not None, "checked before"
        entry = entry_at(catalog, at)
        dropped += len(entry.summary.checkpoints)
        lost = remember(lost, [(key, c) for c in entry.summary.checkpoints])
        catalog = remove(catalog, at)
        portfolio = without_owner(portfolio, int(key.owner))
        if entry.session is not None:
            sessions = unbind(sessions, entry.session, key)
    counters = replace(
        state.counters,
        owners_evicted=state.counters.owners_evicted + len(losses.evicted),
        checkpoints_dropped=state.counters.checkpoints_dropped + dropped,
    )
    return replace(
        state, catalog=catalog, sessions=sessions, portfolio=portfolio, lost=lost, counters=counters
    )


def entry_of(catalog: Catalog, owner: OwnerKey) -> Entry:
    """Returns the entry of an owner, or raises InvariantError if it is not catalogued."""
    at = find(catalog, owner)
    if at is None:
        raise InvariantError(f"catalog: owner {owner.owner} of generation {owner.generation} is not in it")
    return entry_at(catalog, at)
