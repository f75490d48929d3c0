"""Expert routing against every expert computed for every token, in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ninfer_jax.model.moe import route, routed_experts

H, F, E, K = 12, 6, 10, 3
routed = jax.jit(routed_experts)


def weights(seed=0):
    rng = np.random.default_rng(seed)
    gate_up = (rng.normal(size=(E, H, 2 * F)) / np.sqrt(H)).astype(np.float32)
    down = (rng.normal(size=(E, F, H)) / np.sqrt(F)).astype(np.float32)
    return gate_up, down


def every_expert(x, w, experts, gate_up, down):
    out = np.zeros(x.shape, np.float64)
    for n in range(len(x)):
        for weight, e in zip(w[n], experts[n], strict=True):
            gate, up = np.split(x[n].astype(np.float64) @ gate_up[e], 2)
            out[n] += weight * ((gate / (1 + np.exp(-gate)) * up) @ down[e])
    return out


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 200])
def test_routed_sum_equals_every_expert(num_tokens):
    rng = np.random.default_rng(num_tokens)
    x = rng.normal(size=(num_tokens, H)).astype(np.float32)
    router = rng.normal(size=(H, E)).astype(np.float32)
    w, experts = route(jnp.asarray(x), jnp.asarray(router), K)
    gate_up, down = weights()
    got = routed(x, w, experts, gate_up, down)
    expected = every_expert(x, np.asarray(w), np.asarray(experts), gate_up, down)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [5, 150])
def test_all_tokens_may_choose_the_same_experts(num_tokens):
    x = np.random.default_rng(3).normal(size=(num_tokens, H)).astype(np.float32)
    experts = np.tile(np.array([[9, 0, 4]], np.int32), (num_tokens, 1))
    w = np.full((num_tokens, K), 1 / 3, np.float32)
    got = routed(x, w, experts, *weights())
    np.testing.assert_allclose(got, every_expert(x, w, experts, *weights()), rtol=0, atol=1e-5)


def test_an_expert_that_nobody_chose_is_not_touched():
    gate_up, down = weights()
    gate_up[5], down[5] = np.nan, np.nan
    experts = np.array([[0, 1, 2], [6, 7, 4]], np.int32)
    got = routed(np.ones((2, H), np.float32), np.full((2, K), 0.5, np.float32), experts, gate_up, down)
    assert np.isfinite(got).all()


def test_routing_is_softmax_over_all_experts_then_renormalised_top_k():
    logits = np.array([[3.0, 1.0, 2.0, 0.0]], np.float32)
    w, experts = route(jnp.asarray(logits), jnp.eye(4), 2)
    assert experts.tolist() == [[0, 2]]
    np.testing.assert_allclose(w, [[np.e / (1 + np.e), 1 / (1 + np.e)]], rtol=1e-6)


def test_memory_is_one_block_and_not_one_copy_of_the_weights_per_token():
    experts, hidden, width, tokens = 32, 64, 64, 8
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((tokens, hidden), jnp.float32),
            ((tokens, 8), jnp.float32),
            ((tokens, 8), jnp.int32),
            ((experts, hidden, 2 * width), jnp.float32),
            ((experts, width, hidden), jnp.float32),
        )
    ]
    temp = jax.jit(routed_experts).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    one_expert = 4 * 3 * hidden * width
    assert temp < 3 * one_expert, (temp, one_expert)
