"""Carries every resource transition of an engine through its steps: claim, start, result, adoption.

Owns the order of those steps between the manager, which decides, and the program, which does. Knows jobs, but
neither queue nor lanes: the worker says when. At most one transition is open (X-6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ninfer_jax.context_cache.ports import ProgramPort as PlanningPort
from ninfer_jax.context_cache.records import Admission, CapturePlan, Claim
from ninfer_jax.context_cache.resource_manager import ResourceManager
from ninfer_jax.errors import InvariantError, StaleHandleError, StalePlanError
from ninfer_jax.job import Job
from ninfer_jax.planner.backfill import BackfillProof
from ninfer_jax.planner.ids import CheckpointKind, CheckpointRef
from ninfer_jax.planner.plan import Aborted, ResourcePlan
from ninfer_jax.planner.work import Direction
from ninfer_jax.program.admission import RequestWork
from ninfer_jax.request import RequestId, SequenceHandle
from ninfer_jax.results import MaterializationRecord
from ninfer_jax.reuse import OwnerKey, TransitionResult


class TransitionPort(PlanningPort, Protocol):
    """What carrying transitions needs from the program, beyond planning."""

    def start(self, plan: ResourcePlan, problem: object, target: object, work: RequestWork) -> None:
        """Opens a materialisation."""
        ...

    def start_capture(
        self, plan: ResourcePlan, problem: object, target: object, handle: SequenceHandle
    ) -> None:
        """Opens a shared capture."""
        ...

    def advance_transition(self) -> TransitionResult | None:
        """Goes on; None while copies are in flight."""
        ...

    def cancel_transition(self) -> None:
        """Asks it to abort."""
        ...

    def wait_for_copies(self) -> None:
        """Sleeps until the copies in flight have arrived."""
        ...

    def frontier_tokens(self, handle: SequenceHandle) -> int:
        """Returns a sequence's committed frontier."""
        ...

    def capture_private(
        self,
        handle: SequenceHandle,
        kind: CheckpointKind,
        *,
        ordinal: int = 0,
        replaces: CheckpointRef | None = None,
    ) -> TransitionResult:
        """Takes a checkpoint at the frontier."""
        ...

    def finish(self, handle: SequenceHandle) -> TransitionResult:
        """Publishes a terminated sequence."""
        ...

    def discard(self, handle: SequenceHandle) -> None:
        """Releases a terminated sequence."""
        ...

    def evict(self, owner: OwnerKey) -> TransitionResult:
        """Releases an inactive owner."""
        ...


@dataclass(frozen=True, eq=False)
class Landed:
    """A materialisation that has become stable."""

    job: Job
    record: MaterializationRecord
    active: SequenceHandle | None
    aborted_because: str | None


@dataclass(frozen=True, eq=False)
class _Open:
    job: Job
    claim: Claim
    planning_ns: int


