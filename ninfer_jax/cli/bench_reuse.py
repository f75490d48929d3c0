"""``ninfer-jax bench reuse``: what starting from kept context costs against computing it again.

Owns what is measured and the report. Everything of one shape runs on one engine in one run: only ratios mean
much on a shared machine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ninfer_jax.cli.arguments import print_json
from ninfer_jax.cli.bench_shapes import SHAPES, hf_config, write_checkpoint
from ninfer_jax.options import PAGE_TOKENS

if TYPE_CHECKING:
    from ninfer_jax.engine import Engine
    from ninfer_jax.handle import RequestHandle
    from ninfer_jax.results import GenerationResult

DEFAULT_SHAPES = ("dense-tiny", "hidden-512")
DEFAULT_TOKENS = (256, 1024, 4096)
SUFFIX_TOKENS = 16
ROOM_TOKENS = 512  # beside the longest prompt, for what the turns themselves leave behind
KINDS = ("device", "host", "identical")


def add_parser(subjects: argparse._SubParsersAction) -> None:
    """Attaches the subject."""
    parser = subjects.add_parser("reuse", help="time to first token from kept context, against from nothing")
    parser.add_argument(
        "--shape",
        action="append",
        choices=sorted(SHAPES),
        help=f"may be repeated (default: {' and '.join(DEFAULT_SHAPES)})",
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=list(DEFAULT_TOKENS), metavar="T", help="default: 256 1k 4k"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="turns of each kind (default 3)")
    parser.add_argument("--prefill-chunk", type=int, default=1024, metavar="T", help="default 1024")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures and reports."""
    report = {name: measure(name, args.tokens, repeats=args.repeats) for name in args.shape or DEFAULT_SHAPES}
    if args.json:
        print_json(report)
        return 0
    for name, found in report.items():
        print(name)
        for tokens, row in found["tokens"].items():
            ratios = ", ".join(
                f"{kind} {row[kind]['first_token_s'] * 1e3:.1f} ms ({row[kind]['ratio_to_cold']:.3f})"
                for kind in KINDS
            )
            print(f"{tokens:>6} tokens: cold {row['cold']['first_token_s'] * 1e3:.1f} ms; {ratios}")
        planning, decode = found["planning"], found["decode"]
        print(
            f"planning of {planning['admissions']} admissions: p50 {planning['p50_ms']:.2f} ms, p99 "
            f"{planning['p99_ms']:.2f} ms; decode step {decode['plain_ms']:.2f} ms, with a copy in flight "
            f"{decode['copying_ms']} ms in {decode['copying_steps']} steps; a boundary that pushes a context "
            f"out {decode['starting_ms']} ms, {decode['offloads']} of them"
        )
    return 0


def measure(
    shape_name: str, token_counts: Sequence[int], *, repeats: int, prefill_chunk: int = 1024
) -> dict[str, Any]:
    """Returns the report of one shape.

    Args:
        shape_name: of `SHAPES`.
        token_counts: prompt lengths.
        repeats: turns of each kind; a time is the best turn's, which other load disturbed least.
        prefill_chunk: tokens of one prefill step.
    """
    from ninfer_jax.engine import Engine

    shape = SHAPES[shape_name]
    max_context = max(token_counts) + ROOM_TOKENS
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(shape, Path(directory), with_weights=False)
        with Engine.from_pretrained(
            path,
            load_format="dummy",
            threaded=False,
            max_context=max_context,
            kv_capacity=max_context,  # one request may need it all: so a context is pushed to the host
            max_concurrency=2,
            prefill_chunk=prefill_chunk,
            device_state_slots=6 + repeats,
            host_state_slots=32,
            max_private_continuations=64,
        ) as engine:
            bench = _Bench(engine, hf_config(shape)["vocab_size"], repeats)
            rows = {str(tokens): bench.first_tokens(tokens) for tokens in token_counts}
            decode = bench.decode_steps(max(token_counts))
            return {
                "repeats": repeats,
                "tokens": rows,
                "planning": bench.planning(),
                "decode": decode,
                "compilations_after_warmup": engine._parts.program.compilations_after_warmup,
            }


