"""Draws on device against exact distributions and NumPy oracles: cuts, penalties, bans, seeds, logprobs.

Statistical tests state their false-alarm rate; seeds are fixed, so a test always passes or always fails.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ninfer_jax.model.sampling import (
    MAX_LOGPROBS,
    NO_CANDIDATE,
    NO_LOGPROBS,
    NO_TOKEN,
    NOT_FINITE,
    Sampled,
    SamplerState,
    SamplingRows,
    make_sampler_state,
    sample,
    set_lane,
)

# A chi-square test with a smaller p than this fails: one false alarm in a million tests.
FALSE_ALARM_RATE = 1e-6

ROW_DTYPES = {
    "lanes": np.int32,
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "presence": np.float32,
    "frequency": np.float32,
    "repetition": np.float32,
    "seed": np.uint32,
    "step": np.int32,
    "ban_eos": np.bool_,
    "num_logprobs": np.int32,
}
NEUTRAL = {
    "lanes": 0,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence": 0.0,
    "frequency": 0.0,
    "repetition": 1.0,
    "seed": 0,
    "step": 0,
    "ban_eos": False,
    "num_logprobs": NO_LOGPROBS,
}

jitted = jax.jit(sample)


def make_rows(num_rows: int, **values: Any) -> SamplingRows:
    """Rows of neutral parameters but for those given, each a scalar or one value per row."""
    merged = {**NEUTRAL, **values}
    return SamplingRows(
        **{
            name: np.broadcast_to(np.asarray(merged[name], dtype), num_rows)
            for name, dtype in ROW_DTYPES.items()
        }
    )


def draw_many(
    logits: np.ndarray, num_draws: int, state: SamplerState | None = None, **values: Any
) -> np.ndarray:
    """Independent draws from one row's logits, by output index; `seed` 0 unless given."""
    vocab_size = logits.shape[-1]
    state = make_sampler_state(1, vocab_size, vocab_size) if state is None else state
    eos_mask = values.pop("eos_mask", np.zeros(vocab_size, bool))
    batch = 5_000  # rows of one call: one program serves every statistical test
    assert num_draws % batch == 0
    repeated = np.broadcast_to(logits.astype(np.float32), (batch, vocab_size))
    tokens = []
    for start in range(0, num_draws, batch):
        rows = make_rows(batch, **{"step": np.arange(start, start + batch), **values})
        tokens.append(np.asarray(jitted(repeated, state, rows, eos_mask)[0].tokens))
    return np.concatenate(tokens)


