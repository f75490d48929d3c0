"""The capacity vector: which axes exist, in which units, and what fits.

Owns: axis numbering, unit sizes, the independent comparison per axis (R-1, R-2). Owns no occupancy.

Letters: N typed KV pools (1 or 2), R = 3 + N axes, J = 1 + N *items* (a StateImage, a page of each pool).
Arrays hold int32 units (slots, pages, arena granules); bytes are Python ints and appear only here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

DEVICE_STATE: Final = 0
HOST_STATE: Final = 1
HOST_KV: Final = 2
DEVICE_PAGES: Final = 3  # DEVICE_PAGES + n is the page axis of pool n


@dataclass(frozen=True)
class PoolSpec:
    """One typed KV pool (K-1): its Device pages and what one packed page takes on Host.

    Attributes:
        device_pages: page groups on Device.
        page_granules: arena granules of one packed page; 1 when the granule is this pool's page.
        page_bytes: bytes of one page group, for transfer work.
        staging_pages: pages of this pool that packing for D2H borrows while copies fly (design 3);
            0 when packing uses memory outside the pool.
    """

    name: str
    device_pages: int
    page_granules: int = 1
    page_bytes: int = 0
    staging_pages: int = 0


@dataclass(frozen=True)
class PhysicalCapacity:
    """Everything the program fixes at start (R-1). Build with `make_capacity`.

    Attributes:
        device_state_slots: StateImage slots on Device, active guarantee included (S-1).
        host_state_slots: complete StateImages on Host.
        host_kv_granules: size of the one Host KV arena, in granules (K-7).
        pools: the typed pools, Main first.
        granule_bytes: bytes of one arena granule.
        state_image_bytes: bytes of one StateImage.
        page_tokens: tokens of one page (K-2).
        lanes: active sequences at most (P-1); a logical limit kept here because readiness asks for it.
    """

    device_state_slots: int
    host_state_slots: int
    host_kv_granules: int
    pools: tuple[PoolSpec, ...]
    granule_bytes: int
    state_image_bytes: int
    page_tokens: int
    lanes: int

    @property
    def num_pools(self) -> int:
        """N, the number of typed pools."""
        return len(self.pools)

    @property
    def num_axes(self) -> int:
        """R, the length of every unit vector."""
        return DEVICE_PAGES + len(self.pools)

    def units(self) -> np.ndarray:
        """Returns the capacity as int32[R], in axis order."""
        head = [self.device_state_slots, self.host_state_slots, self.host_kv_granules]
        return np.asarray(head + [pool.device_pages for pool in self.pools], np.int32)

    def page_granules(self) -> np.ndarray:
        """Returns int32[N], arena granules of one packed page of each pool."""
        return np.asarray([pool.page_granules for pool in self.pools], np.int32)

    def item_bytes(self) -> tuple[int, ...]:
        """Returns the bytes of one unit of each item: StateImage, then a page of each pool; length J."""
        return (self.state_image_bytes, *(pool.page_bytes for pool in self.pools))


def make_capacity(
    *,
    device_state_slots: int,
    device_pages: int | tuple[int, ...],
    host_state_slots: int = 0,
    host_kv_granules: int = 0,
    page_granules: tuple[int, ...] | None = None,
    page_bytes: tuple[int, ...] | None = None,
    staging_pages: tuple[int, ...] | None = None,
    state_image_bytes: int = 0,
    granule_bytes: int = 1,
    page_tokens: int = 64,
    lanes: int = 1,
) -> PhysicalCapacity:
    """Returns a validated capacity.

    Args:
        device_pages: pages of each pool; one number means a single pool named "main".
        page_granules: granules per packed page of each pool, default 1.
        page_bytes: bytes per page of each pool, default ``page_granules * granule_bytes``.
    Raises:
        ValueError: for a negative size, no pool, more than two pools, or tuples of different length.
    """
    pages = (device_pages,) if isinstance(device_pages, int) else tuple(device_pages)
    if not 1 <= len(pages) <= 2:
        raise ValueError(f"got {len(pages)} KV pools, expected 1 (main) or 2 (main, backend)")
    granules = page_granules or (1,) * len(pages)
    sizes = page_bytes or tuple(g * granule_bytes for g in granules)
    staging = staging_pages or (0,) * len(pages)
    if not len(granules) == len(sizes) == len(staging) == len(pages):
        raise ValueError(
            f"per-pool tuples must have {len(pages)} entries: got page_granules={granules}, "
            f"page_bytes={sizes}, staging_pages={staging}"
        )
    numbers = (device_state_slots, host_state_slots, host_kv_granules, *pages, *sizes, *staging)
    if min(numbers) < 0 or min(granules) < 1 or page_tokens < 1 or lanes < 1:
        raise ValueError(f"capacities must be >= 0, page sizes and lanes >= 1; got {numbers}, {granules}")
    if max(numbers[:3] + pages) > np.iinfo(np.int32).max // 4:
        raise ValueError("a capacity in units must stay below 2**29: choose a larger granule")
    names = ("main", "backend")
    pools = tuple(PoolSpec(names[n], pages[n], granules[n], sizes[n], staging[n]) for n in range(len(pages)))
    return PhysicalCapacity(
        device_state_slots,
        host_state_slots,
        host_kv_granules,
        pools,
        granule_bytes,
        state_image_bytes,
        page_tokens,
        lanes,
    )


def axis_names(capacity: PhysicalCapacity) -> tuple[str, ...]:
    """Returns the readable name of each axis, in axis order."""
    pages = tuple(f"device_{pool.name}_pages" for pool in capacity.pools)
    return ("device_state_slots", "host_state_slots", "host_kv_granules", *pages)


def fits(used: np.ndarray, capacity: np.ndarray) -> bool:
    """Returns whether every axis holds on its own; slack never moves between axes (R-2).

    Args:
        used: int32[..., R].
        capacity: int32[R].
    """
    return bool(np.all(used <= capacity))


def residual(used: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Returns int32[..., R], units missing on each axis (0 where it fits)."""
    return np.maximum(used - capacity, 0).astype(np.int32)


def ceil_div(a: int, b: int) -> int:
    """Returns a / b rounded up, for non-negative a."""
    return -(-a // b)
