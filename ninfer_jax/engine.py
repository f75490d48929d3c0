"""The engine: one resident model, one worker, and the public calls around them.

The composition root (design 1): it joins frontend, program and worker, and owns the thread, the clock and
the way in and out. It orders no request, holds no page and matches no stop string.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack, overload

from ninfer_jax.checks import checked_seconds
from ninfer_jax.context_cache.request_facts import RequestFacts, make_request_facts
from ninfer_jax.engine_sessions import EngineSessions, SessionFacts, list_saved_sessions
from ninfer_jax.errors import EngineClosedError, OptionError, PromptError, RequestError, RequestErrorKind
from ninfer_jax.frontend.frontend import Frontend
from ninfer_jax.handle import RequestHandle, Response
from ninfer_jax.inbox import Ask, Close, Inbox, Submit
from ninfer_jax.job import NS_PER_S, Job
from ninfer_jax.options import EngineOptions, ResolvedOptions
from ninfer_jax.outstanding import OutstandingGate, OutstandingSlot
from ninfer_jax.parts import EngineParts, ModelFacts, make_manager
from ninfer_jax.plan_trace import PlanTrace
from ninfer_jax.planner.outcome import PlanOutcome
from ninfer_jax.prepare import PreparedRequest, PromptOptions, prepare_request
from ninfer_jax.progress import progress_bar
from ninfer_jax.prompts import Messages, Prompt, is_messages, one_or_many
from ninfer_jax.request import HintArguments, Request, RequestId, checked_session
from ninfer_jax.request_log import RequestLog
from ninfer_jax.results import Event, GenerationResult
from ninfer_jax.sampling_params import SamplingParams
from ninfer_jax.session_store import RestoreReport
from ninfer_jax.worker import Worker

__all__ = ["Engine", "plan_memory"]

logger = logging.getLogger("ninfer_jax")


class Engine:
    """Serves one model to any number of threads; at most C requests run at once (P-1).

    Use ``from_pretrained``, and ``with`` or ``close`` to give the device memory back.

    Args:
        parts: what ``assemble`` put together; the engine takes the program over.
        threaded: False starts no worker thread; then ``step``, ``result`` and ``generate`` drive the engine
            in the caller's thread, and only one thread may use it.
        clock: monotonic nanoseconds.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        threaded: bool = True,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if isinstance(parts, str | Path):
            raise OptionError(
                f"Engine: got the path {str(parts)!r}; use Engine.from_pretrained({str(parts)!r})"
            )
        self._parts = parts
        self._clock = clock
        self._inbox: Inbox = queue.SimpleQueue()
        self._gate = OutstandingGate(parts.options.max_outstanding_requests)
        self._numbers = itertools.count(1)
        self._door = threading.Lock()  # orders submissions before the Close message
        self._is_closing = False
        self._worker = Worker(
            parts.program,
            make_manager(parts),
            num_lanes=parts.options.max_concurrency,
            max_long_anchors=parts.options.cache.max_long_anchors_per_continuation,
            max_outstanding=parts.options.max_outstanding_requests,
            inbox=self._inbox,
            clock=clock,
            log=None if parts.options.request_log is None else RequestLog(parts.options.request_log),
            trace=None if parts.options.trace_plans is None else PlanTrace(parts.options.trace_plans),
        )
        self._sessions = EngineSessions(
            parts,
            self._worker,
            _asker_of(weakref.ref(self)),
            self._numbers.__next__,
        )
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._worker.run, name="ninfer-jax worker", daemon=True)
            self._thread.start()
        self._finalizer = weakref.finalize(self, _shut_down, self._inbox, self._worker, self._thread)
        logger.info("engine ready\n%s", self.describe())
        if parts.options.session_dir is not None and Path(parts.options.session_dir).is_dir():
            self._sessions.restore_all(Path(parts.options.session_dir))

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        options: EngineOptions | None = None,
        threaded: bool = True,
        clock: Callable[[], int] = time.monotonic_ns,
        **changes: Any,
    ) -> Engine:
        """Returns a running engine for a checkpoint.

        Args:
            path: a Hugging Face directory, or ``"demo"`` for the embedded model.
            options: base options; default ``EngineOptions()``.
            threaded: see the class.
            clock: monotonic nanoseconds.
            changes: fields of ``EngineOptions`` or ``ContextCacheOptions`` by name.
        Raises:
            OptionError: if an option is out of range, contradicts another, or cannot fit the device.
            ValueError: if the checkpoint is of an unsupported architecture or incomplete.
        """
        # Imported here, so that a mistake on a command line is answered before JAX and the model are loaded.
        from ninfer_jax.assembly import assemble

        return cls(assemble(path, options, changes), threaded=threaded, clock=clock)

    # -- asking ----------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        anchor_prompt_end: bool = False,
        timeout_s: float | None = None,
        **hints: Unpack[HintArguments],
    ) -> RequestHandle:
        """Returns the handle of a new request; the answer grows in the background.

        Args:
            prompt: text, token ids, or messages.
            sampling: None takes the checkpoint's own defaults.
            tools, enable_thinking, template_kwargs: variables of the chat template, for messages.
            anchor_prompt_end: propose an anchor before the last token of a prompt of token ids (N-7).
            timeout_s: seconds for the whole request. Waiting when they pass, it fails with QUEUE_TIMEOUT;
                running, it ends with what it has and finish reason ``timeout``.
            hints: ``session``, ``retention``, ``cache``, ``markers``,
                ``allow_engine_automatic_shared_prefixes``, ``allow_engine_prefix_grid``,
                ``automatic_private_anchors``, ``update_session_index``.
        Raises:
            PromptError, OptionError: if the prompt or a parameter is wrong; nothing was queued.
            RequestError: OVERLOADED if too many requests are unfinished or unread, CONTEXT_LENGTH_EXCEEDED
                if the prompt is too long.
            EngineClosedError: if the engine is closed or has failed.
        """
        how = PromptOptions(tools, enable_thinking, template_kwargs, anchor_prompt_end)
        return self._submit(
            self._require_slot(), prompt, sampling, how, timeout_s=timeout_s, hints=hints, wants_events=True
        )

    def chat(
        self,
        messages: Messages,
        *,
        sampling: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        **hints: Unpack[HintArguments],
    ) -> GenerationResult:
        """Returns the answer to a conversation; arguments as for ``submit``.

        Raises:
            PromptError, OptionError, RequestError, EngineClosedError: as ``submit`` and
                ``RequestHandle.result``.
        """
        if not is_messages(messages):
            raise PromptError(f"chat: got {type(messages).__name__}, expected messages with role and content")
        how = PromptOptions(tools, enable_thinking, template_kwargs)
        handle = self._submit(
            self._require_slot(),
            messages,
            sampling,
            how,
            timeout_s=timeout_s,
            hints=hints,
            wants_events=False,
        )
        return handle.result()

    def stream(
        self, prompt: Prompt, *, sampling: SamplingParams | None = None, **arguments: Any
    ) -> Iterator[Event]:
        """Returns the events of a new request: one start, deltas, one end. Dropping the iterator cancels it.

        The request is submitted by this call, not by the first event; ``arguments`` as for ``submit``.
        """
        return _events_of(self.submit(prompt, sampling=sampling, **arguments))

    # A string is a sequence of strings too; the first overload that fits decides, as it does at run time.
    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self,
        prompts: Prompt,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        **hints: Unpack[HintArguments],
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        **hints: Unpack[HintArguments],
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        **hints: Unpack[HintArguments],
    ) -> GenerationResult | list[GenerationResult]:
        """Returns one result for one prompt, a list in the order of the prompts for several.

        Any number of prompts is taken: they are fed to the queue as places come free.

        Args:
            prompts: text or token ids (or messages), one or many.
            sampling: one for all, or one for each prompt.
            show_progress: None shows a bar where stderr is a terminal.
            tools, enable_thinking, template_kwargs: variables of the chat template, for messages.
            timeout_s: seconds for each request, from when it is fed to the queue; see ``submit``.
            hints: as for ``submit``.
        Raises:
            PromptError, OptionError, RequestError: of the first prompt that is refused or fails; the others
                are cancelled. OVERLOADED too, where without a worker thread unread answers hold every place.
            EngineClosedError: if the engine is closed or has failed.
        """
        items, is_single = one_or_many(prompts)
        params = _one_for_each(sampling, len(items))
        how = PromptOptions(tools, enable_thinking, template_kwargs)
        results: dict[int, GenerationResult] = {}
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        handles: dict[int, RequestHandle] = {}
        try:
            with progress_bar(len(items), show_progress) as advance:

                def collect() -> None:
                    while self._thread is None and ended.empty():
                        self._worker.step()
                    index = ended.get()
                    results[index] = result = handles.pop(index).result()
                    advance(result.usage.completion_tokens)

                for index, item in enumerate(items):
                    while (slot := self._take_slot()) is None:
                        if handles:
                            collect()
                        elif self._thread is None:
                            raise self._overloaded()  # this thread holds every place, so none comes back
                        else:
                            self._gate.wait_for_room(1.0)  # others hold every place
                    handles[index] = self._submit(
                        slot,
                        item,
                        params[index],
                        how,
                        timeout_s=timeout_s,
                        hints=hints,
                        wants_events=False,
                        on_end=lambda number=index: ended.put(number),
                    )
                while handles:
                    collect()
        finally:
            for handle in handles.values():
                handle.close()
        return results[0] if is_single else [results[index] for index in range(len(items))]

    # -- looking ---------------------------------------------------------------------------------------------

    @property
    def options(self) -> ResolvedOptions:
        """The options with every default filled in."""
        return self._parts.options

    @property
    def frontend(self) -> Frontend:
        """The checkpoint's tokenizer, template and output rules."""
        return self._parts.frontend

    @property
    def model(self) -> ModelFacts:
        """What is resident."""
        return self._parts.model

    def describe(self) -> str:
        """Returns the model, the resolved options and the memory table as text."""
        return self._parts.describe()

    def stats(self) -> dict[str, Any]:
        """Returns totals, gauges and occupancy per axis as plain data, as of one stable boundary."""
        report = self._ask(self._worker.stats)
        return {**report, "outstanding": self._gate.held, "outstanding_limit": self._gate.limit}

    def plan(
        self,
        prompt: Prompt,
        *,
        sampling: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        anchor_prompt_end: bool = False,
        **hints: Unpack[HintArguments],
    ) -> PlanOutcome:
        """Returns the plan that this request would get now, without starting it; nothing changes.

        Arguments as for ``submit``. ``explain()`` tells it to a person, ``to_json()`` saves it for
        ``ninfer-jax plan``.

        Raises:
            PromptError, OptionError, RequestError, EngineClosedError: as ``submit``.
        """
        self._require_open()
        how = PromptOptions(tools, enable_thinking, template_kwargs, anchor_prompt_end)
        made = self._prepare(prompt, sampling, how, hints, default_seed=0)
        request = self._request(RequestId(0), made, timeout_s=None)
        facts = _facts(request, made)
        return self._ask(lambda: self._worker.dry_run(facts))

    # -- sessions on disk ------------------------------------------------------------------------------------

    def save_session(self, session: str, path: str | Path) -> Path:
        """Saves the context that a session is bound to, with every checkpoint; changes nothing here (C-11).

        Args:
            session: the key that its requests were given.
            path: a folder for this one session; an earlier save in it is replaced only once the new one is
                complete, whatever happens meanwhile.
        Returns:
            The folder of the new version inside.
        Raises:
            SessionError: NOT_FOUND, BUSY, or UNSUITABLE_PATH.
            OptionError, EngineClosedError: as ``submit``.
        """
        self._require_open()
        return self._sessions.save(checked_session(session), path)

    def restore_session(self, path: str | Path, session: str | None = None) -> RestoreReport:
        """Restores a saved context; requests that begin with its tokens find it, others never.

        Args:
            path: what ``save_session`` was given.
            session: also bind it to this key.
        Returns:
            Which checkpoints are there again, and why the others are not.
        Raises:
            SessionError: saying what is wrong with the file, or that it does not fit; nothing was changed.
            OptionError, EngineClosedError: as ``submit``; also if the cache is off.
        """
        self._require_open()
        if not self._parts.options.cache.enabled:
            raise OptionError("restore_session: this engine's cache is off, so it keeps no context (F-4)")
        return self._sessions.restore(path, None if session is None else checked_session(session))

    def list_sessions(self, directory: str | Path) -> list[SessionFacts]:
        """Returns what a directory of saved sessions holds.

        Raises:
            SessionError: NOT_FOUND if there is no such directory.
        """
        return list_saved_sessions(directory)

    # -- what is kept ----------------------------------------------------------------------------------------

    def clear_cache(self) -> int:
        """Releases every inactive context that no running request reads, and says how many.

        What running requests publish when they end is kept as ever. A request that is just being moved to the
        device is waited for.
        """
        self._require_open()
        return self._ask(self._worker.clear_cache)

    # -- driving and ending ----------------------------------------------------------------------------------

    def step(self) -> bool:
        """Does one boundary and says whether it did anything; only for engines without a worker thread."""
        if self._thread is not None:
            raise OptionError("step() is for engines made with threaded=False; this one has a worker thread")
        return self._worker.step()

    def close(self) -> None:
        """Ends every request with UNAVAILABLE and frees the device memory; a second call does nothing.

        With ``session_dir`` the contexts that sessions are bound to are saved first.
        """
        directory = self._parts.options.session_dir
        try:
            if directory is not None and not self._is_closing and self._worker.failure is None:
                self._sessions.save_all(Path(directory))
        finally:
            with self._door:
                self._is_closing = True
            self._finalizer()
            self._gate.wake()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _take_slot(self) -> OutstandingSlot | None:
        self._require_open()
        slot = self._gate.try_acquire()
        if slot is None and self._thread is None:
            self._worker.read_mail()  # dropped handles may have sent their places back
            slot = self._gate.try_acquire()
        return slot

    def _require_slot(self) -> OutstandingSlot:
        slot = self._take_slot()
        if slot is None:
            raise self._overloaded()
        return slot

    def _overloaded(self) -> RequestError:
        return RequestError(
            RequestErrorKind.OVERLOADED,
            f"{self._gate.held} requests are unfinished or unread, the limit is {self._gate.limit} "
            "(max_concurrency + max_pending_requests); read or drop answers, or try again later",
        )

    def _submit(
        self,
        slot: OutstandingSlot,
        prompt: Prompt,
        sampling: SamplingParams | None,
        how: PromptOptions,
        *,
        timeout_s: float | None,
        hints: HintArguments,
        wants_events: bool,
        on_end: Callable[[], None] | None = None,
    ) -> RequestHandle:
        try:
            number = RequestId(next(self._numbers))
            seed = (self._parts.options.seed + number) % 2**32
            made = self._prepare(prompt, sampling, how, hints, default_seed=seed)
            request = self._request(number, made, timeout_s=timeout_s)
            response = Response(number, slot, wants_events=wants_events, on_end=on_end)
            job = Job(
                request=request,
                work=made.work,
                facts=_facts(request, made),
                output=made.output,
                response=response,
                wants_logprobs=made.wants_logprobs,
            )
            handle = RequestHandle(
                response,
                self._inbox,
                pump=None if self._thread is not None else self._worker.step,
                keep_alive=self,
            )
            with self._door:
                self._require_open()
                self._inbox.put(Submit(job))
        except BaseException:
            slot.response_done()
            slot.consumer_released()
            raise
        return handle

    def _prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        how: PromptOptions,
        hints: HintArguments,
        *,
        default_seed: int,
    ) -> PreparedRequest:
        return prepare_request(
            self._parts.frontend,
            self._parts.options,
            prompt,
            sampling=sampling,
            prompt_options=how,
            hints=hints,
            default_seed=default_seed,
        )

    def _request(self, number: RequestId, made: PreparedRequest, *, timeout_s: float | None) -> Request:
        now_ns = self._clock()
        return Request(
            request_id=number,
            publication_order=number,
            identity=made.prepared.identity,
            hints=made.hints,
            submitted_ns=now_ns,
            pending_deadline_ns=now_ns + round(self._parts.options.pending_timeout_s * NS_PER_S),
            deadline_ns=_deadline(now_ns, timeout_s),
        )

    def _require_open(self) -> None:
        if self._is_closing:
            raise EngineClosedError("the engine is closed")
        failure = self._worker.failure
        if failure is not None:
            raise EngineClosedError(f"the engine failed and takes no requests: {failure!r}") from failure

    def _ask(self, question: Callable[[], Any]) -> Any:
        """Returns the worker's answer at its next stable boundary."""
        answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        with self._door:
            is_running = self._thread is not None and not self._is_closing
            if is_running:
                self._inbox.put(Ask(question, answers))
        if not is_running:
            if self._thread is not None and self._thread is not threading.current_thread():
                self._thread.join()  # it may still be stepping towards its end
            return question()
        is_answer, value = answers.get()
        if not is_answer:
            raise value
        return value


