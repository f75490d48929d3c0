"""Owns the bytes of the Host tier: the arena of packed KV pages and the slots of state images.

It does not own which granule or slot is whose: `PhysicalState` says so, and every index arrives from there.
A granule is one packed page of all layers; the operating system commits memory as it is first written.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from ninfer_jax.program.memory_table import HOST_PAGES, HOST_STATES


class HostTier:
    """The only holder of Host copies.

    Args:
        num_granules: packed pages.
        num_slots: state images.
        page: shape and dtype of one packed page, [L, 2, Hkv, 64, D].
        image: shapes and dtypes of one state image, leaf by leaf.
    """

    def __init__(
        self,
        num_granules: int,
        num_slots: int,
        *,
        page: jax.ShapeDtypeStruct,
        image: Sequence[jax.ShapeDtypeStruct],
    ) -> None:
        self._pages = np.zeros((num_granules, *page.shape), page.dtype)
        self._images = [np.zeros((num_slots, *leaf.shape), leaf.dtype) for leaf in image]

    @property
    def num_bytes(self) -> dict[str, int]:
        """Bytes of arena and slots, written or not, by axis."""
        return {HOST_PAGES: self._pages.nbytes, HOST_STATES: sum(leaf.nbytes for leaf in self._images)}

    def put_pages(self, granules: Sequence[int], packed: np.ndarray) -> None:
        """Stores pages [N, L, 2, Hkv, 64, D] at their granules."""
        self._pages[list(granules)] = packed[: len(granules)]

    def pages(self, granules: Sequence[int], padded_to: int) -> np.ndarray:
        """Returns [padded_to, L, 2, Hkv, 64, D], zeros behind the named pages; new memory."""
        packed = np.zeros((padded_to, *self._pages.shape[1:]), self._pages.dtype)
        packed[: len(granules)] = self._pages[list(granules)]
        return packed

    def put_image(self, slot: int, leaves: Sequence[np.ndarray]) -> None:
        """Stores a state image."""
        for held, leaf in zip(self._images, leaves, strict=True):
            held[slot] = leaf

    def image(self, slot: int) -> list[np.ndarray]:
        """Returns the leaves of a state image; new memory."""
        return [held[slot].copy() for held in self._images]
