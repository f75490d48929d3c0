"""The host's share of a decode round, measured by an engine whose compiled programs compute nothing.

Owns the empty programs. They take and give back exactly the buffers of the real ones (donated, and every
weight still an argument), so what is left of a round is what runs outside the model: scheduling, page
mapping, packing, dispatch, the tokens' way to the host, commit, output rules and publication.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ninfer_jax.assembly import draw_up, model_facts
from ninfer_jax.cli.bench_sides import EngineSide
from ninfer_jax.engine import Engine
from ninfer_jax.frontend.frontend import Frontend
from ninfer_jax.model.cache import Cache, make_cache_spec
from ninfer_jax.model.loader import load_model
from ninfer_jax.model.sampling import SamplerState
from ninfer_jax.parts import EngineParts
from ninfer_jax.program.compilation import CompileCounter
from ninfer_jax.program.execution import Buffers, ModelExecutor, Programs, make_buffers, prefill_buckets
from ninfer_jax.program.packing import RESULT_WIDTH
from ninfer_jax.program.program import Program
from ninfer_jax.program.row_layout import ROW_WIDTH
from ninfer_jax.program.weight_bundle import WeightBundle, make_weight_bundle


def host_overhead_s(
    directory: Path,
    *,
    num_rows: int,
    num_steps: int,
    repeats: int,
    clock: Callable[[], float] = time.thread_time,
) -> float:
    """Returns the median seconds per decode round of an engine that computes nothing.

    By default seconds of the driving thread's own processor time: other load on the machine would count as
    overhead on a wall clock, and an empty program runs in the thread that calls it.

    Args:
        directory: a checkpoint, for its geometry; weights are random.
        num_rows: B, also the engine's concurrency.
        num_steps: rounds per repetition.
        repeats: repetitions; the median of their means counts.
        clock: seconds.
    """
    side = EngineSide(_empty_engine(directory, num_rows), clock)
    prompts = np.ones((num_rows, 16), np.int32)
    try:
        side.decode_s(prompts, num_steps)
        return float(np.median([side.decode_s(prompts, num_steps) / num_steps for _ in range(repeats)]))
    finally:
        side.close()


def _empty_engine(directory: Path, num_rows: int) -> Engine:
    changes = {
        "max_concurrency": num_rows,
        "max_context": 1024,
        "kv_capacity": 1024 * num_rows,
        "load_format": "dummy",
        "prefill_chunk": 64,
    }
    plan = draw_up(directory, None, changes)
    capacity = plan.sizing.capacity
    model = load_model(directory, dtype="float32", load_format="dummy")
    spec = make_cache_spec(plan.config, "float32")
    vocab_size = plan.config.vocab_size

    def fresh() -> Buffers:
        return make_buffers(spec, capacity, vocab_size, vocab_size)

    buffers, eos_mask = fresh(), jnp.zeros(vocab_size, bool)
    weights = make_weight_bundle(model.leaves)
    executor = ModelExecutor(
        weights,
        _empty_programs(weights, buffers, eos_mask, num_rows, capacity.row_pages),
        buffers,
        eos_mask,
        make_buffers_fn=fresh,
        capacity=capacity,
        counter=CompileCounter(),
    )
    parts = EngineParts(
        options=plan.options,
        frontend=Frontend.from_directory(directory, vocab_size=vocab_size),
        program=Program(capacity, executor, prefill_chunk_tokens=64, memory=plan.sizing.memory),
        model=model_facts(plan),
    )
    return Engine(parts, threaded=False)


def _empty_programs(
    weights: WeightBundle, buffers: Buffers, eos_mask: jax.Array, num_lanes: int, width: int
) -> Programs:
    def decode(
        arrays: tuple[jax.Array, ...],
        eos_mask: jax.Array,
        lanes: SamplerState,
        cache: Cache,
        counts: jax.Array,
        rows: jax.Array,
    ) -> tuple[Cache, jax.Array, jax.Array]:
        return cache, counts, jnp.zeros((rows.shape[0], RESULT_WIDTH), jnp.int32)

    def draw(
        arrays: tuple[jax.Array, ...],
        eos_mask: jax.Array,
        lanes: SamplerState,
        cache: Cache,
        counts: jax.Array,
        rows: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        return counts, jnp.zeros((rows.shape[0], RESULT_WIDTH), jnp.int32)

    def prefill(arrays: tuple[jax.Array, ...], cache: Cache, packed: jax.Array) -> Cache:
        return cache

    def set_lane(
        counts: jax.Array,
        lanes: SamplerState,
        lane: jax.Array,
        bias: jax.Array,
        seen: jax.Array,
        banned: jax.Array,
    ) -> tuple[jax.Array, SamplerState]:
        return counts, lanes

    # Kept although unused: handing over hundreds of weights is part of what a round costs.
    jit_decode = jax.jit(decode, donate_argnames=("cache", "counts"), keep_unused=True)
    jit_draw = jax.jit(draw, donate_argnames=("counts",), keep_unused=True)
    jit_prefill = jax.jit(prefill, donate_argnames=("cache",), keep_unused=True)
    jit_set_lane = jax.jit(set_lane, donate_argnames=("counts", "lanes"), keep_unused=True)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    arrays, cache, counts, lanes = weights.arrays, buffers.cache, buffers.counts, buffers.lanes
    flags = jax.ShapeDtypeStruct(eos_mask.shape, jnp.bool_)
    bias = jax.ShapeDtypeStruct(eos_mask.shape, jnp.float32)
    return Programs(
        decode={
            size: jit_decode.lower(
                arrays, eos_mask, lanes, cache, counts, ints(size, ROW_WIDTH + width)
            ).compile()
            for size in range(1, num_lanes + 1)
        },
        prefill={
            size: jit_prefill.lower(arrays, cache, ints(4 + width + 4 * size)).compile()
            for size in prefill_buckets(64)
        },
        draw_from_tail={
            1: jit_draw.lower(arrays, eos_mask, lanes, cache, counts, ints(1, ROW_WIDTH + width)).compile()
        },
        set_lane=jit_set_lane.lower(counts, lanes, ints(), bias, flags, flags).compile(),
    )
