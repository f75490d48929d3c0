"""Where a request will capture on its way, and what a full set of anchors gives up for a new one.

Owns the private-only policy: kinds, frontiers, ordinals, replacement (C-3, N-6, N-7). What a shared capture
gains is in `shared_capture`; whether any capture fits is the program's answer, and "no" is a skip (Y-6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ninfer_jax.context_cache.catalog import NO_EVIDENCE
from ninfer_jax.context_cache.request_facts import RequestFacts, marker_frontier
from ninfer_jax.identity import Evidence, cuts_media
from ninfer_jax.planner.ids import CheckpointKind, CheckpointRef
from ninfer_jax.reuse import CheckpointSummary

DECLARED = Evidence.EXPLICIT_BOUNDARY | Evidence.REQUESTED_AUTOMATIC


@dataclass(frozen=True)
class CaptureIntent:
    """One frontier at which prefill will stop to capture. Chosen at admission, reserves nothing.

    Attributes:
        evidence: why somebody wants it shared; none for private kinds.
    """

    frontier_tokens: int
    kind: CheckpointKind
    evidence: Evidence = NO_EVIDENCE

    @property
    def is_shared(self) -> bool:
        """Whether it would become an owner of its own."""
        return self.kind is CheckpointKind.SHARED_STABLE_PREFIX


@dataclass(frozen=True)
class PrivateCapture:
    """One checkpoint that the active lineage gains.

    Attributes:
        replaces: the lineage's checkpoint that goes for it, or None.
    """

    kind: CheckpointKind
    ordinal: int
    replaces: CheckpointRef | None


def proposed_captures(
    facts: RequestFacts, *, max_long_anchors: int, max_shared: int
) -> tuple[CaptureIntent, ...]:
    """Returns every frontier at which this prompt would capture from root, ascending, private ones first.

    At one frontier there is at most one private kind: TurnClosure before ResponseReplay before LongAnchor.
    Frontiers inside an image or video are dropped (ID-11).
    """
    if not facts.participates:
        return ()
    end = facts.prompt_tokens
    private: dict[int, CheckpointKind] = {}
    shared: dict[int, Evidence] = {}
    closure, anchor = facts.turn_closure_frontier, facts.prompt_end_anchor
    if facts.from_messages and closure is not None:
        private[closure] = CheckpointKind.TURN_CLOSURE
    if facts.from_messages:
        private.setdefault(end, CheckpointKind.RESPONSE_REPLAY)
    if max_long_anchors and anchor is not None:
        private.setdefault(anchor, CheckpointKind.LONG_ANCHOR)
    for marker in facts.hints.markers:
        frontier = marker_frontier(marker, facts.boundaries)
        if frontier is None:
            continue
        if marker.kind == "shared_stable_prefix":
            shared[frontier] = shared.get(frontier, NO_EVIDENCE) | marker.evidence
        elif max_long_anchors:
            private.setdefault(frontier, CheckpointKind.LONG_ANCHOR)
    found = [CaptureIntent(f, kind) for f, kind in private.items()]
    if max_shared:
        found += [
            CaptureIntent(f, CheckpointKind.SHARED_STABLE_PREFIX, evidence) for f, evidence in shared.items()
        ]
    legal = [
        c for c in found if 0 < c.frontier_tokens <= end and not cuts_media(facts.identity, c.frontier_tokens)
    ]
    return tuple(sorted(legal, key=lambda c: (c.frontier_tokens, c.is_shared)))


def frontiers_of(captures: Sequence[CaptureIntent]) -> tuple[int, ...]:
    """Returns the frontiers of some captures, ascending, each once."""
    return tuple(sorted({c.frontier_tokens for c in captures}))


def coverage_losses(frontiers: Sequence[int]) -> list[int]:
    """Returns what losing each of some ascending anchors costs: gap below times gap above.

    The top anchor uses its lower gap twice; duplicates lose nothing (design 6).

    >>> coverage_losses([1000, 5000, 5200, 9000, 12000])
    [4000000, 800000, 760000, 11400000, 9000000]
    """
    losses = []
    for i, frontier in enumerate(frontiers):
        below = frontier - (frontiers[i - 1] if i else 0)
        above = frontiers[i + 1] - frontier if i + 1 < len(frontiers) else below
        losses.append(below * above)
    return losses


def private_capture(
    checkpoints: Sequence[CheckpointSummary],
    frontier_tokens: int,
    kind: CheckpointKind,
    *,
    max_long_anchors: int,
) -> PrivateCapture | None:
    """Returns how the lineage takes one more checkpoint, or None if what it has is worth more.

    Args:
        checkpoints: of the active lineage, the surviving ones of a consumed source included.
    """
    same = [c for c in checkpoints if c.ref.kind is kind]
    if any(c.frontier_tokens == frontier_tokens for c in same):
        return None
    if kind is not CheckpointKind.LONG_ANCHOR:
        return PrivateCapture(kind, 0, same[0].ref if same else None)
    if max_long_anchors < 1:
        return None
    if len(same) < max_long_anchors:
        used = {c.ref.ordinal for c in same}
        return PrivateCapture(kind, next(n for n in range(1, len(same) + 2) if n not in used), None)
    rows = sorted([(c.frontier_tokens, c.ref) for c in same], key=lambda row: row[0])
    frontiers = sorted([f for f, _ in rows] + [frontier_tokens])
    losses = coverage_losses(frontiers)
    victim = frontiers[losses.index(min(losses))]  # the shallower one on ties
    if victim == frontier_tokens:
        return None
    ref = next(ref for f, ref in rows if f == victim)
    return PrivateCapture(kind, ref.ordinal, ref)
