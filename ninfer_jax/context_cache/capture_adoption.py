"""How a capture's absolute result becomes the manager's next state (X-8, A-6).

Owns the checks on the lineage and on the new shared owner, and the change that follows. An aborted capture is
a skip: the request goes on with what it has (Y-6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ninfer_jax.context_cache.adoption import without_claim
from ninfer_jax.context_cache.captures import DECLARED, CaptureIntent, PrivateCapture
from ninfer_jax.context_cache.catalog import (
    Entry,
    publish,
)
from ninfer_jax.context_cache.losses import (
    checked_losses,
    refuse_strangers,
    rows_by_owner,
    with_losses,
)
from ninfer_jax.context_cache.records import (
    ActiveRecord,
    CacheState,
    CaptureClaim,
    CapturePlan,
    changed,
)
from ninfer_jax.errors import InvariantError
from ninfer_jax.planner.demand import grant_credit
from ninfer_jax.planner.ids import CheckpointKind, CheckpointRef, OwnerId, OwnerKind
from ninfer_jax.planner.plan import Committed
from ninfer_jax.request import RequestId
from ninfer_jax.reuse import OwnerKey, OwnerSummary, TransitionResult


def adopted_capture(state: CacheState, claim: CaptureClaim, result: TransitionResult) -> CacheState:
    """Returns the state after a capture reached a stable end.

    Raises:
        InvariantError: if the result contradicts the claim; the claim stays open.
    """
    plan, rows = claim.plan, rows_by_owner(result)
    record = state.actives[plan.request_id]
    losses = checked_losses(state.catalog, claim.victims, result, rows)
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
    refuse_strangers(rows, expected)
    state = with_losses(replace(state, open_claim=None), losses)
    is_committed = isinstance(result.outcome, Committed)
    if shared is None:
        state = without_claim(state, claim)
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
