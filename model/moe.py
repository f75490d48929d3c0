"""Owns the sparse feed-forward block: routing, the routed experts and the shared expert.

It owns no dense FFN (`layers.py`, which the shared expert reuses). Every weight of an expert is read at most
once per block of rows that chose it, and no expert that nobody chose is read at all.

Letters: N tokens, H hidden size, E experts, k experts per token, F expert width, A = N * k assignments.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ninfer_jax.model.config import Qwen35Config
from ninfer_jax.model.layers import DenseFFN, matmul, swiglu, weight_param

# Rows of one expert worked on at once: as many as decode can have, or enough to keep a matrix unit busy.
_FEW_ROWS, _MANY_ROWS = 8, 64


def route(x: jax.Array, router: jax.Array, num_experts_per_tok: int) -> tuple[jax.Array, jax.Array]:
    """Returns (weights [N, k] in the dtype of `x`, experts int32[N, k]): exact top-k, always renormalised.

    Args:
        x: [N, H].
        router: [H, E].
        num_experts_per_tok: k.
    """
    probabilities = jax.nn.softmax(matmul(x, router).astype(jnp.float32), axis=-1)
    weights, experts = lax.top_k(probabilities, num_experts_per_tok)
    return (weights / jnp.sum(weights, axis=-1, keepdims=True)).astype(x.dtype), experts


def routed_experts(
    x: jax.Array, weights: jax.Array, experts: jax.Array, gate_up: jax.Array, down: jax.Array
) -> jax.Array:
    """Returns [N, H], the weighted sum of each token's experts.

    Assignments are sorted by expert and cut into blocks of one expert each; a loop runs over the blocks that
    exist, so the work follows the routing and the memory is one block. Not differentiable.

    Args:
        x: [N, H].
        weights: [N, k].
        experts: int32[N, k].
        gate_up: [E, H, 2F].
        down: [E, F, H].
    """
    num_tokens, per_token = experts.shape
    num_experts = gate_up.shape[0]
    rows = _FEW_ROWS if num_tokens <= _FEW_ROWS else _MANY_ROWS
    order = jnp.argsort(experts.reshape(-1), stable=True)
    counts = jnp.zeros(num_experts, jnp.int32).at[experts.reshape(-1)].add(1)
    first = jnp.cumsum(counts) - counts  # of each expert's assignments, in sorted order
    blocks = -(-counts // rows)
    last_block = jnp.cumsum(blocks)
    # Padded so that a block may start anywhere; a padding row points past the tokens and is dropped.
    sorted_tokens = jnp.pad(order // per_token, (0, rows), constant_values=num_tokens)
    sorted_weights = jnp.pad(weights.reshape(-1)[order], (0, rows))

    def run_block(index: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last_block, index, side="right").astype(jnp.int32)
        within = (index - (last_block[expert] - blocks[expert])) * rows
        start = first[expert] + within
        mine = jnp.arange(rows) < counts[expert] - within
        tokens = jnp.where(mine, lax.dynamic_slice_in_dim(sorted_tokens, start, rows), num_tokens)
        scale = lax.dynamic_slice_in_dim(sorted_weights, start, rows)
        some = x.at[tokens].get(mode="fill", fill_value=0)
        hidden = swiglu(matmul(some, lax.dynamic_index_in_dim(gate_up, expert, keepdims=False)))
        result = matmul(hidden, lax.dynamic_index_in_dim(down, expert, keepdims=False))
        return out.at[tokens].add(result * scale[:, None], mode="drop")

    return lax.fori_loop(0, last_block[-1], run_block, jnp.zeros_like(x))


class SparseFFN(nnx.Module):
    """Routed experts plus one shared expert with its own scalar gate."""

    def __init__(self, config: Qwen35Config, dtype: jnp.dtype) -> None:
        assert config.moe is not None
        moe, hidden = config.moe, config.hidden_size
        self.num_experts_per_tok = moe.num_experts_per_tok
        self.router = weight_param((hidden, moe.num_experts), dtype)
        self.gate_up = weight_param((moe.num_experts, hidden, 2 * moe.moe_intermediate_size), dtype)
        self.down = weight_param((moe.num_experts, moe.moe_intermediate_size, hidden), dtype)
        self.shared = DenseFFN(hidden, moe.shared_expert_intermediate_size, dtype)
        self.shared_gate = weight_param((hidden, 1), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the block's output for `x` [N, H], before the residual."""
        weights, experts = route(x, self.router[...], self.num_experts_per_tok)
        routed = routed_experts(x, weights, experts, self.gate_up[...], self.down[...])
        return routed + jax.nn.sigmoid(matmul(x, self.shared_gate[...])) * self.shared(x)
