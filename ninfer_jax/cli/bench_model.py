"""``ninfer-jax bench model``: prefill and decode speed of the whole engine, beside transformers in the
same run.

Owns what is measured, in which order, and the report. Only ratios of one run mean much on a shared
machine, so the sides take turns; a ratio is the median of the turns' ratios, a speed that of the best turn,
which other load disturbed least.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ninfer_jax.cli.arguments import print_json
from ninfer_jax.cli.bench_shapes import SHAPES, BenchShape, write_checkpoint

if TYPE_CHECKING:
    from ninfer_jax.cli.bench_sides import Side

DEFAULT_SHAPES = ("dense-tiny", "hidden-512")
NUM_AGREEING_TOKENS = 8

# A job ends after `--repeats` turns, or sooner when it has had its time, but not before a median means much.
FEWEST_TURNS = 3
JOB_BUDGET_S = 8.0


def add_parser(subjects: argparse._SubParsersAction) -> None:
    """Attaches the subject."""
    parser = subjects.add_parser(
        "model", help="prefill and decode speed, beside transformers where installed"
    )
    parser.add_argument(
        "--shape",
        action="append",
        choices=sorted(SHAPES),
        help=f"may be repeated (default: {' and '.join(DEFAULT_SHAPES)})",
    )
    parser.add_argument(
        "--dummy", action="store_true", help="random weights made in memory; then nothing is compared"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help=f"the most turns of each side (default 5; slow jobs stop at {FEWEST_TURNS})",
    )
    parser.add_argument("--prompt-tokens", type=int, nargs="+", metavar="T", help="default: 512 2048")
    parser.add_argument("--rows", type=int, nargs="+", metavar="B", help="decode batch sizes, default: 1 4 8")
    parser.add_argument("--steps", type=int, metavar="N", help="decode steps per repetition")
    parser.add_argument("--no-transformers", action="store_true", help="do not compare")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report."""
    report = run_bench_model(args)
    if args.json:
        print_json(report)
    else:
        print_report(report)
    return 0


