"""Owns the step from a batch of logits to one token per row, and the per-lane arrays that step reads.

It does not own the cuts (`model.truncation`), the randomness (`model.noise`), the user's parameters or their
defaults, nor which lane serves which request: rows name lanes, and a lane is a row of `SamplerState`.

The order of one draw, row by row (vLLM's):

    logits -> + logit bias -> repetition, frequency, presence penalties -> banned ids -> [greedy: argmax]
           -> / temperature -> top_k -> top_p -> min_p -> draw

Repetition looks at prompt and output (above 1 it shrinks a positive score and grows a negative one);
frequency and presence look at the output only. Log-probabilities describe the model, not the draw: the
log-softmax of the raw logits over all V rows, before any of the above.

A row that has no token to draw says so in place of one: `NO_CANDIDATE` where every id is banned, `NOT_FINITE`
where the best score is NaN or infinite. Any token at all would be a wrong answer that nobody notices.

A row's token is a function of its logits, its parameters, its lane's arrays, its seed and its output index;
the other rows, the lane number and B decide only which of several equivalent paths computes it. The paths are
behind `lax.cond`: a batch of plain greedy rows pays one maximum, and nothing ever sorts the vocabulary.

Letters: `B` rows, `C` lanes, `V` rows of the output head, `K` leading tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from ninfer_jax.model.blocks import BLOCK_TOKENS, block_masses, first_argmax, leading
from ninfer_jax.model.noise import draw_block, draw_listed
from ninfer_jax.model.truncation import Cuts, is_cut, keep_by_border, keep_leading

# Columns of `Sampled.top_ids`, and the largest `num_logprobs`.
MAX_LOGPROBS = 20

# `SamplingRows.num_logprobs` of a row that wants none; 0 means the drawn token's alone.
NO_LOGPROBS = -1

# `Sampled.top_ids` where a row did not ask for that many.
NO_TOKEN = -1

# `Sampled.tokens` of a row that cannot draw; both are negative, and no token is.
NO_CANDIDATE = -1  # every id is banned
NOT_FINITE = -2  # the model's logits, or the penalties on them, are NaN or infinite

# Below this a row is greedy: score / temperature would overflow before it changed any draw.
MIN_TEMPERATURE = 1e-5

# Where every cut row has a top_k of at most this many, no more leading tokens are looked for; otherwise
# BLOCK_TOKENS are, and a cut that reaches beyond those is found by its border.
FEW_LEADING_TOKENS = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class SamplerState:
    """What the lanes' draws depend on beside the logits; donated to every step and updated in place."""

    bias: jax.Array  # f32[C, V], added to the logits
    has_bias: jax.Array  # bool[C], whether the lane's bias is anywhere nonzero
    prompt_seen: jax.Array  # bool[C, V], ids that occur in the prompt
    early_ban: jax.Array  # bool[C, V], ids held back while the row sets `ban_eos` (beside the EOS ids)
    output_counts: jax.Array  # int32[C, V], how often each id was drawn
    allowed_vocab_size: int = dataclasses.field(metadata={"static": True})  # ids from here on are never drawn


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class SamplingRows:
    """The parameters of one draw, one row per sequence in the batch."""

    lanes: jax.Array  # int32[B], distinct rows of SamplerState
    temperature: jax.Array  # f32[B], below MIN_TEMPERATURE = greedy
    top_k: jax.Array  # int32[B], 0 = off
    top_p: jax.Array  # f32[B], 1 = off
    min_p: jax.Array  # f32[B], 0 = off
    presence: jax.Array  # f32[B], 0 = off
    frequency: jax.Array  # f32[B], 0 = off
    repetition: jax.Array  # f32[B], 1 = off
    seed: jax.Array  # uint32[B]
    step: jax.Array  # int32[B], output index of the token being drawn
    ban_eos: jax.Array  # bool[B], hold back the EOS ids and the lane's early_ban
    num_logprobs: jax.Array  # int32[B], NO_LOGPROBS, or how many of the best to report beside the drawn one


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Sampled:
    """The drawn tokens, with the model's log-probabilities for the rows that asked."""

    tokens: jax.Array  # int32[B], NO_CANDIDATE or NOT_FINITE where there is none to draw
    logprob: jax.Array  # f32[B], of the drawn token; 0 where the row asked for none
    top_ids: jax.Array  # int32[B, 20], best first, ids below allowed_vocab_size; NO_TOKEN beyond num_logprobs
    top_logprobs: jax.Array  # f32[B, 20], -inf beyond num_logprobs


def make_sampler_state(num_lanes: int, vocab_size: int, allowed_vocab_size: int) -> SamplerState:
    """Returns the state of lanes without bias, prompt or output.

    Args:
        num_lanes: C.
        vocab_size: V, rows of the output head.
        allowed_vocab_size: ids from here to V - 1 are padding of the head and are never drawn.

    Returns:
        A SamplerState; 10 bytes per lane and id.

    Raises:
        ValueError: if the allowed ids are none or more than there are rows.
    """
    if not 1 <= allowed_vocab_size <= vocab_size:
        raise ValueError(
            f"allowed_vocab_size is {allowed_vocab_size}; it must be from 1 to the head's {vocab_size} rows"
        )
    return SamplerState(
        bias=jnp.zeros((num_lanes, vocab_size), jnp.float32),
        has_bias=jnp.zeros(num_lanes, bool),
        prompt_seen=jnp.zeros((num_lanes, vocab_size), bool),
        early_ban=jnp.zeros((num_lanes, vocab_size), bool),
        output_counts=jnp.zeros((num_lanes, vocab_size), jnp.int32),
        allowed_vocab_size=allowed_vocab_size,
    )


