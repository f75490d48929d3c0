"""Owns the model as a whole: the `Qwen35` module and the pure functions that run it.

It owns no weights on disk (`loader.py`), no sampling and no page allocation: which pages and slots a step
touches arrives as arrays.

Letters: B rows or sequences, T tokens, V vocabulary, H hidden size, W page-table width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from ninfer_jax.model.attention import GatedAttention, causal_attention
from ninfer_jax.model.cache import PAGE_TOKENS, Cache, make_cache, make_cache_spec
from ninfer_jax.model.config import FULL_ATTENTION, Qwen35Config
from ninfer_jax.model.gated_delta import GatedDeltaNet
from ninfer_jax.model.kernels.page_write import write_tokens
from ninfer_jax.model.kernels.paged_attention import Backend, decode_attention, prefill_attention
from ninfer_jax.model.layers import DenseFFN, OffsetNorm, precision_of, rotary_table, weight_param
from ninfer_jax.model.moe import SparseFFN

Mixer = GatedAttention | GatedDeltaNet
# What one pass does with layer i: (i, its mixer, the normed input) -> the mixer's output.
MixFn = Callable[[int, Mixer, jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class DecodeBatch:
    """One token for each of B rows. The rows' write slots are distinct."""

    tokens: jax.Array  # int32[B]
    positions: jax.Array  # int32[3, B], M-RoPE rows
    block_tables: jax.Array  # int32[B, W], page ids in token order
    lengths: jax.Array  # int32[B], KV tokens including this one
    read_slots: jax.Array  # int32[B]; num_slots (out of range) reads the zero state
    write_slots: jax.Array  # int32[B]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class PrefillChunk:
    """Consecutive tokens of one sequence, padded on the right to T."""

    tokens: jax.Array  # int32[T]
    positions: jax.Array  # int32[3, T], M-RoPE rows
    block_table: jax.Array  # int32[W], page ids in token order
    start_tokens: jax.Array  # int32[], KV tokens before this chunk
    num_tokens: jax.Array  # int32[], valid tokens, at least 1
    read_slot: jax.Array  # int32[]; num_slots (out of range) reads the zero state
    write_slot: jax.Array  # int32[]


class Block(nnx.Module):
    """One pre-norm layer: mixer, then feed-forward, each added to the residual stream."""

    def __init__(self, config: Qwen35Config, kind: str, dtype: jnp.dtype) -> None:
        self.mixer_norm = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer: Mixer = (GatedAttention if kind == FULL_ATTENTION else GatedDeltaNet)(config, dtype)
        self.ffn_norm = OffsetNorm(config.hidden_size, config.rms_norm_eps)
        if config.intermediate_size is None:
            self.ffn: DenseFFN | SparseFFN = SparseFFN(config, dtype)
        else:
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


