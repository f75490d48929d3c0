"""The chunked delta rule against the recurrence in float64, where chunking is known to go wrong."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.model.gated_delta import chunked_rule, inverse_unit_lower, l2_normalise, recurrent_rule

HK, HV, DK, DV, T = 2, 6, 8, 5, 130
chunked = jax.jit(chunked_rule)


def recurrence64(q, k, v, beta, g, state):
    """The definition, token by token in float64."""
    q, k = (np.repeat(np.asarray(x, np.float64), HV // HK, axis=1) for x in (q, k))
    v, beta, g, state = (np.asarray(x, np.float64) for x in (v, beta, g, state))
    out = []
    for t in range(len(v)):
        state = state * np.exp(g[t])[:, None, None]
        delta = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * delta[:, None, :]
        out.append(np.einsum("hkv,hk->hv", state, q[t]))
    return np.array(out), state


def inputs(seed, decay, *, same_keys=False):
    rng = np.random.default_rng(seed)
    q = l2_normalise(jnp.asarray(rng.normal(size=(T, HK, DK)), jnp.float32)) * DK**-0.5
    k = l2_normalise(jnp.asarray(rng.normal(size=(1 if same_keys else T, HK, DK)), jnp.float32))
    k = jnp.broadcast_to(k, (T, HK, DK))
    v = rng.normal(size=(T, HV, DV)).astype(np.float32)
    beta = np.ones((T, HV), np.float32) if same_keys else rng.uniform(0, 1, (T, HV)).astype(np.float32)
    g = -decay * rng.uniform(0, 1, (T, HV)).astype(np.float32)
    state = rng.normal(size=(HV, DK, DV)).astype(np.float32)
    return q, k, v, beta, g, state


# A decay of 10 per token sums to -640 in a chunk: any factorised exp(G_i) * exp(-G_j) overflows there. Equal
# keys with beta 1 and no decay make the triangular system as ill-shaped as it can be.
@pytest.mark.parametrize(
    ("decay", "same_keys"), [(0.0, False), (0.05, False), (1.0, False), (10.0, False), (0.0, True)]
)
def test_chunked_rule_is_the_recurrence(decay, same_keys):
    args = inputs(0, decay, same_keys=same_keys)
    out, state = chunked(*args)
    expected_out, expected_state = recurrence64(*args)
    # float32 with sums over at most 64 + DK terms of size 1.
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=2e-5)
    np.testing.assert_allclose(state, expected_state, rtol=0, atol=2e-5)


def test_single_steps_are_the_recurrence():
    args = inputs(1, 0.3)
    state = jnp.asarray(args[-1])[None]
    outs = []
    for t in range(5):
        out, state = recurrent_rule(*(jnp.asarray(x)[None, t] for x in args[:5]), state)
        outs.append(out[0])
    expected_out, expected_state = recurrence64(*(x[:5] for x in args[:5]), args[5])
    np.testing.assert_allclose(np.array(outs), expected_out, rtol=0, atol=5e-6)
    np.testing.assert_allclose(state[0], expected_state, rtol=0, atol=5e-6)


@pytest.mark.parametrize("valid", [0, 1, 63, 64, 65, 129])
def test_tokens_without_beta_and_g_leave_the_state_alone(valid):
    q, k, v, beta, g, state = inputs(2, 0.5)
    masked = np.arange(T)[:, None] < valid
    out, got = chunked(q, k, v, np.where(masked, beta, 0), np.where(masked, g, 0), state)
    expected_out, expected = recurrence64(*(x[:valid] for x in (q, k, v, beta, g)), state)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(out[:valid], expected_out.reshape(valid, HV, DV), rtol=0, atol=1e-5)


def test_inverse_stays_exact_where_a_series_over_the_whole_chunk_would_explode():
    ones = np.tril(np.ones((1, 64, 64), np.float32), -1)
    got = inverse_unit_lower(jnp.asarray(ones))[0]
    np.testing.assert_allclose(got, np.eye(64) - np.eye(64, k=-1), rtol=0, atol=1e-6)


def test_l2_epsilon_is_on_the_squared_length_and_not_scaled_by_the_head():
    small = jnp.full((1, 32), 1e-4, jnp.float32)
    expected = 1e-4 / np.sqrt(32e-8 + 1e-6)
    np.testing.assert_allclose(l2_normalise(small), np.full((1, 32), expected), rtol=1e-5)