class _Bench:
    """Asks one engine in different ways and keeps the times."""

    def __init__(self, engine: Engine, vocab_size: int, repeats: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._repeats = repeats
        self._rng = np.random.default_rng(0)
        self._planning_ns: list[int] = []

    def _tokens(self, count: int) -> list[int]:
        return self._rng.integers(self._vocab_size, size=count).tolist()

    def _submit(self, prompt: list[int], max_tokens: int, **hints: Any) -> RequestHandle:
        from ninfer_jax.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return self._engine.submit(prompt, sampling=params, **hints)

    def _ask(self, prompt: list[int], *, source: str | None, **hints: Any) -> GenerationResult:
        result = self._submit(prompt, 1, **hints).result()
        record = result.materialization
        assert record is not None, "an answered request was admitted"
        self._planning_ns.append(record.planning_ns)
        if source is not None and record.source != source:
            raise RuntimeError(f"expected to start from {source}, not {record.source}: {record}")
        return result

    def _push_to_host(self) -> None:
        """Starts a request that may need every page, and drops it: what is kept goes to the host."""
        room = self._engine.options.max_context - 1
        handle = self._submit([1], room, cache="disabled")
        while self._engine.stats()["active"] == 0:
            self._engine.step()
        handle.cancel()
        handle.result()

    def first_tokens(self, num_tokens: int) -> dict[str, Any]:
        """Returns times from submission to first token for one prompt length."""
        engine, times = self._engine, {kind: [] for kind in ("cold", *KINDS)}
        restored = 0
        for _ in range(self._repeats):
            engine.clear_cache()
            prompt = self._tokens(num_tokens)
            # The one token drawn is never fed, so what stays ends exactly where the prompt does.
            times["cold"].append(self._ask(prompt, source="root", session="base").timings.first_token_s)
        for _ in range(self._repeats):
            warm = self._ask([*prompt, *self._tokens(SUFFIX_TOKENS)], source="private_endpoint")
            times["device"].append(warm.timings.first_token_s)
            times["identical"].append(self._ask(prompt, source="private_endpoint").timings.first_token_s)
        for _ in range(self._repeats):
            self._push_to_host()
            warm = self._ask([*prompt, *self._tokens(SUFFIX_TOKENS)], source="private_endpoint")
            times["host"].append(warm.timings.first_token_s)
            assert warm.materialization is not None
            restored = max(restored, warm.materialization.restored_bytes)
        cold_s = min(times["cold"])
        return {
            "cold": {"first_token_s": cold_s},
            **{
                kind: {"first_token_s": min(times[kind]), "ratio_to_cold": min(times[kind]) / cold_s}
                for kind in KINDS
            },
            "restored_bytes": restored,
        }

    def decode_steps(self, num_tokens: int) -> dict[str, Any]:
        """Returns the median step of one decoding lane, alone and while a context goes to the host.

        A step counts as copying if the copy was in flight when it began, or was started in it; the time that
        planning took in it is another figure and taken out. On CPU a copy begins and ends inside the boundary
        that starts its request, one chunk of prefill long: then there is no such step, and how long that
        boundary held the lane is told instead.
        """
        from unittest.mock import patch

        from ninfer_jax import worker

        # Planning may take as long as alone: with less, a slow machine drops the context and copies nothing.
        with patch.object(worker, "SHARED_ALLOWANCE_NS", worker.ALONE_ALLOWANCE_NS):
            return self._decode_steps(num_tokens)

    def _decode_steps(self, num_tokens: int) -> dict[str, Any]:
        engine, program = self._engine, self._engine._parts.program
        engine.clear_cache()
        kept = self._tokens(num_tokens)
        self._ask(kept, source="root", session="base")
        plain_s: list[float] = []
        copying_s: list[float] = []
        starting_s: list[float] = []
        for _ in range(self._repeats + 2):
            lane = self._submit(self._tokens(8), 48, cache="disabled")
            for _ in range(24):
                seconds, what = self._step()
                if what == {"decode_rows"}:
                    plain_s.append(seconds)
            # Every page but the one of the lane that decodes.
            pusher = self._submit([1], engine.options.max_context - PAGE_TOKENS - 1, cache="disabled")
            for _ in range(16):
                was_copying = program.has_open_transition
                seconds, what = self._step()
                if "offloaded_bytes" in what:
                    starting_s.append(seconds)
                if "decode_rows" in what and "prefill_chunks" not in what:
                    if was_copying or "offloaded_bytes" in what:
                        copying_s.append(seconds)
            for handle in (pusher, lane):
                handle.cancel()
                handle.result()
            self._ask([*kept, *self._tokens(SUFFIX_TOKENS)], source=None)  # brings it back
        plain_ms = statistics.median(plain_s) * 1e3
        copying_ms = statistics.median(copying_s) * 1e3 if copying_s else None
        return {
            "plain_ms": plain_ms,
            "copying_ms": copying_ms,
            "copying_steps": len(copying_s),
            "ratio": None if copying_ms is None else copying_ms / plain_ms,
            "starting_ms": statistics.median(starting_s) * 1e3 if starting_s else None,
            "offloads": len(starting_s),
        }

    def _step(self) -> tuple[float, set[str]]:
        """Returns the seconds of one boundary without planning, and which totals it raised."""
        before = self._engine.stats()
        started = time.perf_counter()
        self._engine.step()
        seconds = time.perf_counter() - started
        after = self._engine.stats()
        names = ("decode_rows", "prefill_chunks", "offloaded_bytes")
        planning_s = (after["planning_ns"] - before["planning_ns"]) / 1e9
        return seconds - planning_s, {name for name in names if after[name] > before[name]}

    def planning(self) -> dict[str, Any]:
        """Returns planning time per admission."""
        times_ms = np.array(self._planning_ns) / 1e6
        return {
            "admissions": len(times_ms),
            "p50_ms": float(np.percentile(times_ms, 50)),
            "p99_ms": float(np.percentile(times_ms, 99)),
        }
