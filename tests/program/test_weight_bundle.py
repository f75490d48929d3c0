"""The weights reach a program bit for bit through their bundle, and few arrays carry them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ninfer_jax.program.weight_bundle import make_weight_bundle


def some_leaves():
    rng = np.random.default_rng(1)
    shapes = [(5,), (3, 4), (1,), (2, 3, 2), (7,)]
    leaves = [jnp.array(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    return [*leaves, jnp.array(rng.standard_normal(6), jnp.bfloat16)]


def test_every_parameter_comes_back_in_its_place_and_with_its_bits():
    leaves = some_leaves()
    before = [np.array(leaf) for leaf in leaves]
    bundle = make_weight_bundle(leaves)
    back = jax.jit(bundle.leaves)(bundle.arrays)
    assert [leaf.dtype for leaf in back] == [value.dtype for value in before]
    for leaf, value in zip(back, before, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), value)


def test_float32_vectors_share_one_array_and_everything_else_stays_whole():
    leaves = some_leaves()
    bundle = make_weight_bundle(leaves)
    assert [array.shape for array in bundle.arrays] == [(3, 4), (2, 3, 2), (6,), (5 + 1 + 7,)]
    assert bundle.arrays[0] is leaves[1]


def test_taking_over_leaves_no_second_copy():
    leaves = some_leaves()
    num_bytes = sum(leaf.nbytes for leaf in leaves)
    bundle = make_weight_bundle(leaves)
    assert [leaf.is_deleted() for leaf in leaves] == [True, False, True, False, True, False]
    assert sum(array.nbytes for array in bundle.arrays) == num_bytes
