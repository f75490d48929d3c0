"""One request as the manager sees it: order, hints, exact identity with its digests, and its borders.

Owns that value and what follows from it alone. The work itself stays the program's opaque description.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ninfer_jax.digests import PrefixDigests, make_digests
from ninfer_jax.identity import Boundary, BoundaryKind, Evidence, PreparedPrompt, PromptIdentity
from ninfer_jax.planner.portfolio import Retention
from ninfer_jax.request import CacheMarker, Request, RequestHints, RequestId


@dataclass(frozen=True, eq=False)
class RequestFacts:
    """What planning reads of one request. Build with `make_request_facts`.

    Attributes:
        work: the program's description of it (Protocol `Work`).
        boundaries: content borders of the prompt.
        turn_closure_frontier: end of the last user query, before everything a later request may replace.
        prompt_end_anchor: N-7, raw prompts only.
        from_messages: whether the prompt has message structure, and so rewrite checkpoints (N-7).
    """

    request_id: RequestId
    publication_order: int
    hints: RequestHints
    identity: PromptIdentity
    digests: PrefixDigests
    work: Any
    boundaries: tuple[Boundary, ...]
    turn_closure_frontier: int | None
    prompt_end_anchor: int | None
    from_messages: bool

    @property
    def participates(self) -> bool:
        """Whether it reads, captures and publishes at all (C-10)."""
        return self.hints.cache == "read_write"

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return self.identity.num_tokens

    @property
    def binds_session(self) -> str | None:
        """The session that its result may become the binding of."""
        return self.hints.session if self.participates and self.hints.update_session_index else None


def make_request_facts(
    request: Request,
    prepared: PreparedPrompt,
    work: Any,
    *,
    turn_closure_frontier: int | None = None,
    digests: PrefixDigests | None = None,
) -> RequestFacts:
    """Returns the facts of an accepted request.

    Args:
        turn_closure_frontier: end of the last user query; None takes the last rewrite execution frontier,
            which is the same unless the last turn already called tools.
        digests: of the request's identity, where the caller has them.
    """
    identity = request.identity
    if turn_closure_frontier is None and identity.rewrite_execution_frontiers:
        turn_closure_frontier = identity.rewrite_execution_frontiers[-1]
    return RequestFacts(
        request_id=request.request_id,
        publication_order=request.publication_order,
        hints=request.hints,
        identity=identity,
        digests=digests or make_digests(identity),
        work=work,
        boundaries=prepared.boundaries,
        turn_closure_frontier=turn_closure_frontier,
        prompt_end_anchor=prepared.prompt_end_anchor,
        from_messages=prepared.from_messages,
    )


def reuse_domain(facts: RequestFacts) -> bytes:
    """Returns the reuse domain: a digest of the session key, or one of its own (O-4)."""
    session = facts.hints.session
    if session is None:
        return blake2b(b"order %d" % facts.publication_order, digest_size=16).digest()
    return blake2b(b"session " + session.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def retention_of(facts: RequestFacts) -> Retention:
    """Returns the class that the request asked for, as the planner's prior (O-7)."""
    return Retention[facts.hints.retention.upper()]


def marker_frontier(marker: CacheMarker, boundaries: tuple[Boundary, ...]) -> int | None:
    """Returns the token frontier that a marker names, or None where no border falls between two tokens."""
    kind = {"message": BoundaryKind.MESSAGE, "leading_instructions": BoundaryKind.LEADING}.get(marker.place)
    if marker.place == "tools":
        found = [b for b in boundaries if b.kind is BoundaryKind.TOOLS]
    else:
        found = [b for b in boundaries if b.kind is kind and b.message_count == marker.count]
    return found[-1].frontier_tokens if found else None


def explicit_frontiers(facts: RequestFacts) -> frozenset[int]:
    """Returns the frontiers that the caller declared with ExplicitBoundary."""
    named = {
        marker_frontier(marker, facts.boundaries)
        for marker in facts.hints.markers
        if marker.evidence & Evidence.EXPLICIT_BOUNDARY
    }
    return frozenset(f for f in named if f is not None)
