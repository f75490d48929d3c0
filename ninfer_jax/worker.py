"""The one worker: drives requests from the queue to their end, one stable boundary after another.

The only code that changes requests, scheduler and program (Q-2); other threads send messages. Owns the order
of a commit (Q-5), the effect of cancellation and deadlines (Q-6) and recovery from faults (Q-7). Owns neither
thread nor clock: ``step`` is driven from outside, and the time is asked of a function it was given.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ninfer_jax.context_cache.catalog import entries
from ninfer_jax.context_cache.explain import outcome_of
from ninfer_jax.context_cache.records import protected
from ninfer_jax.counters import Counters
from ninfer_jax.errors import (
    ContractError,
    InvariantError,
    NinferError,
    RequestError,
    RequestErrorKind,
    SessionError,
    SessionErrorKind,
    StaleHandleError,
)
from ninfer_jax.handle import CommittedToken
from ninfer_jax.inbox import Abandon, Ask, Cancel, Close, Inbox, Message, Submit
from ninfer_jax.job import Job
from ninfer_jax.model.sampling import NO_CANDIDATE, NOT_FINITE
from ninfer_jax.request import AdmissionStatus, RequestId, RequestState, SequenceHandle
from ninfer_jax.results import FinishReason, GenerationStart, TextDelta, TokenLogprobs
from ninfer_jax.scheduler import Action, AdmissionVerdict, Admit, Decode, Prefill, Scheduler, judge
from ninfer_jax.session_store import RestoreReport
from ninfer_jax.transitions import Landed, TransitionPort, Transitions

if TYPE_CHECKING:
    from ninfer_jax.context_cache.request_facts import RequestFacts
    from ninfer_jax.context_cache.resource_manager import ResourceManager
    from ninfer_jax.frontend.output import Preview
    from ninfer_jax.plan_trace import PlanTrace
    from ninfer_jax.planner.outcome import PlanOutcome
    from ninfer_jax.program.executor import Logprobs
    from ninfer_jax.program.pending import PendingBatch
    from ninfer_jax.program.session_snapshot import ContextContents, Dropped
    from ninfer_jax.request_log import RequestLog
    from ninfer_jax.reuse import OwnerKey, TransitionResult

logger = logging.getLogger("ninfer_jax")

# Optional planning time of one boundary: alone, and while others could run meanwhile (design 6).
ALONE_ALLOWANCE_NS, SHARED_ALLOWANCE_NS = 50_000_000, 10_000_000
NO_TOKEN = {
    NO_CANDIDATE: "every id is banned, so there is nothing to draw; allow at least one",
    NOT_FINITE: "the model's logits are not finite, so there is nothing to draw; check the weights",
}
MAX_FAULTS_IN_A_ROW = 3  # the third one latches the failure


class ProgramPort(TransitionPort, Protocol):
    """What the worker needs from the program; it sees handles and answers, never a page or a slot."""

    def prefill(self, handle: SequenceHandle) -> PendingBatch | None:
        """Runs one chunk; the last one yields the first drawn token."""
        ...

    def decode(self, handles: Sequence[SequenceHandle]) -> PendingBatch:
        """Draws one token for each of exactly these rows."""
        ...

    def commit(self, pending: PendingBatch, accepted: Sequence[int]) -> None:
        """Consumes the batch: accepted tokens become part of their sequences."""
        ...

    def terminate(self, handle: SequenceHandle) -> None:
        """Ends the sequence, which keeps its whole reservation."""
        ...

    def read_context(self, owner: OwnerKey) -> Callable[[], ContextContents]:
        """Starts to read an inactive context, whole."""
        ...

    def adopt_context(
        self, contents: ContextContents, *, max_long_anchors: int
    ) -> tuple[TransitionResult, tuple[Dropped, ...]] | str:
        """Restores a context, or says why it does not fit."""
        ...

    def occupancy(self) -> Mapping[str, int]:
        """Returns used units per axis."""
        ...

    def reset(self) -> None:
        """Clears all device work and contents."""
        ...

    def close(self) -> None:
        """Frees device memory."""
        ...


class Worker:
    """Holds the jobs, the scheduler and the program of one engine.

    Args:
        program: the physical authority.
        manager: the logical authority over what is kept.
        num_lanes: C.
        max_long_anchors: that one continuation may hold.
        max_outstanding: bound of unfinished requests; the gate in front of the inbox enforces it.
        inbox: messages from other threads.
        clock: monotonic nanoseconds.
        log: told of every request that ends.
        trace: told of every admission.
    """

    def __init__(
        self,
        program: ProgramPort,
        manager: ResourceManager,
        *,
        num_lanes: int,
        max_long_anchors: int,
        max_outstanding: int,
        inbox: Inbox,
        clock: Callable[[], int],
        log: RequestLog | None = None,
        trace: PlanTrace | None = None,
    ) -> None:
        self._program = program
        self._manager = manager
        self._transitions = Transitions(program, manager, clock)
        self._inbox = inbox
        self._clock = clock
        self._log = log
        self._trace = trace
        self._scheduler = Scheduler(num_lanes, max_outstanding)
        self._num_lanes = num_lanes
        self._max_long_anchors = max_long_anchors
        self._jobs: dict[RequestId, Job] = {}
        self._counters = Counters()
        self._mail: deque[Message] = deque()
        self._running_deadlines: dict[RequestId, int] = {}
        self._trying: Job | None = None  # the request that is being planned and started
        self._stale: RequestId | None = None  # whose last plan was refused as stale
        self._settling: deque[Job] = deque()  # have ended, but a transition is open (TX-09)
        self._boundary_ns = 0  # when this boundary began: planning shares one allowance (G-10)
        self._faults_in_a_row = 0
        self._failure: BaseException | None = None
        self._closed = False

    # -- facts for other threads: single reads of values that only ever move one way -------------------------

    @property
    def failure(self) -> BaseException | None:
        """What latched the engine, or None."""
        return self._failure

    @property
    def is_closed(self) -> bool:
        """Whether ``Close`` was carried out."""
        return self._closed

    # -- driving ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Steps until closed, sleeping while there is nothing to do; the body of the worker thread."""
        while not self._closed:
            try:
                if not self.step():
                    self._sleep()
            except BaseException as fault:  # nobody else can end the requests that wait for this thread
                logger.exception("the worker cannot go on")
                self._latch(fault)

    def step(self) -> bool:
        """Does one boundary: mail, deadlines, admissions, then one unit of model work.

        Returns:
            Whether anything was done.
        """
        try:
            did_something = self.read_mail()
            if self._closed or self._failure is not None:
                return did_something
            self._boundary_ns = now_ns = self._clock()
            did_something |= self._end_overdue(now_ns)
            did_something |= self._carry_transition(now_ns)
            action = self._next_action()
            while isinstance(action, Admit):
                self._try(action, now_ns)
                did_something = True
                action = self._next_action()
            if isinstance(action, Decode):
                self._decode(action)
            elif isinstance(action, Prefill):
                self._prefill(action)
            elif self._transitions.is_open:
                self._transitions.wait()  # nothing else can run before the copies have arrived
            else:
                return did_something
            return True
        except Exception as fault:
            self._recover(fault)
            return True
        except BaseException as interruption:
            self._recover(interruption)  # Ctrl-C in the thread that drives: clean up, then let it through
            raise

    def _next_action(self) -> Action:
        return self._scheduler.next_action(
            self._program.resource_revision, may_admit=not self._transitions.is_open
        )

    def _sleep(self) -> None:
        """Waits for mail; whatever waits or runs would have given ``step`` something to do."""
        self._mail.append(self._inbox.get())

    # -- mail ------------------------------------------------------------------------------------------------

    def read_mail(self) -> bool:
        """Handles every message that has arrived; whether there was one."""
        if self._inbox.empty() and not self._mail:
            return False
        while not self._inbox.empty():
            self._mail.append(self._inbox.get_nowait())  # this thread is the only reader
        while self._mail:
            self._open(self._mail.popleft())
        return True

    def _open(self, message: Message) -> None:
        if isinstance(message, Submit):
            self._accept(message.job)
        elif isinstance(message, Cancel):
            self._cancel(message.response.request_id)
        elif isinstance(message, Abandon):
            message.response.slot.consumer_released()
            self._cancel(message.response.request_id)
        elif isinstance(message, Ask):
            try:
                message.answers.put((True, message.question()))
            except Exception as mistake:
                message.answers.put((False, mistake))
                if isinstance(mistake, InvariantError) or not isinstance(mistake, NinferError):
                    raise  # not only the asker's: something of the engine broke
        elif isinstance(message, Close):
            self._close()

    def _accept(self, job: Job) -> None:
        self._counters.submitted += 1
        if self._closed or self._failure is not None:
            self._fail(job, RequestErrorKind.UNAVAILABLE, "the engine no longer accepts requests")
            return
        self._jobs[job.request_id] = job
        request = job.request
        deadline_ns = request.pending_deadline_ns
        if request.deadline_ns is not None:
            deadline_ns = min(deadline_ns, request.deadline_ns)
        if not self._scheduler.enqueue(job.request_id, deadline_ns):
            self._fail(job, RequestErrorKind.OVERLOADED, "the queue is full")

    def _cancel(self, request_id: RequestId) -> None:
        job = self._jobs.get(request_id)
        if job is not None:  # else it has ended meanwhile
            self._end(job, "cancelled")

    # -- deadlines -------------------------------------------------------------------------------------------

    def _end_overdue(self, now_ns: int) -> bool:
        expired = self._scheduler.expired(now_ns)
        for request_id in expired:
            job = self._jobs[request_id]
            waited_s = (now_ns - job.request.submitted_ns) / 1e9
            self._scheduler.drop_waiting(request_id)
            self._fail(job, RequestErrorKind.QUEUE_TIMEOUT, f"waited {waited_s:.1f} s without being admitted")
        overdue = [
            request_id for request_id, deadline_ns in self._running_deadlines.items() if deadline_ns <= now_ns
        ]
        for request_id in overdue:
            self._end(self._jobs[request_id], "timeout")
        return bool(expired or overdue)

    # -- admission -------------------------------------------------------------------------------------------

    def _try(self, action: Admit, now_ns: int) -> None:
        job = self._trying = self._jobs[action.request_id]
        started_ns = self._clock()
        admission = self._transitions.plan(
            job,
            allowance_ns=max(0, self._allowance_ns() - (started_ns - self._boundary_ns)),
            runnable_requests=self._scheduler.runnable,
        )
        planning_ns = self._clock() - started_ns
        self._counters.plans += 1
        self._counters.planning_ns += planning_ns
        status = AdmissionStatus[admission.readiness.name]
        verdict = judge(status, self._scheduler.num_active)
        if verdict is AdmissionVerdict.START and action.head is not None:
            head, donors = self._jobs[action.head], self._scheduler.donors(action.head)
            if not self._transitions.proves_backfill(admission, head=head, donors=donors):
                verdict = AdmissionVerdict.KEEP_WAITING
        if verdict is AdmissionVerdict.START:
            if self._transitions.begin(job, admission, planning_ns):
                job.move_to(RequestState.MATERIALIZING)
                self._scheduler.begin(job.request_id)
                if self._trace is not None:
                    self._trace.write(job.request_id, self._transitions.open_plan_id, admission)
                self._counters.backfills += action.head is not None
                if job.request.deadline_ns is not None:
                    self._running_deadlines[job.request_id] = job.request.deadline_ns
                self._carry_transition(now_ns)
            elif self._stale == job.request_id:
                raise InvariantError(f"request {job.request_id}: two fresh plans in a row were called stale")
            else:
                self._stale = job.request_id  # it is planned once more (TX-01)
                return
        elif verdict is AdmissionVerdict.KEEP_WAITING:
            self._counters.blocked_assessments += 1
            self._scheduler.block(job.request_id, self._program.resource_revision)
        else:
            self._reject(job, verdict)
        self._trying = self._stale = None

    def _allowance_ns(self) -> int:
        return ALONE_ALLOWANCE_NS if not self._scheduler.runnable else SHARED_ALLOWANCE_NS

    def _reject(self, job: Job, verdict: AdmissionVerdict) -> None:
        self._scheduler.drop_waiting(job.request_id)
        if verdict is AdmissionVerdict.REJECT_TOO_LARGE:
            self._fail(
                job,
                RequestErrorKind.CONTEXT_LENGTH_EXCEEDED,
                f"{job.request.prompt_tokens} prompt and {job.work.max_output_tokens} output tokens "
                "do not fit this engine even alone",
            )
        else:
            self._fail(
                job, RequestErrorKind.OVERLOADED, "nothing is active, yet there is no room for the request"
            )

    def _carry_transition(self, now_ns: int) -> bool:
        """Carries an open materialisation on; whether it has become stable."""
        if not self._transitions.is_open:
            return False
        landed = self._transitions.carry_on()
        if landed is None:
            return False
        job = landed.job
        if landed.active is None:
            self._scheduler.leave(job.request_id)
            self._running_deadlines.pop(job.request_id, None)
            if job.ending is not None:
                self._close_answer(job, job.ending, None, now_ns)
            else:
                self._fail(job, RequestErrorKind.FAULT, f"it could not start: {landed.aborted_because}")
        else:
            self._activate(job, landed, now_ns)
        while self._settling:
            self._settle_lane(self._settling.popleft())
        return True

    def _activate(self, job: Job, landed: Landed, now_ns: int) -> None:
        record = job.record = landed.record
        job.sequence = landed.active
        self._scheduler.activate(job.request_id)
        job.move_to(RequestState.PREFILL)
        job.admitted_ns = now_ns
        counters = self._counters
        counters.admissions += 1
        counters.sources[record.source] += 1
        counters.stop_reasons[record.stop_reason] += 1
        if record.miss_reason is not None:
            counters.misses[record.miss_reason] += 1
        counters.prompt_tokens += job.request.prompt_tokens
        counters.reused_tokens += record.reused_tokens
        counters.restored_bytes += record.restored_bytes
        counters.offloaded_bytes += record.offloaded_bytes
        if job.response.wants_events:
            start = GenerationStart(
                request_id=job.request_id,
                prompt_tokens=job.request.prompt_tokens,
                reused_tokens=record.reused_tokens,
                source=record.source,
            )
            job.response.publish((start,))
        if job.ending is not None:
            self._end(job, job.ending)

    # -- model work ------------------------------------------------------------------------------------------

    def _prefill(self, action: Prefill) -> None:
        job = self._jobs[action.request_id]
        started_ns = self._clock()
        pending = self._program.prefill(_active(job))
        self._scheduler.prefilled_chunk(action.request_id, is_complete=pending is not None)
        if pending is not None:
            job.move_to(RequestState.DECODE_READY)
            self._settle(pending, (job,))
        if job.sequence is not None and job.state is not RequestState.TERMINAL_PENDING:
            others = self._scheduler.runnable - 1
            self._transitions.capture(job, job.sequence, runnable_requests=others)
        self._counters.prefill_chunks += 1
        self._counters.prefill_ns += self._clock() - started_ns

    def _decode(self, action: Decode) -> None:
        jobs = [self._jobs[request_id] for request_id in action.request_ids]
        started_ns = self._clock()
        pending = self._program.decode([_active(job) for job in jobs])
        tokens_ns = self._settle(pending, jobs)
        self._scheduler.decoded()
        counters = self._counters
        counters.decode_rounds[len(jobs)] += 1
        counters.decode_rows += len(jobs)
        counters.decode_step_ns += tokens_ns - started_ns
        counters.decode_settle_ns += self._clock() - tokens_ns

    def _settle(self, pending: PendingBatch, jobs: Sequence[Job]) -> int:
        """Carries one batch through the commit order of Q-5.

        Preview -> program commit -> terminal resources -> budgets -> output commit -> publish: if anything
        before the program's commit fails, no consumer has seen a token of this batch.

        Returns:
            When the tokens had reached the host, in the clock's nanoseconds.
        """
        tokens = pending.tokens().tolist()
        now_ns = self._clock()
        logprobs: Logprobs | None = None
        previews: list[Preview | None] = []
        accepted: list[int] = []
        ended: list[Job] = []
        for job, token in zip(jobs, tokens, strict=True):
            if job.wants_logprobs and logprobs is None:
                logprobs = pending.logprobs()
            is_over = token < 0 or job.response.cancel_requested
            preview = None if is_over else job.output.preview((token,))
            previews.append(preview)
            accepted.append(0 if preview is None else preview.accepted)
            job.is_spoiled |= token == NOT_FINITE
            if preview is None or preview.finish_reason is not None:
                ended.append(job)
        self._program.commit(pending, accepted)
        self._counters.completion_tokens += sum(accepted)
        for job in ended:
            self._release_lane(job)
        for job, token in zip(jobs, tokens, strict=True):
            if token < 0:
                self._fail(job, RequestErrorKind.FAULT, NO_TOKEN[token])
        for row, (job, preview, token) in enumerate(zip(jobs, previews, tokens, strict=True)):
            if preview is None:
                if token >= 0:
                    self._close_answer(job, "cancelled", None, now_ns)
                continue
            if job.first_token_ns is None:
                job.first_token_ns = now_ns
            job.token_ids.append(token)
            drawn = None
            if logprobs is not None and job.wants_logprobs:
                drawn = logprobs_of(logprobs, row, token, job.work.sampling.num_logprobs)
                job.logprobs.append(drawn)
            job.output = preview.next
            job.take_text(preview.deltas)
            job.response.publish(CommittedToken(token, preview.deltas, drawn))
            if preview.finish_reason is not None:
                self._close_answer(job, preview.finish_reason, preview.stop_detail, now_ns)
        return now_ns

    # -- the end of one request ------------------------------------------------------------------------------

    def _end(self, job: Job, reason: FinishReason) -> None:
        """Ends a request at a stable boundary, in whatever state it is (Q-6)."""
        if job.state is RequestState.WAITING:
            self._scheduler.drop_waiting(job.request_id)
        elif job.state is RequestState.MATERIALIZING:
            if job.ending is None:
                job.ending = reason
                self._transitions.cancel()  # honoured at its next stable boundary
            return
        else:
            self._release_lane(job)
        self._close_answer(job, reason, None, self._clock())

    def _release_lane(self, job: Job) -> None:
        """Active -> TerminalPending -> Free, at once unless a transition is open: it goes first (TX-09)."""
        job.move_to(RequestState.TERMINAL_PENDING)
        self._program.terminate(_active(job))
        self._scheduler.retire(job.request_id)
        self._running_deadlines.pop(job.request_id, None)
        if self._transitions.is_open:
            self._settling.append(job)
        else:
            self._settle_lane(job)

    def _settle_lane(self, job: Job) -> None:
        """Publishes what the request leaves behind, and gives everything else back."""
        self._transitions.settle(job, _active(job))
        job.sequence = None
        self._scheduler.leave(job.request_id)

    def _close_answer(
        self, job: Job, reason: FinishReason, stop_detail: str | int | None, now_ns: int
    ) -> None:
        """Publishes the end. An answer that was cut off gives out the text it was still holding back."""
        held = () if reason in ("stop", "length") else job.output.finish()
        job.take_text(held)
        if held and job.response.wants_events:
            job.response.publish(tuple(TextDelta(delta.text, delta.channel, (), None) for delta in held))
        job.move_to(RequestState.FINISHED)
        self._counters.finished[reason] += 1
        if reason in ("stop", "length"):
            self._faults_in_a_row = 0
        del self._jobs[job.request_id]
        if self._log is not None:
            self._log.write(job, reason, now_ns, is_failure=False)
        job.response.finish(job.result(reason, stop_detail, now_ns))

    def _fail(self, job: Job, kind: RequestErrorKind, message: str) -> None:
        job.state = RequestState.FINISHED  # from any state: a fault respects no lifecycle
        self._counters.failed[kind.value] += 1
        self._jobs.pop(job.request_id, None)
        if self._log is not None:
            self._log.write(job, kind.value, self._clock(), is_failure=True)
        job.response.fail(RequestError(kind, f"request {job.request_id}: {message}"))

    # -- faults ----------------------------------------------------------------------------------------------

    def _recover(self, fault: BaseException) -> None:
        """Clears all device work, fails what it touched, keeps the untouched queue (Q-7)."""
        self._counters.faults += 1
        if isinstance(fault, Exception):  # an interrupt is somebody's wish, not a sign of a sick host
            self._faults_in_a_row += 1
        broken_contract = isinstance(fault, (InvariantError, StaleHandleError, ContractError))
        if broken_contract or self._faults_in_a_row >= MAX_FAULTS_IN_A_ROW:
            logger.error("engine-wide failure", exc_info=fault)
            self._latch(fault)
            return
        logger.error("a fault in the worker; active requests fail, waiting ones stay", exc_info=fault)
        for job in self._touched_jobs():
            self._fail_touched(job, fault)
        for job in self._settling:
            self._forget(job)
        self._settling.clear()
        try:
            self._program.reset()
            self._transitions.reset()
            leftover = {axis: used for axis, used in self._program.occupancy().items() if used}
        except Exception as second:
            self._latch(second)
            return
        if leftover:
            self._latch(InvariantError(f"after clearing all device work these are still in use: {leftover}"))

    def _touched_jobs(self) -> list[Job]:
        """Every request that has left the queue or was being admitted; the rest of the queue is untouched."""
        untouched = set(self._scheduler.waiting)
        return [job for job in self._jobs.values() if job.request_id not in untouched or job is self._trying]

    def _fail_touched(self, job: Job, fault: BaseException) -> None:
        self._forget(job)
        self._fail(job, RequestErrorKind.FAULT, f"an internal fault ended it: {fault!r}")

    def _forget(self, job: Job) -> None:
        """Takes a request out of queue and lanes without a word to the program, whose contents go too."""
        if job.request_id in self._scheduler.active:
            self._scheduler.leave(job.request_id)
        elif job.request_id in self._scheduler.waiting:
            self._scheduler.drop_waiting(job.request_id)
        self._trying = None
        self._running_deadlines.pop(job.request_id, None)
        job.sequence = None

    def _latch(self, failure: BaseException) -> None:
        """Ends every request and refuses all later ones; only ``Close`` is left."""
        self._failure = failure
        for job in self._touched_jobs():
            self._fail_touched(job, failure)
        for job in list(self._jobs.values()):
            self._forget(job)
            self._fail(job, RequestErrorKind.UNAVAILABLE, "the engine failed before it was admitted")

    def _close(self) -> None:
        """Ends every request, then frees the device."""
        for job in list(self._jobs.values()):
            self._forget(job)
            self._fail(job, RequestErrorKind.UNAVAILABLE, "the engine was closed")
        self._closed = True
        if self._log is not None:
            self._log.close()
        self._program.close()

    # -- asked from outside, at a boundary -------------------------------------------------------------------

    def dry_run(self, facts: RequestFacts) -> PlanOutcome:
        """Returns the plan that a request would get now; changes nothing."""
        admission = self._manager.plan(
            facts,
            allowance_ns=self._allowance_ns(),
            runnable_requests=self._scheduler.runnable,
            clock=self._clock,
        )
        return outcome_of(admission)

    def bound_sessions(self) -> tuple[str, ...]:
        """Returns the sessions that could be saved."""
        return self._manager.bound_sessions()

    def read_session(self, session: str) -> Callable[[], ContextContents]:
        """Starts to read the context of a session, to be waited for in another thread (C-11).

        Raises:
            SessionError: NOT_FOUND, or BUSY while a request reads it or a transition is open (PER-04).
        """
        owner = self._manager.session_owner(session)
        if owner is None:
            raise SessionError(SessionErrorKind.NOT_FOUND, f"no finished context is bound to {session!r}")
        if self._transitions.is_open or owner in protected(self._manager.state):
            raise SessionError(SessionErrorKind.BUSY, f"{session!r} is in use; save it when that has ended")
        return self._program.read_context(owner)

    def adopt_session(self, contents: ContextContents, session: str | None, order: int) -> RestoreReport:
        """Restores a context as if it had just been published; found by its tokens, or by `session` too.

        Args:
            order: publication order, larger than of every request so far (Y-4).
        Raises:
            SessionError: BUSY or TOO_LARGE; nothing changed.
        """
        if self._transitions.is_open or self._scheduler.num_active >= self._num_lanes:
            raise SessionError(SessionErrorKind.BUSY, "a restore needs an idle lane and no open transition")
        if not self._manager.has_room():
            raise SessionError(
                SessionErrorKind.TOO_LARGE, "every private cell is taken; clear_cache() or raise the limit"
            )
        adopted = self._program.adopt_context(contents, max_long_anchors=self._max_long_anchors)
        if isinstance(adopted, str):
            raise SessionError(SessionErrorKind.TOO_LARGE, adopted)
        result, dropped = adopted
        self._manager.adopt_restore(result, session=session, order=order)
        (row,) = result.owners
        return RestoreReport(
            session,
            max(c.frontier_tokens for c in row.checkpoints),
            tuple((c.ref.kind.name.lower(), c.frontier_tokens) for c in row.checkpoints),
            tuple((d.kind.name.lower(), d.frontier_tokens, d.reason) for d in dropped),
        )

    def clear_cache(self) -> int:
        """Releases every inactive context that nobody reads; how many."""
        while self._transitions.is_open:  # a matter of milliseconds
            self._transitions.wait()
            self._carry_transition(self._clock())
        state = self._manager.state
        held = protected(state)
        owners = [entry.summary.owner_key for _, entry in entries(state.catalog)]
        owners = [owner for owner in owners if owner not in held]
        for owner in owners:
            self._transitions.evict(owner)
        return len(owners)

    # -- reports ---------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Returns totals, gauges and occupancy as plain data; called at a boundary."""
        occupancy = {} if self._closed else dict(self._program.occupancy())
        return {
            **self._counters.as_dict(),
            "waiting": self._scheduler.num_waiting,
            "active": self._scheduler.num_active,
            "occupancy": occupancy,
            "cache": self._manager.summary(),
            "failure": None if self._failure is None else repr(self._failure),
        }


def _active(job: Job) -> SequenceHandle:
    if job.sequence is None:
        raise InvariantError(f"request {job.request_id} holds no lane")
    return job.sequence


def logprobs_of(logprobs: Logprobs, row: int, token: int, num_top: int) -> TokenLogprobs:
    """Returns one row of a step's log-probabilities with its ``num_top`` best alternatives."""
    top = zip(logprobs.top_ids[row, :num_top].tolist(), logprobs.top[row, :num_top].tolist(), strict=True)
    return TokenLogprobs(token_id=token, logprob=float(logprobs.drawn[row]), top=tuple(top))
