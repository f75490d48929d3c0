"""Measures the physical half of a planning round: tables, batches of targets, exact confirmation.

Prints one JSON object: milliseconds as p50 and p99 per owners and pages. `--json` is the only format.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import numpy as np

from ninfer_jax import planner
from ninfer_jax.planner.options import Survivors
from ninfer_jax.planner.problem import Problem


def make_benchmark_state(owners: int, checkpoints: int, pages: int, seed: int = 0) -> planner.PhysicalState:
    """Returns a full state: groups of eight owners share a root prefix, one in five is on Host."""
    rng = random.Random(seed)
    per_owner = max(pages // owners, checkpoints + 4)
    capacity = planner.make_capacity(
        device_state_slots=owners * checkpoints + 8,
        device_pages=pages + per_owner,
        host_state_slots=owners * checkpoints,
        host_kv_granules=pages,
        lanes=4,
    )
    state = planner.make_state(capacity, num_owners=owners + 4)
    group: planner.OwnerId | None = None  # type: ignore[name-defined]
    for o in range(owners):
        tokens = per_owner * 64 - rng.randint(0, 63)
        cuts = sorted(rng.sample(range(64, tokens), checkpoints - 1), reverse=True)
        kinds = planner.CheckpointKind
        specs = [planner.CheckpointSpec(tokens, kinds.SESSION_ENDPOINT)]
        specs += [planner.CheckpointSpec(t, kinds.LONG_ANCHOR, ordinal=i + 1) for i, t in enumerate(cuts)]
        share = {} if o % 8 == 0 else {"share_with": group, "share_tokens": 64 * max(per_owner // 4, 1)}
        tier = planner.Tier.HOST if rng.random() < 0.2 else planner.Tier.DEVICE
        state, row = planner.add_owner(state, specs, kv_tier=tier, **share)
        group = row if o % 8 == 0 else group
    return state


def timed(function, repeat: int) -> dict[str, float]:
    """Returns p50 and p99 in milliseconds over `repeat` calls after two warm-up calls."""
    function()
    function()
    samples = []
    for _ in range(repeat):
        start = time.perf_counter_ns()
        function()
        samples.append((time.perf_counter_ns() - start) / 1e6)
    return {f"p{p}_ms": round(float(np.percentile(samples, p)), 3) for p in (50, 99)}


def random_targets(problem: Problem, count: int, seed: int = 0) -> planner.TargetBatch:
    """Returns root targets with random valid codes."""
    rng = np.random.default_rng(seed)
    valid = problem.options.valid
    choices = [np.flatnonzero(valid[v]) for v in range(problem.num_victims)]
    codes = np.stack([rng.choice(c, count) for c in choices], 1).astype(np.int32)
    return planner.make_targets(0, codes)


def measure(owners: int, checkpoints: int, pages: int, repeat: int) -> dict[str, object]:
    """Returns the timings of one size."""
    state = make_benchmark_state(owners, checkpoints, pages)
    request = planner.make_request(64 * 40, 64 * 10)
    sources = [int(planner.checkpoints_of(state, o)[-1]) for o in range(min(3, owners))]  # type: ignore[arg-type]
    candidates = [planner.root_candidate(request)]
    for i, c in enumerate(sources):
        candidates.append(planner.Candidate(i + 1, c, planner.Disposition.CONSUME, request))  # type: ignore[arg-type]
    problem = planner.make_problem(state, candidates)
    functions = planner.physical_functions(problem)
    identity = planner.identity_targets(problem)
    small, large = random_targets(problem, 256), random_targets(problem, 4096)
    templates = enumerate(problem.options.templates)
    demote = next(k for k, t in templates if k > 1 and t.survivors == Survivors.ALL)
    codes = identity.codes[0].copy()
    codes[:2] = demote
    one = planner.make_targets(0, codes)
    return {
        "owners": owners,
        "pages": pages,
        "runs": int((state.run_pool >= 0).sum()),
        "classes": int((problem.objects.class_of >= 0).sum()),
        "options": problem.num_options,
        "tables": timed(lambda: planner.make_problem(state, candidates), repeat),
        "identities": timed(lambda: functions.assess(identity), repeat),
        "targets_256": timed(lambda: functions.assess(small), repeat),
        "targets_256_numpy": timed(lambda: planner.assess_numpy(problem, small), max(repeat // 5, 3)),
        "targets_4096": timed(lambda: functions.assess(large), max(repeat // 5, 3)),
        "outcomes_256_numpy": timed(lambda: functions.outcomes(small), max(repeat // 5, 3)),
        "successors": timed(lambda: functions.successors(one, residual=np.ones(4, np.int32)), repeat),
        "confirm": timed(lambda: functions.confirm(one), repeat),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--owners", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--pages", type=int, nargs="+", default=[4000])
    parser.add_argument("--checkpoints", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=50)
    args = parser.parse_args()
    results = [measure(o, args.checkpoints, p, args.repeat) for o in args.owners for p in args.pages]
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
