"""``ninfer-jax bench session``: saving and restoring a context against computing it again.

Owns what is measured and the report. One run, one engine: prefill, save, restore and a plain file of the same
bytes take turns, so that the ratios mean something on a shared machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ninfer_jax.cli.arguments import print_json
from ninfer_jax.cli.bench_shapes import SHAPES, write_checkpoint

if TYPE_CHECKING:
    from ninfer_jax.engine import Engine

DEFAULT_TOKENS = (1024, 8192, 32768)


def add_parser(subjects: argparse._SubParsersAction) -> None:
    """Attaches the subject."""
    parser = subjects.add_parser("session", help="save and restore, against prefilling the same tokens")
    parser.add_argument("--shape", default="hidden-512", choices=sorted(SHAPES), help="default hidden-512")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=list(DEFAULT_TOKENS), metavar="T", help="default: 1k 8k 32k"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="turns of each kind (default 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Returns the exit code after measuring and reporting."""
    report = measure(args.shape, tuple(args.tokens), repeats=args.repeats)
    if args.json:
        print_json(report)
        return 0
    for tokens, row in report["tokens"].items():
        print(
            f"{tokens:>6} tokens: prefill {row['prefill_s']:.3f} s, save {row['save_s']:.3f} s "
            f"(engine held {row['save_blocks_s'] * 1e3:.0f} ms), restore {row['restore_s']:.3f} s, "
            f"{row['restore_over_prefill']:.3f} of prefilling; plain files {row['plain_write_s']:.3f} s and "
            f"{row['plain_read_s']:.3f} s for {row['megabytes']:.1f} MB"
        )
    return 0


def measure(shape_name: str, token_counts: tuple[int, ...], *, repeats: int) -> dict[str, Any]:
    """Returns the report.

    Args:
        shape_name: of `bench_shapes`.
        token_counts: lengths of the saved contexts, ascending or not.
        repeats: turns; times are medians.
    """
    from ninfer_jax.engine import Engine

    folder = Path(tempfile.mkdtemp(prefix="ninfer-bench-session-"))
    try:
        most = max(token_counts) + 64
        shape = SHAPES[shape_name]
        shape = replace(shape, config={**shape.config, "max_position_embeddings": 2 * most})
        checkpoint = write_checkpoint(shape, folder / "model", with_weights=False)
        with Engine.from_pretrained(
            checkpoint,
            load_format="dummy",
            threaded=False,
            max_context=-(-most // 64) * 64,
            max_concurrency=1,
            kv_capacity=-(-most // 64) * 64,
        ) as engine:
            rows = {}
            for count in token_counts:
                print(f"{count} tokens ...", file=sys.stderr)
                rows[str(count)] = _measure_one(engine, folder / f"s{count}", count, repeats)
        return {"shape": shape_name, "tokens": rows}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure_one(engine: Engine, folder: Path, count: int, repeats: int) -> dict[str, float]:
    from ninfer_jax.sampling_params import SamplingParams

    prompt = [(31 * i + count) % 1000 for i in range(count)]
    times: dict[str, list[float]] = {}

    def timed(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    num_bytes = 0
    for _ in range(repeats):
        engine.clear_cache()
        started = time.perf_counter()
        engine.generate(prompt, SamplingParams(max_tokens=1), session="s")
        timed("prefill_s", time.perf_counter() - started)

        started = time.perf_counter()
        engine._worker.read_session("s")  # the only part for which the worker is held
        timed("save_blocks_s", time.perf_counter() - started)
        started = time.perf_counter()
        engine.save_session("s", folder)
        timed("save_s", time.perf_counter() - started)
        num_bytes = engine.list_sessions(folder.parent)[0].num_bytes

        write_s, read_s = _plain_files(folder.parent / "plain", num_bytes)
        timed("plain_write_s", write_s)
        timed("plain_read_s", read_s)

        engine.clear_cache()
        started = time.perf_counter()
        engine.restore_session(folder, session="s")
        timed("restore_s", time.perf_counter() - started)
        shutil.rmtree(folder)
    row = {name: statistics.median(seconds) for name, seconds in times.items()}
    row["megabytes"] = num_bytes / 1e6
    row["save_mb_per_s"] = row["megabytes"] / row["save_s"]
    row["restore_mb_per_s"] = row["megabytes"] / row["restore_s"]
    row["restore_over_prefill"] = row["restore_s"] / row["prefill_s"]
    row["save_over_plain"] = row["save_s"] / row["plain_write_s"]
    row["restore_over_plain"] = row["restore_s"] / row["plain_read_s"]
    return {name: round(value, 4) for name, value in row.items()}


def _plain_files(path: Path, num_bytes: int) -> tuple[float, float]:
    """Returns the seconds of one safetensors file of as many bytes: written and synced, then read."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    arrays = {"x": np.random.default_rng(0).integers(0, 255, num_bytes, np.uint8)}
    started = time.perf_counter()
    save_file(arrays, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    written_s = time.perf_counter() - started
    started = time.perf_counter()
    load_file(path)
    return written_s, time.perf_counter() - started
