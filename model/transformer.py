"""Owns the model as a whole: the `Qwen35` module and the pure functions that run it.

It owns no weights on disk (`loader.py`), no sampling and no page allocation: which pages and slots a step touches
arrives as arrays.

Letters: B rows or sequences, T tokens, V vocabulary, H hidden size, W page-table width.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from ninfer_jax.model.attention import GatedAttention, causal_attention
from ninfer_jax.model.config import FULL_ATTENTION, Qwen35Config
from ninfer_jax.model.gated_delta import GatedDeltaNet
from ninfer_jax.model.layers import DenseFFN, OffsetNorm, precision_of, rotary_table, weight_param

Mixer = GatedAttention | GatedDeltaNet
# What one pass does with layer i: (i, its mixer, the normed input) -> the mixer's output.
MixFn = Callable[[int, Mixer, jax.Array], jax.Array]


class Block(nnx.Module):
    """One pre-norm layer: mixer, then feed-forward, each added to the residual stream."""

    def __init__(self, config: Qwen35Config, kind: str, dtype: jnp.dtype) -> None:
        self.mixer_norm = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer: Mixer = (GatedAttention if kind == FULL_ATTENTION else GatedDeltaNet)(config, dtype)
        self.ffn_norm = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        assert config.intermediate_size is not None
        self.ffn = DenseFFN(config.hidden_size, config.intermediate_size, dtype)


class Qwen35(nnx.Module):
    """Structure and parameters of a text model; only `nnx.Param` leaves, no state.

    Parameters start as zeros: use `loader.load_model` or `loader.make_random_module`.
    """

    def __init__(self, config: Qwen35Config, dtype: jnp.dtype = jnp.float32) -> None:
        self.config = config
        self.embedding = weight_param((config.vocab_size, config.hidden_size), dtype)
        self.layers = nnx.List([Block(config, kind, dtype) for kind in config.layer_types])
        self.norm = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        # [V, H] like the embedding, so that tied and untied heads are one product.
        self.head = None if config.tie_word_embeddings else weight_param(self.embedding.shape, dtype)

    @property
    def dtype(self) -> jnp.dtype:
        """The model dtype: of weights, activations and KV."""
        return self.embedding.dtype


def head_logits(module: Qwen35, hidden: jax.Array) -> jax.Array:
    """Returns f32[..., V] from final-norm hidden rows [..., H]."""
    weight = (module.embedding if module.head is None else module.head)[...]
    precision = precision_of(hidden.dtype)
    if hidden.ndim == 2 and hidden.shape[0] == 1:
        # A matrix-vector product with the matrix on the left: the other order repacks all V rows on CPU.
        return jnp.matmul(weight, hidden[0], precision=precision)[None].astype(jnp.float32)
    return jnp.einsum("...h,vh->...v", hidden, weight, precision=precision).astype(jnp.float32)


def run_layers(
    module: Qwen35, x: jax.Array, mix: MixFn, observe: Callable[[jax.Array], None] | None = None
) -> jax.Array:
    """Returns the final-norm hidden [N, H]: the one residual loop that every pass shares.

    Args:
        module: the model.
        x: [N, H] embeddings.
        mix: applies layer i's mixer; where state and KV come from is the caller's business.
        observe: called with the residual stream before the first and after every layer (tests).
    """
    observe = observe or (lambda _: None)
    observe(x)
    for index, block in enumerate(module.layers):
        x = x + mix(index, block.mixer, block.mixer_norm(x))
        x = x + block.ffn(block.ffn_norm(x))
        observe(x)
    return module.norm(x)


def text_positions(num_tokens: int, start: jax.Array | int = 0) -> jax.Array:
    """Returns int32[3, T], the equal rows of plain text starting at `start`."""
    return jnp.broadcast_to(start + jnp.arange(num_tokens, dtype=jnp.int32), (3, num_tokens))


def sequence_hidden(
    module: Qwen35,
    tokens: jax.Array,
    positions: jax.Array | None = None,
    observe: Callable[[jax.Array], None] | None = None,
) -> jax.Array:
    """Returns the final-norm hidden [T, H] of one whole sequence without any cache; differentiable.

    Args:
        module: the model.
        tokens: int32[T].
        positions: int32[3, T]; text positions when absent.
        observe: see `run_layers`.
    """
    config, num_tokens = module.config, tokens.shape[0]
    positions = text_positions(num_tokens) if positions is None else positions
    cos, sin = rotary_table(config, positions, module.dtype)
    recurrent = jnp.zeros(
        (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim), jnp.float32
    )
    conv = jnp.zeros((config.conv_channels, config.linear_conv_kernel_dim - 1), module.dtype)

    def mix(_: int, mixer: Mixer, x: jax.Array) -> jax.Array:
        if isinstance(mixer, GatedDeltaNet):
            return mixer.chunk(x, recurrent, conv, num_tokens)[0]
        heads = mixer.project(x, cos, sin)
        return mixer.finish(causal_attention(heads.q, heads.k, heads.v, mixer.scale), heads.gate)

    return run_layers(module, module.embedding[...][tokens], mix, observe)


def sequence_logits(module: Qwen35, tokens: jax.Array) -> jax.Array:
    """Returns f32[B, T, V] of whole sequences from zero state; differentiable, for training.

    Args:
        module: the model.
        tokens: int32[B, T]; pad on the right, padding never reaches earlier positions.
    """
    hidden = jax.vmap(lambda row: sequence_hidden(module, row))(tokens)
    return head_logits(module, hidden)