def _asker_of(engine: weakref.ref[Engine]) -> Callable[[Callable[[], Any]], Any]:
    """Returns `Engine._ask` without holding the engine: dropping it must free the device at once."""

    def ask(question: Callable[[], Any]) -> Any:
        found = engine()
        assert found is not None, "only the engine's own methods ask"
        return found._ask(question)

    return ask


def _facts(request: Request, made: PreparedRequest) -> RequestFacts:
    closure = made.prepared.turn_closure_frontier
    return make_request_facts(request, made.prepared, made.work, turn_closure_frontier=closure)


def plan_memory(path: str | Path, *, options: EngineOptions | None = None, **changes: Any) -> dict[str, Any]:
    """Returns what an engine with these options would allocate, without reading weights.

    Returns:
        Plain data: ``MemoryTable.as_dict``, nothing allocated yet.
    Raises:
        OptionError, ValueError: as ``Engine.from_pretrained``.
    """
    from ninfer_jax.assembly import draw_up

    return draw_up(path, options, changes).sizing.memory.as_dict()


def _shut_down(inbox: Inbox, worker: Worker, thread: threading.Thread | None) -> None:
    """Closes the worker and waits for it; also the engine's finaliser, so it must not hold the engine."""
    inbox.put(Close())
    if thread is None:
        while not worker.is_closed:
            worker.step()
    elif thread is not threading.current_thread():
        thread.join()


def _events_of(handle: RequestHandle) -> Iterator[Event]:
    try:
        yield from handle
    finally:
        handle.close()


def _one_for_each(
    sampling: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams | None]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling] * count
    if not isinstance(sampling, Sequence) or isinstance(sampling, str):
        raise OptionError(
            f"sampling: got {type(sampling).__name__}, expected SamplingParams, or a list with one per prompt"
        )
    if len(sampling) != count:
        raise OptionError(f"sampling: got {len(sampling)} for {count} prompts, expected one for each, or one")
    return list(sampling)


def _deadline(now_ns: int, timeout_s: float | None) -> int | None:
    if timeout_s is None:
        return None
    return now_ns + round(checked_seconds("timeout_s", timeout_s) * NS_PER_S)
