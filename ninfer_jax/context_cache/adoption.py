"""How a materialisation's absolute result becomes the manager's next state (X-8).

Owns the comparison of the result with its claim, and the pure change that follows. Everything is checked
before anything is changed, and nothing here needs room: cells were reserved before the start (Y-5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ninfer_jax.context_cache.catalog import (
    Catalog,
    Entry,
    HitCount,
    HitKey,
    entry_at,
    find,
    remove,
    reserve,
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
    ActiveRecord,
    CacheState,
    CaptureClaim,
    Claim,
    Edge,
    changed,
    counted,
)
from ninfer_jax.context_cache.request_facts import retention_of
from ninfer_jax.context_cache.sessions import restore_binding, unbind
from ninfer_jax.errors import InvariantError
from ninfer_jax.planner.demand import commit_demand
from ninfer_jax.planner.ids import CheckpointKind, OwnerId, OwnerKind
from ninfer_jax.planner.plan import Committed
from ninfer_jax.request import SequenceHandle
from ninfer_jax.reuse import CheckpointSummary, OwnerSummary, TransitionResult


def adopted_materialization(state: CacheState, claim: Claim, result: TransitionResult) -> CacheState:
    """Returns the state after a materialisation reached a stable end.

    Raises:
        InvariantError: if the result contradicts the claim; the claim stays open.
    """
    rows = rows_by_owner(result)
    losses = checked_losses(state.catalog, claim.victims, result, rows)
    is_committed = isinstance(result.outcome, Committed)
    expected = {v.owner for v in claim.victims}
    if claim.source is not None:
        expected.add(claim.source.owner)
    active = None
    if isinstance(result.outcome, Committed):
        active = _checked_active(claim, result, rows)
        expected.add(active.owner)
    elif result.active is not None:
        raise InvariantError("result: an aborted materialisation names an active sequence")
    refuse_strangers(rows, expected)
    source = None if claim.source is None else entry_of(state.catalog, claim.source)
    if source is not None:
        _check_source(claim, source, result, rows, active)
    state = with_losses(replace(state, open_claim=None), losses)
    if not is_committed or active is None or result.active is None:
        return _aborted(state, claim)
    return _activated(state, claim, result, active, result.active)


def _checked_active(
    claim: Claim, result: TransitionResult, rows: Mapping[OwnerId, OwnerSummary]
) -> OwnerSummary:
    outcome = result.outcome
    assert isinstance(outcome, Committed)
    row = None if outcome.active_owner is None else rows.get(outcome.active_owner)
    if row is None or row.kind is not OwnerKind.ACTIVE or result.active is None:
        raise InvariantError("result: committed, but the new active sequence has no summary or no handle")
    if outcome.plan_id != claim.plan.plan_id:
        raise InvariantError(f"result: of plan {outcome.plan_id}, the claim is for {claim.plan.plan_id}")
    return row


def _check_source(
    claim: Claim,
    source: Entry,
    result: TransitionResult,
    rows: Mapping[OwnerId, OwnerSummary],
    active: OwnerSummary | None,
) -> None:
    """Checks that the source is whole, or was handed over completely."""
    summary = source.summary
    released = {ref for ref in result.outcome.deleted if ref.owner == summary.owner}
    if active is None or not claim.consumes:
        row = rows.get(summary.owner)
        if released or (row is not None and (row.owner_key, row.refs) != (summary.owner_key, summary.refs)):
            raise InvariantError(f"result: the retained source, owner {summary.owner}, was changed")
        return
    if summary.owner in rows and rows[summary.owner].owner_key == summary.owner_key:
        raise InvariantError(f"result: the consumed source, owner {summary.owner}, still exists")
    places = {_place(c): c.ref for c in summary.checkpoints}
    survivors = {_place(c) for c in active.checkpoints}
    lost = frozenset(ref for place, ref in places.items() if place not in survivors)
    # a survivor lives on under the new owner's name: its old name may count as deleted or not
    if not survivors <= set(places) or released not in (lost, summary.refs):
        raise InvariantError(f"result: the new lineage is not what owner {summary.owner} had to hand over")


def _place(c: CheckpointSummary) -> tuple[int, CheckpointKind, int, int]:
    """What of a checkpoint stays the same when its owner changes (C-4)."""
    return int(c.row), c.ref.kind, c.ref.ordinal, c.frontier_tokens


def _activated(
    state: CacheState, claim: Claim, result: TransitionResult, active: OwnerSummary, handle: SequenceHandle
) -> CacheState:
    admission = claim.admission
    facts = admission.request
    epoch = state.epoch + 1
    catalog, sessions, lost = state.catalog, state.sessions, state.lost
    hits: Mapping[HitKey, HitCount] = {}
    edges = state.edges
    if claim.source is not None:
        at = find(catalog, claim.source)
        assert at is not None, "checked before"
        entry = entry_at(catalog, at)
        ref = admission.chosen.ref if admission.chosen is not None else None
        assert ref is not None, "a claim with a source has a chosen reference"
        name = (ref.kind, ref.ordinal)
        old = entry.hits.get(name, HitCount(0, 0))
        hits_now = {**entry.hits, name: HitCount(old.num_hits + 1, epoch)}
        if claim.consumes:
            hits = hits_now
            catalog = remove(catalog, at)
            if entry.session is not None:
                sessions = unbind(sessions, entry.session, claim.source)
            kept = {_place(c) for c in active.checkpoints}
            released = [c for c in entry.summary.checkpoints if _place(c) not in kept and c.ref != ref]
            lost = remember(lost, [(claim.source, c) for c in released])
        else:
            catalog = update(catalog, at, replace(entry, hits=hits_now))
            edges = edges | {Edge(facts.request_id, claim.source)}
    record = ActiveRecord(
        request_id=facts.request_id,
        handle=handle,
        summary=active,
        cell=claim.destination,
        session=facts.binds_session,
        retention=retention_of(facts),
        order=facts.publication_order,
        hits=hits,
        captures=admission.captures,
        facts=facts,
    )
    counters = state.counters
    counters = replace(
        counters,
        selected=counted(counters.selected, admission.source_kind),
        missed=counted(counters.missed, admission.miss_reason),
        reused_tokens=counters.reused_tokens + admission.reused_tokens,
        prompt_tokens=counters.prompt_tokens + facts.prompt_tokens,
        materializations_committed=counters.materializations_committed + 1,
    )
    portfolio = state.portfolio
    if admission.demand is not None:
        portfolio = commit_demand(portfolio, admission.demand)
    return changed(
        state,
        epoch=epoch,
        catalog=catalog,
        sessions=sessions,
        portfolio=portfolio,
        actives={**state.actives, facts.request_id: record},
        edges=edges,
        lost=lost,
        counters=counters,
    )


def _aborted(state: CacheState, claim: Claim) -> CacheState:
    counters = replace(state.counters, materializations_aborted=state.counters.materializations_aborted + 1)
    return changed(without_claim(state, claim), counters=counters)


def rolled_back(state: CacheState, claim: Claim | CaptureClaim) -> CacheState:
    """Returns the state as if the claim had never been made: the program did not start (X-3)."""
    return changed(without_claim(replace(state, open_claim=None), claim))


def without_claim(state: CacheState, claim: Claim | CaptureClaim) -> CacheState:
    """Returns the state without what a claim had reserved or set aside."""
    catalog, sessions = state.catalog, state.sessions
    if isinstance(claim, Claim):
        if claim.destination is not None:
            catalog = unreserve(catalog, claim.destination, claim.admission.request.request_id)
        if claim.consumed_session is not None:
            sessions = restore_binding(sessions, claim.consumed_session, claim.claim_id)
    elif claim.plan.shared is not None:
        catalog = unreserve(catalog, claim.plan.shared.cell, claim.plan.request_id)
    return replace(state, catalog=catalog, sessions=sessions)


def with_destination(catalog: Catalog, claim: Claim) -> Catalog:
    """Returns the catalog with the claim's destination promised to its request."""
    if claim.destination is None:
        return catalog
    return reserve(catalog, claim.destination, claim.admission.request.request_id)