def run_bench_model(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the report: ``prefill`` and ``decode`` tokens/s, ``ratio_to_transformers``, compilations.

    With ``--dummy`` also ``start`` (seconds, peak memory against the estimate).

    Raises:
        ValueError: if an argument is out of range.
    """
    if args.repeats < 1:
        raise ValueError(f"--repeats: got {args.repeats}, expected 1 or more")
    if args.steps is not None and args.steps < 1:
        raise ValueError(f"--steps: got {args.steps}, expected 1 or more")
    if any(size < 1 for size in args.prompt_tokens or ()):
        raise ValueError(f"--prompt-tokens: got {args.prompt_tokens}, expected 1 or more")
    rows = args.rows or []
    if any(not 1 <= number <= 8 for number in rows):
        raise ValueError(f"--rows: got {rows}, expected numbers from 1 to 8")
    report: dict[str, Any] = {
        "prefill": {},
        "decode": {},
        "ratio_to_transformers": {},
        "compilations_after_warmup": 0,
    }
    with tempfile.TemporaryDirectory(prefix="ninfer-bench-") as folder:
        for name in args.shape or DEFAULT_SHAPES:
            measure_shape(SHAPES[name], Path(folder) / name, args, report)
    return report


def measure_shape(
    shape: BenchShape, directory: Path, args: argparse.Namespace, report: dict[str, Any]
) -> None:
    """Measures one shape and writes its part of the report."""
    prompt_sizes = tuple(args.prompt_tokens or shape.prompt_tokens)
    batch_rows = tuple(args.rows or shape.batch_rows)
    num_steps = args.steps or shape.decode_steps
    write_checkpoint(shape, directory, with_weights=not args.dummy)

    from ninfer_jax.assembly import assemble
    from ninfer_jax.cli.bench_sides import EngineSide, TransformersSide
    from ninfer_jax.engine import Engine

    before_bytes = _status_bytes("VmRSS")
    start = time.perf_counter()
    context = max(*prompt_sizes, shape.decode_prompt_tokens + num_steps + 4 * max(batch_rows)) + 64
    parts = assemble(
        directory,
        None,
        {
            "max_concurrency": max(batch_rows),
            "max_context": context,
            "kv_capacity": context * max(batch_rows),
            "prefill_chunk": min(1024, max(prompt_sizes)),  # no larger bucket is ever asked for
            "load_format": "dummy" if args.dummy else "auto",
        },
    )
    start_s = time.perf_counter() - start
    say(f"{shape.name}: ready in {start_s:.1f} s")
    sides: list[Side] = [EngineSide(Engine(parts, threaded=False))]
    compares = not args.dummy and not args.no_transformers and _has_transformers()
    if compares:
        # As many threads as XLA's own pool uses: the processors of this process.
        sides.append(TransformersSide(directory, len(os.sched_getaffinity(0))))
    rng = np.random.default_rng(0)
    vocab_size = shape.config["vocab_size"]
    jobs: dict[tuple[str, int], Callable[[Side], float]] = {}  # seconds; by kind and size
    num_tokens: dict[tuple[str, int], int] = {}
    for size in prompt_sizes:
        prompt = rng.integers(0, vocab_size, size, np.int32)
        jobs["prefill", size] = lambda side, prompt=prompt: side.prefill_s(prompt)
        num_tokens["prefill", size] = size
    for size in batch_rows:
        prompts = rng.integers(0, vocab_size, (size, shape.decode_prompt_tokens), np.int32)
        jobs["decode", size] = lambda side, prompts=prompts: side.decode_s(prompts, num_steps)
        num_tokens["decode", size] = size * num_steps
    try:
        prompt = rng.integers(0, vocab_size, 100, np.int32)
        answers = [side.greedy(prompt, NUM_AGREEING_TOKENS) for side in sides]
        if any(answer != answers[0] for answer in answers):
            raise RuntimeError(f"the sides disagree on greedy tokens, so speeds mean nothing: {answers}")
        warm_up(jobs, sides)
        seconds = take_turns(jobs, sides, args.repeats, budget_s=JOB_BUDGET_S)
        say(f"{shape.name}: measured after {time.perf_counter() - start:.1f} s")
        report["compilations_after_warmup"] += parts.program.compilations_after_warmup
        planned_bytes = parts.program.memory_table().planned_bytes
        peak_bytes = _status_bytes("VmHWM")
    finally:
        for side in sides:
            side.close()
    _write(report, shape.name, seconds, num_tokens, sides)
    if args.dummy:
        report.setdefault("start", {})[shape.name] = {
            "seconds": round(start_s, 1),
            "estimated_bytes": planned_bytes,
            "peak_rss_bytes": peak_bytes,
            "rss_before_bytes": before_bytes,
            "peak_growth_over_estimate": round((peak_bytes - before_bytes) / planned_bytes, 3),
        }
    from ninfer_jax.cli.bench_host import host_overhead_s

    overhead_s = host_overhead_s(
        directory, num_rows=max(batch_rows), num_steps=max(64, num_steps), repeats=args.repeats
    )
    report["decode"][shape.name]["host_overhead_ms"] = {str(max(batch_rows)): round(1e3 * overhead_s, 4)}


def say(line: str) -> None:
    """Tells a person who waits how far it is; the report itself goes to standard output."""
    print(line, file=sys.stderr, flush=True)


def warm_up(jobs: Mapping[tuple[str, int], Callable[[Side], float]], sides: Sequence[Side]) -> None:
    """Runs the smallest job of each kind once on each side, unmeasured; later nothing is initialised."""
    for kind in dict.fromkeys(kind for kind, _ in jobs):
        smallest = min(size for other, size in jobs if other == kind)
        for side in sides:
            jobs[kind, smallest](side)


def take_turns(
    jobs: Mapping[tuple[str, int], Callable[[Side], float]],
    sides: Sequence[Side],
    most_turns: int,
    *,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[tuple[str, int], np.ndarray]:
    """Returns seconds f64[turns, sides] of every job; the sides alternate, so that both meet the same load.

    Args:
        jobs: by kind and size.
        sides: who takes turns.
        most_turns: of each side and job.
        budget_s: a job that has taken this long ends after its `FEWEST_TURNS`.
        clock: seconds.
    """
    seconds: dict[tuple[str, int], np.ndarray] = {}
    for key, job in jobs.items():
        end, turns = clock() + budget_s, []
        while len(turns) < most_turns and (len(turns) < FEWEST_TURNS or clock() < end):
            turns.append([job(side) for side in sides])
        seconds[key] = np.array(turns)
    return seconds


def _write(
    report: dict[str, Any],
    shape_name: str,
    seconds: Mapping[tuple[str, int], np.ndarray],
    num_tokens: Mapping[tuple[str, int], int],
    sides: Sequence[Side],
) -> None:
    for (kind, size), taken in seconds.items():
        speeds = num_tokens[kind, size] / np.min(taken, axis=0)
        report[kind].setdefault(shape_name, {})[str(size)] = {
            side.name: round(float(speed), 1) for side, speed in zip(sides, speeds, strict=True)
        }
        if len(sides) == 2:
            ratios = report["ratio_to_transformers"].setdefault(shape_name, {"prefill": {}, "decode": {}})
            ratios[kind][str(size)] = round(float(np.median(taken[:, 1] / taken[:, 0])), 2)


def print_report(report: Mapping[str, Any]) -> None:
    """Prints the report for a person."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for shape_name in report["prefill"]:
        table = Table(title=f"{shape_name}: tokens per second")
        for column in ("what", "ninfer-jax", "transformers", "ratio"):
            table.add_column(column, justify="left" if column == "what" else "right")
        for kind, unit in (("prefill", "tokens"), ("decode", "rows")):
            for size, speeds in report[kind][shape_name].items():
                if size == "host_overhead_ms":
                    continue
                ratio = report["ratio_to_transformers"].get(shape_name, {}).get(kind, {}).get(size)
                table.add_row(
                    f"{kind}, {size} {unit}",
                    f"{speeds['ninfer_jax']:,.0f}",
                    f"{speeds['transformers']:,.0f}" if "transformers" in speeds else "-",
                    "-" if ratio is None else f"{ratio:.2f}x",
                )
        console.print(table)
        for size, milliseconds in report["decode"][shape_name]["host_overhead_ms"].items():
            console.print(f"host time per decode round of {size} rows: {milliseconds:.3f} ms")
        start = report.get("start", {}).get(shape_name)
        if start is not None:
            console.print(
                f"ready in {start['seconds']:.1f} s; peak memory {start['peak_rss_bytes'] / 2**30:.2f} GiB, "
                f"{start['rss_before_bytes'] / 2**30:.2f} before, estimate "
                f"{start['estimated_bytes'] / 2**30:.2f} GiB"
            )
    if not report["ratio_to_transformers"]:
        console.print("not compared: pip install torch transformers, and leave out --dummy")
    console.print(f"compilations after warm-up: {report['compilations_after_warmup']}")


def _has_transformers() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def _status_bytes(field: str) -> int:
    """Returns a line of /proc/self/status in bytes; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)
