"""How far the planner's choices are from the best ones: random small problems, optimum by exhaustion.

    python tools/planner_gap.py --problems 3000 --seed 0 --json

Owns the generator of random problems, the exhaustive optimum and the report. The optimum obeys the rules that
bind the search: the licence of the recency ladder, publication cells, exact arena placement. Time does not
stop the searches here (a standing clock), so that a seed gives the same report on every machine; the count
budgets do, and the milliseconds are reported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ninfer_jax.planner.candidate import Candidate, Disposition, make_request, root_candidate
from ninfer_jax.planner.capacity import DEVICE_PAGES, DEVICE_STATE, HOST_KV, HOST_STATE, make_capacity
from ninfer_jax.planner.cost import (
    GENERIC_CPU,
    GENERIC_GPU,
    Q32,
    MachineCostModel,
    PrefillModel,
    TransferCoefficients,
    TransferModel,
)
from ninfer_jax.planner.demand import Demand, Portfolio, commit_demand, grant_credit
from ninfer_jax.planner.extents import make_arena
from ninfer_jax.planner.functions import physical_functions
from ninfer_jax.planner.ids import NO_EXTENT, NO_OWNER, CheckpointKind, OwnerKind, Tier
from ninfer_jax.planner.operations import CheckpointSpec, activate_root, add_owner, advance, evict, place_run
from ninfer_jax.planner.planning import search_round
from ninfer_jax.planner.portfolio import PortfolioValue, Retention, make_facts, make_value
from ninfer_jax.planner.problem import Problem, make_problem
from ninfer_jax.planner.publication import PublicationSlots, publication_slots
from ninfer_jax.planner.search import SearchFunctions, SearchResult, search_materialization
from ninfer_jax.planner.search_types import Budget
from ninfer_jax.planner.state import PhysicalState, make_state, used
from ninfer_jax.planner.target import ABSENT, EVICT, KEEP, TargetBatch, make_targets, take

MAX_TARGETS = 30_000  # complete targets of one problem, over all candidates
CHUNK = 1024
GRANULES = (1, 2)


@dataclass(frozen=True, eq=False)
class Case:
    """One random problem with everything that a search needs."""

    problem: Problem
    value: PortfolioValue
    adoptable: PublicationSlots
    recency: np.ndarray | None


def random_state(rng: random.Random) -> PhysicalState:
    """Returns a legal state with aliases, both tiers, one or two pools, and little room left."""
    pools = rng.choice([1, 1, 2])
    roomy = make_capacity(
        device_state_slots=64,
        host_state_slots=64,
        device_pages=(400,) * pools,
        host_kv_granules=1200,
        page_granules=tuple(rng.choice(GRANULES) for _ in range(pools)),
        staging_pages=tuple(rng.choice([0, 0, 2]) for _ in range(pools)),
        page_bytes=(4096,) * pools,
        state_image_bytes=rng.choice([2048, 40_960]),
        lanes=8,
    )
    state = make_state(roomy)
    made: list[int] = []
    for _ in range(rng.choice([1, 2, 3, 4, 4, 5, 5, 6, 6])):
        frontiers = sorted(
            {rng.choice([64, 100, 128, 200, 256, 330, 450, 600]) for _ in range(rng.choice([1, 1, 2, 3]))}
        )
        is_shared = rng.random() < 0.3
        kinds = [CheckpointKind.LONG_ANCHOR] * (len(frontiers) - 1) + [CheckpointKind.SESSION_ENDPOINT]
        specs = [
            CheckpointSpec(f, CheckpointKind.SHARED_STABLE_PREFIX if is_shared else k, ordinal=i)
            for i, (f, k) in enumerate(zip(frontiers, kinds, strict=True))
        ]
        sharing: dict = {}
        if made and rng.random() < 0.5:
            other = rng.choice(made)
            length = min(frontiers[-1], int(state.owner_frontier[other].min()))
            whole = length == frontiers[-1] and all(int(t) == length for t in state.owner_frontier[other])
            if whole and rng.random() < 0.5:
                rows = np.flatnonzero(
                    (state.checkpoint_owner == other) & (state.checkpoint_frontier == length)
                )
                specs[-1] = replace(specs[-1], image=int(state.checkpoint_image[rows[0]]))
            sharing = dict(share_with=other, share_tokens=length, share_tail=whole and rng.random() < 0.5)
        tiers = rng.choices([Tier.DEVICE, Tier.HOST, Tier.BOTH], [6, 1, 2], k=2)
        state, owner = add_owner(
            state,
            specs,
            kind=OwnerKind.SHARED if is_shared else OwnerKind.PRIVATE,
            kv_tier=tiers[0],
            state_tier=tiers[1],
            **sharing,
        )
        made.append(owner)
    if rng.random() < 0.4:
        state, active = activate_root(state, rng.randint(64, 500))
        state = advance(state, active, rng.randint(1, 64))
    if rng.random() < 0.4:  # holes in the arena
        gone = rng.choice(made)
        for run in range(len(state.run_pool)):
            if state.run_host_start[run] != NO_EXTENT and state.run_device[run] and rng.random() < 0.5:
                state = place_run(state, run, Tier.DEVICE)
        if len(made) > 2:
            state = evict(state, gone)
    return state


def shrink(state: PhysicalState, rng: random.Random, pages: int) -> PhysicalState:
    """Returns the state on a machine that is nearly full, so that a request of `pages` needs pressure."""
    capacity, have = state.capacity, used(state)
    taken = [
        (
            int(state.run_host_start[r]),
            int(state.run_pages[r]) * capacity.pools[state.run_pool[r]].page_granules,
        )
        for r in np.flatnonzero((state.run_pool >= 0) & (state.run_host_start != NO_EXTENT))
    ]
    host = max((a + n for a, n in taken), default=0)
    tight = rng.random() < 0.8
    host_room = rng.choice([0, 0, rng.randint(1, 8), rng.randint(4, 30), 200])
    small = replace(
        capacity,
        device_state_slots=int(have[DEVICE_STATE]) + rng.choice([0, 0, 1, 2, 4]),
        host_state_slots=int(have[HOST_STATE]) + (rng.choice([0, 1, 2, 8]) if host_room else 0),
        host_kv_granules=max(host, int(have[HOST_KV])) + host_room,
        pools=tuple(
            replace(
                pool,
                device_pages=int(have[DEVICE_PAGES + n]) + (rng.randint(0, pages) if tight else pages + 4),
            )
            for n, pool in enumerate(capacity.pools)
        ),
    )
    return replace(state, capacity=small, arena=make_arena(small.host_kv_granules, taken))


def random_model(rng: random.Random) -> MachineCostModel:
    """Returns one of several machines; in some, transfers are dear, in some nearly free."""
    if rng.random() < 0.4:
        return rng.choice([GENERIC_CPU, GENERIC_GPU])

    def one() -> TransferCoefficients:
        return TransferCoefficients(
            rng.choice([0, 1_000, 100_000]),
            rng.choice([0, 500, 20_000]),
            rng.choice([1, 10, 100]) * Q32 // 10,
        )

    prefill = PrefillModel(
        rng.choice([0, 1_000_000]), rng.choice([1, 100, 10_000]) * Q32, rng.choice([0, 1, 50]) * Q32, 0, 0
    )
    return MachineCostModel(TransferModel(one(), one(), one()), prefill)


def random_case(seed: int) -> Case:
    """Returns one random problem, small enough to be exhausted."""
    rng = random.Random(seed)
    while True:
        state = random_state(rng)
        prompt = rng.randint(300, 900)
        output = rng.choice([0, 64, 200])
        pages = -(-(prompt + output) // 64)
        state = shrink(state, rng, pages)
        request = make_request(prompt, output, num_pools=state.capacity.num_pools)
        candidates = [root_candidate(request)]
        rows = [
            c
            for c in np.flatnonzero(state.checkpoint_owner != NO_OWNER)
            if state.owner_kind[state.checkpoint_owner[c]] in (OwnerKind.PRIVATE, OwnerKind.SHARED)
            and state.checkpoint_frontier[c] <= prompt
        ]
        rng.shuffle(rows)
        for c in rows[: rng.randint(0, 3)]:
            private = state.owner_kind[state.checkpoint_owner[c]] == OwnerKind.PRIVATE
            how = Disposition.CONSUME if private and rng.random() < 0.7 else Disposition.RETAIN
            candidates.append(Candidate(len(candidates), int(c), how, request, rng.random() < 0.2))
        for max_options in rng.choice([(64, 24, 12, 8, 5, 3), (16, 10, 6, 3), (8, 5, 3)]):
            problem = make_problem(state, candidates, max_options=max_options)
            if num_targets(problem, None) <= MAX_TARGETS:
                break
        else:
            continue
        break
    names = ["a", "b", "c", "d", "e"]
    portfolio = Portfolio()
    for i in range(rng.randint(0, 8)):
        portfolio = commit_demand(portfolio, Demand(i, frozenset(rng.sample(names, rng.randint(0, 3)))))
    for o in np.flatnonzero(state.owner_kind == OwnerKind.SHARED):
        if rng.random() < 0.5:
            portfolio = grant_credit(portfolio, int(o), [f"own {o}"])
    facts = make_facts(
        problem,
        portfolio=portfolio,
        keys={int(c): rng.choice([*names, None]) for c in problem.checkpoints},
        retention={int(o): rng.choice(list(Retention)) for o in problem.victims},
        hits={int(c): (rng.randint(0, 3), rng.randint(0, 9)) for c in problem.checkpoints},
    )
    value = make_value(problem, facts, random_model(rng))
    adoptable = publication_slots(problem, vacant=rng.choice([0, 1, 2]), publishes=rng.random() < 0.6)
    recency = None
    if rng.random() < 0.2:
        recency = np.asarray([rng.randint(0, 20) for _ in problem.victims], np.int64)
    return Case(problem, value, adoptable, recency)


def search_case(case: Case, budget: Budget | None = None) -> SearchResult:
    """Returns what the planner finds."""
    problem = case.problem
    functions = physical_functions(problem)
    round_ = search_round(problem, case.recency)
    return search_materialization(
        round_,
        SearchFunctions(
            functions.assess,
            functions.confirm,
            functions.successors,
            case.value,
            case.value.tie_break,
            case.adoptable,
        ),
        budget or Budget(),
        lambda: 0,
    )


def open_codes(problem: Problem, candidate: int, licensed: np.ndarray | None) -> list[list[int]]:
    """Returns the codes that each victim may take."""
    source = int(problem.source_victim[candidate])
    out = []
    for v in range(problem.num_victims):
        codes = [KEEP, *(int(k) for k in np.flatnonzero(problem.options.valid[v]) if k != KEEP)]
        if licensed is not None and not licensed[v]:
            codes = [k for k in codes if k != EVICT]
        out.append([ABSENT] if v == source else codes)
    return out


def num_targets(problem: Problem, licensed: np.ndarray | None) -> int:
    """Returns how many complete targets a problem has."""
    total = 0
    for d in range(len(problem.candidates)):
        count = 1
        for codes in open_codes(problem, d, licensed):
            count *= len(codes)
        total += count
    return total


def all_targets(problem: Problem, licensed: np.ndarray | None) -> Iterator[TargetBatch]:
    """Yields every complete target in blocks."""
    for d in range(len(problem.candidates)):
        product = itertools.product(*open_codes(problem, d, licensed))
        while block := list(itertools.islice(product, CHUNK)):
            yield make_targets(d, np.asarray(block, np.int32).reshape(len(block), problem.num_victims))


def exhaust(case: Case, licensed: np.ndarray | None) -> int | None:
    """Returns the least J over all feasible, adoptable and placeable targets; None if there is none."""
    functions = physical_functions(case.problem)
    prices, batches = [], []
    for block in all_targets(case.problem, licensed):
        assessment = functions.assess(block)
        rows = np.flatnonzero(assessment.fits)
        rows = rows[case.adoptable(take(block, rows))]
        some = take(block, rows)
        prices.append(case.value(block, assessment)[rows])
        batches.append(some)
    flat = np.concatenate(prices)
    where = [(i, j) for i, b in enumerate(batches) for j in range(len(b))]
    for at in np.argsort(flat, kind="stable"):
        i, j = where[at]
        if functions.confirm(take(batches[i], np.array([j]))).ok:
            return int(flat[at])
    return None


def measure(num_problems: int, seed: int, *, verbose: bool = False) -> dict:
    """Returns the report over `num_problems` random problems."""
    ratios, missed, milliseconds = [], 0, []
    problems = 0
    while problems < num_problems:
        case = random_case(seed * 1_000_003 + problems)
        start = time.perf_counter()
        result = search_case(case)
        milliseconds.append(1e3 * (time.perf_counter() - start))
        best = exhaust(case, None if case.recency is None else result.licensed)
        problems += 1
        if result.best is None:
            missed += best is not None
            continue
        assert best is not None, "the search found a target that exhaustion did not"
        ratio = 1.0 if result.best.price_ns == best else result.best.price_ns / max(best, 1)
        ratios.append(ratio)
        if verbose and ratio > 1:
            print(
                f"problem {problems - 1}: {result.best.price_ns} against {best} ({ratio:.4f}), "
                f"{result.stop.name}, {result.num_targets} of {num_targets(case.problem, None)} targets",
                file=sys.stderr,
            )
    return {
        "problems": problems,
        "optimal_share": sum(r <= 1 for r in ratios) / max(len(ratios), 1),
        "worst_ratio": max(ratios, default=1.0),
        "mean_ratio": float(np.mean(ratios)) if ratios else 1.0,
        "infeasible_missed": missed,
        "p50_ms": float(np.percentile(milliseconds, 50)),
        "p99_ms": float(np.percentile(milliseconds, 99)),
    }


def main() -> int:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    args = parser.parse_args()
    report = measure(args.problems, args.seed, verbose=not args.json)
    if args.json:
        print(json.dumps(report))
    else:
        for name, number in report.items():
            print(f"{name:18} {number}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
