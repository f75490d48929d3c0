"""Owns all physical state of one engine: lanes, rows, state slots, pages, reservations and buffers.

It does not own request order, cache policy, text, stop rules or the clock. Nobody else holds a page id or a
count of free units; the engine sees handles, answers and `occupancy()` (D-4, D-5).

Lifecycle of one sequence: `activate` reserves everything it can ever need (A-1), `prefill` and `decode`
convert within that, `commit` advances the ledger, `terminate` ends it keeping the reservation (A-5),
`discard` returns it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from ninfer_jax.errors import ContractError, InvariantError, StaleHandleError
from ninfer_jax.options import PAGE_TOKENS
from ninfer_jax.program.admission import RequestWork
from ninfer_jax.program.capacity import CapacityVector, pages_for
from ninfer_jax.program.executor import ZERO_STATE, Executor, PrefillInputs, StepResult
from ninfer_jax.program.memory_table import MemoryTable
from ninfer_jax.program.pages import PageStore
from ninfer_jax.program.pending import PendingBatch
from ninfer_jax.program.row_layout import PROMPT_TOKENS, STEP, TOKEN
from ninfer_jax.program.rows import ExecutionRows
from ninfer_jax.program.sequence import Sequence, SequenceFacts, SequencePhase, StateBinding
from ninfer_jax.program.slots import SlotPool
from ninfer_jax.request import AdmissionStatus, SequenceHandle


class Program:
    """The single holder of what physically exists; driven by one worker thread (Q-2).

    Every refused call raises before anything changed.
    """

    def __init__(
        self, capacity: CapacityVector, executor: Executor, *, prefill_chunk_tokens: int, memory: MemoryTable
    ) -> None:
        self._capacity = capacity
        self._executor = executor
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._memory = memory
        self._generations = [0] * capacity.num_lanes
        self._revision = 0
        self._next_serial = 0
        self._closed = False
        self._make_stores()

    def _make_stores(self) -> None:
        capacity = self._capacity
        if len(capacity.pools) != 1:
            # An execution row has one block table: a second pool's pages would overwrite the first one's.
            raise InvariantError(f"got {len(capacity.pools)} page pools, an execution row maps exactly one")
        self._lanes = SlotPool("lanes", capacity.num_lanes)
        self._rows = ExecutionRows(capacity.num_lanes, capacity.row_pages)
        self._state_slots = SlotPool("state slots", capacity.num_state_slots)
        self._pools = tuple(PageStore(pool) for pool in capacity.pools)
        self._active: dict[int, Sequence] = {}  # by lane
        self._open_batches: dict[int, PendingBatch] = {}  # by serial

    # -- what exists -----------------------------------------------------------------------------------------

    @property
    def capacity(self) -> CapacityVector:
        """The capacity vector, fixed at start (R-1)."""
        return self._capacity

    @property
    def resource_revision(self) -> int:
        """Grows when global free or reserved capacity changed, not by a request's own progress (R-11)."""
        return self._revision

    @property
    def prefill_chunk_tokens(self) -> int:
        """The most prompt tokens one `prefill` call runs."""
        return self._prefill_chunk_tokens

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
        """Returns used units per axis: unique allocations and concrete reservations (R-4); zero when idle."""
        used = {
            "lanes": self._lanes.num_taken,
            "execution_rows": self._rows.pool.num_taken,
            "state_slots": self._state_slots.num_taken,
            "host_state_slots": 0,
            "host_kv_bytes": 0,
            "open_batches": len(self._open_batches),
        }
        for store in self._pools:
            name = f"{store.capacity.kind.value}_pages"
            used[name] = store.num_mapped + store.num_reserved
            used[f"{name}_reserved"] = store.num_reserved
        return used

    def facts(self, handle: SequenceHandle) -> SequenceFacts:
        """Returns a picture of one active sequence.

        Raises:
            StaleHandleError: if the handle is of an earlier activation.
        """
        sequence = self._get(handle)
        return SequenceFacts(
            phase=sequence.phase,
            frontier_tokens=sequence.frontier_tokens,
            ledger_tokens=tuple(sequence.ledger_tokens[: sequence.num_ledger_tokens].tolist()),
            num_output_tokens=sequence.num_output_tokens,
            decomposition=tuple(sequence.decomposition),
            mapped_pages=tuple(tuple(space.mapped) for space in sequence.spaces),
            reserved_pages=tuple(space.reserved_pages for space in sequence.spaces),
            state_slot=sequence.state.write_slot,
            row=sequence.row,
        )

    # -- admission -------------------------------------------------------------------------------------------

    def assess(self, work: RequestWork) -> AdmissionStatus:
        """Returns whether this request could become Active now; changes nothing (G-5, G-14)."""
        num_tokens = len(work.identity.tokens) + work.max_output_tokens
        if num_tokens > self._capacity.max_context_tokens or any(
            pages_for(num_tokens) > pool.num_pages for pool in self._capacity.pools
        ):
            return AdmissionStatus.PERMANENTLY_INFEASIBLE
        if self._lanes.num_free == 0 or self._rows.pool.num_free == 0 or self._state_slots.num_free == 0:
            return AdmissionStatus.TEMPORARILY_BLOCKED
        if any(pages_for(num_tokens) > store.num_available for store in self._pools):
            return AdmissionStatus.TEMPORARILY_BLOCKED
        return AdmissionStatus.READY

    def activate(self, work: RequestWork) -> SequenceHandle:
        """Returns the handle of a new active sequence, started from root with all it may need reserved.

        Secured at once: a lane, an execution row, one state destination, and in every pool the pages of the
        whole prompt plus the whole output (A-1). Nothing that runs later can fail for memory.

        Raises:
            ContractError: if `assess` does not answer READY, or the request has no prompt or no output.
        """
        self._require_open()
        num_prompt_tokens = len(work.identity.tokens)
        if num_prompt_tokens < 1 or work.max_output_tokens < 1:
            raise ContractError(
                f"a request needs at least one prompt and one output token, got {num_prompt_tokens} and "
                f"{work.max_output_tokens}"
            )
        status = self.assess(work)
        if status is not AdmissionStatus.READY:
            raise ContractError(
                f"activate needs a request that assess calls ready, this one is {status.value}"
            )
        num_tokens = num_prompt_tokens + work.max_output_tokens
        lane = self._lanes.take()
        self._generations[lane] += 1
        write_slot = self._state_slots.take()
        ledger_tokens = np.empty(num_tokens, np.int32)
        ledger_tokens[:num_prompt_tokens] = work.identity.tokens
        sequence = Sequence(
            handle=SequenceHandle(lane, self._generations[lane]),
            work=work,
            row=self._rows.lease(
                lane=lane,
                state_slot=write_slot,
                prompt_tokens=num_prompt_tokens,
                rope_delta=work.identity.rope_delta,
                sampling=work.sampling,
            ),
            state=StateBinding(read_slot=None, write_slot=write_slot),
            spaces=tuple(store.open(pages_for(num_tokens)) for store in self._pools),
            ledger_tokens=ledger_tokens,
            num_ledger_tokens=num_prompt_tokens,
        )
        self._active[lane] = sequence
        try:
            self._executor.set_lane(lane, work.sampling, ledger_tokens[:num_prompt_tokens])
        except BaseException:
            self._release(sequence)  # nobody has its handle yet
            raise
        self._revision += 1
        return sequence.handle

    # -- model steps -----------------------------------------------------------------------------------------

    def prefill(self, handle: SequenceHandle) -> PendingBatch | None:
        """Returns None after one more chunk of the prompt, or the first drawn token after the last one.

        A chunk ends at the chunk size, at the next rewrite frontier (C-7) or at the end of the prompt. Prompt
        tokens are known, so a chunk is committed by running it; only the drawn token waits for `commit`.

        Raises:
            StaleHandleError, ContractError: before anything changed.
        """
        sequence = self._get(handle)
        self._require(sequence, SequencePhase.PREFILL)
        identity = sequence.work.identity
        start = sequence.frontier_tokens
        end = self._chunk_end(start, len(identity.tokens), identity.rewrite_execution_frontiers)
        self._map_up_to(sequence, end)
        read_slot = sequence.state.read_slot
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
        sequence.state = StateBinding(sequence.state.write_slot, sequence.state.write_slot)
        sequence.frontier_tokens = end
        sequence.decomposition.append((start, end - start))
        if end < len(identity.tokens):
            return None
        # The first token is drawn from the stored tail hidden by a program of its own: the head is compiled
        # once instead of once per bucket, and a later request that starts at this very frontier repeats the
        # same draw.
        result = self._executor.draw_from_tail(self._rows.copy([sequence.row]))
        return self._open_batch([sequence], fed_tokens=0, result=result)

    def _chunk_end(self, start: int, num_prompt_tokens: int, frontiers: Seq[int]) -> int:
        end = min(start + self._prefill_chunk_tokens, num_prompt_tokens)
        return min([end, *(frontier for frontier in frontiers if frontier > start)])

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
        for sequence in sequences:
            if sequence.frontier_tokens >= sequence.mapped_tokens:
                self._map_up_to(sequence, sequence.frontier_tokens + 1)
        # The rows stand ready: activation, prefill, page mapping and commits keep them.
        result = self._executor.decode(self._rows.copy(rows))
        return self._open_batch(sequences, fed_tokens=1, result=result)

    def _map_up_to(self, sequence: Sequence, num_tokens: int) -> None:
        if num_tokens <= sequence.mapped_tokens:
            return
        for store, space in zip(self._pools, sequence.spaces, strict=True):
            start_page = len(space.mapped)
            added = store.grow(space, pages_for(num_tokens))
            self._rows.append(sequence.row, start_page, added)
        sequence.mapped_tokens = pages_for(num_tokens) * PAGE_TOKENS

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
                can then only end, because its device state may be ahead of its ledger.

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
        del self._open_batches[pending.serial]
        for handle, count, token in zip(pending.handles, accepted, tokens, strict=True):
            sequence = self._active[handle.lane]
            sequence.open_batch = None
            if count == 0:
                sequence.phase = SequencePhase.ENDING
                continue
            sequence.ledger_tokens[sequence.num_ledger_tokens] = token
            sequence.num_ledger_tokens += 1
            sequence.num_output_tokens += 1
            sequence.frontier_tokens += pending.fed_tokens
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
            sequence.phase = SequencePhase.ENDING

    # -- the end ---------------------------------------------------------------------------------------------

    def terminate(self, handle: SequenceHandle) -> None:
        """Ends an active sequence; it keeps handle, lane and full reservation until `discard` (A-5, ACT-09).

        Raises:
            StaleHandleError, ContractError: if it has an open batch or was terminated before; nothing
            changed.
        """
        sequence = self._get(handle)
        self._require_settled(sequence)
        if sequence.phase is SequencePhase.TERMINAL_PENDING:
            raise ContractError(f"lane {handle.lane} was terminated before")
        sequence.phase = SequencePhase.TERMINAL_PENDING

    def discard(self, handle: SequenceHandle) -> None:
        """Releases everything a terminated sequence holds; its handle is stale from here on.

        Raises:
            StaleHandleError, ContractError: if it was not terminated first; nothing changed.
        """
        sequence = self._get(handle)
        self._require(sequence, SequencePhase.TERMINAL_PENDING)
        self._release(sequence)
        self._revision += 1

    def _release(self, sequence: Sequence) -> None:
        for store, space in zip(self._pools, sequence.spaces, strict=True):
            store.close(space)
        self._state_slots.give_back(sequence.state.write_slot)
        self._rows.give_back(sequence.row)
        self._lanes.give_back(sequence.handle.lane)
        del self._active[sequence.handle.lane]

    def reset(self) -> None:
        """Clears all device work and contents after a fault; every handle and batch becomes stale (Q-7)."""
        self._require_open()
        self._make_stores()
        self._revision += 1
        self._executor.reset()

    def close(self) -> None:
        """Frees device memory; a second call does nothing. Every later call but this one is refused."""
        if self._closed:
            return
        self._closed = True
        self._make_stores()
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
        for pool in (self._lanes, self._rows.pool, self._state_slots):
            pool.check()
        for store in self._pools:
            store.check()
        sequences = list(self._active.values())
        self._agree("lanes", self._lanes.num_taken, len(sequences))
        self._agree("rows", self._rows.pool.num_taken, len({sequence.row for sequence in sequences}))
        slots = {sequence.state.write_slot for sequence in sequences}
        self._agree("state slots", self._state_slots.num_taken, len(slots))
        for index, store in enumerate(self._pools):
            spaces = [sequence.spaces[index] for sequence in sequences]
            self._agree(
                "mapped pages", store.num_mapped, len({page for space in spaces for page in space.mapped})
            )
            self._agree("reserved pages", store.num_reserved, sum(space.reserved_pages for space in spaces))
        for sequence in sequences:
            mapped = sequence.spaces[0].mapped
            row = self._rows.tables[sequence.row]
            self._agree("row entries", int((row >= 0).sum()), len(mapped))
            if row[: len(mapped)].tolist() != mapped:
                raise InvariantError(
                    f"row {sequence.row} maps {row[: len(mapped)].tolist()}, its space {mapped}"
                )
            if pages_for(sequence.frontier_tokens) > len(mapped):
                raise InvariantError(f"frontier {sequence.frontier_tokens} with {len(mapped)} mapped pages")
            if sequence.num_output_tokens:
                numbers = self._rows.numbers[sequence.row]
                last = sequence.ledger_tokens[sequence.num_ledger_tokens - 1]
                self._agree("the row's token", int(numbers[TOKEN]), int(last))
                self._agree("the row's step", int(numbers[STEP]), sequence.num_output_tokens)
                length = int(numbers[PROMPT_TOKENS] + numbers[STEP])
                self._agree("the row's next length", length, sequence.frontier_tokens + 1)
        open_rows = sorted(handle.lane for batch in self._open_batches.values() for handle in batch.handles)
        waiting = sorted(sequence.handle.lane for sequence in sequences if sequence.open_batch is not None)
        if open_rows != waiting:
            raise InvariantError(f"open batches hold lanes {open_rows}, lanes {waiting} say so")

    @staticmethod
    def _agree(what: str, books: int, recount: int) -> None:
        if books != recount:
            raise InvariantError(f"{what}: the books say {books}, a recount says {recount}")