def set_lane(
    state: SamplerState,
    lane: jax.Array,
    bias: jax.Array,
    prompt_seen: jax.Array,
    early_ban: jax.Array | None = None,
) -> SamplerState:
    """Returns the state with one lane made ready for a new sequence: its output is empty again.

    Args:
        state: donate it; every array is updated in place.
        lane: int32[], below C.
        bias: f32[V], finite.
        prompt_seen: bool[V].
        early_ban: bool[V], ids that `ban_eos` holds back beside the EOS ids; None for none.

    Returns:
        The new SamplerState.
    """
    if early_ban is None:
        early_ban = jnp.zeros_like(prompt_seen)
    return dataclasses.replace(
        state,
        bias=_set_row(state.bias, lane, bias),
        has_bias=state.has_bias.at[lane].set(jnp.any(bias != 0.0)),
        prompt_seen=_set_row(state.prompt_seen, lane, prompt_seen),
        early_ban=_set_row(state.early_ban, lane, early_ban),
        output_counts=_set_row(state.output_counts, lane, jnp.zeros_like(bias, jnp.int32)),
    )


def sample(
    logits: jax.Array, state: SamplerState, rows: SamplingRows, eos_mask: jax.Array
) -> tuple[Sampled, SamplerState]:
    """Returns one token per row, and the state that has counted it.

    Args:
        logits: f32[B, V], of the model, untouched.
        state: donate it; only `output_counts` changes, in place.
        rows: the parameters of each row.
        eos_mask: bool[V], the checkpoint's EOS ids, held back in rows with `ban_eos`.

    Returns:
        Sampled, and the SamplerState with one more count per row that drew a token.
    """
    logits = logits.astype(jnp.float32)
    may_draw = jnp.arange(logits.shape[-1], dtype=jnp.int32) < state.allowed_vocab_size
    stochastic = rows.temperature >= MIN_TEMPERATURE
    penalised = (rows.presence != 0.0) | (rows.frequency != 0.0) | (rows.repetition != 1.0)
    adjusted = penalised | state.has_bias[rows.lanes] | rows.ban_eos

    def draw() -> tuple[jax.Array, jax.Array]:
        adjust = partial(_adjusted, logits, state, rows, eos_mask)
        scores = jnp.where(may_draw, lax.cond(jnp.any(adjusted), adjust, lambda: logits), -jnp.inf)
        greedy = first_argmax(scores, state.allowed_vocab_size)
        drawn = lax.cond(
            jnp.any(stochastic), partial(_draw_stochastic, scores, rows, stochastic), lambda: greedy
        )
        return jnp.where(stochastic, drawn, greedy), _score_of(scores, greedy)

    def take_best() -> tuple[jax.Array, jax.Array]:
        greedy = first_argmax(logits, state.allowed_vocab_size)
        return greedy, _score_of(logits, greedy)

    drawn, best = lax.cond(jnp.any(stochastic | adjusted), draw, take_best)
    logprob, top_ids, top_logprobs = _logprobs(logits, may_draw, drawn, rows.num_logprobs)
    # The best score alone tells: a NaN anywhere would be it, and it is -inf only where everything is.
    is_drawn = jnp.isfinite(best)
    tokens = jnp.where(is_drawn, drawn, jnp.where(best == -jnp.inf, NO_CANDIDATE, NOT_FINITE))
    counted = state.output_counts.at[rows.lanes, drawn].add(is_drawn.astype(jnp.int32))
    return Sampled(tokens, logprob, top_ids, top_logprobs), dataclasses.replace(state, output_counts=counted)


