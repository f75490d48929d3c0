"""Planning one capture: the private-only baseline, then a shared prefix if it gains strictly (E-7, A-6).

Owns the order and the reasons for skipping, as one pure function of the manager's state and the program's
answers. Reserves nothing: choosing a candidate at admission did not either (invariant 17).
"""

from __future__ import annotations

from ninfer_jax.context_cache.captures import CaptureIntent, private_capture
from ninfer_jax.context_cache.catalog import entries
from ninfer_jax.context_cache.ports import CaptureUnits, ProgramPort
from ninfer_jax.context_cache.records import ActiveRecord, CacheState, CapturePlan, SharedCapture
from ninfer_jax.context_cache.shared_capture import plan_shared
from ninfer_jax.options import ResolvedCacheOptions
from ninfer_jax.planner.cost import MachineCostModel
from ninfer_jax.planner.ids import OwnerKind
from ninfer_jax.request import RequestId


def plan_capture(
    state: CacheState,
    request_id: RequestId,
    frontier_tokens: int,
    program: ProgramPort,
    options: ResolvedCacheOptions,
    model: MachineCostModel,
    units: CaptureUnits,
    *,
    blocked_requests: int,
) -> CapturePlan:
    """Returns the next thing to capture at a frontier of an active request, or why there is nothing."""
    record = state.actives[request_id]
    wanted = [c for c in record.captures if c.frontier_tokens == frontier_tokens]
    private, shared, why = None, None, "nothing was to be captured here"
    if state.open_claim is not None:
        wanted, why = [], "a transition is open"
    for capture in wanted:  # the private one first
        if capture.is_shared:
            shared, why = _shared_part(state, record, capture, program, model, units, blocked_requests)
            continue
        private = private_capture(
            record.summary.checkpoints,
            frontier_tokens,
            capture.kind,
            max_long_anchors=options.max_long_anchors_per_continuation,
        )
        why = "what the lineage has is worth more"
        if private is not None:
            break
    is_skip = private is None and shared is None
    return CapturePlan(state.version, request_id, frontier_tokens, private, shared, why if is_skip else "")


def _shared_part(
    state: CacheState,
    record: ActiveRecord,
    capture: CaptureIntent,
    program: ProgramPort,
    model: MachineCostModel,
    units: CaptureUnits,
    blocked_requests: int,
) -> tuple[SharedCapture | None, str]:
    """Returns the shared part, or why there is none."""
    facts = record.facts
    key = facts.digests.key(capture.frontier_tokens)
    for at, entry in entries(state.catalog):
        if at.kind is OwnerKind.SHARED and any(
            c.key == key and program.verify(c.ref, facts.identity) for c in entry.summary.checkpoints
        ):
            return None, "the very prefix is shared already"
    planned = plan_shared(
        state,
        program.capture_problem(record.handle),
        model,
        units,
        capture,
        key,
        rewrite_frontiers=facts.identity.rewrite_execution_frontiers,
        blocked_requests=blocked_requests,
    )
    return planned, "sharing it gains nothing"
