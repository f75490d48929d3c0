"""Planning one admission: sources, round, facts, search, and what the answer means for the request.

Owns the order of those steps as one pure function of the manager's state and the program's answers (N-1, N-2,
N-9). Every rule inside it has a file of its own; the search is the planner's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ninfer_jax.context_cache.captures import CaptureIntent, frontiers_of, proposed_captures
from ninfer_jax.context_cache.catalog import first_vacant, num_vacant
from ninfer_jax.context_cache.lost import miss_reason
from ninfer_jax.context_cache.portfolio_facts import demand_of, facts_of, may_publish, recency_of
from ninfer_jax.context_cache.ports import ProgramPort
from ninfer_jax.context_cache.records import Admission, CacheState, claimed, protected
from ninfer_jax.context_cache.request_facts import RequestFacts
from ninfer_jax.context_cache.shortlist import Hit, Shortlist, find_sources
from ninfer_jax.context_cache.sources import SourceRule, source_choices, source_rule
from ninfer_jax.options import ResolvedCacheOptions
from ninfer_jax.planner.cost import MachineCostModel
from ninfer_jax.planner.demand import with_provisional
from ninfer_jax.planner.functions import PhysicalFunctions, physical_functions
from ninfer_jax.planner.ids import CheckpointKind, OwnerKind
from ninfer_jax.planner.planning import plan_materialization
from ninfer_jax.planner.problem import Problem, identity_targets
from ninfer_jax.planner.publication import publication_slots
from ninfer_jax.planner.search_types import Budget, Clock
from ninfer_jax.reuse import SourceChoice, SourceKind

_SOURCE_KINDS: Mapping[CheckpointKind, SourceKind] = {
    CheckpointKind.SESSION_ENDPOINT: "private_endpoint",
    CheckpointKind.TURN_CLOSURE: "private_turn_closure",
    CheckpointKind.RESPONSE_REPLAY: "private_response_replay",
    CheckpointKind.LONG_ANCHOR: "private_long_anchor",
    CheckpointKind.SHARED_STABLE_PREFIX: "shared_stable_prefix",
}


def plan_admission(
    state: CacheState,
    request: RequestFacts,
    program: ProgramPort,
    options: ResolvedCacheOptions,
    model: MachineCostModel,
    *,
    budget: Budget,
    clock: Clock,
) -> Admission:
    """Returns where the request would start from now, with everything needed to claim or to explain it."""
    found = find_sources(state.catalog, request, program, moving=claimed(state))
    captures = _proposals(request, found, options)
    demand = demand_of(request, found, captures)
    portfolio = state.portfolio if demand is None else with_provisional(state.portfolio, demand)
    captures = tuple(
        c
        for c in captures
        if not c.is_shared or may_publish(c, request.digests.key(c.frontier_tokens), portfolio)
    )
    intent = frontiers_of(captures)
    work = _with_frontiers(request.work, intent)
    choices, problem, functions = _round(state, request, found, program, work)
    facts = facts_of(state, problem, portfolio)
    vacant = num_vacant(state.catalog, OwnerKind.PRIVATE)
    recency = recency_of(state, len(facts.weights)) if options.recency_eviction else None
    planned = plan_materialization(
        problem,
        facts,
        model,
        adoptable=publication_slots(problem, vacant=vacant, publishes=request.participates),
        budget=budget,
        clock=clock,
        recency=recency,
        intent=intent,
        functions=functions,
    )
    chosen, reused = None, 0
    if planned.plan is not None:
        chosen, reused = choices[planned.plan.candidate.ordinal], planned.plan.reused_tokens
    # at or below the reuse base there is nothing left to stop for
    final = tuple(c for c in captures if c.frontier_tokens > reused)
    return Admission(
        version=state.version,
        request=request,
        work=_with_frontiers(work, frontiers_of(final)),
        problem=problem,
        choices=choices,
        shortlist=found,
        planned=planned,
        chosen=chosen,
        reused_tokens=reused,
        source_kind="root" if chosen is None or chosen.ref is None else _SOURCE_KINDS[chosen.ref.kind],
        miss_reason=miss_reason(request, found, state.lost, state.catalog, reused),
        captures=final,
        demand=demand,
        facts=facts,
        model=model,
        budget=budget,
        vacant=vacant,
        recency=recency,
        intent=intent,
    )


def _proposals(
    request: RequestFacts, found: Shortlist, options: ResolvedCacheOptions
) -> tuple[CaptureIntent, ...]:
    """Returns what the prompt would capture, without what is a shared prefix already (E-5)."""
    resident = {hit.checkpoint.frontier_tokens for hit in found.verified if hit.is_shared}
    proposals = proposed_captures(
        request,
        max_long_anchors=options.max_long_anchors_per_continuation,
        max_shared=options.max_shared_prefixes,
    )
    return tuple(c for c in proposals if not (c.is_shared and c.frontier_tokens in resident))


def _round(
    state: CacheState, request: RequestFacts, found: Shortlist, program: ProgramPort, work: Any
) -> tuple[tuple[SourceChoice, ...], Problem, PhysicalFunctions]:
    """Returns the candidates with their dispositions settled, and the round over them (N-9)."""
    held = protected(state)
    has_vacant_cell = first_vacant(state.catalog, OwnerKind.PRIVATE) is not None

    def rule(hit: Hit) -> SourceRule:
        is_protected = hit.entry.summary.owner_key in held
        return source_rule(request, hit, is_protected=is_protected, has_vacant_cell=has_vacant_cell)

    rules = [rule(hit) for hit in found.verified]
    choices = source_choices(request, found.verified, rules, lambda at: True)
    problem = program.problem(work, choices)
    functions = physical_functions(problem)
    if SourceRule.RETAIN_IF_FITS in rules:
        fits = functions.assess(identity_targets(problem)).fits
        settled = source_choices(request, found.verified, rules, lambda at: bool(fits[at]))
        if settled != choices:
            choices = settled
            problem = program.problem(work, choices)
            functions = physical_functions(problem)
    return choices, problem, functions


def _with_frontiers(work: Any, frontiers: tuple[int, ...]) -> Any:
    """Returns the work with its capture frontiers; the rest of it is not the manager's business."""
    return dataclasses.replace(work, capture_frontiers=frontiers)
