"""Owns the capacity vector: how many units of each physical axis exist, fixed at start (R-1).

It does not own how the numbers are found (`sizing`) nor what is in use (the stores).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ninfer_jax.options import PAGE_TOKENS


class PoolKind(Enum):
    """Which continuation state a typed page pool holds (K-1)."""

    MAIN = "main"  # K and V of every full-attention layer


@dataclass(frozen=True)
class PoolCapacity:
    """One typed pool: a page group is the slice of all its planes for one logical block."""

    kind: PoolKind
    num_pages: int
    page_bytes: int


@dataclass(frozen=True)
class CapacityVector:
    """Every axis of physical capacity; slack on one never covers another (R-2)."""

    num_lanes: int  # C; also the number of execution rows
    max_context_tokens: int
    num_state_slots: int  # C + H, one pool (S-1)
    state_image_bytes: int
    pools: tuple[PoolCapacity, ...]
    num_host_state_slots: int
    host_kv_bytes: int
    keeps_context: bool = True  # whether anything outlives its request; without, nothing is ever copied

    @property
    def num_host_pages(self) -> int:
        """Granules of the Host arena; one granule is one packed page of the main pool (K-7)."""
        page_bytes = self.pools[0].page_bytes
        return self.host_kv_bytes // page_bytes if page_bytes else 0

    @property
    def row_pages(self) -> int:
        """Width of a block table, L = ceil(max_context / P)."""
        return pages_for(self.max_context_tokens)


def pages_for(num_tokens: int) -> int:
    """Returns how many pages hold that many tokens."""
    return -(-num_tokens // PAGE_TOKENS)
