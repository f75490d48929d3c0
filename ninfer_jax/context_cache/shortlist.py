"""Which catalogued checkpoints a prompt may start from: narrowed by digests, proved by the program (C-6).

Owns the order of sources and the bound on their number (N-1). An equal key is only a reason to ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ninfer_jax.context_cache.catalog import Catalog, CellId, Entry, entries
from ninfer_jax.context_cache.ports import ProgramPort
from ninfer_jax.context_cache.request_facts import RequestFacts
from ninfer_jax.planner.ids import CheckpointKind, OwnerKind
from ninfer_jax.reuse import CheckpointSummary, OwnerKey, PrefixKey

MAX_SOURCES: Final = 63  # beside root; beyond it only duplicates of ever shallower frontiers are left
_KIND_ORDER: Final = (
    CheckpointKind.SESSION_ENDPOINT,
    CheckpointKind.TURN_CLOSURE,
    CheckpointKind.RESPONSE_REPLAY,
    CheckpointKind.LONG_ANCHOR,
    CheckpointKind.SHARED_STABLE_PREFIX,
)


@dataclass(frozen=True)
class Hit:
    """One checkpoint whose key equals the prompt's."""

    cell: CellId
    entry: Entry
    checkpoint: CheckpointSummary

    @property
    def is_shared(self) -> bool:
        """Whether its owner is a shared prefix."""
        return self.cell.kind is OwnerKind.SHARED


@dataclass(frozen=True)
class Shortlist:
    """Hits in candidate order: of each private cell endpoint, rewrites, anchors; then shared cells.

    Attributes:
        num_entries: checkpoints looked at.
        refused: equal keys that exact verification denied.
    """

    num_entries: int
    verified: tuple[Hit, ...]
    refused: tuple[Hit, ...]

    @property
    def keys(self) -> frozenset[PrefixKey]:
        """The exactly matched resident keys (O-4)."""
        return frozenset(hit.checkpoint.key for hit in self.verified)


NO_HITS = Shortlist(0, (), ())


def find_sources(
    catalog: Catalog,
    facts: RequestFacts,
    program: ProgramPort,
    *,
    moving: frozenset[OwnerKey] = frozenset(),
) -> Shortlist:
    """Returns what of the catalog is exactly a prefix of the prompt; nothing for a Disabled request.

    Args:
        moving: owners of the open transition; what they lost already is not adopted yet, so a denial means
            nothing.
    """
    if not facts.participates:
        return NO_HITS
    num_entries, verified, refused = 0, [], []
    keys: dict[int, PrefixKey] = {}
    for cell, entry in entries(catalog):
        ordered = sorted(
            entry.summary.checkpoints, key=lambda c: (_KIND_ORDER.index(c.ref.kind), c.ref.ordinal)
        )
        for checkpoint in ordered:
            num_entries += 1
            frontier = checkpoint.frontier_tokens
            if frontier > facts.prompt_tokens:
                continue
            if frontier not in keys:
                keys[frontier] = facts.digests.key(frontier)
            if keys[frontier] != checkpoint.key:
                continue
            hit = Hit(cell, entry, checkpoint)
            is_exact = program.verify(checkpoint.ref, facts.identity)
            if is_exact:
                verified.append(hit)
            elif entry.summary.owner_key not in moving:
                refused.append(hit)
    return Shortlist(num_entries, _deepest(verified), tuple(refused))


def _deepest(hits: list[Hit]) -> tuple[Hit, ...]:
    """Returns at most MAX_SOURCES hits, the deepest ones, in their order."""
    if len(hits) <= MAX_SOURCES:
        return tuple(hits)
    ranked = sorted(range(len(hits)), key=lambda i: (-hits[i].checkpoint.frontier_tokens, i))
    return tuple(hits[i] for i in sorted(ranked[:MAX_SOURCES]))
