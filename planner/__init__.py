"""Values and pure functions that choose what an admission starts from and what it costs others.

No device, no clock, no I/O, no randomness: the same problem gives the same plan, bit for bit. Usable on its
own, without model or engine.

How the parts fit
-----------------

Physical half (imports nothing of the value half, so that a price can never decide feasibility, O-1):

    ids, capacity, extents       names; the capacity vector; the Host arena as a value
    state                        PhysicalState: unique objects, replicas, references, reservations, pins
    rows, operations, invariants legal operations that build and change states; the checks
    work, candidate              counts of copies and prefill; what one admission may start from
    target, options,             a batch of option codes; what the codes mean and which degrades which; how
    option_sizes                 much of an owner they take
    lineage                      what survives when a source is consumed
    holders, contributions       who holds what in one revision; what every option does to it
    sources, needs               what a candidate's source keeps and hands over; what the candidate asks for
    tables, problem              the arrays of the pressure domain; one planning round, which makes them late
    identity                     rounds without pressure: identities assessed without any table
    projection, stages           post-state sums, Move/Fork, COW and stage peaks of B targets at once
    cells, class_patterns,       the same for a batch of neighbours: one reference, its differences, each
    sparse_projection            distinct end of the shared classes once
    resolution                   the same for one target, object by object, with the exact arena recipe
    outcomes                     where every checkpoint ends up, and the recipes that recover it
    successors                   legal further degradations of a target
    search_types, functions      the Protocols a search is given, and their physical implementations
    post_state                   the states after each stage of a target, and the copies between them
    plan, transition, readiness  sealed plans, how a target becomes one, the four answers
    backfill                     the persistent backfill proof

Value half:

    cost                         prices of copies and prefill; presets
    demand, round_facts          what requests asked for; that and the prices of rebuilding, by owner
    savings, losses, portfolio   what checkpoints save, what options lose; what states are worth, J of targets
    search_model, search_session,
    search_steps, recency_ladder,
    search_values, search        the materialisation search; `allowance` is its time rule
    shared_capture               the other entry: Skip, unless a capture gains strictly
    publication, planning        catalog cells; everything wired into one call

No file of the search imports projection or portfolio. It is called with

    assess(targets) -> Assessment               every target's stage peaks, residual and work counts
    confirm(target) -> Confirmation             exact arena geometry, before a target becomes an incumbent
    outcomes(targets) -> CheckpointOutcomes     for `value` only
    successors(target, residual=...) -> targets monotone neighbours, helpful first, nothing pruned
    value(targets, assessment) -> int64[B]      J in nanoseconds, saturated
    tie_break(targets, assessment) -> int64     what decides among equal J (O-12)
    adoptable(targets) -> bool[B]               logical publication, asked of the manager
    budget, clock                               optional effort; identity and root-maximal are outside of it

and the physical four come from `physical_functions(make_problem(state, candidates))`. A target names its
owners by victim row: `problem.victims[v]` is the owner, code KEEP / ABSENT / EVICT are fixed, all others are
`problem.options.templates[code]`. The source of a candidate is ABSENT and no successor touches it.

One call's inputs, decision, one-screen explanation, file and replay: `outcome`, over `problem_json` (what a
file holds) and `codec` (how values are written).

Arrays hold int32 units (slots, pages, granules); bytes and nanoseconds are Python ints.

>>> from ninfer_jax import planner
>>> capacity = planner.make_capacity(device_state_slots=2, device_pages=6)
>>> state = planner.make_state(capacity)
>>> state, x = planner.add_owner(state, [planner.CheckpointSpec(256)])
>>> request = planner.make_request(prompt_tokens=200, output_tokens=100)
>>> problem = planner.make_problem(state, [planner.root_candidate(request)])
>>> identity = planner.identity_targets(problem)
>>> planner.assess_numpy(problem, identity).residual.tolist()  # 4 pages of X, 5 for the request
[[0, 0, 0, 3]]
>>> maximal = planner.maximal_targets(problem)
>>> plan = planner.seal(problem, maximal)
>>> [victim.owner == x for victim in plan.victims], plan.used[-1].tolist()
([True], [1, 0, 0, 5])
>>> after, active = planner.apply(problem, maximal)
>>> planner.used(after).tolist()
[1, 0, 0, 5]

Plan, look, change one constant, plan again:

>>> roomy = planner.make_capacity(device_state_slots=3, device_pages=12)
>>> state, x = planner.add_owner(planner.make_state(roomy), [planner.CheckpointSpec(256)])
>>> state, y = planner.add_owner(state, [planner.CheckpointSpec(384)])
>>> def plan(state, retention):
...     problem = planner.make_problem(state, [planner.root_candidate(request)])
...     return planner.plan_materialization(
...         problem,
...         planner.make_facts(problem, retention=retention),
...         planner.resolve_cost_model(platform="gpu"),
...         adoptable=planner.publication_slots(problem, vacant=1),
...         budget=planner.Budget(),
...         clock=lambda: 0,
...     )
>>> [v.owner == x for v in plan(state, {}).plan.victims]  # the shorter context is the smaller loss
[True]
>>> again = plan(state, {x: planner.Retention.LIVE_SESSION})
>>> [v.owner == y for v in again.plan.victims], again.search.stop.name
([True], 'QUEUE_EXHAUSTED')
"""

