"""Kept sets against sorting in float64; both ways of finding them must agree with it and with each other."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer_jax.model.blocks import leading
from ninfer_jax.model.truncation import Cuts, keep_by_border, keep_leading

# float32 sums of up to 1,500 terms against float64 ones: borders this close to p may fall either way.
MASS_TOLERANCE = 1e-5

SIZES = (3, 40, 700, 1500)
NUM_LEADING = 64

# Scores on a coarse grid are full of ties; the others have none.
grids = st.sampled_from([None, 0.5, 2.0])


def make_scores(vocab_size: int, seed: int, spread: float, grid: float | None) -> np.ndarray:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=vocab_size) * spread
    scores[rng.random(vocab_size) < 0.1] = -np.inf  # forbidden ids
    if np.isneginf(scores).all():
        scores[0] = 0.0
    if grid is not None:
        scores = np.round(scores / grid) * grid
    return (scores - scores.max() + 0.0).astype(np.float32)  # +0.0: no negative zeros, as in the product


def naive_prefix(scores: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The kept ids in order: the definition, by sorting, in float64."""
    exact = scores.astype(np.float64)
    order = np.lexsort((np.arange(len(exact)), -exact))
    order = order[np.isfinite(exact[order])]
    if top_k > 0:
        order = order[:top_k]
    weights = np.exp(exact[order])
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]]) / weights.sum()
    stays = np.ones(len(order), bool) if top_p >= 1 else before < top_p
    # The border of min_p itself is exact: float32 exp is compared with float32 min_p, as on device.
    return order[stays & (np.asarray(jnp.exp(scores[order])) >= np.float32(min_p))]


def check_between(kept: np.ndarray, scores: np.ndarray, top_k: int, top_p: float, min_p: float) -> None:
    """The kept ids are a prefix of the order, between the prefixes of slightly smaller and larger p."""
    least = naive_prefix(scores, top_k, max(1e-9, top_p - MASS_TOLERANCE) if top_p < 1 else 1.0, min_p)
    most = naive_prefix(scores, top_k, top_p + MASS_TOLERANCE if top_p < 1 else 1.0, min_p)
    assert set(least) <= set(kept) <= set(most)
    assert set(kept) == set(most[: len(kept)])


@functools.cache
def border_program(vocab_size: int) -> jax.stages.Wrapped:
    del vocab_size  # one program per size, shared by all examples
    return jax.jit(keep_by_border)


@functools.cache
def leading_program(vocab_size: int) -> jax.stages.Wrapped:
    def keep(scores: jax.Array, cuts: Cuts) -> tuple[jax.Array, jax.Array, jax.Array]:
        best, ids = leading(scores, min(NUM_LEADING, vocab_size))
        kept, complete = keep_leading(best, cuts, vocab_size, jnp.sum(jnp.exp(scores), axis=-1))
        return ids, kept, complete

    return jax.jit(keep)


cases = given(
    vocab_size=st.sampled_from(SIZES),
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    grid=grids,
    top_k=st.one_of(st.just(0), st.integers(1, 2000)),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)


def make_cuts(top_k: int, top_p: float, min_p: float) -> Cuts:
    return Cuts(
        jnp.full(1, top_k, jnp.int32), jnp.full(1, top_p, jnp.float32), jnp.full(1, min_p, jnp.float32)
    )


@cases
def test_border_against_sorting(
    vocab_size: int, seed: int, spread: float, grid: float | None, top_k: int, top_p: float, min_p: float
) -> None:
    scores = make_scores(vocab_size, seed, spread, grid)
    kept = border_program(vocab_size)(scores[None], make_cuts(top_k, top_p, min_p))[0]
    check_between(np.flatnonzero(kept), scores, top_k, top_p, min_p)


@cases
def test_leading_against_sorting(
    vocab_size: int, seed: int, spread: float, grid: float | None, top_k: int, top_p: float, min_p: float
) -> None:
    scores = make_scores(vocab_size, seed, spread, grid)
    ids, kept, complete = leading_program(vocab_size)(scores[None], make_cuts(top_k, top_p, min_p))
    listed = np.asarray(ids[0])[np.asarray(kept[0])]
    assert np.asarray(kept[0])[: len(listed)].all(), "not a prefix"
    wanted = naive_prefix(scores, top_k, top_p, min_p)
    if complete[0]:
        check_between(listed, scores, top_k, top_p, min_p)
    else:
        # Never given up when the list holds the answer, but for a top_k beyond the list (whose mass is
        # unknown) and the last place (whose successor is).
        assert len(wanted) >= min(NUM_LEADING, vocab_size) or NUM_LEADING < top_k < vocab_size


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (0, 1.0, 0.0, [0, 1, 2, 3, 4]),
        (3, 1.0, 0.0, [0, 1, 2]),  # ids 2 and 3 tie for the third place: the lower one stays
        (0, 0.4, 0.0, [0]),  # the first token alone has 0.4: nothing before the second is below it
        (0, 0.41, 0.0, [0, 1]),
        (2, 0.6, 0.0, [0]),  # renormalised over the two left: 0.4 / 0.65 > 0.6
        (0, 1.0, 0.5, [0, 1]),  # at least half of 0.4
        (0, 0.7, 0.5, [0, 1]),  # min_p after top_p
    ],
)
def test_by_hand(top_k: int, top_p: float, min_p: float, kept: list[int]) -> None:
    probabilities = np.array([0.4, 0.25, 0.15, 0.15, 0.05])
    scores = np.log(probabilities / 0.4).astype(np.float32)
    border = border_program(5)(scores[None], make_cuts(top_k, top_p, min_p))[0]
    np.testing.assert_array_equal(np.flatnonzero(border), kept)
    ids, leading_kept, complete = leading_program(5)(scores[None], make_cuts(top_k, top_p, min_p))
    np.testing.assert_array_equal(np.asarray(ids[0])[np.asarray(leading_kept[0])], kept)
    assert complete[0]
