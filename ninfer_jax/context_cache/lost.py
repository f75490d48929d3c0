"""What was here not long ago: the keys of checkpoints that are gone, and why a request reuses no more.

Owns a small bounded memory and the wording of misses (design 7). It explains; nothing is ever decided by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ninfer_jax.context_cache.catalog import Catalog, find
from ninfer_jax.context_cache.request_facts import RequestFacts
from ninfer_jax.context_cache.shortlist import Shortlist
from ninfer_jax.reuse import CheckpointSummary, MissReason, OwnerKey, PrefixKey

MAX_LOST_KEYS: Final = 256


@dataclass(frozen=True)
class LostKeys:
    """Keys of checkpoints that went, oldest first, with the owner that had them."""

    owners: Mapping[PrefixKey, OwnerKey] = field(default_factory=dict)


def remember(lost: LostKeys, gone: Iterable[tuple[OwnerKey, CheckpointSummary]]) -> LostKeys:
    """Returns the memory with more keys; the oldest are forgotten."""
    owners = dict(lost.owners)
    for owner, checkpoint in gone:
        owners.pop(checkpoint.key, None)
        owners[checkpoint.key] = owner
    return LostKeys(dict(list(owners.items())[-MAX_LOST_KEYS:]))


def miss_reason(
    facts: RequestFacts, found: Shortlist, lost: LostKeys, catalog: Catalog, reused_tokens: int
) -> MissReason | None:
    """Returns why no deeper frontier is reused, or None if nothing suggests one.

    ====================================  ===================
    deeper than what is reused there is   reason
    ====================================  ===================
    a verified checkpoint, not chosen     infeasible
    an equal key that verification denied identity_mismatch
    a dropped checkpoint, owner remains   no_state
    a dropped checkpoint, owner is gone   evicted
    nothing, and nothing is reused        no_match
    ====================================  ===================
    """
    if not facts.participates:
        return "disabled"
    if any(hit.checkpoint.frontier_tokens > reused_tokens for hit in found.verified):
        return "infeasible"
    if any(hit.checkpoint.frontier_tokens > reused_tokens for hit in found.refused):
        return "identity_mismatch"
    reasons = set()
    for key, owner in lost.owners.items():
        f = key.frontier_tokens
        if reused_tokens < f <= facts.prompt_tokens and facts.digests.key(f) == key:
            reasons.add("evicted" if find(catalog, owner) is None else "no_state")
    if reasons:
        return "no_state" if "no_state" in reasons else "evicted"
    return None if reused_tokens else "no_match"