from ninfer_jax.planner.allowance import StopReason
from ninfer_jax.planner.backfill import BackfillProof, BackfillRefused, is_proof_stale, prove_backfill
from ninfer_jax.planner.candidate import (
    Candidate,
    Disposition,
    RequestWork,
    capture_candidate,
    make_request,
    remaining_prefill,
    root_candidate,
)
from ninfer_jax.planner.capacity import PhysicalCapacity, PoolSpec, axis_names, fits, make_capacity, residual
from ninfer_jax.planner.cost import (
    CostPresets,
    MachineCostModel,
    hardware_class,
    parse_presets,
    prefill_ns,
    prefill_signature,
    presets_text,
    resolve_cost_model,
    transfer_ns,
    work_ns,
)
from ninfer_jax.planner.demand import (
    Demand,
    Portfolio,
    SharedCredit,
    commit_demand,
    grant_credit,
    num_domains,
    with_provisional,
    without_owner,
)
from ninfer_jax.planner.extents import HostArena, make_arena
from ninfer_jax.planner.functions import PhysicalFunctions, physical_functions
from ninfer_jax.planner.holders import Holdings, make_holdings
from ninfer_jax.planner.ids import CheckpointKind, CheckpointRef, OwnerKind, Tier
from ninfer_jax.planner.invariants import check_invariants
from ninfer_jax.planner.operations import (
    activate_root,
    add_owner,
    advance,
    capture,
    demote,
    drop_checkpoint,
    evict,
    finish,
    place_image,
    place_run,
    set_edge,
    set_pin,
    set_transaction,
    settle_fork,
    truncate,
)
from ninfer_jax.planner.outcome import PlanOutcome, decide, differences, from_json, replay
from ninfer_jax.planner.outcomes import checkpoint_outcomes, make_outcome_tables, recoveries
from ninfer_jax.planner.plan import Aborted, Committed, Readiness, ResourcePlan, ResourceResult, is_stale
from ninfer_jax.planner.planning import (
    Planned,
    PriceSplit,
    capture_scenario,
    plan_materialization,
)
from ninfer_jax.planner.portfolio import (
    CacheFacts,
    NewCheckpoint,
    Retention,
    capture_gains,
    make_facts,
    make_value,
)
from ninfer_jax.planner.post_state import apply
from ninfer_jax.planner.problem import Problem, identity_targets, make_problem, maximal_targets
from ninfer_jax.planner.problem_json import PlanInputs
from ninfer_jax.planner.projection import assess, assess_numpy
from ninfer_jax.planner.publication import publication_slots
from ninfer_jax.planner.readiness import gate, isolated_root_fits, readiness
from ninfer_jax.planner.resolution import confirm, resolve
from ninfer_jax.planner.rows import CheckpointSpec
from ninfer_jax.planner.search import SearchResult, search_materialization
from ninfer_jax.planner.search_types import Assessment, Budget, CheckpointOutcomes, Confirmation
from ninfer_jax.planner.shared_capture import CaptureResult, CaptureScenario, plan_shared_capture
from ninfer_jax.planner.state import (
    PhysicalState,
    checkpoint_ref,
    checkpoints_of,
    eligible,
    exclusive,
    is_device_ready,
    is_valid,
    make_state,
    used,
)
from ninfer_jax.planner.successors import make_successor_tables, successors
from ninfer_jax.planner.tables import Tables
from ninfer_jax.planner.target import ABSENT, EVICT, KEEP, TargetBatch, make_targets
from ninfer_jax.planner.transition import seal
from ninfer_jax.planner.work import Direction, Phase, PrefillWork, TransferWork, Work, prefill_work

