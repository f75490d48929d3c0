"""The generator against published vectors, its noise against its distribution, and searches against NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ninfer_jax.model.blocks import first_argmax, leading, row_sums
from ninfer_jax.model.noise import BLOCK_STREAM, TOKEN_STREAM, draw_block, draw_listed, gumbel, threefry

FALSE_ALARM_RATE = 1e-6


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [  # the known answers that come with the paper's library (Random123, threefry2x32, 20 rounds)
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_known_answers(
    key: tuple[int, int], counter: tuple[int, int], words: tuple[int, int]
) -> None:
    got = threefry(*(jnp.uint32(word) for word in (*key, *counter)))
    assert tuple(int(word) for word in got) == words


def test_noise_is_gumbel() -> None:
    noise = gumbel(
        jnp.arange(4, dtype=jnp.uint32), jnp.zeros(4, jnp.int32), jnp.arange(50_000)[None], TOKEN_STREAM
    )
    assert np.isfinite(noise).all()
    for row in np.asarray(noise):
        assert stats.kstest(row, stats.gumbel_r.cdf).pvalue > FALSE_ALARM_RATE
    # The largest noise decides draws: of 23 bits, the best thousand of 200,000 would hold dozens of ties.
    high = np.sort(np.asarray(noise).ravel())[-1000:]
    assert (np.diff(high) == 0).sum() < 3


@pytest.mark.parametrize("changed", ["seed", "step", "index", "stream"])
def test_every_argument_gives_other_noise(changed: str) -> None:
    base = {"seed": 1, "step": 2, "index": 3, "stream": TOKEN_STREAM}
    other = {**base, changed: base[changed] + 1}
    noise = [
        float(
            gumbel(
                jnp.full(1, values["seed"], jnp.uint32),
                jnp.full(1, values["step"], jnp.int32),
                jnp.full((1, 1), values["index"], jnp.int32),
                values["stream"],
            )[0, 0]
        )
        for values in (base, other)
    ]
    assert noise[0] != noise[1]
    assert BLOCK_STREAM == TOKEN_STREAM + 1  # the stream tried above


def test_an_excluded_token_is_not_drawn_even_beside_one_other() -> None:
    ids = jnp.broadcast_to(jnp.arange(8), (20_000, 8))
    scores = jnp.where(ids == 5, 0.0, -jnp.inf)
    drawn = draw_listed(scores, ids, jnp.zeros(20_000, jnp.uint32), jnp.arange(20_000))
    assert (np.asarray(drawn) == 5).all()


def test_blocks_are_drawn_by_their_mass() -> None:
    # Three blocks with mass 0.2, 0.5 and 0.3, spread differently inside.
    scores = np.full(1400, -np.inf, np.float32)
    scores[[3, 500]] = np.log(0.1)
    scores[512:1012] = np.log(0.5 / 500)
    scores[1399] = np.log(0.3)
    scores -= scores.max()
    num_draws = 10_000
    rows = jnp.broadcast_to(scores, (num_draws, 1400))
    _, ids = jax.jit(draw_block)(rows, jnp.zeros(num_draws, jnp.uint32), jnp.arange(num_draws))
    counts = np.bincount(np.asarray(ids[:, 0]) // 512, minlength=3)
    assert stats.chisquare(counts, num_draws * np.array([0.2, 0.5, 0.3])).pvalue > FALSE_ALARM_RATE


@functools.cache
def argmax_program(vocab_size: int, num_columns: int) -> jax.stages.Wrapped:
    return jax.jit(lambda values: first_argmax(values, num_columns))


@functools.cache
def leading_program(vocab_size: int, count: int) -> jax.stages.Wrapped:
    return jax.jit(lambda values: leading(values, count))


coarse = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed))


@given(rng=coarse, size=st.sampled_from([(5, 5), (600, 513), (1600, 1600), (1600, 1100)]), ties=st.booleans())
def test_first_argmax_against_numpy(rng: np.random.Generator, size: tuple[int, int], ties: bool) -> None:
    vocab_size, num_columns = size
    values = rng.integers(0, 4, (3, vocab_size)) if ties else rng.normal(size=(3, vocab_size))
    values = values.astype(np.float32)
    values[:, num_columns:] = 100.0
    got = argmax_program(vocab_size, num_columns)(values)
    np.testing.assert_array_equal(got, values[:, :num_columns].argmax(-1))


# 9,000 and 20,011 columns go through blocks (of 8 and of 16 tokens), the last one partial.
@given(rng=coarse, size=st.sampled_from([(50, 50), (9_000, 64), (20_011, 20)]), ties=st.booleans())
def test_leading_against_sorting(rng: np.random.Generator, size: tuple[int, int], ties: bool) -> None:
    vocab_size, count = size
    values = rng.integers(0, 300, (2, vocab_size)) if ties else rng.normal(size=(2, vocab_size))
    values = values.astype(np.float32)
    best, ids = leading_program(vocab_size, count)(values)
    order = np.argsort(-values, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(best, np.take_along_axis(values, order, -1))


def test_row_sums_keep_their_digits() -> None:
    values = np.random.default_rng(0).random((2, 248_320)).astype(np.float32)
    exact = values.astype(np.float64).sum(-1)
    np.testing.assert_allclose(row_sums(jnp.asarray(values)), exact, rtol=1e-6)
