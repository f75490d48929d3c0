"""The manager's whole state as one immutable value, and the records inside it.

Owns the values. Every change is a pure function from one `CacheState` to the next, so that a plan can change
nothing, and an adoption either happens completely or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ninfer_jax.context_cache.captures import CaptureIntent, PrivateCapture
from ninfer_jax.context_cache.catalog import Catalog, CellId, HitCount, HitKey, entries
from ninfer_jax.context_cache.lost import LostKeys
from ninfer_jax.context_cache.sessions import SessionIndex
from ninfer_jax.context_cache.shortlist import Shortlist
from ninfer_jax.identity import Evidence
from ninfer_jax.planner.demand import Demand, Portfolio
from ninfer_jax.planner.plan import Readiness, ResourcePlan, VictimClaim
from ninfer_jax.planner.planning import Planned
from ninfer_jax.planner.portfolio import CacheFacts, Retention
from ninfer_jax.planner.problem import Problem
from ninfer_jax.planner.search_types import Budget
from ninfer_jax.request import RequestId, SequenceHandle
from ninfer_jax.reuse import MissReason, OwnerKey, OwnerSummary, PrefixKey, SourceChoice, SourceKind

if TYPE_CHECKING:
    import numpy as np

    from ninfer_jax.context_cache.request_facts import RequestFacts
    from ninfer_jax.planner.cost import MachineCostModel


class Edge(NamedTuple):
    """An active request protects an inactive owner until the request's terminal settlement (D-3)."""

    request_id: RequestId
    owner: OwnerKey


@dataclass(frozen=True)
class ActiveRecord:
    """One active request: what it holds logically, and what it will publish.

    Attributes:
        summary: its lineage; checkpoints captured so far and those of a consumed source that survived.
        cell: private cell reserved for its continuation; None if it publishes nothing.
        hits: of the lineage's checkpoints, kept across republication.
        captures: still to come, ascending.
        session: that its result may become the binding of.
    """

    request_id: RequestId
    handle: SequenceHandle
    summary: OwnerSummary
    cell: CellId | None
    session: str | None
    retention: Retention
    order: int
    hits: Mapping[HitKey, HitCount]
    captures: tuple[CaptureIntent, ...]
    facts: RequestFacts


@dataclass(frozen=True, eq=False)
class Admission:
    """What one planning call found: readiness, the sealed plan, and why no more is reused.

    Attributes:
        version: of the manager's state that it was planned against.
        work: the request's work with the final capture frontiers; what `program.start` is given.
        choices: root first; row i of `problem.candidates`.
        chosen: the choice of the plan; None if nothing can start.
        captures: what will be captured above the reuse base, ascending.
        demand: the record that becomes part of the window once Active is published; None when Disabled.
        facts, model, budget, vacant, recency, intent: what else the planner was given, to explain and replay.
    """

    version: int
    request: RequestFacts
    work: Any
    problem: Problem
    choices: tuple[SourceChoice, ...]
    shortlist: Shortlist
    planned: Planned
    chosen: SourceChoice | None
    reused_tokens: int
    source_kind: SourceKind
    miss_reason: MissReason | None
    captures: tuple[CaptureIntent, ...]
    demand: Demand | None
    facts: CacheFacts
    model: MachineCostModel
    budget: Budget
    vacant: int
    recency: np.ndarray | None  # int64[O]
    intent: tuple[int, ...]

    @property
    def readiness(self) -> Readiness:
        """One of the four answers (G-14)."""
        return self.planned.readiness

    @property
    def plan(self) -> ResourcePlan | None:
        """The sealed plan, or None if nothing can start."""
        return self.planned.plan

    @property
    def target(self) -> Any:
        """The opaque target that the plan seals, or None."""
        search = self.planned.search
        return None if search is None or search.best is None else search.best.target


@dataclass(frozen=True, eq=False)
class Claim:
    """The logical side of one materialisation, from before its start until its result is adopted (X-3).

    Attributes:
        destination: private cell reserved for the request, or None.
        consumed_session: session whose binding was set aside because its owner is consumed.
    """

    claim_id: int
    admission: Admission
    plan: ResourcePlan
    source: OwnerKey | None
    consumes: bool
    victims: tuple[VictimClaim, ...]
    destination: CellId | None
    consumed_session: str | None