def _score_of(scores: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the score of each row's token: f32[B]."""
    return jnp.take_along_axis(scores, tokens[:, None], axis=-1)[:, 0]


def _adjusted(logits: jax.Array, state: SamplerState, rows: SamplingRows, eos_mask: jax.Array) -> jax.Array:
    """Returns the logits with bias, penalties and early bans applied: f32[B, V]."""
    scores = logits + state.bias[rows.lanes]
    counts = state.output_counts[rows.lanes]
    in_output = counts > 0
    repetition = rows.repetition[:, None]
    shrunk = jnp.where(scores > 0.0, scores / repetition, scores * repetition)
    scores = jnp.where(in_output | state.prompt_seen[rows.lanes], shrunk, scores)
    scores = scores - rows.frequency[:, None] * counts.astype(jnp.float32)
    scores = scores - rows.presence[:, None] * in_output.astype(jnp.float32)
    banned = rows.ban_eos[:, None] & (eos_mask | state.early_ban[rows.lanes])
    return jnp.where(banned, -jnp.inf, scores)


def _draw_stochastic(scores: jax.Array, rows: SamplingRows, stochastic: jax.Array) -> jax.Array:
    """Returns a draw from each stochastic row's cut distribution: int32[B], undefined for greedy rows."""
    num_rows, vocab_size = scores.shape
    temperature = jnp.where(stochastic, rows.temperature, 1.0)[:, None]
    # Distances from the best are divided, not the scores: the best stays exactly 0 and roundings stay small.
    scores = (scores - jnp.max(scores, axis=-1, keepdims=True)) / temperature
    # A logit of -0.0 beside a best of 0.0 is tied with it; as a negative zero it would be listed behind it.
    scores = jnp.where(scores < 0.0, scores, 0.0)
    cuts = Cuts(rows.top_k, rows.top_p, rows.min_p)
    cut = stochastic & is_cut(cuts)

    def list_leading(count: int) -> tuple[jax.Array, jax.Array]:
        best, ids = leading(scores, min(count, vocab_size))
        missing = ((0, 0), (0, BLOCK_TOKENS - best.shape[-1]))
        return jnp.pad(best, missing, constant_values=-jnp.inf), jnp.pad(ids, missing)

    def list_cut() -> tuple[jax.Array, jax.Array, jax.Array]:
        few = (rows.top_k > 0) & (rows.top_k <= FEW_LEADING_TOKENS)
        best, ids, mass = lax.cond(
            jnp.all(few | ~cut),
            lambda: (*list_leading(FEW_LEADING_TOKENS), jnp.zeros(num_rows, jnp.float32)),
            lambda: (*list_leading(BLOCK_TOKENS), jnp.sum(block_masses(scores), axis=-1)),
        )
        keep, complete = keep_leading(best, cuts, vocab_size, mass)
        return jnp.where(keep, best, -jnp.inf), ids, cut & ~complete

    def list_nothing() -> tuple[jax.Array, jax.Array, jax.Array]:
        empty = jnp.zeros((num_rows, BLOCK_TOKENS), jnp.float32)
        return empty, empty.astype(jnp.int32), jnp.zeros_like(cut)

    listed, ids, beyond = lax.cond(jnp.any(cut), list_cut, list_nothing)
    whole = stochastic & (~cut | beyond)

    def list_block() -> tuple[jax.Array, jax.Array]:
        kept = lax.cond(
            jnp.any(beyond),
            lambda: jnp.where(keep_by_border(scores, cuts) | ~beyond[:, None], scores, -jnp.inf),
            lambda: scores,
        )
        block_scores, block_ids = draw_block(kept, rows.seed, rows.step)
        return jnp.where(whole[:, None], block_scores, listed), jnp.where(whole[:, None], block_ids, ids)

    listed, ids = lax.cond(jnp.any(whole), list_block, lambda: (listed, ids))
    return draw_listed(listed, ids, rows.seed, rows.step)


def _logprobs(
    logits: jax.Array, may_draw: jax.Array, tokens: jax.Array, num_logprobs: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the fields `logprob`, `top_ids` and `top_logprobs` of `Sampled`."""
    num_rows, vocab_size = logits.shape
    no_ids = jnp.full((num_rows, MAX_LOGPROBS), NO_TOKEN, jnp.int32)
    no_logprobs = jnp.full((num_rows, MAX_LOGPROBS), -jnp.inf, jnp.float32)

    def best(log_mass: jax.Array) -> tuple[jax.Array, jax.Array]:
        values, ids = leading(jnp.where(may_draw, logits, -jnp.inf), min(MAX_LOGPROBS, vocab_size))
        missing = ((0, 0), (0, MAX_LOGPROBS - values.shape[-1]))
        values = jnp.pad(values - log_mass[:, None], missing, constant_values=-jnp.inf)
        ids = jnp.pad(ids, missing, constant_values=NO_TOKEN)
        asked = jnp.arange(MAX_LOGPROBS, dtype=jnp.int32) < num_logprobs[:, None]
        # Fewer ids than asked for may be drawable; the rest of the list stays empty.
        asked = asked & (values > -jnp.inf)
        return jnp.where(asked, ids, NO_TOKEN), jnp.where(asked, values, -jnp.inf)

    def compute() -> tuple[jax.Array, jax.Array, jax.Array]:
        peak = jnp.max(logits, axis=-1)
        log_mass = peak + jnp.log(jnp.sum(block_masses(logits - peak[:, None]), axis=-1))
        chosen = _score_of(logits, tokens) - log_mass
        top_ids, top_logprobs = lax.cond(
            jnp.any(num_logprobs > 0), best, lambda _: (no_ids, no_logprobs), log_mass
        )
        return jnp.where(num_logprobs >= 0, chosen, 0.0), top_ids, top_logprobs

    return lax.cond(
        jnp.any(num_logprobs > NO_LOGPROBS),
        compute,
        lambda: (jnp.zeros(num_rows, jnp.float32), no_ids, no_logprobs),
    )


def _set_row(array: jax.Array, row: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the array with one row replaced, as a slice update that runs in place under donation."""
    return lax.dynamic_update_index_in_dim(array, values.astype(array.dtype), row, axis=0)