__all__ = [
    "ABSENT",
    "EVICT",
    "KEEP",
    "Aborted",
    "Assessment",
    "BackfillProof",
    "BackfillRefused",
    "Budget",
    "CacheFacts",
    "Candidate",
    "CaptureResult",
    "CaptureScenario",
    "CheckpointKind",
    "CheckpointOutcomes",
    "CheckpointRef",
    "CheckpointSpec",
    "Committed",
    "Confirmation",
    "CostPresets",
    "Demand",
    "Direction",
    "Disposition",
    "Holdings",
    "HostArena",
    "MachineCostModel",
    "NewCheckpoint",
    "OwnerKind",
    "Phase",
    "PhysicalCapacity",
    "PhysicalFunctions",
    "PhysicalState",
    "PlanInputs",
    "PlanOutcome",
    "Planned",
    "PoolSpec",
    "Portfolio",
    "PrefillWork",
    "PriceSplit",
    "Problem",
    "Readiness",
    "RequestWork",
    "ResourcePlan",
    "ResourceResult",
    "Retention",
    "SearchResult",
    "SharedCredit",
    "StopReason",
    "Tables",
    "TargetBatch",
    "Tier",
    "TransferWork",
    "Work",
    "activate_root",
    "add_owner",
    "advance",
    "apply",
    "assess",
    "assess_numpy",
    "axis_names",
    "capture",
    "capture_candidate",
    "capture_gains",
    "capture_scenario",
    "check_invariants",
    "checkpoint_outcomes",
    "checkpoint_ref",
    "checkpoints_of",
    "commit_demand",
    "confirm",
    "decide",
    "demote",
    "differences",
    "drop_checkpoint",
    "eligible",
    "evict",
    "exclusive",
    "finish",
    "fits",
    "from_json",
    "gate",
    "grant_credit",
    "hardware_class",
    "identity_targets",
    "is_device_ready",
    "is_proof_stale",
    "is_stale",
    "is_valid",
    "isolated_root_fits",
    "make_arena",
    "make_capacity",
    "make_facts",
    "make_holdings",
    "make_outcome_tables",
    "make_problem",
    "make_request",
    "make_state",
    "make_successor_tables",
    "make_targets",
    "make_value",
    "maximal_targets",
    "num_domains",
    "parse_presets",
    "physical_functions",
    "place_image",
    "place_run",
    "plan_materialization",
    "plan_shared_capture",
    "prefill_ns",
    "prefill_signature",
    "prefill_work",
    "presets_text",
    "prove_backfill",
    "publication_slots",
    "readiness",
    "recoveries",
    "remaining_prefill",
    "replay",
    "residual",
    "resolve",
    "resolve_cost_model",
    "root_candidate",
    "seal",
    "search_materialization",
    "set_edge",
    "set_pin",
    "set_transaction",
    "settle_fork",
    "successors",
    "transfer_ns",
    "truncate",
    "used",
    "with_provisional",
    "without_owner",
    "work_ns",
]
