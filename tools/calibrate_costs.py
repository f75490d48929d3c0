"""Measures what copies and prefill cost on this machine, and writes a preset for the planner's cost model.

    python -m tools.calibrate_costs --output costs.json        (from the root of the checkout)

Owns the measurements and the fits; the file format and its checks are `planner/cost.py`'s. A price only
orders plans that are feasible anyway, so a noisy machine gives worse choices, never wrong ones. Run it on a
quiet machine: every sample is the median of a few repeats, and the fit weighs relative errors.

Vision work cannot be measured on a text model: its two coefficients are the generic ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ninfer_jax.assembly import checkpoint_directory
from ninfer_jax.model.cache import PAGE_TOKENS, Cache, make_cache, make_cache_spec
from ninfer_jax.model.loader import LoadedModel, load_model
from ninfer_jax.model.transformer import PrefillChunk, prefill_chunk
from ninfer_jax.planner.cost import (
    GENERIC_CPU,
    GENERIC_GPU,
    Q32,
    CostPresets,
    MachinePreset,
    PrefillModel,
    TransferCoefficients,
    TransferModel,
    hardware_class,
    parse_presets,
    prefill_signature,
    presets_text,
)
from ninfer_jax.planner.work import Direction, attention_pairs

KIB = 1024
BATCH_OPERATIONS = (1, 2, 4, 8, 16)
BATCH_BYTES = tuple(KIB << n for n in (2, 8, 12, 14))  # of one operation: 4 KiB to 16 MiB
MAX_BATCH_BYTES = 64 * KIB * KIB
CHUNKS = (64, 128, 256, 512, 1024)
STARTS = (0, 512, 1024, 3072)


@dataclass(frozen=True)
class Fit:
    """Coefficients and how well they say what was measured."""

    coefficients: tuple[float, ...]
    median_error: float  # relative
    num_samples: int


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the preset; 0 when done."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo", help="a checkpoint directory, or 'demo'")
    parser.add_argument("--dummy", action="store_true", help="random weights: only config.json is read")
    parser.add_argument("--output", type=Path, help="file to write (default: standard output)")
    parser.add_argument("--repeats", type=int, default=7, help="of every sample; the median counts")
    parser.add_argument("--quick", action="store_true", help="few small samples, for a test of the tool")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    weights = "dummy" if args.dummy else "auto"
    model = load_model(checkpoint_directory(args.model), load_format=weights)
    text = calibrate(model, repeats=args.repeats, is_quick=args.quick)
    if args.output is None:
        print(text, end="")
    else:
        args.output.write_text(text)
        print(json.dumps(json.loads(text)["provenance"], indent=1), file=sys.stderr)
    return 0


def calibrate(model: LoadedModel, *, repeats: int, is_quick: bool) -> str:
    """Returns the preset file's text, already read back once."""
    device = jax.devices()[0]
    sizes = BATCH_BYTES[:2] if is_quick else BATCH_BYTES
    counts = BATCH_OPERATIONS[:3] if is_quick else BATCH_OPERATIONS
    transfers = {d: fit_transfer(measure_transfers(d, counts, sizes, repeats)) for d in Direction}
    chunks, starts = (CHUNKS[:2], STARTS[:2]) if is_quick else (CHUNKS, STARTS)
    prefill = fit_prefill(measure_prefill(model, chunks, starts, repeats))
    generic = (GENERIC_CPU if device.platform == "cpu" else GENERIC_GPU).prefill
    chunk_ns, token_ns, pair_ns = prefill.coefficients
    machine = MachinePreset(
        hardware_class(device.device_kind, getattr(device, "compute_capability", None)),
        TransferModel(*(_transfer_coefficients(transfers[d]) for d in Direction)),
        (
            (
                prefill_signature(prefill_facts(model)),
                PrefillModel(
                    round(chunk_ns),
                    round(token_ns * Q32),
                    round(pair_ns * Q32),
                    generic.vision_item_ns,
                    generic.patch_q32,
                ),
            ),
        ),
    )
    presets = CostPresets((machine,))
    fits = {**{d.name.lower(): f for d, f in transfers.items()}, "prefill": prefill}
    provenance = {
        "tool": "tools/calibrate_costs.py",
        "jax": jax.__version__,
        "platform": device.platform,
        "repeats": repeats,
        "median_error_percent": {n: round(100 * f.median_error) for n, f in fits.items()},
        "samples": {n: f.num_samples for n, f in fits.items()},
    }
    text = presets_text(presets, provenance=provenance)
    if parse_presets(text) != presets:
        raise AssertionError("the preset does not read back as it was written")
    return text


def prefill_facts(model: LoadedModel) -> dict[str, Any]:
    """Returns what the prefill speed of a model depends on, for `prefill_signature` (O-3)."""
    return {"text": model.config.signature, "vision": None, "dtype": jnp.dtype(model.dtype).name}


def _transfer_coefficients(fit: Fit) -> TransferCoefficients:
    batch_ns, operation_ns, byte_ns = fit.coefficients
    return TransferCoefficients(round(batch_ns), round(operation_ns), max(round(byte_ns * Q32), 1))


# ---------------------------------------------------------------- samples


