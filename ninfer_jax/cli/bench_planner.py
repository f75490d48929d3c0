"""``ninfer-jax bench planner``: how long planning takes, and what it does not depend on.

Owns the synthetic states, what is timed, and the report. Times are wall milliseconds (p50, p99) and processor
milliseconds (cpu); on a shared machine compare them with `reference`, a fixed NumPy workload of the same run.

    holdings          what follows from the state alone; the program makes it once a revision
    tables            the pressure domain of one request: options, tables
    targets_N         assessing N random targets
    identity_search   a round that needs no pressure, planned again on a problem that was planned before
    identity_round    the same with a new problem each time: sources, search, seal
    pressured_round   a whole round on a full state: problem, tables, search of `--targets` targets, seal

Rounds start from given holdings and given facts of the manager; both change with a revision, not with a
request.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ninfer_jax.cli.arguments import print_json
from ninfer_jax.options import PAGE_TOKENS

if TYPE_CHECKING:
    from ninfer_jax.planner import (
        Budget,
        CacheFacts,
        Candidate,
        Holdings,
        PhysicalState,
        Problem,
        TargetBatch,
    )
    from ninfer_jax.planner.problem_json import PlanInputs

GROUP = 8  # owners that share one root prefix
UNHURRIED_NS = 60 * 10**9
GROWTH_OWNERS = (8, 16, 32, 64, 128, 256)
GROWTH_PAGES = (1_000, 4_000, 16_000, 64_000)


def add_parser(subjects: argparse._SubParsersAction) -> None:
    """Attaches the subject."""
    parser = subjects.add_parser("planner", help="time of tables, targets and whole planning rounds")
    parser.add_argument("--owners", type=int, nargs="+", default=[16, 64], metavar="O", help="default: 16 64")
    parser.add_argument("--checkpoints", type=int, default=8, metavar="M", help="of each owner (default 8)")
    parser.add_argument("--pages", type=int, default=4_000, metavar="P", help="default: 4000")
    parser.add_argument("--repeats", type=int, default=100, metavar="N", help="of every timing (default 100)")
    parser.add_argument(
        "--rounds", type=int, default=2_000, metavar="N", help="rounds of the memory check (default 2000)"
    )
    parser.add_argument("--targets", type=int, default=2_048, metavar="N", help="of a round (default 2048)")
    parser.add_argument("--no-growth", action="store_true", help="skip growth with owners and pages")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the last pressured round for `plan`")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report."""
    report = run_bench_planner(args)
    if args.json:
        print_json(report)
    else:
        print_report(report)
    return 0


@dataclass(frozen=True, eq=False)
class Bench:
    """One size: a full state, and a request that fits beside it and one that does not."""

    state: PhysicalState
    holdings: Holdings
    facts: CacheFacts
    easy: tuple[Candidate, ...]
    hard: tuple[Candidate, ...]
    max_targets: int

    def problem(self, candidates: tuple[Candidate, ...]) -> Problem:
        """Returns a new round on the state."""
        from ninfer_jax import planner

        return planner.make_problem(self.state, candidates, holdings=self.holdings)


