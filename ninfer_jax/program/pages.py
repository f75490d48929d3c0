"""Owns the pages of one typed pool: the free list, who has which page mapped, and who may still map how many.

It does not own buffers (the executor holds them) nor sequences. A page is mapped, reserved by somebody's
entitlement, or free for anybody; a unit is never in two of these at once (R-5).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from ninfer_jax.errors import InvariantError
from ninfer_jax.program.capacity import PoolCapacity


@dataclass(eq=False)
class AddressSpace:
    """The pages of one continuation in one pool, in logical order, and the entitlement behind them.

    Only its `PageStore` changes it. Unmapping keeps the entitlement (A-2).
    """

    entitled_pages: int
    mapped: list[int] = field(default_factory=list)

    @property
    def reserved_pages(self) -> int:
        """Pages it may still map: capacity that nobody else can take (A-1)."""
        return self.entitled_pages - len(self.mapped)


class PageStore:
    """The only holder of a pool's free pages; hands out the lowest free id first, so runs repeat exactly."""

    def __init__(self, capacity: PoolCapacity) -> None:
        self.capacity = capacity
        self._free = list(range(capacity.num_pages))  # ascending, which is already a heap
        self._spaces: set[AddressSpace] = set()
        self._reserved_pages = 0

    @property
    def num_mapped(self) -> int:
        """Pages that hold somebody's tokens."""
        return self.capacity.num_pages - len(self._free)

    @property
    def num_reserved(self) -> int:
        """Pages promised to an active sequence and not mapped yet."""
        return self._reserved_pages

    @property
    def num_available(self) -> int:
        """Pages that a new entitlement can take."""
        return len(self._free) - self._reserved_pages

    def open(self, entitled_pages: int) -> AddressSpace:
        """Returns an empty address space whose whole growth is reserved.

        Args:
            entitled_pages: the most pages it will ever map at once.

        Raises:
            InvariantError: if the pool cannot guarantee that many; callers ask `num_available` first.
        """
        if not 0 <= entitled_pages <= self.num_available:
            raise InvariantError(f"reservation of {entitled_pages} pages, {self.num_available} are available")
        space = AddressSpace(entitled_pages)
        self._spaces.add(space)
        self._reserved_pages += entitled_pages
        return space

    def grow(self, space: AddressSpace, num_pages: int) -> list[int]:
        """Returns the ids newly mapped so that the space maps at least `num_pages`; reserved becomes mapped.

        Raises:
            InvariantError: if that is beyond the entitlement (A-1); nothing is mapped then.
        """
        missing = num_pages - len(space.mapped)
        if missing <= 0:
            return []
        if missing > space.reserved_pages:
            raise InvariantError(f"mapping page {num_pages} of a space entitled to {space.entitled_pages}")
        added = [heapq.heappop(self._free) for _ in range(missing)]
        space.mapped.extend(added)
        self._reserved_pages -= missing
        return added

    def shrink(self, space: AddressSpace, num_pages: int) -> list[int]:
        """Returns the ids unmapped so that `num_pages` at most stay mapped; capacity stays reserved (A-2)."""
        dropped = space.mapped[num_pages:]
        del space.mapped[num_pages:]
        for page in dropped:
            heapq.heappush(self._free, page)
        self._reserved_pages += len(dropped)
        return dropped

    def close(self, space: AddressSpace) -> None:
        """Gives everything back: mapped pages and what was still reserved."""
        self.shrink(space, 0)
        self._reserved_pages -= space.entitled_pages
        space.entitled_pages = 0
        self._spaces.remove(space)

    def check(self) -> None:
        """Recounts from the objects.

        Raises:
            InvariantError: naming the two numbers that disagree.
        """
        mapped = [page for space in self._spaces for page in space.mapped]
        both = sorted(mapped + self._free)
        if both != list(range(self.capacity.num_pages)):
            raise InvariantError(
                f"mapped and free pages are {both}, not each of {self.capacity.num_pages} once"
            )
        reserved = sum(space.reserved_pages for space in self._spaces)
        if reserved != self._reserved_pages:
            raise InvariantError(
                f"counter says {self._reserved_pages} reserved pages, the spaces sum to {reserved}"
            )
        if any(space.reserved_pages < 0 for space in self._spaces) or self.num_available < 0:
            raise InvariantError(f"{reserved} pages are reserved, {len(self._free)} are free")
