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
    target, options              a batch of option codes; what the codes mean and which degrades which
    lineage                      what survives when a source is consumed
    holders, contributions       who holds what; what every option does to it
    problem                      the tables of one planning round, sources of candidates included
    projection, stages           post-state sums, Move/Fork, COW and stage peaks of B targets at once
    resolution                   the same for one target, object by object, with the exact arena recipe
    outcomes                     where every checkpoint ends up, and the recipes that recover it
    successors                   legal further degradations of a target
    search_types, functions      the Protocols a search is given, and their physical implementations
    plan, transition, readiness  sealed plans, post-states, the four answers
    backfill                     the persistent backfill proof

Value half: cost, portfolio, search, shared_capture. `search` imports `search_types`, `target` and `plan`
only. It is called with

    assess(targets) -> Assessment               every target's stage peaks, residual and work counts
    confirm(target) -> Confirmation             exact arena geometry, before a target becomes an incumbent
    outcomes(targets) -> CheckpointOutcomes     for `value` only
    successors(target, residual=...) -> targets monotone neighbours, helpful first, nothing pruned
    value(targets, assessment) -> list[int]     J in integer nanoseconds, saturated
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
"""

from ninfer_jax.planner.backfill import BackfillProof, BackfillRefused, is_proof_stale, prove_backfill
from ninfer_jax.planner.candidate import (
    Candidate,
    Disposition,
    RequestWork,
    make_request,
    remaining_prefill,
    root_candidate,
)
from ninfer_jax.planner.capacity import PhysicalCapacity, PoolSpec, axis_names, fits, make_capacity, residual
from ninfer_jax.planner.extents import HostArena, make_arena
from ninfer_jax.planner.functions import PhysicalFunctions, physical_functions
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
from ninfer_jax.planner.problem import Problem, Tables, identity_targets, make_problem, maximal_targets
from ninfer_jax.planner.problem_json import PlanInputs
from ninfer_jax.planner.projection import assess, assess_numpy
from ninfer_jax.planner.readiness import gate, isolated_root_fits, readiness
from ninfer_jax.planner.resolution import confirm, resolve
from ninfer_jax.planner.rows import CheckpointSpec
from ninfer_jax.planner.search_types import Assessment, Budget, CheckpointOutcomes, Confirmation
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
from ninfer_jax.planner.target import ABSENT, EVICT, KEEP, TargetBatch, make_targets
from ninfer_jax.planner.transition import apply, seal
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
    "Candidate",
    "CheckpointKind",
    "CheckpointOutcomes",
    "CheckpointRef",
    "CheckpointSpec",
    "Committed",
    "Confirmation",
    "Direction",
    "Disposition",
    "HostArena",
    "OwnerKind",
    "Phase",
    "PhysicalCapacity",
    "PhysicalFunctions",
    "PhysicalState",
    "PlanInputs",
    "PlanOutcome",
    "PoolSpec",
    "PrefillWork",
    "Problem",
    "Readiness",
    "RequestWork",
    "ResourcePlan",
    "ResourceResult",
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
    "check_invariants",
    "checkpoint_outcomes",
    "checkpoint_ref",
    "checkpoints_of",
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
    "identity_targets",
    "is_device_ready",
    "is_proof_stale",
    "is_stale",
    "is_valid",
    "isolated_root_fits",
    "make_arena",
    "make_capacity",
    "make_outcome_tables",
    "make_problem",
    "make_request",
    "make_state",
    "make_successor_tables",
    "make_targets",
    "maximal_targets",
    "physical_functions",
    "place_image",
    "place_run",
    "prefill_work",
    "prove_backfill",
    "readiness",
    "recoveries",
    "remaining_prefill",
    "replay",
    "residual",
    "resolve",
    "root_candidate",
    "seal",
    "set_edge",
    "set_pin",
    "set_transaction",
    "settle_fork",
    "successors",
    "truncate",
    "used",
]
