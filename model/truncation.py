"""Owns which tokens of a row top-k, top-p and min-p leave in the draw.

It does not own the scores (`model.sampling` makes them of logits, penalties and temperature) nor the draw
(`model.noise`).

Convention: the tokens of a row are ordered by score, the lower id first among equals, and every cut keeps
a prefix of that order. top_k keeps the first k. top_p keeps a token while the mass before it,
renormalised over what top_k left, is below p, so at least one stays. min_p keeps the tokens at least
min_p times as likely as the best. This is the order of Hugging Face's processors (temperature, top_k,
top_p, min_p); vLLM applies min_p before top_p, which keeps other tokens only where both cut. Exactly k
stay when the k-th is tied: top_k = 1 is then greedy decoding, which "all that tie" would not be.

Sorting 248,320 scores takes 150 ms a row on one core, so nothing here sorts a vocabulary. `keep_leading` says
what stays of the best few and whether that is all; for the rare row where it is not, `keep_by_border` finds
the last token kept by building its sort key bit by bit.

Letters: `B` rows, `V` tokens, `K` leading tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ninfer_jax.model.blocks import row_sums

_DISTANCE_BITS = 31  # of a non-negative float32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Cuts:
    """The three cuts of each row; one that is off has its neutral value."""

    top_k: jax.Array  # int32[B], 0 = off
    top_p: jax.Array  # f32[B], 1 = off
    min_p: jax.Array  # f32[B], 0 = off


def is_cut(cuts: Cuts) -> jax.Array:
    """Returns which rows leave anything out: bool[B]."""
    return (cuts.top_k > 0) | (cuts.top_p < 1.0) | (cuts.min_p > 0.0)


def keep_leading(
    best: jax.Array, cuts: Cuts, vocab_size: int, total_mass: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns which of a row's leading tokens stay, and whether no token beyond them does.

    Args:
        best: f32[B, K], scores in descending order, the first one 0; -inf past the end of the vocabulary.
        cuts: the cuts of each row.
        vocab_size: V, the tokens that `best` leads.
        total_mass: f32[B], sum of exp(score) over the vocabulary; not read in rows with a top_k of at most K,
            whose mass is that of a prefix.

    Returns:
        bool[B, K], a prefix of each row, and bool[B], true where it is complete.
    """
    num_leading = best.shape[-1]
    weights = jnp.exp(best)
    running = jnp.cumsum(weights, axis=-1)
    before = jnp.pad(running[:, :-1], ((0, 0), (1, 0)))
    limit = jnp.where(cuts.top_k > 0, jnp.minimum(cuts.top_k, vocab_size), vocab_size)
    within = limit <= num_leading
    last = jnp.minimum(limit, num_leading) - 1
    mass = jnp.where(within, jnp.take_along_axis(running, last[:, None], axis=-1)[:, 0], total_mass)
    cuts_mass = cuts.top_p < 1.0
    keep = (
        (jnp.arange(num_leading, dtype=jnp.int32) < limit[:, None])
        & ((before < (cuts.top_p * mass)[:, None]) | ~cuts_mass[:, None])
        & (weights >= cuts.min_p[:, None])
        & (best > -jnp.inf)
    )
    # With K < top_k < V the mass that top_p renormalises by is not known here.
    mass_known = ~cuts_mass | (limit == vocab_size)
    return keep, within | (~keep[:, -1] & mass_known)


def keep_by_border(scores: jax.Array, cuts: Cuts) -> jax.Array:
    """Returns which tokens of the whole vocabulary stay, whatever the cuts.

    Costs about 50 passes over the scores for each of top_k and top_p that any row uses.

    Args:
        scores: f32[B, V], maximum 0.
        cuts: the cuts of each row.

    Returns:
        bool[B, V].
    """
    weights = jnp.exp(scores)
    distances = jnp.abs(scores)  # of -0.0 too: its bits must not order it last

    def cut(kept: jax.Array, by_count: jax.Array) -> tuple[jax.Array, None]:
        measured = jnp.where(kept, jnp.where(by_count, 1.0, weights), 0.0)
        by_mass = jnp.where(cuts.top_p < 1.0, cuts.top_p * row_sums(measured), jnp.inf)
        count = jnp.where(cuts.top_k > 0, cuts.top_k.astype(jnp.float32), jnp.inf)
        return kept & _reached(distances, measured, jnp.where(by_count, count, by_mass)), None

    kept, _ = lax.scan(cut, scores > -jnp.inf, jnp.array([True, False]))
    return kept & (weights >= cuts.min_p[:, None])


def _reached(distances: jax.Array, measured: jax.Array, target: jax.Array) -> jax.Array:
    """Returns the tokens before which, in the order of (distance, id), less than the target has been
    measured.

    The order's key is the distance's bit pattern (non-negative floats order like integers) followed by the
    id. The last key to be kept is built from its highest bit down: a bit is set if less than the target lies
    below the key that it makes. Rounded sums of non-negative terms in a fixed order are monotone, so this is
    a true bisection.

    Args:
        distances: f32[B, V], not negative.
        measured: f32[B, V], not negative; up to 2^24 ones are counted exactly.
        target: f32[B], infinite for rows that keep everything.

    Returns:
        bool[B, V].
    """
    vocab_size = distances.shape[-1]
    ids = jnp.arange(vocab_size, dtype=jnp.int32)
    patterns = lax.bitcast_convert_type(distances, jnp.int32)
    id_bits = max(1, (vocab_size - 1).bit_length())
    num_bits = _DISTANCE_BITS + id_bits

    def below(pattern: jax.Array, last_id: jax.Array) -> jax.Array:
        tied = (patterns == pattern[:, None]) & (ids < last_id[:, None])
        return (patterns < pattern[:, None]) | tied

    def set_bit(place: jax.Array, key: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        in_pattern = place < _DISTANCE_BITS
        shift = jnp.where(in_pattern, _DISTANCE_BITS - 1 - place, num_bits - 1 - place)
        bit = jnp.left_shift(jnp.int32(1), shift)
        pattern = key[0] | jnp.where(in_pattern, bit, 0)
        last_id = key[1] | jnp.where(in_pattern, 0, bit)
        accept = row_sums(jnp.where(below(pattern, last_id), measured, 0.0)) < target
        return jnp.where(accept, pattern, key[0]), jnp.where(accept, last_id, key[1])

    searched = target < jnp.inf
    zeros = jnp.zeros_like(target, jnp.int32)
    pattern, last_id = lax.fori_loop(0, jnp.where(jnp.any(searched), num_bits, 0), set_bit, (zeros, zeros))
    return below(pattern, last_id + 1) | ~searched[:, None]
