"""The parts that one engine is made of, and how they describe themselves.

Owns values and text only; ``assembly`` makes the parts, the engine runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ninfer_jax.options import ResolvedOptions
from ninfer_jax.program.memory_table import format_bytes

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


@dataclass(frozen=True, eq=False)
class EngineParts:
    """The parts of one engine, ready to run. Built by ``assemble``, or around an executor of a test."""

    options: ResolvedOptions
    frontend: Frontend
    program: Program
    model: ModelFacts

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
    switches = [
        name for name in ("endpoint_anchors", "recency_eviction", "kv_lease_growth") if getattr(cache, name)
    ]
    return [
        *lines,
        "reuse      not yet: every request starts from root; recorded for it:",
        f"           {cache.max_private_continuations} private continuations with "
        f"{cache.max_long_anchors_per_continuation} anchors each, {cache.max_shared_prefixes} shared; "
        f"{', '.join(switches) or 'no switches'}",
        f"           {cache.host_state_slots} host states, host KV "
        f"{format_bytes(cache.host_kv_capacity_bytes)} (not allocated)",
        f"states     {options.total_device_state_slots} on the device",
    ]