@dataclass(frozen=True, eq=False)
class SharedCapture:
    """A shared publication that gains strictly.

    Attributes:
        cell: shared cell it will occupy: vacant, or that of the entry it replaces.
        plan: sealed; its victims are part of the same transition.
        gain_ns: NetGain of the chosen target (O-10).
    """

    key: PrefixKey
    evidence: Evidence
    cell: CellId
    problem: Problem
    target: Any
    plan: ResourcePlan
    gain_ns: int


@dataclass(frozen=True, eq=False)
class CapturePlan:
    """What to capture next at one frontier: a private checkpoint, a shared prefix, or nothing.

    Attributes:
        skipped: why there is nothing, for reports.
    """

    version: int
    request_id: RequestId
    frontier_tokens: int
    private: PrivateCapture | None
    shared: SharedCapture | None
    skipped: str = ""

    @property
    def is_skip(self) -> bool:
        """Whether there is nothing to capture."""
        return self.private is None and self.shared is None


@dataclass(frozen=True, eq=False)
class CaptureClaim:
    """The logical side of one capture, from before its start until its result is adopted."""

    claim_id: int
    plan: CapturePlan

    @property
    def victims(self) -> tuple[VictimClaim, ...]:
        """Owners that the shared part degrades."""
        return () if self.plan.shared is None else self.plan.shared.plan.victims


@dataclass(frozen=True)
class FinishIntent:
    """How one request ends: publish its frozen state as an endpoint, or give everything back (A-5)."""

    request_id: RequestId
    handle: SequenceHandle
    publish: bool


@dataclass(frozen=True)
class ReleaseIntent:
    """An explicit eviction of one inactive, unprotected owner."""

    owner: OwnerKey
    cell: CellId


OpenClaim: TypeAlias = Claim | CaptureClaim


@dataclass(frozen=True)
class Counters:
    """What happened since the start; sums of the per-request records."""

    selected: Mapping[str, int] = field(default_factory=dict)  # by source kind
    missed: Mapping[str, int] = field(default_factory=dict)  # by reason
    reused_tokens: int = 0
    prompt_tokens: int = 0
    materializations_committed: int = 0
    materializations_aborted: int = 0
    captures_committed: int = 0
    captures_aborted: int = 0
    captures_skipped: int = 0
    published_private: int = 0
    published_shared: int = 0
    discarded: int = 0
    owners_evicted: int = 0
    checkpoints_dropped: int = 0


def counted(tally: Mapping[str, int], name: str | None) -> Mapping[str, int]:
    """Returns a tally with one more of a name; None counts nothing."""
    return tally if name is None else {**tally, name: tally.get(name, 0) + 1}


@dataclass(frozen=True, eq=False)
class CacheState:
    """Everything the manager holds.

    Attributes:
        version: grows with every change; plans and claims of another version are stale.
        epoch: logical time of hits and publications.
        open_claim: at most one, as there is at most one global transition (X-6).
    """

    catalog: Catalog
    version: int = 0
    epoch: int = 0
    next_claim: int = 0
    sessions: SessionIndex = field(default_factory=SessionIndex)
    portfolio: Portfolio = field(default_factory=Portfolio)
    actives: Mapping[RequestId, ActiveRecord] = field(default_factory=dict)
    edges: frozenset[Edge] = frozenset()
    open_claim: OpenClaim | None = None
    lost: LostKeys = field(default_factory=LostKeys)
    counters: Counters = field(default_factory=Counters)


def changed(state: CacheState, **changes: Any) -> CacheState:
    """Returns the next state; its version has moved."""
    return replace(state, version=state.version + 1, **changes)


def claimed(state: CacheState) -> frozenset[OwnerKey]:
    """Returns the owners that the open claim names."""
    claim = state.open_claim
    if claim is None:
        return frozenset()
    owners = {OwnerKey(v.owner, v.generation) for v in claim.victims}
    if isinstance(claim, Claim) and claim.source is not None:
        owners.add(claim.source)
    return frozenset(owners)


def protected(state: CacheState) -> frozenset[OwnerKey]:
    """Returns the owners that no plan may consume: read by an active request, or part of the open claim."""
    return claimed(state) | {edge.owner for edge in state.edges}


def summaries(state: CacheState) -> Iterator[OwnerSummary]:
    """Returns the summary of every owner, catalogued ones first."""
    for _, entry in entries(state.catalog):
        yield entry.summary
    for record in state.actives.values():
        yield record.summary