def _read_slots(pool: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns the state in `slots` [...]; zeros for an index out of range, which is how a sequence starts."""
    return pool.at[slots].get(mode="fill", fill_value=0)


@dataclass(eq=False)
class _Working:
    """The per-layer arrays of one pass over the cache; a layer replaces its own as it runs."""

    k_pages: list[jax.Array]
    v_pages: list[jax.Array]
    recurrent: list[jax.Array]
    conv: list[jax.Array]

    @classmethod
    def of(cls, cache: Cache) -> _Working:
        """Returns the arrays of a cache, ready to be replaced."""
        return cls(list(cache.k_pages), list(cache.v_pages), list(cache.recurrent), list(cache.conv))

    def cache_with(self, tail_hidden: jax.Array) -> Cache:
        """Returns the cache after the pass."""
        return Cache(
            tuple(self.k_pages), tuple(self.v_pages), tuple(self.recurrent), tuple(self.conv), tail_hidden
        )


def _mix_over_cache(
    config: Qwen35Config,
    working: _Working,
    rotary: tuple[jax.Array, jax.Array],
    *,
    read: jax.Array,
    write: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    advance: Callable[..., tuple[jax.Array, jax.Array, jax.Array]],
    attend: Callable[[jax.Array, jax.Array, jax.Array, float], jax.Array],
) -> MixFn:
    """Returns what decode and prefill do with every layer; they differ in `advance` and `attend` alone.

    Args:
        config: says which state or pool a layer owns.
        working: read and replaced in place.
        rotary: cos and sin of the tokens.
        read: int32[...], state slots; out of range reads the zero state.
        write: int32[...], state slots.
        page_ids: int32[N], where the tokens' K and V go; out of range writes nothing.
        offsets: int32[N], columns of those pages.
        advance: (mixer, x, recurrent, conv) -> (out, recurrent, conv) of a linear layer.
        attend: (q, k_pages, v_pages, scale) -> the attended values of a full-attention layer.
    """

    def mix(index: int, mixer: Mixer, x: jax.Array) -> jax.Array:
        if isinstance(mixer, GatedDeltaNet):
            i = config.linear_layers.index(index)
            state = _read_slots(working.recurrent[i], read), _read_slots(working.conv[i], read)
            out, recurrent, conv = advance(mixer, x, *state)
            working.recurrent[i] = working.recurrent[i].at[write].set(recurrent, mode="drop")
            working.conv[i] = working.conv[i].at[write].set(conv, mode="drop")
            return out
        i = config.full_layers.index(index)
        heads = mixer.project(x, *rotary)
        # Written first, read after: reading the old pool would make XLA keep a copy of it.
        working.k_pages[i] = write_tokens(working.k_pages[i], heads.k, page_ids, offsets)
        working.v_pages[i] = write_tokens(working.v_pages[i], heads.v, page_ids, offsets)
        attended = attend(heads.q, working.k_pages[i], working.v_pages[i], mixer.scale)
        return mixer.finish(attended, heads.gate)

    return mix


def decode_step(
    module: Qwen35, cache: Cache, batch: DecodeBatch, *, backend: Backend = "xla"
) -> tuple[jax.Array, Cache]:
    """Returns (logits f32[B, V] of the next token, cache) after one token of each row.

    Args:
        module: the model.
        cache: donate it; pages and slots that no row names keep their contents.
        batch: the rows.
        backend: attention backend, static.
    """
    last = batch.lengths - 1
    page_ids = jnp.take_along_axis(batch.block_tables, last[:, None] // PAGE_TOKENS, axis=1)[:, 0]
    working = _Working.of(cache)
    mix = _mix_over_cache(
        module.config,
        working,
        rotary_table(module.config, batch.positions, module.dtype),
        read=batch.read_slots,
        write=batch.write_slots,
        page_ids=page_ids,
        offsets=last % PAGE_TOKENS,
        advance=lambda mixer, x, *state: mixer.step(x, *state),
        attend=lambda q, k_pages, v_pages, scale: decode_attention(
            q, k_pages, v_pages, batch.block_tables, batch.lengths, scale=scale, backend=backend
        ),
    )
    hidden = run_layers(module, module.embedding[...][batch.tokens], mix)
    tail = cache.tail_hidden.at[batch.write_slots].set(hidden, mode="drop")
    return head_logits(module, hidden), working.cache_with(tail)


def prefill_hidden(
    module: Qwen35,
    cache: Cache,
    chunk: PrefillChunk,
    *,
    backend: Backend = "xla",
    observe: Callable[[jax.Array], None] | None = None,
) -> tuple[jax.Array, Cache]:
    """Returns (final-norm hidden [T, H], cache) after one chunk; rows of padding mean nothing.

    Args:
        module: the model.
        cache: donate it.
        chunk: the tokens.
        backend: attention backend, static.
        observe: see `run_layers`.
    """
    offsets = jnp.arange(chunk.tokens.shape[0], dtype=jnp.int32)
    index_in_sequence = chunk.start_tokens + offsets
    pages = chunk.block_table.at[index_in_sequence // PAGE_TOKENS].get(mode="fill", fill_value=-1)
    working = _Working.of(cache)
    mix = _mix_over_cache(
        module.config,
        working,
        rotary_table(module.config, chunk.positions, module.dtype),
        read=chunk.read_slot,
        write=chunk.write_slot,
        page_ids=jnp.where(offsets < chunk.num_tokens, pages, -1),  # no page: padding writes nothing
        offsets=index_in_sequence % PAGE_TOKENS,
        advance=lambda mixer, x, *state: mixer.chunk(x, *state, chunk.num_tokens),
        attend=lambda q, k_pages, v_pages, scale: prefill_attention(
            q,
            k_pages,
            v_pages,
            chunk.block_table,
            chunk.start_tokens,
            chunk.num_tokens,
            scale=scale,
            backend=backend,
        ),
    )
    hidden = run_layers(module, module.embedding[...][chunk.tokens], mix, observe)
    last = lax.dynamic_index_in_dim(hidden, chunk.num_tokens - 1, keepdims=False)
    tail = cache.tail_hidden.at[chunk.write_slot].set(last, mode="drop")
    return hidden, working.cache_with(tail)


def prefill_chunk(
    module: Qwen35, cache: Cache, chunk: PrefillChunk, *, backend: Backend = "xla"
) -> tuple[jax.Array, Cache]:
    """Returns (logits f32[V] after the last valid token, cache) of one chunk.

    Args:
        module: the model.
        cache: donate it; pages and slots that the chunk does not name keep their contents.
        chunk: the tokens.
        backend: attention backend, static.
    """
    hidden, cache = prefill_hidden(module, cache, chunk, backend=backend)
    last = lax.dynamic_index_in_dim(hidden, chunk.num_tokens - 1, keepdims=True)
    return head_logits(module, last)[0], cache


def logits_from_tail(module: Qwen35, cache: Cache, slots: jax.Array) -> jax.Array:
    """Returns f32[B, V], the next-token logits of states that are complete: no token is run.

    Args:
        module: the model.
        cache: only read.
        slots: int32[B].
    """
    return head_logits(module, _read_slots(cache.tail_hidden, slots))


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


def full_logits(module: Qwen35, tokens: jax.Array) -> jax.Array:
    """Returns f32[T, V] of one text from root, through the same pages and slots that serving uses.

    Args:
        module: the model.
        tokens: int32[T], T >= 1; padding on the right changes nothing before it.
    """
    num_tokens = tokens.shape[0]
    num_pages = -(-num_tokens // PAGE_TOKENS)
    cache = make_cache(make_cache_spec(module.config, module.dtype.name), num_pages, num_slots=1)
    chunk = PrefillChunk(
        tokens=tokens,
        positions=text_positions(num_tokens),
        block_table=jnp.arange(num_pages, dtype=jnp.int32),
        start_tokens=jnp.int32(0),
        num_tokens=jnp.int32(num_tokens),
        read_slot=jnp.int32(cache.num_slots),
        write_slot=jnp.int32(0),
    )
    return head_logits(module, prefill_hidden(module, cache, chunk)[0])


def sequence_logits(module: Qwen35, tokens: jax.Array) -> jax.Array:
    """Returns f32[B, T, V] of whole sequences from zero state; differentiable, for training.

    Args:
        module: the model.
        tokens: int32[B, T]; pad on the right, padding never reaches earlier positions.
    """
    hidden = jax.vmap(lambda row: sequence_hidden(module, row))(tokens)
    return head_logits(module, hidden)
