"""The Host KV arena as a value: where bytes are free, not just how many (R-2, K-7).

Owns: sorted free intervals, first fit, and the exact test of a complete release/allocation recipe.
Owns no page and no byte: positions and lengths are granules.

A release returns exactly the whole packed pages it names, so part of an earlier extent may be released;
an allocation is one contiguous extent. Every operation returns a new arena.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HostArena:
    """Free space of one arena: ``(start, length)`` intervals, sorted, disjoint and never adjacent."""

    size: int
    free: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Placed:
    """The recipe fits; ``starts[i]`` is where allocation i lands."""

    arena: HostArena
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Blocked:
    """Allocation ``index`` found no hole: it needs ``needed`` granules, the largest hole has ``largest``.

    ``missing`` is what a residual should show: total granules of this and the later allocations that
    the free intervals cannot hold contiguously; never 0, so a geometric failure still looks like a deficit.
    """

    index: int
    needed: int
    largest: int
    missing: int


def make_arena(size: int, used: Iterable[tuple[int, int]] = ()) -> HostArena:
    """Returns an arena of `size` granules in which the `used` intervals are taken.

    >>> make_arena(10, [(3, 1), (6, 1)]).free
    ((0, 3), (4, 2), (7, 3))

    Raises:
        ValueError: if an interval overlaps another or leaves the arena.
    """
    free: list[tuple[int, int]] = []
    at = 0
    for start, length in sorted(used):
        if start < at or length < 1 or start + length > size:
            raise ValueError(f"interval ({start}, {length}) overlaps or leaves an arena of {size} granules")
        if start > at:
            free.append((at, start - at))
        at = start + length
    if at < size:
        free.append((at, size - at))
    return HostArena(size, tuple(free))


def free_granules(arena: HostArena) -> int:
    """Returns the sum of all free granules; it never proves that an extent fits (R-2)."""
    return sum(length for _, length in arena.free)


def largest_hole(arena: HostArena) -> int:
    """Returns the longest extent that could be allocated now."""
    return max((length for _, length in arena.free), default=0)


def allocate(arena: HostArena, length: int) -> tuple[HostArena, int] | None:
    """Returns the arena after first fit of `length`, and where it starts; None if no hole is long enough."""
    for i, (start, hole) in enumerate(arena.free):
        if hole >= length:
            rest = ((start + length, hole - length),) if hole > length else ()
            return HostArena(arena.size, arena.free[:i] + rest + arena.free[i + 1 :]), start
    return None


def release(arena: HostArena, intervals: Iterable[tuple[int, int]]) -> HostArena:
    """Returns the arena with all `intervals` free again, merged with their neighbours.

    Raises:
        ValueError: if an interval is already free or leaves the arena (a double release).
    """
    pieces = sorted([*arena.free, *(i for i in intervals if i[1])])
    merged: list[tuple[int, int]] = []
    for start, length in pieces:
        if start < 0 or length < 0 or start + length > arena.size:
            raise ValueError(f"cannot release ({start}, {length}): outside an arena of {arena.size} granules")
        if merged and start < merged[-1][0] + merged[-1][1]:
            raise ValueError(f"cannot release ({start}, {length}): part of it is already free")
        if merged and start == merged[-1][0] + merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return HostArena(arena.size, tuple(merged))


def take_intervals(arena: HostArena, intervals: Iterable[tuple[int, int]]) -> HostArena:
    """Returns the arena after taking exactly these free `intervals` (chosen by an earlier `place`)."""
    taken, at = list(intervals), 0
    for start, length in arena.free:
        if start > at:
            taken.append((at, start - at))
        at = start + length
    if at < arena.size:
        taken.append((at, arena.size - at))
    return make_arena(arena.size, taken)


def place(
    arena: HostArena, releases: Iterable[tuple[int, int]], allocations: Sequence[int]
) -> Placed | Blocked:
    """Returns where every allocation lands after all releases, or which one is blocked (K-7).

    This is the whole recipe of one target: HostReleases first, then CopyPreparation in canonical order.

    Args:
        releases: ``(start, length)`` granules given back before any allocation.
        allocations: granules of each contiguous extent, in canonical order.
    """
    arena = release(arena, releases)
    holes = [list(hole) for hole in arena.free]
    starts: list[int] = []
    first = 0  # no hole before it can take anything
    for i, length in enumerate(allocations):
        at = next((h for h in range(first, len(holes)) if holes[h][1] >= length), None)
        if at is None:
            left = HostArena(arena.size, tuple((start, hole) for start, hole in holes if hole))
            largest = largest_hole(left)
            rest = sum(allocations[i:]) - free_granules(left)
            return Blocked(i, length, largest, max(length - largest, rest, 1))
        start, hole = holes[at]
        starts.append(start)
        holes[at] = [start + length, hole - length]
        while first < len(holes) and not holes[first][1]:
            first += 1
    return Placed(HostArena(arena.size, tuple((start, hole) for start, hole in holes if hole)), tuple(starts))
