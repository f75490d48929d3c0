"""Owns the form in which a model's weights are handed to the compiled programs: few arrays instead of many.

Handing over one array costs the host about a microsecond per step, whatever its size, and half of the
parameters are vectors (norm gains, decay rates). They travel side by side in one array, and each program cuts
them out again, which XLA fuses into their readers. Matrices stay apart: a product would have to copy its
stretch first. It does not own the model's structure, nor what a parameter means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, eq=False)
class WeightBundle:
    """A model's weights as the programs take them."""

    arrays: tuple[jax.Array, ...]  # whole parameters in their order, then f32[sum of the vectors' sizes]
    vector_sizes: tuple[int | None, ...]  # by parameter, in the order of `LoadedModel.leaves`; None is whole

    def leaves(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Returns the parameters that these arrays hold, in order; for use inside a compiled program.

        Args:
            arrays: traced, of the shapes of `self.arrays`.
        """
        whole = iter(arrays)
        leaves: list[jax.Array] = []
        start = 0
        for size in self.vector_sizes:
            if size is None:
                leaves.append(next(whole))
            else:
                leaves.append(arrays[-1][start : start + size])
                start += size
        return tuple(leaves)


def make_weight_bundle(leaves: Sequence[jax.Array]) -> WeightBundle:
    """Returns the bundle of a model's parameters; it takes them over, and the vectors are freed.

    Args:
        leaves: in the order of `LoadedModel.leaves`, at least one of them a float32 vector.
    """
    is_vector = [leaf.ndim == 1 and leaf.dtype == jnp.float32 for leaf in leaves]
    vectors = [leaf for leaf, is_one in zip(leaves, is_vector, strict=True) if is_one]
    whole = [leaf for leaf, is_one in zip(leaves, is_vector, strict=True) if not is_one]
    bundle = WeightBundle(
        arrays=(*whole, jnp.concatenate(vectors)),
        vector_sizes=tuple(
            leaf.size if is_one else None for leaf, is_one in zip(leaves, is_vector, strict=True)
        ),
    )
    for vector in vectors:
        vector.delete()  # two copies would not be in the memory table
    return bundle
