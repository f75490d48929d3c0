"""Owns the two steps from a config to a running Program: size first, then allocate and compile.

It does not own loading: weights come between the two, so that a capacity that cannot fit is refused before
any is read.
"""

from __future__ import annotations

import jax

from ninfer_jax.model.cache import make_cache_spec
from ninfer_jax.model.config import Qwen35Config
from ninfer_jax.model.loader import DTypeName, LoadedModel
from ninfer_jax.program.execution import Progress, make_model_executor
from ninfer_jax.program.free_memory import free_device_bytes
from ninfer_jax.program.program import Program
from ninfer_jax.program.sizing import SizingOptions, SizingPlan, plan_capacity
from ninfer_jax.program.unit_costs import make_unit_costs


def size_program(
    config: Qwen35Config,
    options: SizingOptions,
    *,
    dtype: DTypeName,
    prefill_chunk_tokens: int,
    device: jax.Device,
    free_bytes: int | None = None,
) -> SizingPlan:
    """Returns the capacity an engine of this model will have; reads no weight and allocates nothing.

    Args:
        config: the geometry.
        options: what the user asked for.
        dtype: of weights, activations and KV.
        prefill_chunk_tokens: the longest chunk.
        device: where everything will live; weights must not be there yet.
        free_bytes: F; measured on the device when None.

    Raises:
        OptionError: if it cannot fit, naming what would.
    """
    spec = make_cache_spec(config, dtype)
    costs = make_unit_costs(
        config,
        spec,
        dtype=dtype,
        prefill_chunk_tokens=prefill_chunk_tokens,
        num_lanes=options.max_concurrency,
    )
    return plan_capacity(options, costs, free_device_bytes(device) if free_bytes is None else free_bytes)


def open_program(
    model: LoadedModel,
    plan: SizingPlan,
    *,
    prefill_chunk_tokens: int,
    eos_token_ids: frozenset[int],
    allowed_vocab_size: int,
    progress: Progress | None = None,
) -> Program:
    """Returns a Program over the real executor, allocated, compiled and warm.

    Args:
        model: taken over; closing the Program frees its weights.
        plan: from `size_program` with the model's own config and dtype.
        prefill_chunk_tokens: the longest chunk.
        eos_token_ids: held back by `min_tokens`.
        allowed_vocab_size: ids from here on are never drawn.
        progress: told after each compiled program.
    """
    executor = make_model_executor(
        model,
        make_cache_spec(model.config, model.dtype.name),
        plan.capacity,
        prefill_chunk_tokens=prefill_chunk_tokens,
        eos_token_ids=eos_token_ids,
        allowed_vocab_size=allowed_vocab_size,
        progress=progress,
    )
    return Program(plan.capacity, executor, prefill_chunk_tokens=prefill_chunk_tokens, memory=plan.memory)
