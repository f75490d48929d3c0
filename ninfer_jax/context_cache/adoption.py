"""How the program's absolute results become the manager's next state (X-8, TX-07, TX-08).

Owns the comparison of a result with its claim, and the pure change that follows. Everything is checked before
anything is changed, and nothing here needs room: cells were reserved before the transition started (Y-5). A
result that contradicts its claim is a broken invariant of the engine, never a cache miss (Q-7).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ninfer_jax.context_cache.captures import DECLARED, CaptureIntent, PrivateCapture
from ninfer_jax.context_cache.catalog import (
    Catalog,
    Entry,
    HitCount,
    HitKey,
    entry_at,
    find,
    publish,
    remove,
    reserve,
    summarised,
    unreserve,
    update,
)
from ninfer_jax.context_cache.lost import remember
from ninfer_jax.context_cache.records import (
    ActiveRecord,
    CacheState,
    CaptureClaim,
    CapturePlan,
    Claim,
    Edge,
    changed,
    counted,
)
from ninfer_jax.context_cache.request_facts import retention_of
from ninfer_jax.context_cache.sessions import bind, restore_binding, unbind
from ninfer_jax.errors import InvariantError
from ninfer_jax.planner.demand import commit_demand, grant_credit, without_owner
from ninfer_jax.planner.ids import CheckpointKind, CheckpointRef, OwnerId, OwnerKind
from ninfer_jax.planner.plan import Committed, VictimClaim
from ninfer_jax.planner.portfolio import Retention
from ninfer_jax.request import RequestId, SequenceHandle
from ninfer_jax.reuse import CheckpointSummary, OwnerKey, OwnerSummary, TransitionResult


@dataclass(frozen=True)
class _Losses:
    """What the victims of one transition lost, checked against the claim."""

    evicted: tuple[OwnerKey, ...]
    shrunk: tuple[OwnerSummary, ...]  # final summaries of victims that stay


# ---------------------------------------------------------------- materialisation


def adopted_materialization(state: CacheState, claim: Claim, result: TransitionResult) -> CacheState:
    """Returns the state after a materialisation reached a stable end.

    Raises:
        InvariantError: if the result contradicts the claim; the claim stays open.
    """
    rows = _rows_by_owner(result)
    losses = _checked_losses(state.catalog, claim.victims, result, rows)
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
    _refuse_strangers(rows, expected)
    source = None if claim.source is None else _entry_of(state.catalog, claim.source)
    if source is not None:
        _check_source(claim, source, result, rows, active)
    state = _with_losses(replace(state, open_claim=None), losses)
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
    return changed(_without_claim(state, claim), counters=counters)


def rolled_back(state: CacheState, claim: Claim | CaptureClaim) -> CacheState:
    """Returns the state as if the claim had never been made: the program did not start (X-3)."""
    return changed(_without_claim(replace(state, open_claim=None), claim))


def _without_claim(state: CacheState, claim: Claim | CaptureClaim) -> CacheState:
    catalog, sessions = state.catalog, state.sessions
    if isinstance(claim, Claim):
        if claim.destination is not None:
            catalog = unreserve(catalog, claim.destination, claim.admission.request.request_id)
        if claim.consumed_session is not None:
            sessions = restore_binding(sessions, claim.consumed_session, claim.claim_id)
    elif claim.plan.shared is not None:
        catalog = unreserve(catalog, claim.plan.shared.cell, claim.plan.request_id)
    return replace(state, catalog=catalog, sessions=sessions)


# ---------------------------------------------------------------- capture


def adopted_capture(state: CacheState, claim: CaptureClaim, result: TransitionResult) -> CacheState:
    """Returns the state after a capture reached a stable end.

    Raises:
        InvariantError: if the result contradicts the claim; the claim stays open.
    """
    plan, rows = claim.plan, _rows_by_owner(result)
    record = state.actives[plan.request_id]
    losses = _checked_losses(state.catalog, claim.victims, result, rows)
    expected = {v.owner for v in claim.victims} | {record.summary.owner}
    lineage, shared = record.summary, None
    if isinstance(result.outcome, Committed):
        lineage = _checked_lineage(record, plan.private, plan.frontier_tokens, rows)
        if plan.shared is not None:
            known = {OwnerKey(v.owner, v.generation) for v in claim.victims} | {record.summary.owner_key}
            shared = _checked_shared(plan.frontier_tokens, rows, known)
            expected.add(shared.owner)
    elif record.summary.owner in rows and rows[record.summary.owner].refs != record.summary.refs:
        raise InvariantError("result: an aborted capture changed the active lineage")
    _refuse_strangers(rows, expected)
    state = _with_losses(replace(state, open_claim=None), losses)
    is_committed = isinstance(result.outcome, Committed)
    if shared is None:
        state = _without_claim(state, claim)
    rest = tuple(c for c in record.captures if _is_ahead(c, plan))
    hits = record.hits
    if plan.private is not None and plan.private.kind is CheckpointKind.LONG_ANCHOR and is_committed:
        hits = {k: v for k, v in hits.items() if k != (plan.private.kind, plan.private.ordinal)}
    record = replace(record, summary=lineage, captures=rest, hits=hits)
    counters = replace(
        state.counters,
        captures_committed=state.counters.captures_committed + is_committed,
        captures_aborted=state.counters.captures_aborted + (not is_committed),
        published_shared=state.counters.published_shared + (shared is not None),
    )
    catalog, portfolio = state.catalog, state.portfolio
    if shared is not None and plan.shared is not None:
        entry = Entry(
            shared,
            order=record.order,
            published_epoch=state.epoch + 1,
            evidence=plan.shared.evidence,
        )
        catalog = publish(catalog, plan.shared.cell, entry)
        if plan.shared.evidence & DECLARED:
            portfolio = grant_credit(portfolio, int(shared.owner), [plan.shared.key])
    return changed(
        state,
        epoch=state.epoch + is_committed,
        catalog=catalog,
        portfolio=portfolio,
        actives={**state.actives, plan.request_id: record},
        counters=counters,
    )


def _is_ahead(capture: CaptureIntent, plan: CapturePlan) -> bool:
    """Returns whether a capture is still to come: at one frontier the shared one follows the private one."""
    if capture.frontier_tokens != plan.frontier_tokens:
        return capture.frontier_tokens > plan.frontier_tokens
    return capture.is_shared and plan.shared is None


def without_captures(state: CacheState, request_id: RequestId, frontier_tokens: int) -> CacheState:
    """Returns the state after the captures up to a frontier were skipped."""
    record = state.actives[request_id]
    rest = tuple(c for c in record.captures if c.frontier_tokens > frontier_tokens)
    if rest == record.captures:
        return state
    counters = replace(state.counters, captures_skipped=state.counters.captures_skipped + 1)
    actives = {**state.actives, request_id: replace(record, captures=rest)}
    return changed(state, actives=actives, counters=counters)


def _checked_lineage(
    record: ActiveRecord,
    private: PrivateCapture | None,
    frontier_tokens: int,
    rows: Mapping[OwnerId, OwnerSummary],
) -> OwnerSummary:
    before = record.summary
    after = rows.get(before.owner)
    if after is None and private is None:
        return before
    if after is None or after.owner_key != before.owner_key or after.kind is not OwnerKind.ACTIVE:
        raise InvariantError("result: a capture without the summary of its active sequence")
    expected = {(c.ref, c.frontier_tokens) for c in before.checkpoints}
    if private is not None:
        if private.replaces is not None:
            expected = {x for x in expected if x[0] != private.replaces}
        ref = CheckpointRef(before.owner, before.generation, private.kind, private.ordinal)
        expected.add((ref, frontier_tokens))
    if {(c.ref, c.frontier_tokens) for c in after.checkpoints} != expected:
        raise InvariantError(f"result: the lineage of owner {before.owner} is not what was to be captured")
    return after


def _checked_shared(
    frontier_tokens: int, rows: Mapping[OwnerId, OwnerSummary], known: set[OwnerKey]
) -> OwnerSummary:
    # by generation: the new owner may have the row of the one it replaced
    new = [row for row in rows.values() if row.owner_key not in known and row.kind is OwnerKind.SHARED]
    if len(new) != 1 or [c.frontier_tokens for c in new[0].checkpoints] != [frontier_tokens]:
        raise InvariantError(f"result: expected one new shared owner at {frontier_tokens} tokens")
    return new[0]


# ---------------------------------------------------------------- terminal settlement and releases


def adopted_finish(state: CacheState, request_id: RequestId, result: TransitionResult) -> CacheState:
    """Returns the state after the request's terminal settlement (A-5, Y-4).

    Raises:
        InvariantError: if what was published is not the request's own continuation.
    """
    record = state.actives[request_id]
    rows = _rows_by_owner(result)
    _refuse_strangers(rows, {record.summary.owner})
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
    entry = _entry_of(state.catalog, owner)
    if not isinstance(result.outcome, Committed):
        return state
    claim = VictimClaim(owner.owner, owner.generation, True, tuple(entry.summary.refs))
    rows = _rows_by_owner(result)
    losses = _checked_losses(state.catalog, (claim,), result, rows)
    _refuse_strangers(rows, set())
    return changed(_with_losses(state, losses))


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


# ---------------------------------------------------------------- victims


def _rows_by_owner(result: TransitionResult) -> dict[OwnerId, OwnerSummary]:
    """Returns the rows by owner: their order means nothing, but each owner is reported once (TX-08)."""
    rows = {row.owner: row for row in result.owners}
    if len(rows) != len(result.owners):
        raise InvariantError("result: an owner is reported twice")
    return rows


def _refuse_strangers(rows: Iterable[OwnerId], expected: set[OwnerId]) -> None:
    strangers = sorted(set(rows) - expected)
    if strangers:
        raise InvariantError(f"result: owner {strangers[0]} was touched, but the claim does not name it")


def _checked_losses(
    catalog: Catalog,
    victims: Sequence[VictimClaim],
    result: TransitionResult,
    rows: Mapping[OwnerId, OwnerSummary],
) -> _Losses:
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
        summary = _entry_of(catalog, key).summary
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
    return _Losses(tuple(gone), tuple(shrunk))


def _with_losses(state: CacheState, losses: _Losses) -> CacheState:
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


def _entry_of(catalog: Catalog, owner: OwnerKey) -> Entry:
    at = find(catalog, owner)
    if at is None:
        raise InvariantError(f"catalog: owner {owner.owner} of generation {owner.generation} is not in it")
    return entry_at(catalog, at)


def with_destination(catalog: Catalog, claim: Claim) -> Catalog:
    """Returns the catalog with the claim's destination promised to its request."""
    if claim.destination is None:
        return catalog
    return reserve(catalog, claim.destination, claim.admission.request.request_id)