def softmax(scores: np.ndarray) -> np.ndarray:
    scores = scores.astype(np.float64)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def assert_distribution(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square against the exact distribution, bins of fewer than 10 expected draws merged into one."""
    counts = np.bincount(tokens, minlength=len(probabilities)).astype(float)
    assert counts[probabilities == 0].sum() == 0, "a token outside the distribution was drawn"
    expected = probabilities * len(tokens)
    large = expected >= 10
    if expected[~large].sum() > 0:
        counts = np.append(counts[large], counts[~large].sum())
        expected = np.append(expected[large], expected[~large].sum())
    else:
        counts, expected = counts[large], expected[large]
    assert len(expected) > 1
    assert stats.chisquare(counts, expected).pvalue > FALSE_ALARM_RATE


def naive_kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """bool[V]: the definition, by sorting, in float64."""
    scores = logits.astype(np.float64) / temperature
    order = np.lexsort((np.arange(len(scores)), -scores))
    kept = order[np.isfinite(scores[order])]
    if top_k > 0:
        kept = kept[:top_k]
    weights = np.exp(scores[kept] - scores.max())
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]]) / weights.sum()
    stays = np.ones(len(kept), bool) if top_p >= 1 else before < top_p
    stays &= weights >= min_p
    mask = np.zeros(len(scores), bool)
    mask[kept[stays]] = True
    return mask


VOCAB = (
    1500  # three draw blocks, the last one partial; more than the leading tokens, so borders are searched too
)


def typical_logits(num_rows: int = 1, spread: float = 2.0) -> np.ndarray:
    rng = np.random.default_rng(5)
    return (rng.normal(size=(num_rows, VOCAB)) * spread).astype(np.float32)


# One case per path: whole vocabulary, few leading, many leading, searched border by mass, by count, by both.
CUT_CASES = {
    "none": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k few": {"top_k": 20},
    "top_k few with top_p and min_p": {"top_k": 20, "top_p": 0.8, "min_p": 0.1},
    "top_k many": {"top_k": 200},
    "top_p within the leading": {"top_p": 0.5},
    "min_p": {"min_p": 0.05},
    "top_p beyond the leading": {"top_p": 0.98, "temperature": 9.0},
    "top_k beyond the leading": {"top_k": 600, "temperature": 4.0},
    "top_k and top_p beyond the leading": {"top_k": 620, "top_p": 0.97, "temperature": 9.0},
    "min_p beyond the leading": {"min_p": 0.2, "temperature": 9.0},
    "top_k of the whole vocabulary": {"top_k": VOCAB},
}


@pytest.mark.parametrize("case", CUT_CASES)
def test_draws_follow_the_exact_distribution(case: str) -> None:  # issue 2 item 8
    values = CUT_CASES[case]
    (logits,) = typical_logits()
    cuts = {name: values.get(name, NEUTRAL[name]) for name in ("temperature", "top_k", "top_p", "min_p")}
    kept = naive_kept(logits, **cuts)
    probabilities = softmax(np.where(kept, logits / cuts["temperature"], -np.inf))
    assert_distribution(draw_many(logits, 10_000, seed=11, **values), probabilities)


def test_draws_by_seed_follow_the_distribution_too() -> None:
    # One draw of each of many seeds: the seeds' streams must be as independent as the steps'.
    (logits,) = typical_logits(spread=3.0)
    tokens = draw_many(logits, 10_000, step=0, seed=np.arange(5_000))
    # `draw_many` repeats the 5,000 seeds in each batch.
    np.testing.assert_array_equal(tokens[:5_000], tokens[5_000:])
    assert_distribution(tokens[:5_000], softmax(logits))


def test_consecutive_draws_are_independent() -> None:
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    tokens = draw_many(np.pad(logits, (0, VOCAB - 4), constant_values=-np.inf), 10_000, seed=3)
    pairs = np.bincount(4 * tokens[:-1:2] + tokens[1::2], minlength=16)
    assert stats.chi2_contingency(pairs.reshape(4, 4)).pvalue > FALSE_ALARM_RATE


@pytest.fixture(scope="module")
def mixed_batch() -> tuple[np.ndarray, SamplerState, dict[str, np.ndarray]]:
    """Eight rows in eight lanes, each forcing another path, with penalties, biases, bans and logprobs."""
    num_rows = 8
    state = make_sampler_state(num_rows, VOCAB, VOCAB - 4)
    rng = np.random.default_rng(8)
    state = dataclasses.replace(
        state,
        bias=state.bias.at[3].set(rng.normal(size=VOCAB).astype(np.float32)),
        has_bias=state.has_bias.at[3].set(True),
        prompt_seen=jnp.asarray(rng.random((num_rows, VOCAB)) < 0.3),
        early_ban=jnp.asarray(rng.random((num_rows, VOCAB)) < 0.01),
        output_counts=jnp.asarray(rng.integers(0, 3, (num_rows, VOCAB)), jnp.int32),
    )
    values = {
        "lanes": np.arange(8),
        "temperature": np.array([0, 1, 1, 0, 9, 0.7, 1, 1.3]),
        "top_k": np.array([0, 20, 0, 0, 0, 300, 0, 50]),
        "top_p": np.array([1, 0.9, 1, 1, 0.98, 0.95, 0.5, 1]),
        "min_p": np.array([0, 0, 0, 0, 0, 0, 0.01, 0.02]),
        "presence": np.array([0, 0, 0.5, 0, 0, 0, 0, 1.5]),
        "frequency": np.array([0, 0, 0.5, 0, 0, 0, 0, 0.1]),
        "repetition": np.array([1, 1, 1.2, 1, 1, 1, 1, 0.8]),
        "seed": np.array([1, 2, 3, 4, 5, 5, 7, 2**32 - 1], np.uint32),
        "step": np.array([0, 1, 2, 3, 4, 5, 6, 1000]),
        "ban_eos": np.array([0, 0, 1, 0, 1, 0, 0, 0], bool),
        "num_logprobs": np.array([-1, 0, 3, 20, -1, -1, 1, 2]),
    }
    return typical_logits(num_rows), state, values


def take_rows(sampled: Sampled, index: Any) -> Sampled:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], sampled)


@pytest.mark.parametrize("chosen", [[0], [2], [4], [7], [5, 1, 6], [7, 4, 0], [3, 0, 1]])
def test_a_row_draws_alike_in_every_batch(
    mixed_batch: tuple[np.ndarray, SamplerState, dict[str, np.ndarray]], chosen: list[int]
) -> None:  # the seed's promise: other rows, order and B do not matter
    logits, state, values = mixed_batch
    eos_mask = np.arange(VOCAB) == 7
    for offset in range(4):
        moved = {**values, "step": values["step"] + offset}
        together, _ = jitted(logits, state, make_rows(8, **moved), eos_mask)
        some = {name: value[chosen] for name, value in moved.items()}
        alone, _ = jitted(logits[chosen], state, make_rows(len(chosen), **some), eos_mask)
        left, right = take_rows(together, chosen), take_rows(alone, slice(None))
        np.testing.assert_array_equal(left.tokens, right.tokens)
        np.testing.assert_array_equal(left.top_ids, right.top_ids)
        # XLA adds the row's exponentials in another order for B = 1.
        np.testing.assert_allclose(left.logprob, right.logprob, rtol=1e-6)
        np.testing.assert_allclose(left.top_logprobs, right.top_logprobs, rtol=1e-6)


def test_a_row_draws_alike_in_every_lane(
    mixed_batch: tuple[np.ndarray, SamplerState, dict[str, np.ndarray]],
) -> None:
    logits, state, values = mixed_batch
    eos_mask = np.arange(VOCAB) == 7
    order = np.array([3, 1, 4, 0, 5, 2, 7, 6])  # row r of the state moves to lane order[r]
    placed = jax.tree.map(lambda leaf: leaf.at[order].set(leaf), state)
    before, counted = jitted(logits, state, make_rows(8, **values), eos_mask)
    after, moved = jitted(logits, placed, make_rows(8, **{**values, "lanes": order}), eos_mask)
    chex.assert_trees_all_equal(before, after)
    np.testing.assert_array_equal(counted.output_counts, moved.output_counts[order])


def test_greedy_is_the_lowest_of_the_largest() -> None:
    logits = np.zeros((4, VOCAB), np.float32)
    logits[0, [40, 500, 620]] = 2.0
    logits[1, [639, 3]] = 2.0
    logits[2, 639] = 2.0
    tokens = jitted(
        logits, make_sampler_state(1, VOCAB, VOCAB), make_rows(4, temperature=0), np.zeros(VOCAB, bool)
    )
    np.testing.assert_array_equal(tokens[0].tokens, [40, 3, 639, 0])


@pytest.mark.parametrize("values", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_the_tightest_cut_is_greedy_decoding(values: dict[str, float]) -> None:
    logits = typical_logits(4)
    state, no_eos = make_sampler_state(1, VOCAB, VOCAB), np.zeros(VOCAB, bool)
    for step in range(8):
        drawn, _ = jitted(logits, state, make_rows(4, step=step, **values), no_eos)
        np.testing.assert_array_equal(drawn.tokens, logits.argmax(-1))


def naive_adjusted(logits: np.ndarray, state: SamplerState, values: dict[str, np.ndarray]) -> np.ndarray:
    """f64[B, V]: bias and penalties by the formulas of the field, one row at a time."""
    adjusted = logits.astype(np.float64)
    for row, lane in enumerate(values["lanes"]):
        counts = np.asarray(state.output_counts[lane])
        adjusted[row] += np.asarray(state.bias[lane])
        for token in range(adjusted.shape[1]):
            if counts[token] > 0 or state.prompt_seen[lane, token]:
                repetition = values["repetition"][row]
                adjusted[row, token] *= repetition if adjusted[row, token] < 0 else 1 / repetition
            adjusted[row, token] -= values["frequency"][row] * counts[token]
            adjusted[row, token] -= values["presence"][row] * (counts[token] > 0)
    return adjusted


@given(
    seed=st.integers(0, 2**32 - 1),
    penalties=st.lists(
        st.tuples(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.2, 3)).map(np.float32),
        min_size=4,
        max_size=4,
    ),
)
def test_penalties_against_the_formulas(seed: int, penalties: list[np.ndarray]) -> None:
    rng, vocab_size = np.random.default_rng(seed), 24
    logits = (rng.normal(size=(4, vocab_size)) * 3).astype(np.float32)
    state = dataclasses.replace(
        make_sampler_state(4, vocab_size, vocab_size),
        bias=jnp.asarray(rng.normal(size=(4, vocab_size)), jnp.float32),
        has_bias=jnp.ones(4, bool),
        prompt_seen=jnp.asarray(rng.random((4, vocab_size)) < 0.3),
        output_counts=jnp.asarray(rng.integers(0, 4, (4, vocab_size)), jnp.int32),
    )
    values = {"lanes": np.array([2, 0, 3, 1]), "presence": np.stack(penalties)[:, 0]}
    values |= {"frequency": np.stack(penalties)[:, 1], "repetition": np.stack(penalties)[:, 2]}
    adjusted = naive_adjusted(logits, state, values)
    drawn, _ = jitted(logits, state, make_rows(4, temperature=0, **values), np.zeros(vocab_size, bool))
    # The drawn token is the best one; a float32 score may tie where the float64 one does not.
    best = np.take_along_axis(adjusted, np.asarray(drawn.tokens)[:, None], -1)[:, 0]
    np.testing.assert_allclose(best, adjusted.max(-1), atol=1e-5)


def test_penalties_shape_the_distribution() -> None:
    (logits,) = typical_logits()
    state = make_sampler_state(1, VOCAB, VOCAB)
    rng = np.random.default_rng(2)
    bias, seen = rng.normal(size=VOCAB).astype(np.float32), rng.random(VOCAB) < 0.2
    state = set_lane(state, jnp.int32(0), jnp.asarray(bias), jnp.asarray(seen))
    counts = rng.integers(0, 3, VOCAB)
    state = dataclasses.replace(state, output_counts=state.output_counts.at[0].set(counts))
    values = {"presence": 0.4, "frequency": 0.3, "repetition": 1.4}
    tokens = draw_many(logits, 10_000, state, **values)
    arrays = {name: np.array([value]) for name, value in {"lanes": 0, **values}.items()}
    assert_distribution(tokens, softmax(naive_adjusted(logits[None], state, arrays)[0]))


def test_the_output_is_counted_and_a_new_sequence_starts_empty() -> None:
    vocab_size = 24
    logits = np.zeros((4, vocab_size), np.float32)
    logits[np.arange(4), [5, 6, 5, 7]] = 9.0
    state, no_eos = make_sampler_state(4, vocab_size, vocab_size), np.zeros(vocab_size, bool)
    rows = make_rows(4, temperature=0, lanes=np.array([3, 1, 0, 2]), presence=np.array([0, 0, 0, 2.0]))
    for step in range(1, 4):
        sampled, state = jitted(logits, state, dataclasses.replace(rows, step=np.full(4, step)), no_eos)
        np.testing.assert_array_equal(sampled.tokens, [5, 6, 5, 7])
        assert state.output_counts[3, 5] == step
        assert state.output_counts.sum() == 4 * step
    seen = jnp.arange(vocab_size) == 2
    state = set_lane(state, jnp.int32(3), jnp.zeros(vocab_size), seen, early_ban=seen)
    assert state.output_counts[3].sum() == 0
    assert state.output_counts.sum() == 9
    np.testing.assert_array_equal(state.prompt_seen[3], seen)
    np.testing.assert_array_equal(state.early_ban[3], seen)
    assert not state.has_bias.any()


@pytest.mark.parametrize(
    "values",
    [{}, {"top_k": 20}, {"top_p": 0.9}, {"top_p": 0.99, "temperature": 9.0}, {"temperature": 0}],
    ids=str,
)
def test_forbidden_ids_are_never_drawn(values: dict[str, float]) -> None:
    # Ids beyond the tokenizer, EOS and the lane's stop ids hold nearly all the mass; bias pulls at them too.
    (logits,) = typical_logits(spread=1.0)
    allowed, eos, stop = VOCAB - 30, 17, 600
    logits[[eos, stop]] = 12.0
    logits[allowed:] = 15.0
    bias = np.zeros(VOCAB, np.float32)
    bias[-1] = 100.0
    state = make_sampler_state(1, VOCAB, allowed)
    state = set_lane(
        state, jnp.int32(0), jnp.asarray(bias), jnp.zeros(VOCAB, bool), jnp.arange(VOCAB) == stop
    )
    eos_mask = np.arange(VOCAB) == eos
    num_draws = 100_000 if not values else 5_000
    banned = draw_many(logits, num_draws, state, eos_mask=eos_mask, ban_eos=True, **values)
    assert not np.isin(banned, [eos, stop]).any()
    assert banned.max() < allowed
    free = draw_many(logits, 5_000, state, eos_mask=eos_mask, **values)
    assert np.isin(free, [eos, stop]).any()
    assert free.max() < allowed


def test_logprobs_are_of_the_raw_logits(
    mixed_batch: tuple[np.ndarray, SamplerState, dict[str, np.ndarray]],
) -> None:
    logits, state, values = mixed_batch
    sampled, _ = jitted(logits, state, make_rows(8, **values), np.zeros(VOCAB, bool))
    exact = np.log(softmax(logits))
    for row, asked in enumerate(values["num_logprobs"]):
        if asked == NO_LOGPROBS:
            assert sampled.logprob[row] == 0
        else:
            # float32 log-sum-exp over 640 terms against float64
            np.testing.assert_allclose(sampled.logprob[row], exact[row, sampled.tokens[row]], atol=1e-5)
        shown = max(asked, 0)
        best = np.argsort(-exact[row, : VOCAB - 4], kind="stable")[:shown]
        np.testing.assert_array_equal(sampled.top_ids[row, :shown], best)
        np.testing.assert_allclose(sampled.top_logprobs[row, :shown], exact[row, best], atol=1e-5)
        assert (np.asarray(sampled.top_ids[row, shown:]) == NO_TOKEN).all()
        assert np.isneginf(np.asarray(sampled.top_logprobs[row, shown:])).all()


def test_a_tiny_vocabulary_has_fewer_alternatives_than_columns() -> None:
    logits = np.array([[1.0, 3.0, 2.0, 0.0]], np.float32)
    state = make_sampler_state(1, 4, 3)
    sampled, _ = jitted(logits, state, make_rows(1, num_logprobs=MAX_LOGPROBS), np.zeros(4, bool))
    np.testing.assert_array_equal(sampled.top_ids[0], [1, 2, 0] + [NO_TOKEN] * 17)
    assert sampled.tokens[0] in (0, 1, 2)


def test_one_trace_serves_all_parameters(
    mixed_batch: tuple[np.ndarray, SamplerState, dict[str, np.ndarray]],
) -> None:
    logits, state, values = mixed_batch
    chex.clear_trace_counter()
    once = jax.jit(chex.assert_max_traces(sample, n=1))
    for rows in (make_rows(8, **values), make_rows(8), make_rows(8, temperature=0, num_logprobs=20)):
        once(logits, state, rows, np.zeros(VOCAB, bool))


def test_the_state_is_updated_in_place() -> None:  # issue 2 item 5
    num_lanes, num_rows, vocab_size = 8, 2, 20_000
    state = make_sampler_state(num_lanes, vocab_size, vocab_size)
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    step = jax.jit(sample, donate_argnames="state")
    compiled = step.lower(
        jnp.zeros((num_rows, vocab_size)), state, make_rows(num_rows), jnp.zeros(vocab_size, bool)
    ).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == state_bytes
    # A few times the rows' scores, and no copy of the lanes' arrays (10 bytes per lane and id).
    assert memory.temp_size_in_bytes < 10 * num_rows * vocab_size * 4
    row = jnp.zeros(vocab_size)
    memory = (
        jax.jit(set_lane, donate_argnames="state")
        .lower(state, jnp.int32(0), row, row > 0, row > 0)
        .compile()
        .memory_analysis()
    )
    assert memory.alias_size_in_bytes == state_bytes
    assert memory.temp_size_in_bytes < 4 * vocab_size * 4


def test_a_state_without_drawable_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed_vocab_size is 0; it must be from 1 to the head's 8 rows"):
        make_sampler_state(1, 8, 0)
    with pytest.raises(ValueError, match="allowed_vocab_size is 9"):
        make_sampler_state(1, 8, 9)


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition": 1.2},
        {},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"top_k": 600, "temperature": 4.0, "num_logprobs": 3},
    ],
    ids=str,
)
def test_a_row_without_a_token_to_draw_says_so_and_its_neighbours_draw(values: dict[str, float]) -> None:
    logits = typical_logits(num_rows=5)
    logits[1, 700] = np.nan
    logits[2, 3] = np.inf
    state = make_sampler_state(5, VOCAB, VOCAB - 10)
    everything = np.ones(VOCAB, bool)
    for lane in (3, 4):
        state = set_lane(state, np.int32(lane), np.zeros(VOCAB), np.zeros(VOCAB, bool), everything)
    rows = make_rows(5, lanes=np.arange(5), ban_eos=np.arange(5) == 3, **values)
    sampled, after = jitted(logits, state, rows, np.zeros(VOCAB, bool))
    tokens = np.asarray(sampled.tokens)
    assert tokens[1:4].tolist() == [NOT_FINITE, NOT_FINITE, NO_CANDIDATE]
    assert np.asarray(after.output_counts).sum(axis=1).tolist() == [1, 0, 0, 0, 1]
    plain = typical_logits(num_rows=5)
    undisturbed = jitted(plain, make_sampler_state(5, VOCAB, VOCAB - 10), rows, np.zeros(VOCAB, bool))[0]
    assert tokens[[0, 4]].tolist() == np.asarray(undisturbed.tokens)[[0, 4]].tolist()


def test_ids_beyond_the_allowed_ones_may_be_anything() -> None:
    logits = typical_logits()
    logits[:, VOCAB - 10 :] = np.nan  # rows of the head that belong to no token
    state = make_sampler_state(1, VOCAB, VOCAB - 10)
    for temperature in (0.0, 1.0):
        sampled, _ = jitted(logits, state, make_rows(1, temperature=temperature), np.zeros(VOCAB, bool))
        assert 0 <= int(sampled.tokens[0]) < VOCAB - 10
