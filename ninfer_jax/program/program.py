"""Owns the running sequences of one engine: their ledgers, lanes, rows, model steps and model transactions.

It does not own request order, cache policy, text, stop rules or the clock, nor the books of pages and
images: `resources` holds those, and this is its only user. Nobody outside sees a page id or a count of free
units; the engine sees handles, answers and `occupancy()` (D-4, D-5).

Lifecycle of one sequence: a sealed plan is `start`ed and stepped by `advance_transition` until it is stable
(`activate` does both for a root start); `prefill` and `decode` convert what was reserved; `commit` advances
the ledger; `terminate` ends it keeping the reservation (A-5); `finish` publishes it, `discard` releases it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from ninfer_jax.errors import ContractError, InvariantError, StaleHandleError
from ninfer_jax.identity import PromptIdentity, extend_identity
from ninfer_jax.planner.backfill import BackfillProof, BackfillRefused, prove_backfill
from ninfer_jax.planner.candidate import Candidate, capture_candidate, make_request
from ninfer_jax.planner.candidate import RequestWork as PlannedWork
from ninfer_jax.planner.capacity import make_capacity
from ninfer_jax.planner.extents import Blocked
from ninfer_jax.planner.ids import CheckpointKind, CheckpointRef, OwnerId, OwnerKind, Revision, Tier
from ninfer_jax.planner.plan import Aborted, Readiness, ResourcePlan
from ninfer_jax.planner.post_state import Activation
from ninfer_jax.planner.problem import Problem, identity_targets, make_problem
from ninfer_jax.planner.readiness import gate
from ninfer_jax.planner.rows import CheckpointSpec
from ninfer_jax.planner.target import TargetBatch
from ninfer_jax.planner.transition import seal
from ninfer_jax.planner.work import prefill_work
from ninfer_jax.program.admission import RequestWork
from ninfer_jax.program.capacity import CapacityVector, pages_for
from ninfer_jax.program.executor import ZERO_STATE, Executor, PrefillInputs, StepResult
from ninfer_jax.program.history import Segment
from ninfer_jax.program.memory_table import MemoryTable
from ninfer_jax.program.pending import PendingBatch
from ninfer_jax.program.resources import Resources, SharedCapture
from ninfer_jax.program.row_layout import PROMPT_TOKENS, STEP, TOKEN
from ninfer_jax.program.rows import ExecutionRows
from ninfer_jax.program.sequence import Sequence, SequenceFacts, SequencePhase, StateBinding
from ninfer_jax.program.session_snapshot import ContextContents, Dropped
from ninfer_jax.program.slots import SlotPool
from ninfer_jax.request import AdmissionStatus, SequenceHandle
from ninfer_jax.reuse import (
    ROOT_CHOICE,
    OwnerKey,
    OwnerSummary,
    SourceChoice,
    TransitionResult,
    zero_stage_result,
)

_STATUS = {
    Readiness.PERMANENTLY_INFEASIBLE: AdmissionStatus.PERMANENTLY_INFEASIBLE,
    Readiness.TEMPORARILY_BLOCKED: AdmissionStatus.TEMPORARILY_BLOCKED,
    Readiness.NEEDS_TRANSFER: AdmissionStatus.NEEDS_TRANSFER,
    Readiness.READY: AdmissionStatus.READY,
}


class Observer(Protocol):
    """Looks on while sequences run and changes nothing; checks are made of it."""

    def on_commit(self, pending: PendingBatch) -> None:
        """A batch has run; its state is on the device, its tokens are not taken yet."""
        ...

    def on_terminate(self, handle: SequenceHandle) -> None:
        """A sequence ends; it still holds everything."""
        ...


class Program:
    """The single holder of what physically exists; driven by one worker thread (Q-2).

    Every refused call raises before anything changed.

    Args:
        capacity: fixed at start (R-1).
        executor: the device.
        prefill_chunk_tokens: the longest chunk.
        memory: planned bytes, for reports.
        on_operation: told each physical operation before it happens; tests raise from it.
    """

    def __init__(
        self,
        capacity: CapacityVector,
        executor: Executor,
        *,
        prefill_chunk_tokens: int,
        memory: MemoryTable,
        on_operation: Callable[[str], None] | None = None,
    ) -> None:
        if len(capacity.pools) != 1:
            # An execution row has one block table: a second pool's pages would overwrite the first one's.
            raise InvariantError(f"got {len(capacity.pools)} page pools, an execution row maps exactly one")
        self._capacity = capacity
        self._executor = executor
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._memory = memory
        self._generations = [0] * capacity.num_lanes
        self._next_serial = 0
        self._closed = False
        self.observer: Observer | None = None
        pool = capacity.pools[0]
        self._resources = Resources(
            make_capacity(
                device_state_slots=capacity.num_state_slots,
                device_pages=(pool.num_pages,),
                host_state_slots=capacity.num_host_state_slots,
                host_kv_granules=capacity.num_host_pages,
                state_image_bytes=capacity.state_image_bytes,
                page_bytes=(pool.page_bytes,),
                granule_bytes=pool.page_bytes,
                lanes=capacity.num_lanes,
            ),
            executor.mover,
            on_operation=on_operation,
        )
        self._forget_sequences()

    def _forget_sequences(self) -> None:
        capacity = self._capacity
        self._lanes = SlotPool("lanes", capacity.num_lanes)
        self._rows = ExecutionRows(capacity.num_lanes, capacity.row_pages)
        self._active: dict[int, Sequence] = {}  # by lane
        self._open_batches: dict[int, PendingBatch] = {}  # by serial
        self._starting: RequestWork | None = None  # whose materialisation is open
        self._capturing: Sequence | None = None  # whose shared capture is open

    # -- what exists -----------------------------------------------------------------------------------------

    @property
    def capacity(self) -> CapacityVector:
        """The capacity vector, fixed at start (R-1)."""
        return self._capacity

    @property
    def resource_revision(self) -> int:
        """Grows when global free or reserved capacity changed, not by a request's own progress (R-11)."""
        return self._resources.revision

    @property
    def has_open_transition(self) -> bool:
        """Whether the one global transition is running (X-6)."""
        return self._resources.transaction is not None

    @property
    def prefill_chunk_tokens(self) -> int:
        """The most prompt tokens one `prefill` call runs."""
        return self._prefill_chunk_tokens

    @property
    def executor(self) -> Executor:
        """The device, for checks that look at its bits; whoever runs a step on it has spoiled the books."""
        return self._executor

    @property
    def attention_backend(self) -> str:
        """Which attention kernels run, for reports."""
        return self._executor.attention_backend

    @property
    def compilations_after_warmup(self) -> int:
        """Backend compilations since warm-up; anything but zero is a defect."""
        return self._executor.compilations_after_warmup

    def memory_table(self) -> MemoryTable:
        """Returns planned and allocated bytes per axis."""
        return self._memory.with_allocated(self._executor.allocated_bytes())

    def occupancy(self) -> dict[str, int]:
        """Returns used units per axis: unique allocations and concrete reservations (R-4).

        Zero when idle on an engine that keeps nothing; else what inactive owners hold.
        """
        self._sync()
        units, pool = self._resources.occupancy(), self._capacity.pools[0].kind.value
        return {
            "lanes": self._lanes.num_taken,
            "execution_rows": self._rows.pool.num_taken,
            "state_slots": units["device_state_slots"],
            "host_state_slots": units["host_state_slots"],
            "host_kv_pages": units["host_kv_granules"],
            "open_batches": len(self._open_batches),
            f"{pool}_pages": units[f"device_{pool}_pages"],
            f"{pool}_pages_reserved": units[f"device_{pool}_pages_reserved"],
        }

    def facts(self, handle: SequenceHandle) -> SequenceFacts:
        """Returns a picture of one active sequence.

        Raises:
            StaleHandleError: if the handle is of an earlier activation.
        """
        sequence = self._get(handle)
        mapped = pages_for(sequence.frontier_tokens)
        table = self._rows.tables[sequence.row]
        pages = table[table >= 0].tolist()
        return SequenceFacts(
            phase=sequence.phase,
            frontier_tokens=sequence.frontier_tokens,
            ledger_tokens=tuple(sequence.ledger_tokens[: sequence.num_ledger_tokens].tolist()),
            num_output_tokens=sequence.num_output_tokens,
            work=sequence.work,
            history=tuple(sequence.history),
            mapped_pages=(tuple(pages[:mapped]),),
            reserved_pages=(len(pages) - mapped,),
            state_slot=sequence.state.write_slot,
            row=sequence.row,
        )

    def frontier_tokens(self, handle: SequenceHandle) -> int:
        """Returns how many tokens a sequence's KV and state cover."""
        return self._get(handle).frontier_tokens

    def verify(self, ref: CheckpointRef, identity: PromptIdentity) -> bool:
        """Returns whether a checkpoint lives, is valid and is exactly this prompt's prefix (C-1, C-5)."""
        return self._resources.verify(ref, identity)

    def summary(self, owner: OwnerId) -> OwnerSummary:
        """Returns one owner with its checkpoints."""
        return self._resources.summary(owner)

    # -- planning --------------------------------------------------------------------------------------------

    def problem(self, work: RequestWork, choices: Seq[SourceChoice]) -> Problem:
        """Returns the planning round of one request on the current state (D-5).

        Args:
            work: the request.
            choices: root first, then sources that `verify` accepted at this revision.
        Raises:
            StaleHandleError: if a source is gone.
        """
        self._require_open()
        self._sync()
        planned, candidates = self._planned(work), []
        for ordinal, choice in enumerate(choices):
            row = None if choice.ref is None else self._resources.find(choice.ref)
            if choice.ref is not None and row is None:
                raise StaleHandleError(f"{choice.ref} is gone; make the shortlist again")
            candidates.append(Candidate(ordinal, row, choice.disposition, planned, choice.is_session_binding))
        return make_problem(self._resources.state, candidates, holdings=self._resources.holdings)

    def _planned(self, work: RequestWork) -> PlannedWork:
        return make_request(
            len(work.identity.tokens),
            work.max_output_tokens,
            chunk_tokens=self._prefill_chunk_tokens,
            rewrite_frontiers=(*work.identity.rewrite_execution_frontiers, *work.capture_frontiers),
        )

    def backfill(
        self, problem: Problem, target: TargetBatch, *, head: RequestWork, donors: Seq[SequenceHandle]
    ) -> BackfillProof | BackfillRefused:
        """Returns the persistent backfill proof for a planned borrower (A-7)."""
        owners = [self._get(donor).owner for donor in donors]
        return prove_backfill(problem, target, head=self._planned(head), donors=owners)

    def assess(self, work: RequestWork) -> AdmissionStatus:
        """Returns whether this request could start from root as things stand; changes nothing (G-5, G-14)."""
        num_tokens = len(work.identity.tokens) + work.max_output_tokens
        if num_tokens > self._capacity.max_context_tokens:
            return AdmissionStatus.PERMANENTLY_INFEASIBLE
        planned, state = self._planned(work), self._resources.state
        early = gate(state, planned)
        if early is not None:
            return _STATUS[early]
        problem = self.problem(work, [ROOT_CHOICE])
        sealed = seal(problem, identity_targets(problem))
        if sealed is None or isinstance(sealed, Blocked):
            return AdmissionStatus.TEMPORARILY_BLOCKED
        return _STATUS[sealed.readiness]

    # -- the one transition ----------------------------------------------------------------------------------

    def start(self, plan: ResourcePlan, problem: Problem, target: TargetBatch, work: RequestWork) -> None:
        """Opens the materialisation of a sealed plan (X-1, X-2).

        Raises:
            StalePlanError, PlanConsumedError, ContractError: nothing changed.
        """
        self._require_open()
        _require_tokens(work)
        if self._lanes.num_free == 0:
            raise ContractError(f"all {self._capacity.num_lanes} lanes are in use")
        self._resources.start(plan, problem, target, identity=work.identity)
        self._starting = work

    def advance_transition(self) -> TransitionResult | None:
        """Carries the open transition on; None while copies are in flight, else its stable end (X-7, X-9)."""
        landed = self._resources.step()
        if landed is None:
            return None
        work, self._starting = self._starting, None
        captured, self._capturing = self._capturing, None
        if captured is not None:  # an unaligned tail page stayed with the prefix, the sequence has a copy
            self._rows.append(captured.row, 0, self._resources.block_table(captured.owner))
        active = None
        if landed.activation is not None:
            assert work is not None, "only a materialisation activates"
            active = self._open_sequence(landed.activation, work)
        return TransitionResult(landed.outcome, active, landed.owners)

    def wait_for_copies(self) -> None:
        """Sleeps until the copies in flight have arrived."""
        self._resources.wait()

    def cancel_transition(self) -> None:
        """Asks the open transition to abort at its next stable boundary (Q-6)."""
        self._resources.cancel()

    def activate(self, work: RequestWork) -> SequenceHandle:
        """Returns the handle of a new sequence that starts from root, with all it may need reserved (A-1).

        Raises:
            ContractError: if `assess` does not answer READY, or the request has no prompt or no output.
        """
        self._require_open()
        _require_tokens(work)
        status = self.assess(work)
        if status is not AdmissionStatus.READY:
            raise ContractError(
                f"activate needs a request that assess calls ready, this one is {status.value}"
            )
        problem = self.problem(work, [ROOT_CHOICE])
        target = identity_targets(problem)
        plan = seal(problem, target)
        assert isinstance(plan, ResourcePlan), "assess found that it fits"
        self.start(plan, problem, target, work)
        result = self.advance_transition()
        if result is None or result.active is None:
            raise InvariantError(f"a root start without pressure ended with {result}")
        return result.active

    def _open_sequence(self, activation: Activation, work: RequestWork) -> SequenceHandle:
        owner, num_prompt_tokens = activation.owner, len(work.identity.tokens)
        base = int(self._resources.state.owner_frontier[owner, 0])
        lane = self._lanes.take()
        self._generations[lane] += 1
        ledger_tokens = np.empty(num_prompt_tokens + work.max_output_tokens, np.int32)
        ledger_tokens[:num_prompt_tokens] = work.identity.tokens
        row = self._rows.lease(
            lane=lane,
            state_slot=activation.write_slot,
            prompt_tokens=num_prompt_tokens,
            rope_delta=work.identity.rope_delta,
            sampling=work.sampling,
        )
        self._rows.append(row, 0, self._resources.block_table(owner))
        sequence = Sequence(
            handle=SequenceHandle(lane, self._generations[lane]),
            owner=owner,
            work=work,
            row=row,
            state=StateBinding(activation.read_slot, activation.write_slot),
            ledger_tokens=ledger_tokens,
            num_ledger_tokens=num_prompt_tokens,
            frontier_tokens=base,
            history=list(self._resources.history(owner)),
        )
        self._active[lane] = sequence
        try:
            self._executor.set_lane(lane, work.sampling, ledger_tokens[:num_prompt_tokens])
        except BaseException:
            self._close_sequence(sequence)  # nobody has its handle yet
            self._resources.release(owner)
            raise
        return sequence.handle

    # -- model steps -----------------------------------------------------------------------------------------

    def prefill(self, handle: SequenceHandle) -> PendingBatch | None:
        """Returns None after one more chunk of the prompt, or the first drawn token after the last one.

        A chunk ends at the chunk size, at the next rewrite frontier (C-7), where a capture is due, or at the
        end of the prompt. Prompt tokens are known, so a chunk is committed by running it; only the drawn
        token waits for `commit`. A prompt that a checkpoint covers whole runs no chunk at all.

        Raises:
            StaleHandleError, ContractError: before anything changed.
        """
        sequence = self._get(handle)
        self._require(sequence, SequencePhase.PREFILL)
        work, start = sequence.work, sequence.frontier_tokens
        end = self._chunk_end(start, work)
        if start < end:
            self._run_chunk(sequence, start, end)
            if end < len(work.identity.tokens):
                return None
        else:
            self._own_image(sequence)
        # The first token is drawn from the stored tail hidden by a program of its own: the head is compiled
        # once instead of once per bucket, and a request that starts at this very frontier repeats the draw.
        result = self._executor.draw_from_tail(self._rows.copy([sequence.row]))
        return self._open_batch([sequence], fed_tokens=0, result=result)

    def _run_chunk(self, sequence: Sequence, start: int, end: int) -> None:
        identity, read_slot = sequence.work.identity, sequence.state.read_slot
        self._executor.prefill(
            PrefillInputs(
                tokens=sequence.ledger_tokens[start:end].copy(),
                positions=np.array(identity.positions[:, start:end], np.int32),
                block_table=self._rows.tables[sequence.row].copy(),
                start_tokens=start,
                read_slot=ZERO_STATE if read_slot is None else read_slot,
                write_slot=sequence.state.write_slot,
            )
        )
        sequence.frontier_tokens = end
        sequence.history.append(Segment(start, end - start, decoded=False))
        self._settle_fork(sequence)

    def _own_image(self, sequence: Sequence) -> None:
        """Copies a borrowed image into the sequence's own slot, where no step will write it."""
        read_slot, write_slot = sequence.state.read_slot, sequence.state.write_slot
        if read_slot not in (None, write_slot):
            assert read_slot is not None
            self._executor.mover.copy_image(read_slot, write_slot)
        self._settle_fork(sequence)

    def _settle_fork(self, sequence: Sequence) -> None:
        """After the first state-writing step a sequence reads what it writes (S-3)."""
        write_slot = sequence.state.write_slot
        if sequence.state.read_slot != write_slot:
            sequence.state = StateBinding(write_slot, write_slot)

    def _chunk_end(self, start: int, work: RequestWork) -> int:
        end = min(start + self._prefill_chunk_tokens, len(work.identity.tokens))
        stops = (*work.identity.rewrite_execution_frontiers, *work.capture_frontiers)
        return min([end, *(stop for stop in stops if stop > start)])

    def decode(self, handles: Seq[SequenceHandle]) -> PendingBatch:
        """Returns one drawn token for each of exactly these sequences, uncommitted (Q-3).

        Raises:
            StaleHandleError: if a handle is of an earlier activation.
            ContractError: if a sequence is not ready to decode, occurs twice, or has drawn its whole output.
        """
        if not handles:
            raise ContractError("decode needs at least one sequence")
        sequences = [self._get_decodable(handle) for handle in handles]
        rows = [sequence.row for sequence in sequences]
        if len(set(rows)) != len(rows):
            raise ContractError(f"decode got a sequence twice: {list(handles)}")
        # The rows stand ready: activation filled their block tables, commits keep the rest.
        result = self._executor.decode(self._rows.copy(rows))
        return self._open_batch(sequences, fed_tokens=1, result=result)

    def _open_batch(self, sequences: Seq[Sequence], *, fed_tokens: int, result: StepResult) -> PendingBatch:
        serial = self._next_serial
        self._next_serial += 1
        for sequence in sequences:
            sequence.open_batch = serial
        batch = PendingBatch(
            serial=serial,
            handles=tuple(sequence.handle for sequence in sequences),
            produced=(1,) * len(sequences),
            fed_tokens=fed_tokens,
            result=result,
        )
        self._open_batches[serial] = batch
        return batch

    # -- model transaction -----------------------------------------------------------------------------------

    def commit(self, pending: PendingBatch, accepted: Seq[int]) -> None:
        """Takes the accepted tokens of every row into ledger and frontier; consumes the batch (Q-5).

        Args:
            pending: an open batch of this program.
            accepted: per row the number of tokens taken; 0 means that the row was cancelled, and its sequence
                can then only end: what it fed is in its state, what it drew is not in its ledger.

        Raises:
            ContractError: if the batch was consumed before or a count is not in 0..produced; nothing changed.
        """
        self._require_pending(pending)
        if pending.produced.count(1) != len(pending.handles):
            raise InvariantError(f"rows produced {pending.produced} tokens; a step draws one token per row")
        if len(accepted) != len(pending.handles):
            raise ContractError(f"commit got {len(accepted)} counts for {len(pending.handles)} rows")
        for handle, count, produced in zip(pending.handles, accepted, pending.produced, strict=True):
            if not 0 <= count <= produced:
                raise ContractError(f"lane {handle.lane} accepts {count} of {produced} produced tokens")
        tokens = pending.tokens().tolist()  # may raise a device fault: still before the first change
        if self.observer is not None:
            self.observer.on_commit(pending)
        del self._open_batches[pending.serial]
        for handle, count, token in zip(pending.handles, accepted, tokens, strict=True):
            sequence = self._active[handle.lane]
            sequence.open_batch = None
            self._fed(sequence, pending)
            if count == 0:
                sequence.phase = SequencePhase.ENDING
                continue
            sequence.ledger_tokens[sequence.num_ledger_tokens] = token
            sequence.num_ledger_tokens += 1
            sequence.num_output_tokens += 1
            sequence.phase = SequencePhase.DECODE_READY
            self._rows.feed_next(sequence.row, token, sequence.num_output_tokens)

    def abort(self, pending: PendingBatch) -> None:
        """Drops a batch whole; none of its rows can go on, since a step advances device state in place (Q-5).

        Raises:
            ContractError: if the batch was consumed before.
        """
        self._require_pending(pending)
        del self._open_batches[pending.serial]
        for handle in pending.handles:
            sequence = self._active[handle.lane]
            sequence.open_batch = None
            self._fed(sequence, pending)
            sequence.phase = SequencePhase.ENDING

    @staticmethod
    def _fed(sequence: Sequence, pending: PendingBatch) -> None:
        """Takes the fed ledger tokens into the frontier: KV and state hold them, whatever was drawn."""
        num_tokens, num_rows = pending.fed_tokens, len(pending.handles)
        if not num_tokens:
            return
        start, history = sequence.frontier_tokens, sequence.history
        sequence.frontier_tokens += num_tokens
        last = history[-1] if history else None
        if last is not None and last.decoded and last.num_rows == num_rows:
            history[-1] = last._replace(num_tokens=last.num_tokens + num_tokens)
        else:
            history.append(Segment(start, num_tokens, True, num_rows))

    # -- the end ---------------------------------------------------------------------------------------------

    def terminate(self, handle: SequenceHandle) -> None:
        """Ends an active sequence; it keeps handle, lane and full reservation (A-5, ACT-09).

        Raises:
            StaleHandleError, ContractError: if it has an open batch or was terminated before; nothing
            changed.
        """
        sequence = self._get(handle)
        self._require_settled(sequence)
        if sequence.phase is SequencePhase.TERMINAL_PENDING:
            raise ContractError(f"lane {handle.lane} was terminated before")
        if self.observer is not None:
            self.observer.on_terminate(handle)
        sequence.phase = SequencePhase.TERMINAL_PENDING

    def finish(self, handle: SequenceHandle) -> TransitionResult:
        """Publishes a terminated sequence: its committed state becomes the endpoint of a continuation (A-5).

        Its handle is stale from here on. A sequence that never ran a step has nothing new to keep and is
        discarded: then no owner is reported. But what it consumed of a conversation is published again.

        Raises:
            StaleHandleError, ContractError: if it was not terminated first, or a transition is open (TX-09);
                nothing changed.
        """
        sequence = self._require_terminal(handle)
        frontier = sequence.frontier_tokens
        if sequence.state.read_slot != sequence.state.write_slot:
            if not self._resources.summary(sequence.owner).checkpoints:
                self.discard(handle)
                return self._stable("discard")
            self._own_image(sequence)
        self._sync()
        identity = self._identity_up_to(sequence, frontier)
        spec = self._spec(sequence, frontier, CheckpointKind.SESSION_ENDPOINT, 0)
        self._resources.finish(sequence.owner, spec, identity, tuple(sequence.history))
        self._close_sequence(sequence)
        return self._stable("finish", sequence.owner)

    def _stable(self, what: str, *owners: OwnerId) -> TransitionResult:
        """Returns the result of a transition without stages (X-1, TX-14)."""
        revision = self._resources.revision
        summaries = [self._resources.summary(owner) for owner in owners]
        return zero_stage_result(revision, summaries, name=f"{what} at {revision}")

    def discard(self, handle: SequenceHandle) -> None:
        """Releases everything a terminated sequence holds; its handle is stale from here on.

        Raises:
            StaleHandleError, ContractError: as `finish`.
        """
        sequence = self._require_terminal(handle)
        self._resources.release(sequence.owner)
        self._close_sequence(sequence)

    def _require_terminal(self, handle: SequenceHandle) -> Sequence:
        sequence = self._get(handle)
        self._require(sequence, SequencePhase.TERMINAL_PENDING)
        if self.has_open_transition:
            raise ContractError(f"lane {handle.lane} ends after the open transition has settled (X-6)")
        return sequence

    def _close_sequence(self, sequence: Sequence) -> None:
        self._rows.give_back(sequence.row)
        self._lanes.give_back(sequence.handle.lane)
        del self._active[sequence.handle.lane]

    def evict(self, owner: OwnerKey) -> TransitionResult:
        """Releases an inactive owner whole.

        Raises:
            StaleHandleError: if it is gone; nothing changed.
            ContractError: if it is active, protected by an active sequence, or a transition is open.
        """
        self._require_inactive(owner)
        deleted = tuple(sorted(self._resources.summary(owner.owner).refs))
        self._resources.release(owner.owner)
        revision = self._resources.revision
        return zero_stage_result(
            revision, name=f"release at {revision}", deleted=deleted, evicted=(owner.owner,)
        )

    def _require_inactive(self, owner: OwnerKey) -> None:
        self._require_open()
        state = self._resources.state
        if not self._resources.is_alive(owner):
            raise StaleHandleError(f"owner row {owner.owner} generation {owner.generation} is gone")
        if state.owner_kind[owner.owner] == OwnerKind.ACTIVE or state.edges[:, owner.owner].any():
            raise ContractError(f"owner row {owner.owner} is active or read by an active sequence")

    # -- sessions --------------------------------------------------------------------------------------------

    def read_context(self, owner: OwnerKey) -> Callable[[], ContextContents]:
        """Starts to read an inactive context whole; changes nothing (C-11).

        Returns:
            A function that waits for the bytes, from any thread, whatever happens to the context meanwhile.

        Raises:
            StaleHandleError: if it is gone.
            ContractError: if it is active, read by an active sequence, or a transition is open.
        """
        self._require_inactive(owner)
        return self._resources.read_contents(owner.owner)

    def adopt_context(
        self, contents: ContextContents, *, max_long_anchors: int
    ) -> tuple[TransitionResult, tuple[Dropped, ...]] | str:
        """Returns the new private owner of a restored context and what was dropped, or why it does not fit.

        Raises:
            ContractError: if no lane is idle (PER-05) or a transition is open.
        """
        self._require_open()
        if self._lanes.num_free == 0:
            raise ContractError("a restore needs an idle lane; wait until a request has ended")
        adopted = self._resources.adopt_contents(contents, max_long_anchors=max_long_anchors)
        if isinstance(adopted, str):
            return adopted
        summary, dropped = adopted
        return self._stable("restore", summary.owner), dropped

    def weights_digest(self) -> str:
        """Returns a digest of the weights' values."""
        return self._executor.weights_digest()

    # -- captures --------------------------------------------------------------------------------------------

    def capture_private(
        self,
        handle: SequenceHandle,
        kind: CheckpointKind,
        *,
        ordinal: int = 0,
        replaces: CheckpointRef | None = None,
    ) -> TransitionResult:
        """Takes a checkpoint of a sequence at its frontier, if a state slot is free for it (A-6).

        Returns:
            Committed with the sequence's owner; Aborted if there was no room or the copy failed, and nothing
            changed.
        """
        sequence, frontier = self._get(handle), self.frontier_tokens(handle)
        self._require_settled(sequence)
        if self.has_open_transition:
            return self._skipped("a transition is open")
        self._sync()
        spec = self._spec(sequence, frontier, kind, ordinal)
        identity = self._identity_up_to(sequence, frontier)
        self._resources.remember(sequence.owner, identity, tuple(sequence.history))
        try:
            is_taken = self._resources.capture_private(sequence.owner, spec, replaces=replaces)
        except (InvariantError, ContractError):
            raise
        except Exception as fault:  # before anything was installed: the sequence goes on without it
            return self._skipped(f"{type(fault).__name__}: {fault}")
        if not is_taken:
            return self._skipped("no state slot is free")
        return self._stable("capture", sequence.owner)

    def _skipped(self, why: str) -> TransitionResult:
        return TransitionResult(Aborted("capture", Revision(self._resources.revision), why), None, ())

    def capture_problem(self, handle: SequenceHandle) -> Problem:
        """Returns the round of a shared capture at the sequence's frontier (K-5)."""
        sequence = self._get(handle)
        self._sync()
        state = self._resources.state
        frontier = state.owner_frontier[sequence.owner].tolist()
        return make_problem(state, [capture_candidate(state.capacity, frontier)])

    def start_capture(
        self, plan: ResourcePlan, problem: Problem, target: TargetBatch, handle: SequenceHandle
    ) -> None:
        """Opens the transition of a shared capture; `advance_transition` carries it on.

        Raises:
            StalePlanError, PlanConsumedError, ContractError: nothing changed.
        """
        sequence = self._get(handle)
        self._require_settled(sequence)
        frontier = sequence.frontier_tokens
        spec = self._spec(sequence, frontier, CheckpointKind.SHARED_STABLE_PREFIX, 0)
        capture = SharedCapture(
            sequence.owner,
            spec,
            self._identity_up_to(sequence, frontier),
            tuple(sequence.history),
            Tier.DEVICE,
        )
        self._resources.start(plan, problem, target, capture=capture)
        self._capturing = sequence

    def _spec(self, sequence: Sequence, frontier: int, kind: CheckpointKind, ordinal: int) -> CheckpointSpec:
        rebuild = prefill_work(
            0,
            frontier,
            chunk_tokens=self._prefill_chunk_tokens,
            frontiers=sequence.work.identity.rewrite_execution_frontiers,
        )
        work = (rebuild.chunks, rebuild.vision_items, rebuild.vision_patches)
        return CheckpointSpec(frontier, kind, ordinal, (frontier,), rebuild=work)

    def _identity_up_to(self, sequence: Sequence, frontier: int) -> PromptIdentity:
        identity = sequence.work.identity
        if frontier <= identity.num_tokens:
            return identity
        return extend_identity(identity, sequence.ledger_tokens[identity.num_tokens : frontier])

    def _sync(self) -> None:
        """Brings the state up to the committed frontiers; free of effect on what others may take (R-11)."""
        if self.has_open_transition:
            return  # it goes by the state it was planned on; what actives convert meanwhile is their own
        for sequence in self._active.values():
            if sequence.state.read_slot == sequence.state.write_slot:
                self._resources.advance_to(sequence.owner, sequence.frontier_tokens)

    # -- start over, stop ------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Clears all device work and contents after a fault; every handle and batch becomes stale (Q-7)."""
        self._require_open()
        self._forget_sequences()
        self._resources.reset()
        self._executor.reset()

    def close(self) -> None:
        """Frees device memory; a second call does nothing. Every later call but this one is refused."""
        if self._closed:
            return
        self._closed = True
        self._forget_sequences()
        self._resources.reset()
        self._executor.close()

    # -- guards ----------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise ContractError("this program is closed")

    def _get(self, handle: SequenceHandle) -> Sequence:
        sequence = self._active.get(handle.lane)
        if sequence is not None and (sequence.handle is handle or sequence.handle == handle):
            return sequence
        self._require_open()  # a closed program holds no sequence
        raise StaleHandleError(
            f"lane {handle.lane} generation {handle.generation} is not active; "
            f"the lane is {'free' if sequence is None else f'at generation {sequence.handle.generation}'}"
        )

    def _get_decodable(self, handle: SequenceHandle) -> Sequence:
        sequence = self._get(handle)
        if sequence.open_batch is not None or sequence.phase is not SequencePhase.DECODE_READY:
            self._require(sequence, SequencePhase.DECODE_READY)  # raises, and says which of the two
        if sequence.num_output_tokens >= sequence.work.max_output_tokens:
            raise ContractError(f"lane {handle.lane} has drawn its whole output; terminate it")
        return sequence

    def _require(self, sequence: Sequence, phase: SequencePhase) -> None:
        self._require_settled(sequence)
        if sequence.phase is not phase:
            raise ContractError(
                f"lane {sequence.handle.lane} is in phase {sequence.phase.value}, not {phase.value}"
            )

    def _require_settled(self, sequence: Sequence) -> None:
        if sequence.open_batch is not None:
            raise ContractError(
                f"lane {sequence.handle.lane} has an uncommitted batch; commit or abort it first"
            )

    def _require_pending(self, pending: PendingBatch) -> None:
        self._require_open()
        if self._open_batches.get(pending.serial) is not pending:
            raise ContractError(
                f"batch {pending.serial} is not open: it was consumed before, or is of another program"
            )

    def check(self) -> None:
        """Recounts every book from the objects (R-4, R-7); for tests and a debug option.

        Raises:
            InvariantError: naming the numbers that disagree.
        """
        self._sync()
        self._resources.check()
        for pool in (self._lanes, self._rows.pool):
            pool.check()
        state, sequences = self._resources.state, list(self._active.values())
        self._agree("lanes", self._lanes.num_taken, len(sequences))
        self._agree("rows", self._rows.pool.num_taken, len({sequence.row for sequence in sequences}))
        active = np.flatnonzero(state.owner_kind == OwnerKind.ACTIVE).tolist()
        if active != sorted(int(sequence.owner) for sequence in sequences):
            raise InvariantError(f"active owners are {active}, sequences say {[s.owner for s in sequences]}")
        for sequence in sequences:
            table = self._rows.tables[sequence.row]
            pages = self._resources.block_table(sequence.owner)
            if table[: len(pages)].tolist() != pages or (table[len(pages) :] >= 0).any():
                raise InvariantError(f"row {sequence.row} maps {table.tolist()}, its space {pages}")
            numbers = self._rows.numbers[sequence.row]
            fed = sequence.num_output_tokens
            self._agree("a row's output", int(numbers[STEP]), fed)
            self._agree("a row's prompt", int(numbers[PROMPT_TOKENS]), sequence.work.identity.num_tokens)
            if fed:
                self._agree(
                    "a row's token",
                    int(numbers[TOKEN]),
                    int(sequence.ledger_tokens[sequence.num_ledger_tokens - 1]),
                )
        open_rows = sorted(handle.lane for batch in self._open_batches.values() for handle in batch.handles)
        waiting = sorted(sequence.handle.lane for sequence in sequences if sequence.open_batch is not None)
        if open_rows != waiting:
            raise InvariantError(f"open batches hold lanes {open_rows}, lanes {waiting} say so")

    @staticmethod
    def _agree(what: str, books: int, recount: int) -> None:
        if books != recount:
            raise InvariantError(f"{what}: the books say {books}, a recount says {recount}")


def _require_tokens(work: RequestWork) -> None:
    if not len(work.identity.tokens) or work.max_output_tokens < 1:
        raise ContractError(
            "a request needs at least one prompt and one output token, got "
            f"{len(work.identity.tokens)} and {work.max_output_tokens}"
        )
