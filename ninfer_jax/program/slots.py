"""Owns a set of equal numbered places (lanes, execution rows, state slots): which are free, which are taken.

It does not own what lies in them. State slots are one pool and belong to no lane (S-1, CFG-04).
"""

from __future__ import annotations

import heapq

from ninfer_jax.errors import InvariantError


class SlotPool:
    """The only holder of which places are taken; hands out the lowest free one, so runs repeat exactly."""

    def __init__(self, name: str, num_slots: int) -> None:
        self.name = name
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Places that can be taken."""
        return len(self._free)

    @property
    def num_taken(self) -> int:
        """Places somebody holds."""
        return len(self._taken)

    def take(self) -> int:
        """Returns the lowest free place, now taken.

        Raises:
            InvariantError: if none is free; callers ask `num_free` first.
        """
        if not self._free:
            raise InvariantError(f"all {self.num_slots} {self.name} are taken")
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Frees a taken place.

        Raises:
            InvariantError: if it was not taken.
        """
        if slot not in self._taken:
            raise InvariantError(f"{self.name}: {slot} was given back but is not taken")
        self._taken.remove(slot)
        heapq.heappush(self._free, slot)

    def check(self) -> None:
        """Recounts from the objects.

        Raises:
            InvariantError: if some place is in both sets or in neither.
        """
        if sorted([*self._free, *self._taken]) != list(range(self.num_slots)):
            raise InvariantError(
                f"{self.name}: free {self._free} and taken {self._taken} of {self.num_slots}"
            )
