"""ResourceManager: the holder of logical cache policy (D-2).

Owns catalogs, session index, edges, claims, demand and counters, as one immutable `CacheState` that it
replaces. It decides what a request may start from, what it leaves behind and who is degraded for it; whether
anything fits, and what is where, is the program's word. Not thread-safe: the worker alone calls it (Q-2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ninfer_jax.context_cache.admission_planning import plan_admission
from ninfer_jax.context_cache.adoption import adopted_materialization, rolled_back, with_destination
from ninfer_jax.context_cache.capture_adoption import adopted_capture, without_captures
from ninfer_jax.context_cache.capture_planning import plan_capture
from ninfer_jax.context_cache.captures import (
    frontiers_of,
)
from ninfer_jax.context_cache.catalog import (
    Catalog,
    CellId,
    entries,
    entry_at,
    find,
    first_vacant,
    make_catalog,
    reserve,
)
from ninfer_jax.context_cache.ports import CaptureUnits, ProgramPort
from ninfer_jax.context_cache.records import (
    ActiveRecord,
    Admission,
    CacheState,
    CaptureClaim,
    CapturePlan,
    Claim,
    FinishIntent,
    OpenClaim,
    ReleaseIntent,
    changed,
    protected,
)
from ninfer_jax.context_cache.request_facts import RequestFacts
from ninfer_jax.context_cache.sessions import claim_binding, without_owners
from ninfer_jax.context_cache.settlement import adopted_finish, adopted_release, adopted_restore, discarded
from ninfer_jax.errors import ContractError, StaleHandleError
from ninfer_jax.options import ResolvedCacheOptions
from ninfer_jax.planner.backfill import BackfillProof, BackfillRefused
from ninfer_jax.planner.candidate import Disposition
from ninfer_jax.planner.cost import MachineCostModel
from ninfer_jax.planner.ids import OwnerKind
from ninfer_jax.planner.plan import ResourcePlan
from ninfer_jax.planner.search_types import Budget, Clock
from ninfer_jax.request import RequestId
from ninfer_jax.reuse import OwnerKey, TransitionResult


class ResourceManager:
    """The one holder of the logical cache state.

    Args:
        program: the physical authority, behind its Protocol.
        options: resolved cache options; they size every catalog (F-1).
        num_lanes: C.
        model: start-resolved prices.
        units: sizes that price the recovery of a capture.
    """

    def __init__(
        self,
        program: ProgramPort,
        options: ResolvedCacheOptions,
        *,
        num_lanes: int,
        model: MachineCostModel,
        units: CaptureUnits,
    ) -> None:
        if options.max_private_continuations < num_lanes:
            raise ContractError(
                f"max_private_continuations {options.max_private_continuations} is below the {num_lanes} "
                "lanes: every active request needs a cell to publish into (F-3)"
            )
        self._program = program
        self._options = options
        self._model = model
        self._units = units
        self._state = CacheState(make_catalog(options.max_private_continuations, options.max_shared_prefixes))

    @property
    def state(self) -> CacheState:
        """The current value; immutable, so it may be kept and compared."""
        return self._state

    # ---------------------------------------------------------------- admission

    def plan(
        self, request: RequestFacts, *, allowance_ns: int, runnable_requests: int, clock: Clock
    ) -> Admission:
        """Returns where the request would start from now; changes nothing, here or in the program.

        Args:
            allowance_ns: optional planning time left at this admission boundary (G-10).
            runnable_requests: others that wait for this planning.
            clock: monotone nanoseconds.
        """
        return plan_admission(
            self._state,
            request,
            self._program,
            self._options,
            self._model,
            budget=Budget(deadline_ns=allowance_ns, blocked_requests=runnable_requests),
            clock=clock,
        )

    def claim(self, admission: Admission) -> Claim:
        """Returns the logical claim of a planned admission, made before the program starts (X-3, Y-5).

        Raises:
            StaleHandleError: if anything changed since it was planned; plan again.
            ContractError: if there is nothing to start, the request is active, or another claim is open.
        """
        state, plan, request = self._state, admission.plan, admission.request
        self._expect_no_claim()
        if plan is None or admission.chosen is None:
            raise ContractError(f"nothing to claim: the request is {admission.readiness.name}")
        if admission.version != state.version or plan.revision != self._program.resource_revision:
            raise StaleHandleError("the cache changed after this admission was planned; plan it again")
        if request.request_id in state.actives:
            raise ContractError(f"request {request.request_id} is active already")
        chosen = admission.chosen
        source = None if chosen.ref is None else OwnerKey(chosen.ref.owner, chosen.ref.generation)
        consumes = chosen.disposition is Disposition.CONSUME
        session = None
        if consumes and source is not None:
            session = entry_at(state.catalog, _found(state.catalog, source)).session
        claim = Claim(
            claim_id=state.next_claim,
            admission=admission,
            plan=plan,
            source=source,
            consumes=consumes,
            victims=plan.victims,
            destination=_destination(state.catalog, request, plan, source if consumes else None),
            consumed_session=session,
        )
        sessions = state.sessions
        if session is not None:
            sessions = claim_binding(sessions, session, claim.claim_id)
        self._state = changed(
            state,
            next_claim=state.next_claim + 1,
            catalog=with_destination(state.catalog, claim),
            sessions=sessions,
            open_claim=claim,
        )
        return claim

    def rollback(self, claim: Claim | CaptureClaim) -> None:
        """Takes back a claim whose transition never started; everything is as before.

        Raises:
            ContractError: if it is not the open claim.
        """
        self._expect_open(claim)
        self._state = rolled_back(self._state, claim)

    def adopt_materialization(self, claim: Claim, result: TransitionResult) -> None:
        """Takes over the absolute result of a started materialisation (X-8).

        Raises:
            InvariantError: if the result contradicts the claim; nothing was changed, the claim stays open.
        """
        self._expect_open(claim)
        self._state = adopted_materialization(self._state, claim, result)

    def prove_backfill(
        self, admission: Admission, *, head: Any, donors: Sequence[RequestId]
    ) -> BackfillProof | BackfillRefused:
        """Returns the program's proof that this admission cannot strand the blocked head (A-7).

        Args:
            head: the head's work.
            donors: active requests whose terminal release the head waits for.
        Raises:
            ContractError: if nothing was planned, or a donor is not active.
        """
        if admission.target is None:
            raise ContractError(f"no target to prove: the request is {admission.readiness.name}")
        handles = [self._active(donor).handle for donor in donors]
        return self._program.backfill(admission.problem, admission.target, head=head, donors=handles)

    # ---------------------------------------------------------------- captures

    def capture_frontiers(self, request_id: RequestId) -> tuple[int, ...]:
        """Returns where an active request still has to stop for a capture, ascending."""
        return frontiers_of(self._active(request_id).captures)

    def capture_intent(
        self, request_id: RequestId, frontier_tokens: int, *, runnable_requests: int = 0
    ) -> CapturePlan:
        """Returns the next thing to capture now that an active request stands at a frontier; changes nothing.

        The private-only baseline comes first (E-7); once it is adopted, asking again gives the shared part,
        if that gains strictly. A skip means that nothing is left here: `skip_captures`, and go on.

        Args:
            runnable_requests: others that the transition would make wait.
        """
        self._active(request_id)
        return plan_capture(
            self._state,
            request_id,
            frontier_tokens,
            self._program,
            self._options,
            self._model,
            self._units,
            blocked_requests=runnable_requests,
        )

    def skip_captures(self, request_id: RequestId, frontier_tokens: int) -> None:
        """Forgets the captures of an active request up to a frontier; the baseline is to go on (Y-6)."""
        self._active(request_id)
        self._state = without_captures(self._state, request_id, frontier_tokens)

    def claim_capture(self, plan: CapturePlan) -> CaptureClaim:
        """Returns the logical claim of a capture, made before the program starts it.

        Raises:
            StaleHandleError: if anything changed since it was planned.
            ContractError: if there is nothing to capture, or another claim is open.
        """
        state = self._state
        self._expect_no_claim()
        if plan.is_skip:
            raise ContractError("nothing to claim: the capture is a skip")
        if plan.version != state.version:
            raise StaleHandleError("the cache changed after this capture was planned; plan it again")
        catalog = state.catalog
        if plan.shared is not None:
            catalog = reserve(catalog, plan.shared.cell, plan.request_id)
        claim = CaptureClaim(state.next_claim, plan)
        self._state = changed(state, next_claim=state.next_claim + 1, catalog=catalog, open_claim=claim)
        return claim

    def adopt_capture(self, claim: CaptureClaim, result: TransitionResult) -> None:
        """Takes over the absolute result of a started capture; an aborted one is a skip (Y-6).

        Raises:
            InvariantError: if the result contradicts the claim; nothing was changed.
        """
        self._expect_open(claim)
        self._state = adopted_capture(self._state, claim, result)

    # ---------------------------------------------------------------- ends and releases

    def finish_intent(self, request_id: RequestId) -> FinishIntent:
        """Returns how an active request ends: publish its continuation, or discard."""
        record = self._active(request_id)
        return FinishIntent(request_id, record.handle, record.cell is not None)

    def adopt_finish(self, request_id: RequestId, result: TransitionResult) -> None:
        """Takes over a terminal settlement: a row of the request's owner was published, none was discarded.

        Raises:
            InvariantError: if something else was published; nothing was changed.
        """
        self._active(request_id)
        self._state = adopted_finish(self._state, request_id, result)

    def release_active(self, request_id: RequestId) -> None:
        """Gives back the edges and the cell of an active request that the program discarded."""
        self._active(request_id)
        self._state = discarded(self._state, request_id)

    def release_intent(self, owner: OwnerKey) -> ReleaseIntent:
        """Returns the intent to evict one inactive owner.

        Raises:
            StaleHandleError: if that generation of the row is not catalogued any more (REV-06).
            ContractError: if an active request or the open transition holds it.
        """
        at = find(self._state.catalog, owner)
        if at is None:
            raise StaleHandleError(f"owner {owner.owner} of generation {owner.generation} is gone")
        if owner in protected(self._state):
            raise ContractError(f"owner {owner.owner} is in use; it can go once its readers have ended")
        return ReleaseIntent(owner, at)

    def adopt_release(self, intent: ReleaseIntent, result: TransitionResult) -> None:
        """Takes over the eviction of one inactive owner.

        Raises:
            InvariantError: if the result says anything else; nothing was changed.
        """
        self._state = adopted_release(self._state, intent.owner, result)

    def session_owner(self, session: str) -> OwnerKey | None:
        """Returns the owner that a session is bound to, or None."""
        return self._state.sessions.bound(session)

    def bound_sessions(self) -> tuple[str, ...]:
        """Returns the sessions that are bound to a catalogued owner."""
        return tuple(s for s in self._state.sessions.bindings if self.session_owner(s) is not None)

    def has_room(self) -> bool:
        """Returns whether another private continuation could be catalogued."""
        return first_vacant(self._state.catalog, OwnerKind.PRIVATE) is not None

    def adopt_restore(self, result: TransitionResult, *, session: str | None, order: int) -> None:
        """Takes over a restored context; ask `has_room` first.

        Raises:
            InvariantError: if the result is not one new private owner; nothing was changed.
        """
        self._expect_no_claim()
        self._state = adopted_restore(self._state, result, session=session, order=order)

    def reset(self) -> None:
        """Forgets everything that lived in the program (Q-7); session orders and counters only ever grow."""
        old = self._state
        fresh = make_catalog(len(old.catalog.private), len(old.catalog.shared))
        self._state = CacheState(
            fresh,
            version=old.version + 1,
            epoch=old.epoch,
            next_claim=old.next_claim,
            sessions=without_owners(old.sessions),
            counters=old.counters,
        )

    # ---------------------------------------------------------------- reports

    def summary(self) -> dict[str, Any]:
        """Returns what the catalog holds and what happened so far, as plain data."""
        state = self._state
        sizes = {}
        for kind, row in (("private", state.catalog.private), ("shared", state.catalog.shared)):
            sizes[kind] = {
                "cells": len(row),
                "catalogued": sum(cell.entry is not None for cell in row),
                "reserved": sum(cell.reserved_by is not None for cell in row),
            }
        return {
            **sizes,
            "checkpoints": sum(len(e.summary.checkpoints) for _, e in entries(state.catalog)),
            "sessions_bound": sum(b.owner is not None for b in state.sessions.bindings.values()),
            "demand_records": len(state.portfolio.demands),
            "shared_credits": len(state.portfolio.credits),
            "edges": len(state.edges),
            "active": len(state.actives),
            "counters": dataclasses.asdict(state.counters),
        }

    # ---------------------------------------------------------------- checks

    def _active(self, request_id: RequestId) -> ActiveRecord:
        record = self._state.actives.get(request_id)
        if record is None:
            raise ContractError(f"request {request_id} is not active")
        return record

    def _expect_no_claim(self) -> None:
        if self._state.open_claim is not None:
            raise ContractError("another transition is claimed; adopt or roll it back first (X-6)")

    def _expect_open(self, claim: OpenClaim) -> None:
        if self._state.open_claim is not claim:
            raise ContractError("this claim is not open; it was adopted or rolled back before")


def _destination(
    catalog: Catalog, request: RequestFacts, plan: ResourcePlan, consumed: OwnerKey | None
) -> CellId | None:
    """Returns the private cell the request will publish into: the consumed source's, a vacant one, or that of
    the first evicted private victim (conventions 15); None if it publishes nothing.
    """
    if not request.participates:
        return None
    if consumed is not None:
        return _found(catalog, consumed)
    vacant = first_vacant(catalog, OwnerKind.PRIVATE)
    if vacant is not None:
        return vacant
    freed = [_found(catalog, OwnerKey(v.owner, v.generation)) for v in plan.victims if v.evicted]
    private = [at for at in freed if at.kind is OwnerKind.PRIVATE]
    if not private:
        raise ContractError("the plan leaves no private cell; it was not adoptable")
    return private[0]


def _found(catalog: Catalog, owner: OwnerKey) -> CellId:
    at = find(catalog, owner)
    if at is None:
        raise StaleHandleError(f"owner {owner.owner} of generation {owner.generation} is gone")
    return at
