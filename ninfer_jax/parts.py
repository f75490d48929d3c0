"""The parts that one engine is made of, and how they describe themselves.

Owns values and text only; ``assembly`` makes the parts, the engine runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ninfer_jax.context_cache.ports import CaptureUnits
from ninfer_jax.context_cache.resource_manager import ResourceManager
from ninfer_jax.options import PAGE_TOKENS, ResolvedOptions
from ninfer_jax.planner.cost import MachineCostModel, resolve_cost_model

if TYPE_CHECKING:
    from ninfer_jax.frontend.frontend import Frontend
    from ninfer_jax.program.program import Program


@dataclass(frozen=True)
class ModelFacts:
    """What a report says about the resident model."""

    source: str
    signature: str  # a digest of the geometry, not of the weights
    num_layers: int
    num_full_attention_layers: int
    is_moe: bool
    vocab_size: int
    dtype: str
    device: str
    tokenizer_digest: str = ""
    template_digest: str = ""


@dataclass(frozen=True, eq=False)
class EngineParts:
    """The parts of one engine, ready to run. Built by ``assemble``, or around an executor of a test."""

    options: ResolvedOptions
    frontend: Frontend
    program: Program
    model: ModelFacts
    prices: MachineCostModel = field(default_factory=lambda: resolve_cost_model(platform="cpu"))

    def describe(self) -> str:
        """Returns the model, the resolved options and the memory table as text."""
        model, options = self.model, self.options
        kind = "mixture of experts" if model.is_moe else "dense"
        lines = [
            f"model      {model.source}: {model.num_layers} layers ({model.num_full_attention_layers} full "
            f"attention), {kind}, vocabulary {model.vocab_size}, signature {model.signature}",
            f"device     {model.device}, {model.dtype}, attention kernels: {self.program.attention_backend}",
            *_option_lines(options, self.program.prefill_chunk_tokens),
            "",
            self.program.memory_table().render(),
        ]
        return "\n".join(lines)


def make_manager(parts: EngineParts) -> ResourceManager:
    """Returns the manager of an engine made of these parts."""
    capacity = parts.program.capacity
    return ResourceManager(
        parts.program,
        parts.options.cache,
        num_lanes=capacity.num_lanes,
        model=parts.prices,
        units=CaptureUnits(
            page_tokens=PAGE_TOKENS,
            prefill_chunk_tokens=parts.program.prefill_chunk_tokens,
            state_bytes=capacity.state_image_bytes,
            page_bytes=tuple(pool.page_bytes for pool in capacity.pools),
        ),
    )


def _option_lines(options: ResolvedOptions, prefill_chunk_tokens: int) -> list[str]:
    cache = options.cache
    capacity = "sized from free memory" if options.kv_capacity == "auto" else f"{options.kv_capacity} tokens"
    lines = [
        f"context    {options.max_context} tokens per request, KV capacity {capacity}",
        f"requests   {options.max_concurrency} at once, {options.max_pending_requests} waiting for up to "
        f"{options.pending_timeout_s:g} s, prefill in chunks of {prefill_chunk_tokens}",
    ]
    if not cache.enabled:
        return [*lines, "reuse      off: every request starts from root"]
    recency = ", eviction by recency" if cache.recency_eviction else ""
    return [
        *lines,
        f"reuse      {cache.max_private_continuations} private continuations with "
        f"{cache.max_long_anchors_per_continuation} anchors each, {cache.max_shared_prefixes} shared"
        f"{recency}",
        f"states     {options.total_device_state_slots} on the device, {cache.host_state_slots} on the host",
    ]
