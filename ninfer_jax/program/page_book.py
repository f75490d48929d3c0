"""Owns which physical page of one pool holds which named page, and which pages are free.

A page has a name (its serial in `PhysicalState`) from the moment it holds tokens; before that it is only
promised to the sequence that will write it. It does not own why pages come and go: `resources` compares two
states and says which names are new and which are gone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from ninfer_jax.errors import InvariantError


class PageBook:
    """The only holder of a pool's page ids; hands out the lowest free one first, so runs repeat exactly."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))  # ascending, which is already a heap
        self._page_of: dict[int, int] = {}  # by serial

    @property
    def num_free(self) -> int:
        """Pages that nobody holds and nobody was promised."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Returns page ids that are now promised to the caller.

        Raises:
            InvariantError: if there are not as many; `PhysicalState` has counted them before.
        """
        if count > len(self._free):
            raise InvariantError(f"{count} pages wanted, {len(self._free)} of {self.num_pages} are free")
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, pages: Iterable[int]) -> None:
        """Frees promised pages that were never named."""
        for page in pages:
            heapq.heappush(self._free, page)

    def name(self, serial: int, page: int) -> None:
        """Says which page holds a name.

        Raises:
            InvariantError: if the name is taken.
        """
        if serial in self._page_of:
            raise InvariantError(f"page serial {serial} is held by page {self._page_of[serial]}, not {page}")
        self._page_of[serial] = page

    def forget(self, serials: Iterable[int]) -> None:
        """Frees the pages of names that are gone."""
        self.give_back([self._page_of.pop(serial) for serial in serials])

    def pages_of(self, serial: int, count: int) -> list[int]:
        """Returns the pages that hold `count` names from a serial on."""
        return [self._page_of[name] for name in range(serial, serial + count)]

    def check(self, named: Iterable[int], promised: Iterable[int]) -> None:
        """Recounts against the names that a state has and the pages that sequences were promised.

        Raises:
            InvariantError: if a page is lost, or in two places.
        """
        if set(named) != set(self._page_of):
            raise InvariantError(
                f"page names: the state has {sorted(set(named))}, the book {sorted(self._page_of)}"
            )
        everywhere = sorted([*self._free, *self._page_of.values(), *promised])
        if everywhere != list(range(self.num_pages)):
            raise InvariantError(
                f"free, named and promised pages are {everywhere}, not each of {self.num_pages} once"
            )