def run_bench_planner(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the report of all sizes."""
    from ninfer_jax.errors import OptionError

    if min(args.owners) < 1 or args.checkpoints < 1 or min(args.repeats, args.rounds, args.targets) < 1:
        raise OptionError("--owners, --checkpoints, --repeats, --rounds and --targets must be at least 1")
    if args.pages < 2 * max(args.owners) or args.checkpoints > 30:
        raise OptionError(
            f"expected at least 2 pages per owner and at most 30 checkpoints, got {args.pages} pages, "
            f"{max(args.owners)} owners and {args.checkpoints} checkpoints"
        )
    report: dict[str, Any] = {"pages": args.pages, "checkpoints": args.checkpoints}
    report["reference"] = timed(reference_work, args.repeats)
    report["sizes"] = []
    bench = None
    for owners in args.owners:
        bench = make_bench(owners, args.checkpoints, args.pages, args.targets)
        report["sizes"].append({"owners": owners, **measure(bench, args.repeats)})
    assert bench is not None
    report["memory"] = measure_memory(bench, args.rounds)
    if not args.no_growth:
        few = max(args.repeats // 5, 3)
        by_owners = [make_bench(o, args.checkpoints, args.pages, args.targets) for o in GROWTH_OWNERS]
        report["growth_with_owners"] = [
            {"owners": o, **brief(b, few)} for o, b in zip(GROWTH_OWNERS, by_owners, strict=True)
        ]
        by_pages = [make_bench(max(args.owners), args.checkpoints, p, args.targets) for p in GROWTH_PAGES]
        report["growth_with_pages"] = [
            {"pages": p, **brief(b, few)} for p, b in zip(GROWTH_PAGES, by_pages, strict=True)
        ]
    if args.save is not None:
        from ninfer_jax.planner.outcome import decide

        args.save.write_text(decide(inputs_of(bench), time.perf_counter_ns).to_json())
        report["saved"] = str(args.save)
    return report


# ---------------------------------------------------------------- states


def make_state(owners: int, checkpoints: int, pages: int, seed: int = 0) -> PhysicalState:
    """Returns a state of about `pages` pages: groups share a root prefix, one owner in five is on Host."""
    from ninfer_jax import planner

    rng = random.Random(seed)
    per_owner = max(pages // owners, checkpoints + 2)
    state = planner.make_state(
        planner.make_capacity(
            device_state_slots=owners * checkpoints + 2,
            device_pages=owners * per_owner,
            host_state_slots=owners * checkpoints,
            host_kv_granules=owners * per_owner,
            granule_bytes=1 << 20,
            state_image_bytes=20 << 20,
            lanes=4,
        ),
        num_owners=owners + 4,
    )
    kinds, first = planner.CheckpointKind, None
    for o in range(owners):
        tokens = per_owner * PAGE_TOKENS - rng.randint(0, PAGE_TOKENS - 1)
        cuts = sorted(rng.sample(range(PAGE_TOKENS, tokens), checkpoints - 1), reverse=True)
        specs = [planner.CheckpointSpec(tokens, kinds.SESSION_ENDPOINT)]
        specs += [planner.CheckpointSpec(t, kinds.LONG_ANCHOR, ordinal=i + 1) for i, t in enumerate(cuts)]
        shared = PAGE_TOKENS * max(per_owner // 4, 1)
        tier = planner.Tier.HOST if rng.random() < 0.2 else planner.Tier.DEVICE
        if o % GROUP == 0:
            state, first = planner.add_owner(state, specs, kv_tier=tier)
        else:
            state, _ = planner.add_owner(state, specs, kv_tier=tier, share_with=first, share_tokens=shared)
    return state


def make_bench(owners: int, checkpoints: int, pages: int, max_targets: int = 2_048) -> Bench:
    """Returns the state with three reusable sources, one easy and one hard request."""
    from ninfer_jax import planner
    from ninfer_jax.planner.ids import CheckpointId, OwnerId

    state = make_state(owners, checkpoints, pages)
    capacity = state.capacity.pools[0].device_pages
    free = capacity - int(planner.used(state)[-1])
    sources = [int(planner.checkpoints_of(state, OwnerId(o))[-1]) for o in range(min(3, owners))]

    def candidates(num_pages: int) -> tuple[Candidate, ...]:
        request = planner.make_request(max(num_pages - 1, 1) * PAGE_TOKENS, PAGE_TOKENS)
        consume = planner.Disposition.CONSUME
        found = [planner.root_candidate(request)]
        for i, row in enumerate(sources):
            if int(state.checkpoint_frontier[row]) < request.prompt_tokens:
                found.append(planner.Candidate(i + 1, CheckpointId(row), consume, request))
        return tuple(found)

    easy, hard = candidates(max(free // 2, 2)), candidates(min(free + max(capacity // 8, 2), capacity))
    holdings = planner.make_holdings(state)
    facts = planner.make_facts(planner.make_problem(state, hard, holdings=holdings))
    return Bench(state, holdings, facts, easy, hard, max_targets)


def inputs_of(bench: Bench) -> PlanInputs:
    """Returns the pressured round as planning inputs."""
    from ninfer_jax.planner.cost import GENERIC_GPU
    from ninfer_jax.planner.problem_json import PlanInputs

    return PlanInputs(bench.state, bench.hard, bench.facts, GENERIC_GPU, budget_of(bench))


def budget_of(bench: Bench) -> Budget:
    """Returns a budget that targets alone bound: a loaded machine then does the same work as a quiet one."""
    from ninfer_jax.planner import Budget

    return Budget(bench.max_targets, deadline_ns=UNHURRIED_NS, first_window_ns=UNHURRIED_NS)


def random_targets(problem: Problem, count: int, seed: int = 0) -> TargetBatch:
    """Returns root targets with random valid codes."""
    from ninfer_jax import planner

    rng = np.random.default_rng(seed)
    choices = [np.flatnonzero(row) for row in problem.options.valid]
    codes = np.stack([rng.choice(c, count) for c in choices], 1).astype(np.int32)
    return planner.make_targets(0, codes)


# ---------------------------------------------------------------- measurements


def measure(bench: Bench, repeats: int) -> dict[str, Any]:
    """Returns all timings of one size."""
    from ninfer_jax import planner

    problem = bench.problem(bench.hard)
    functions = planner.physical_functions(problem)
    small, large = random_targets(problem, 256), random_targets(problem, 4096)
    easy = bench.problem(bench.easy)
    last: list[Any] = []
    pressured = timed(lambda: last.append(plan(bench, bench.hard)), repeats)
    targets = sorted(p.search.num_targets for p in last if p.search is not None)
    return {
        "runs": int((bench.state.run_pool >= 0).sum()),
        "classes": int((problem.objects.class_of >= 0).sum()),
        "options": problem.num_options,
        "holdings": timed(lambda: planner.make_holdings(bench.state), repeats),
        "tables": timed(lambda: bench.problem(bench.hard).tables, repeats),
        "targets_256": timed(lambda: functions.assess(small), repeats),
        "targets_4096": timed(lambda: functions.assess(large), max(repeats // 5, 3)),
        "identity_search": timed(lambda: plan(bench, bench.easy, easy), repeats),
        "identity_round": timed(lambda: plan(bench, bench.easy), repeats),
        "pressured_round": pressured
        | {
            "targets_p50": targets[len(targets) // 2] if targets else 0,
            "stop": last[-1].search.stop.name.lower() if last[-1].search else last[-1].readiness.name,
        },
    }


def brief(bench: Bench, repeats: int) -> dict[str, Any]:
    """Returns the timings that growth is shown with."""
    from ninfer_jax import planner

    problem = bench.problem(bench.hard)
    functions, small = planner.physical_functions(problem), random_targets(problem, 256)
    return {
        "runs": int((bench.state.run_pool >= 0).sum()),
        "holdings": timed(lambda: planner.make_holdings(bench.state), repeats),
        "tables": timed(lambda: bench.problem(bench.hard).tables, repeats),
        "targets_256": timed(lambda: functions.assess(small), repeats),
        "pressured_round": timed(lambda: plan(bench, bench.hard), repeats),
    }


def plan(bench: Bench, candidates: tuple[Candidate, ...], problem: Problem | None = None) -> Any:
    """Returns one whole planning call on a new problem, or on the given one."""
    from ninfer_jax.planner.cost import GENERIC_GPU
    from ninfer_jax.planner.planning import plan_materialization
    from ninfer_jax.planner.publication import publication_slots

    problem = problem or bench.problem(candidates)
    return plan_materialization(
        problem,
        bench.facts,
        GENERIC_GPU,
        adoptable=publication_slots(problem, vacant=1),
        budget=budget_of(bench),
        clock=time.perf_counter_ns,
    )


def measure_memory(bench: Bench, rounds: int) -> dict[str, int]:
    """Returns resident bytes and live Python objects after a warm-up and after `rounds` more rounds."""
    import psutil

    process = psutil.Process()

    def now() -> tuple[int, int]:
        gc.collect()
        return process.memory_info().rss, len(gc.get_objects())

    for _ in range(max(rounds // 10, 3)):
        plan(bench, bench.hard)
    before, objects = now()
    for _ in range(rounds):
        plan(bench, bench.hard)
    after, objects_after = now()
    return {
        "rounds": rounds,
        "rss_before_bytes": before,
        "rss_growth_bytes": after - before,
        "object_growth": objects_after - objects,
    }


def reference_work() -> None:
    """Does a fixed amount of NumPy and interpreter work, the yardstick of this run."""
    numbers = np.arange(20_000, dtype=np.int64)
    for _ in range(5):
        np.sort((numbers * 7919) % 20_011)
        np.cumsum(numbers)
    total = 0
    for i in range(5_000):
        total += i & 3


def timed(function: Callable[[], object], repeats: int) -> dict[str, float]:
    """Returns p50, p99 and processor milliseconds of `repeats` calls after two more."""
    function()
    function()
    wall, cpu = [], []
    for _ in range(repeats):
        start, start_cpu = time.perf_counter_ns(), time.process_time_ns()
        function()
        cpu.append((time.process_time_ns() - start_cpu) / 1e6)
        wall.append((time.perf_counter_ns() - start) / 1e6)
    p50, p99 = (round(float(x), 4) for x in np.percentile(wall, (50, 99)))
    return {"p50_ms": p50, "p99_ms": p99, "cpu_ms": round(float(np.median(cpu)), 4)}


# ---------------------------------------------------------------- report


def print_report(report: dict[str, Any]) -> None:
    """Prints the report for a person."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"planning, {report['pages']:,} pages, {report['checkpoints']} checkpoints per owner")
    for column in ("what", "owners", "p50 ms", "p99 ms", "cpu ms", ""):
        table.add_column(column, justify="left" if column in ("what", "") else "right")
    rows = [("reference workload", "", report["reference"], "")]
    for size in report["sizes"]:
        for name, value in size.items():
            if isinstance(value, dict):
                note = f"{value['targets_p50']:,} targets, {value['stop']}" if "stop" in value else ""
                rows.append((name.replace("_", " "), str(size["owners"]), value, note))
    for name, owners, value, note in rows:
        numbers = (f"{value[k]:.3f}" for k in ("p50_ms", "p99_ms", "cpu_ms"))
        table.add_row(name, owners, *numbers, note)
    console.print(table)
    for key, by in (("growth_with_owners", "owners"), ("growth_with_pages", "pages")):
        for row in report.get(key, ()):
            parts = [f"{n.replace('_', ' ')} {row[n]['p50_ms']:.3f}" for n in row if isinstance(row[n], dict)]
            console.print(f"{row[by]:>7,} {by}, {row['runs']:,} runs: {', '.join(parts)} ms p50")
    memory = report["memory"]
    console.print(
        f"memory over {memory['rounds']:,} rounds: {memory['rss_growth_bytes'] / 2**20:+.1f} MiB resident, "
        f"{memory['object_growth']:+,} Python objects"
    )
