"""How requests and owners leave: terminal settlement, discard, explicit release (A-5, Y-4).

Owns those changes as pure functions. A finished request publishes into the cell that was reserved when it was
admitted; its session binding follows the publication order alone.
"""

from __future__ import annotations

from dataclasses import replace

from ninfer_jax.context_cache.catalog import (
    Catalog,
    Entry,
    entry_at,
    find,
    first_vacant,
    publish,
    summarised,
    unreserve,
    update,
)
from ninfer_jax.context_cache.losses import (
    checked_losses,
    entry_of,
    refuse_strangers,
    rows_by_owner,
    with_losses,
)
from ninfer_jax.context_cache.lost import remember
from ninfer_jax.context_cache.records import (
    CacheState,
    changed,
)
from ninfer_jax.context_cache.sessions import bind
from ninfer_jax.errors import InvariantError
from ninfer_jax.planner.ids import CheckpointKind, OwnerKind
from ninfer_jax.planner.plan import Committed, VictimClaim
from ninfer_jax.planner.portfolio import Retention
from ninfer_jax.request import RequestId
from ninfer_jax.reuse import OwnerKey, TransitionResult


def adopted_finish(state: CacheState, request_id: RequestId, result: TransitionResult) -> CacheState:
    """Returns the state after the request's terminal settlement (A-5, Y-4).

    Raises:
        InvariantError: if what was published is not the request's own continuation.
    """
    record = state.actives[request_id]
    rows = rows_by_owner(result)
    refuse_strangers(rows, {record.summary.owner})
    row = rows.get(record.summary.owner)
    if row is None or not isinstance(result.outcome, Committed):
        return discarded(state, request_id)
    if record.cell is None:
        raise InvariantError(f"result: request {request_id} published without a cell")
    ends = [c for c in row.checkpoints if c.ref.kind is CheckpointKind.SESSION_ENDPOINT]
    others = {c.ref for c in row.checkpoints if c.ref.kind is not CheckpointKind.SESSION_ENDPOINT}
    same = row.owner_key == record.summary.owner_key and row.kind is OwnerKind.PRIVATE
    if not same or len(ends) != 1 or not others <= record.summary.refs:
        raise InvariantError(f"result: request {request_id} did not publish its own continuation")
    epoch = state.epoch + 1
    catalog, sessions = state.catalog, state.sessions
    session, displaced = None, None
    if record.session is not None:
        bound = bind(sessions, record.session, record.order, row.owner_key)
        sessions, displaced = bound.sessions, bound.displaced
        session = record.session if bound.is_bound else None
    retention = record.retention if session is not None else _demoted(record.retention)
    catalog = _anonymous(catalog, displaced)
    entry = summarised(Entry(row, retention, session, record.order, epoch, record.hits), row)
    catalog = publish(catalog, record.cell, entry)
    gone = [c for c in record.summary.checkpoints if c.ref not in row.refs]
    counters = replace(state.counters, published_private=state.counters.published_private + 1)
    return changed(
        _without_active(state, request_id),
        epoch=epoch,
        catalog=catalog,
        sessions=sessions,
        lost=remember(state.lost, [(row.owner_key, c) for c in gone]),
        counters=counters,
    )


def adopted_restore(
    state: CacheState, result: TransitionResult, *, session: str | None, order: int
) -> CacheState:
    """Returns the state after a saved context was restored: anonymous, unless a session is named (C-11).

    Raises:
        InvariantError: if the result is not one new private owner, or no cell is vacant.
    """
    (row,) = result.owners
    cell = first_vacant(state.catalog, OwnerKind.PRIVATE)
    if row.kind is not OwnerKind.PRIVATE or cell is None:
        raise InvariantError(f"result: a restore into cell {cell} reported a {row.kind.name} owner")
    epoch, sessions, catalog = state.epoch + 1, state.sessions, state.catalog
    retention = Retention.RECENT_PRIVATE
    if session is not None:
        bound = bind(sessions, session, order, row.owner_key)
        sessions, catalog = bound.sessions, _anonymous(catalog, bound.displaced)
        session = session if bound.is_bound else None
        retention = Retention.LIVE_SESSION if bound.is_bound else retention
    entry = Entry(row, retention, session, order, epoch)
    return changed(state, epoch=epoch, catalog=publish(catalog, cell, entry), sessions=sessions)


def discarded(state: CacheState, request_id: RequestId) -> CacheState:
    """Returns the state after an active request gave everything back: edges, cell, checkpoints."""
    record = state.actives[request_id]
    catalog = state.catalog
    if record.cell is not None:
        catalog = unreserve(catalog, record.cell, request_id)
    gone = [(record.summary.owner_key, c) for c in record.summary.checkpoints]
    counters = replace(state.counters, discarded=state.counters.discarded + 1)
    return changed(
        _without_active(state, request_id),
        catalog=catalog,
        lost=remember(state.lost, gone),
        counters=counters,
    )


def adopted_release(state: CacheState, owner: OwnerKey, result: TransitionResult) -> CacheState:
    """Returns the state after one inactive owner was evicted on request.

    Raises:
        InvariantError: if anything else went, or the owner is not catalogued.
    """
    entry = entry_of(state.catalog, owner)
    if not isinstance(result.outcome, Committed):
        return state
    claim = VictimClaim(owner.owner, owner.generation, True, tuple(entry.summary.refs))
    rows = rows_by_owner(result)
    losses = checked_losses(state.catalog, (claim,), result, rows)
    refuse_strangers(rows, set())
    return changed(with_losses(state, losses))


def _without_active(state: CacheState, request_id: RequestId) -> CacheState:
    return replace(
        state,
        actives={k: v for k, v in state.actives.items() if k != request_id},
        edges=frozenset(e for e in state.edges if e.request_id != request_id),
    )


def _anonymous(catalog: Catalog, owner: OwnerKey | None) -> Catalog:
    """Returns the catalog after an owner lost its binding: still useful, no longer live (SES-01)."""
    at = None if owner is None else find(catalog, owner)
    if at is None:
        return catalog
    entry = entry_at(catalog, at)
    return update(catalog, at, replace(entry, session=None, retention=_demoted(entry.retention)))


def _demoted(retention: Retention) -> Retention:
    """Returns the class of an owner without a binding; Disposable stays what the caller asked for."""
    return min(retention, Retention.RECENT_PRIVATE)
