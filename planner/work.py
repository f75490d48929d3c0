"""Work as integer counts: transfers, prefill, and the recipes by which a checkpoint could be recovered.

Owns: how much is copied and computed. Owns no price: bytes, operations, tokens and pairs are all it says,
and `cost` turns them into nanoseconds. All numbers are Python ints, so nothing can overflow.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Direction(IntEnum):
    """Which way a copy goes."""

    D2H = 0
    H2D = 1
    D2D = 2


class Phase(IntEnum):
    """Which part of a transition pays: pressure copies run before the candidate's own (O-2).

    Batches of one phase and one direction coalesce before they are priced.
    """

    PRESSURE = 0
    CANDIDATE = 1


@dataclass(frozen=True)
class TransferWork:
    """Copies of one phase and direction, already coalesced."""

    phase: Phase
    direction: Direction
    operations: int
    num_bytes: int


@dataclass(frozen=True)
class PrefillWork:
    """Model work of a token range; pairs are those of `attention_pairs` (O-2)."""

    chunks: int = 0
    tokens: int = 0
    pairs: int = 0
    vision_items: int = 0
    vision_patches: int = 0


@dataclass(frozen=True)
class VisionItem:
    """One media item of a prompt; it counts only when wholly at or before a frontier."""

    end_tokens: int
    patches: int


@dataclass(frozen=True)
class Work:
    """Everything immediate that one target or one recovery costs."""

    transfers: tuple[TransferWork, ...] = ()
    prefill: PrefillWork = PrefillWork()


def attention_pairs(base_tokens: int, suffix_tokens: int) -> int:
    """Returns the query-key pairs of `suffix_tokens` tokens after `base_tokens` reused ones.

    >>> attention_pairs(100, 10)
    1055
    """
    return base_tokens * suffix_tokens + suffix_tokens * (suffix_tokens + 1) // 2


def prefill_work(
    base_tokens: int,
    end_tokens: int,
    *,
    chunk_tokens: int,
    frontiers: Iterable[int] = (),
    vision: Iterable[VisionItem] = (),
) -> PrefillWork:
    """Returns the work of computing tokens ``[base_tokens, end_tokens)``.

    Chunks are counted per segment between `frontiers` (capture and rewrite frontiers, C-7), rounded up, so a
    split costs exactly its extra chunks and leaves the pairs alone.

    >>> prefill_work(0, 1500, chunk_tokens=1024, frontiers=(300,)).chunks
    3

    Args:
        base_tokens: reused tokens.
        end_tokens: frontier to reach.
        chunk_tokens: tokens of one prefill chunk.
        frontiers: forced split points; those outside the open range do nothing.
        vision: the prompt's media items.
    Raises:
        ValueError: if the range is reversed or the chunk is not positive.
    """
    if not 0 <= base_tokens <= end_tokens or chunk_tokens < 1:
        raise ValueError(
            f"expected 0 <= base <= end and chunk >= 1, got base={base_tokens}, end={end_tokens}, "
            f"chunk={chunk_tokens}"
        )
    cuts = sorted({f for f in frontiers if base_tokens < f < end_tokens})
    edges = [base_tokens, *cuts, end_tokens]
    chunks = sum(-(-(b - a) // chunk_tokens) for a, b in itertools.pairwise(edges))
    items = [v for v in vision if base_tokens < v.end_tokens <= end_tokens]
    suffix = end_tokens - base_tokens
    return PrefillWork(
        chunks, suffix, attention_pairs(base_tokens, suffix), len(items), sum(v.patches for v in items)
    )


def coalesce(transfers: Iterable[TransferWork]) -> tuple[TransferWork, ...]:
    """Returns one entry per (phase, direction), in that order; empty ones are left out."""
    sums: dict[tuple[Phase, Direction], tuple[int, int]] = {}
    for t in transfers:
        ops, size = sums.get((t.phase, t.direction), (0, 0))
        sums[t.phase, t.direction] = (ops + t.operations, size + t.num_bytes)
    return tuple(
        TransferWork(phase, direction, ops, size)
        for (phase, direction), (ops, size) in sorted(sums.items())
        if ops or size
    )