class Transitions:
    """Drives manager and program through one transition after the other.

    Args:
        program: the physical authority.
        manager: the logical authority.
        clock: monotonic nanoseconds.
    """

    def __init__(self, program: TransitionPort, manager: ResourceManager, clock: Callable[[], int]) -> None:
        self._program = program
        self._manager = manager
        self._clock = clock
        self._open: _Open | None = None

    @property
    def is_open(self) -> bool:
        """Whether a transition is running."""
        return self._open is not None

    @property
    def open_plan_id(self) -> str:
        """Names the running materialisation's plan, as its record will."""
        if self._open is None:
            raise InvariantError("no materialisation is open")
        return self._open.claim.plan.plan_id

    # -- admission -------------------------------------------------------------------------------------------

    def plan(self, job: Job, *, allowance_ns: int, runnable_requests: int) -> Admission:
        """Returns where a request would start from; changes nothing.

        Args:
            allowance_ns: optional planning time that this boundary has left (G-10).
            runnable_requests: others that wait meanwhile.
        """
        return self._manager.plan(
            job.facts, allowance_ns=allowance_ns, runnable_requests=runnable_requests, clock=self._clock
        )

    def proves_backfill(self, admission: Admission, *, head: Job, donors: Sequence[RequestId]) -> bool:
        """Returns whether starting this request now cannot strand the blocked head (A-7)."""
        proof = self._manager.prove_backfill(admission, head=head.work, donors=donors)
        return isinstance(proof, BackfillProof)

    def begin(self, job: Job, admission: Admission, planning_ns: int) -> bool:
        """Claims and starts a planned admission.

        Returns:
            False if the plan was stale; then everything is as before (X-2, TX-01).
        """
        try:
            claim = self._manager.claim(admission)
        except StaleHandleError:
            return False
        job.work = admission.work
        try:
            self._program.start(claim.plan, admission.problem, admission.target, admission.work)
        except StalePlanError:
            self._manager.rollback(claim)
            return False
        self._open = _Open(job, claim, planning_ns)
        return True

    def carry_on(self) -> Landed | None:
        """Carries the open materialisation on; None while copies are in flight."""
        if self._open is None:
            raise InvariantError("no materialisation is open")
        result = self._program.advance_transition()
        if result is None:
            return None
        opened, self._open = self._open, None
        self._manager.adopt_materialization(opened.claim, result)
        why = result.outcome.reason if isinstance(result.outcome, Aborted) else None
        return Landed(opened.job, record_of(opened.claim, opened.planning_ns), result.active, why)

    def cancel(self) -> None:
        """Asks the open transition to abort at its next stable boundary (Q-6)."""
        self._program.cancel_transition()

    def wait(self) -> None:
        """Sleeps until the copies in flight have arrived; for a worker with nothing else to do."""
        self._program.wait_for_copies()

    # -- captures --------------------------------------------------------------------------------------------

    def capture(self, job: Job, handle: SequenceHandle, *, runnable_requests: int) -> None:
        """Takes what was planned to be captured where a prefilling request stands; at worst none (Y-6)."""
        remaining = self._manager.capture_frontiers(job.request_id)
        frontier = self._program.frontier_tokens(handle)
        if not remaining or frontier < remaining[0]:
            return
        while frontier in self._manager.capture_frontiers(job.request_id):
            plan = self._manager.capture_intent(job.request_id, frontier, runnable_requests=runnable_requests)
            if plan.is_skip or not self._carry_capture(plan, handle):
                break
        self._manager.skip_captures(job.request_id, frontier)

    def _carry_capture(self, plan: CapturePlan, handle: SequenceHandle) -> bool:
        """Carries one capture to its stable end; whether it could be started."""
        claim = self._manager.claim_capture(plan)
        if plan.private is not None:
            private = plan.private
            result = self._program.capture_private(
                handle, private.kind, ordinal=private.ordinal, replaces=private.replaces
            )
        else:
            assert plan.shared is not None, "a capture that is no skip has a part"
            shared = plan.shared
            try:
                self._program.start_capture(shared.plan, shared.problem, shared.target, handle)
            except StalePlanError:
                self._manager.rollback(claim)
                return False
            while (landed := self._program.advance_transition()) is None:
                self._program.wait_for_copies()
            result = landed
        self._manager.adopt_capture(claim, result)
        return True

    # -- ends ------------------------------------------------------------------------------------------------

    def settle(self, job: Job, handle: SequenceHandle) -> None:
        """Publishes or releases a terminated request (A-5, Y-5); no transition may be open (TX-09)."""
        if self._manager.finish_intent(job.request_id).publish and not job.is_spoiled:
            self._manager.adopt_finish(job.request_id, self._program.finish(handle))
        else:
            self._program.discard(handle)
            self._manager.release_active(job.request_id)

    def evict(self, owner: OwnerKey) -> None:
        """Releases one inactive owner that nobody reads.

        Raises:
            StaleHandleError, ContractError: if it is gone or in use; nothing changed.
        """
        intent = self._manager.release_intent(owner)
        self._manager.adopt_release(intent, self._program.evict(owner))

    def reset(self) -> None:
        """Forgets the catalog with the device's contents (Q-7)."""
        self._open = None
        self._manager.reset()


def record_of(claim: Claim, planning_ns: int) -> MaterializationRecord:
    """Returns what a result tells about how its request came to run."""
    admission, plan = claim.admission, claim.plan
    moved = {direction: 0 for direction in Direction}
    for transfer in plan.work.transfers:
        moved[transfer.direction] += transfer.num_bytes
    price, search = admission.planned.price, admission.planned.search
    assert price is not None and search is not None, "a sealed plan was searched and priced"
    return MaterializationRecord(
        source=admission.source_kind,
        reused_tokens=plan.reused_tokens,
        prefill_tokens=admission.request.prompt_tokens - plan.reused_tokens,
        miss_reason=admission.miss_reason,
        restored_bytes=moved[Direction.H2D],
        offloaded_bytes=moved[Direction.D2H],
        degraded_owners=len(plan.victims),
        evicted_owners=sum(victim.evicted for victim in plan.victims),
        plan_id=plan.plan_id,
        price_ns={
            "prefill": price.prefill_ns,
            "pressure": price.pressure_ns,
            "restore": price.restore_ns,
            "copy": price.copy_ns,
            "future_loss": price.public_ns + sum(price.private_ns.values()),
        },
        stop_reason=search.stop.name.lower(),
        targets=search.num_targets,
        is_fallback=search.is_fallback,
        planning_ns=planning_ns,
    )