def measure_transfers(
    direction: Direction, counts: Sequence[int], sizes: Sequence[int], repeats: int
) -> np.ndarray:
    """Returns float64[n, 3] rows of operations, bytes, nanoseconds of coalesced batches."""
    device = jax.devices()[0]
    on_device = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    on_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    source, target = {
        Direction.D2H: (on_device, on_host),
        Direction.H2D: (on_host, on_device),
        Direction.D2D: (on_device, on_device),
    }[direction]
    copy = jax.jit(jnp.copy)
    rows = []
    for size in sizes:
        for count in counts:
            if size * count > MAX_BATCH_BYTES:
                continue
            arrays = [jax.device_put(np.full(size, i, np.uint8), source) for i in range(count)]

            def move(arrays: list[jax.Array] = arrays) -> list[jax.Array]:
                if direction == Direction.D2D:
                    return [copy(a) for a in arrays]
                return [jax.device_put(a, target) for a in arrays]

            rows.append((count, count * size, median_ns(move, repeats)))
    return np.asarray(rows, np.float64)


def measure_prefill(
    model: LoadedModel, chunks: Sequence[int], starts: Sequence[int], repeats: int
) -> np.ndarray:
    """Returns float64[n, 3] rows of tokens, attention pairs, nanoseconds of single chunks."""
    num_pages = -(-(max(chunks) + max(starts)) // PAGE_TOKENS)
    spec = make_cache_spec(model.config, jnp.dtype(model.dtype).name)
    cache = make_cache(spec, num_pages, 1)

    @partial(jax.jit, donate_argnums=1)
    def step(leaves: tuple[jax.Array, ...], cache: Cache, chunk: PrefillChunk) -> tuple[jax.Array, Cache]:
        return prefill_chunk(model.module(leaves), cache, chunk)

    rows = []
    for tokens in chunks:
        for start in starts:
            positions = np.broadcast_to(np.arange(start, start + tokens, dtype=np.int32), (3, tokens))
            chunk = PrefillChunk(
                jnp.zeros(tokens, jnp.int32),
                jnp.asarray(positions),
                jnp.arange(num_pages, dtype=jnp.int32),
                jnp.int32(start),
                jnp.int32(tokens),
                jnp.int32(0),
                jnp.int32(0),
            )

            def run(chunk: PrefillChunk = chunk) -> jax.Array:
                nonlocal cache
                logits, cache = step(model.leaves, cache, chunk)
                return logits

            rows.append((tokens, attention_pairs(start, tokens), median_ns(run, repeats)))
    return np.asarray(rows, np.float64)


def median_ns(function: Callable[[], Any], repeats: int) -> float:
    """Returns the median nanoseconds until the results are there, after one warm-up call."""
    jax.block_until_ready(function())
    samples = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        jax.block_until_ready(function())
        samples.append(time.perf_counter_ns() - start)
    return float(np.median(samples))


# ---------------------------------------------------------------- fits


def fit_transfer(rows: np.ndarray) -> Fit:
    """Returns batch, operation and byte nanoseconds of ``max(batch + operations * op, bytes * rate)`` (O-2).

    Which branch a sample is on depends on the answer: start by size, fit both, assign again until it is
    stable.

    Args:
        rows: float64[n, 3], operations, bytes, nanoseconds.
    """
    operations, num_bytes, ns = rows.T
    by_bytes = num_bytes / operations >= np.median(num_bytes / operations)
    batch = operation = rate = 0.0
    for _ in range(20):
        if by_bytes.all() or not by_bytes.any():
            by_bytes = num_bytes >= np.median(num_bytes)
        counted = np.stack([np.ones(np.sum(~by_bytes)), operations[~by_bytes]], 1)
        batch, operation = non_negative(counted, ns[~by_bytes])
        (rate,) = non_negative(num_bytes[by_bytes, None], ns[by_bytes])
        now = num_bytes * rate > batch + operation * operations
        if np.array_equal(now, by_bytes):
            break
        by_bytes = now
    said = np.maximum(batch + operation * operations, num_bytes * rate)
    return Fit((batch, operation, rate), float(np.median(np.abs(said / ns - 1))), len(rows))


def fit_prefill(rows: np.ndarray) -> Fit:
    """Returns chunk, token and pair nanoseconds.

    Args:
        rows: float64[n, 3], tokens, pairs, nanoseconds.
    """
    tokens, pairs, ns = rows.T
    features = np.stack([np.ones(len(rows)), tokens, pairs], 1)
    found = non_negative(features, ns)
    return Fit(tuple(found), float(np.median(np.abs(features @ found / ns - 1))), len(rows))


def non_negative(features: np.ndarray, ns: np.ndarray) -> np.ndarray:
    """Returns the least-squares coefficients of relative errors, none below zero.

    A coefficient that comes out negative is noise: it is left out and the others are fitted again. With at
    most three features trying every subset is exact.
    """
    weighted, ones = features / ns[:, None], np.ones(len(ns))
    best, best_error = np.zeros(features.shape[1]), float(len(ns))
    for subset in range(1, 1 << features.shape[1]):
        columns = [i for i in range(features.shape[1]) if subset >> i & 1]
        found = np.linalg.lstsq(weighted[:, columns], ones, rcond=None)[0]
        error = float(np.sum((weighted[:, columns] @ found - 1) ** 2))
        if (found >= 0).all() and error < best_error:
            best, best_error = np.zeros(features.shape[1]), error
            best[columns] = found
    return best


if __name__ == "__main__":
    sys.exit(main())
