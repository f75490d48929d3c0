"""Checks that users of the engine can run on their own models: cold equals warm (C-9).

Owns the recording of what a warm engine did and the cold rerun of it: from root, on zeroed buffers, in the
recorded steps. It decides nothing while the engine runs; it only looks on.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from ninfer_jax.errors import ContractError
from ninfer_jax.program.capacity import PAGE_TOKENS, pages_for
from ninfer_jax.program.executor import ZERO_STATE, Executor, PrefillInputs, StepResult
from ninfer_jax.program.history import history_up_to
from ninfer_jax.program.lane_sampling import NO_LOGPROBS, LaneSampling
from ninfer_jax.program.row_layout import PROMPT_TOKENS, ROPE_DELTA, STEP, TOKEN
from ninfer_jax.program.rows import ExecutionRows
from ninfer_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ninfer_jax.engine import Engine
    from ninfer_jax.program.mover import ModelMover
    from ninfer_jax.program.pending import PendingBatch
    from ninfer_jax.program.program import Program
    from ninfer_jax.program.sequence import SequenceFacts
    from ninfer_jax.request import SequenceHandle
    from ninfer_jax.results import GenerationResult

__all__ = [
    "ColdCheck",
    "Recording",
    "assert_cold_equals_warm",
    "check_cold_equals_warm",
    "record",
    "replay_cold",
]

# What people say in turn (texts, or token ids that are appended to the talk so far), or a function that talks
# to the engine as it likes; whatever it asked must be answered when it returns.
Conversation: TypeAlias = "Sequence[str] | Sequence[Sequence[int]] | Callable[[Engine], object]"

SESSION = "cold-equals-warm"
DEFAULT_SAMPLING = SamplingParams(max_tokens=16, temperature=0.0, logprobs=20, ignore_eos=True)


@dataclass(frozen=True, eq=False)
class Draw:
    """What one draw showed of the model."""

    token: int
    tail_hidden: np.ndarray  # [hidden], what the logits are made of
    logprobs: tuple[
        np.ndarray, ...
    ]  # of the drawn token, ids and values of the alternatives; () if not asked


@dataclass(frozen=True, eq=False)
class Recording:
    """One request as it ran, whatever it started from."""

    facts: SequenceFacts
    draws: tuple[Draw, ...]
    image: tuple[np.ndarray, ...]  # its state at the end
    pages: np.ndarray  # [pages, layers, 2, Hkv, 64, D], its KV at the end


@dataclass(frozen=True)
class ColdCheck:
    """What was found equal, bit for bit."""

    requests: int
    draws: int  # tokens with their logits
    kv_tokens: int
    prefill_chunks: int
    decode_steps: int
    sources: Mapping[str, int]  # where the warm requests started from
    reused_tokens: int

    def __str__(self) -> str:
        return (
            f"cold equals warm: {self.requests} requests that reused {self.reused_tokens} tokens, run again "
            f"from root on zeroed memory: {self.draws} draws and state and KV of {self.kv_tokens} tokens are "
            "the same bits"
        )


class _Recorder:
    """Satisfies `program.Observer`: copies the bits that every request leaves on the device."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._draws: dict[SequenceHandle, list[Draw]] = {}
        self.recordings: list[Recording] = []

    def on_commit(self, pending: PendingBatch) -> None:
        """Keeps the draw of every row."""
        tokens = pending.tokens().tolist()
        for row, (handle, token) in enumerate(zip(pending.handles, tokens, strict=True)):
            facts = self._program.facts(handle)
            draw = _draw(self._program.executor, facts.state_slot, pending.result, row, token, facts)
            self._draws.setdefault(handle, []).append(draw)

    def on_terminate(self, handle: SequenceHandle) -> None:
        """Keeps what a request ends with; one that has drawn nothing has nothing to compare."""
        draws = self._draws.pop(handle, None)
        if draws is None:
            return
        facts, executor = self._program.facts(handle), self._program.executor
        image = _image(executor, facts.state_slot)
        pages = _pages(executor, facts.mapped_pages[0], facts.frontier_tokens)
        self.recordings.append(Recording(facts, tuple(draws), image, pages))


def assert_cold_equals_warm(
    engine_factory: Callable[[], Engine],
    conversation: Conversation,
    *,
    sampling: SamplingParams | None = None,
) -> ColdCheck:
    """Returns what was compared, after holding a conversation warm and every request of it again, cold.

    Cold means: all contexts released, device buffers zeroed, each request from root in the steps that its
    state was made of: the same prefill chunks, the same decode steps of as many rows. Tokens, tail hidden
    states (and with them the logits), log-probabilities where asked for, final recurrent state and KV must be
    the same bits. The number of rows belongs to a step because kernels for B rows add up in another order
    than those for one; what the other rows hold does not matter, so they are empty here.

    Args:
        engine_factory: makes the engine, which must be able to keep context; it is closed here.
        conversation: user messages or token ids, turn by turn, in one session; or a function of the engine.
        sampling: of the turns; default 16 greedy tokens with 20 log-probabilities.
    Raises:
        AssertionError: naming request, step and what differs.
    """
    with engine_factory() as engine:
        return check_cold_equals_warm(engine, conversation, sampling=sampling)


def check_cold_equals_warm(
    engine: Engine, conversation: Conversation, *, sampling: SamplingParams | None = None
) -> ColdCheck:
    """Returns what `assert_cold_equals_warm` does, on an idle engine that stays open but loses its contexts.

    Raises:
        AssertionError: naming request, step and what differs.
        ContractError: if the conversation left requests unanswered.
    """
    before = engine.stats()
    recordings = record(engine, conversation, sampling=sampling)
    after = engine.stats()
    engine.clear_cache()
    program = engine._parts.program
    left = {axis: used for axis, used in program.occupancy().items() if used}
    if left:
        raise ContractError(
            f"the conversation left something behind: {left}; read every answer before it returns"
        )
    try:
        for number, recording in enumerate(recordings):
            replay_cold(program, recording, name=f"request {number}")
    finally:
        program.executor.reset()
    return _summary(recordings, before, after)


def record(
    engine: Engine, conversation: Conversation, *, sampling: SamplingParams | None = None
) -> list[Recording]:
    """Returns every request that ended while a conversation was held, in the order they ended."""
    program = engine._parts.program
    program.observer = recorder = _Recorder(program)
    try:
        if callable(conversation):
            conversation(engine)
        else:
            _talk(engine, conversation, sampling or DEFAULT_SAMPLING)
    finally:
        program.observer = None
    return recorder.recordings


def _talk(engine: Engine, turns: Sequence[str] | Sequence[Sequence[int]], sampling: SamplingParams) -> None:
    messages: list[dict[str, str]] = []
    tokens: list[int] = []
    for turn in turns:
        if isinstance(turn, str):
            messages.append({"role": "user", "content": turn})
            result: GenerationResult = engine.chat(messages, sampling=sampling, session=SESSION)
            messages.append({"role": "assistant", "content": result.text})
        else:
            tokens += turn
            result = engine.submit(list(tokens), sampling=sampling, session=SESSION).result()
            tokens += result.token_ids


def _summary(
    recordings: Sequence[Recording], before: Mapping[str, Any], after: Mapping[str, Any]
) -> ColdCheck:
    steps = [segment for recording in recordings for segment in recording.facts.history]
    return ColdCheck(
        requests=len(recordings),
        draws=sum(len(recording.draws) for recording in recordings),
        kv_tokens=sum(recording.facts.frontier_tokens for recording in recordings),
        prefill_chunks=sum(not segment.decoded for segment in steps),
        decode_steps=sum(segment.num_tokens for segment in steps if segment.decoded),
        sources=dict(Counter(after["sources"]) - Counter(before["sources"])),
        reused_tokens=after["reused_tokens"] - before["reused_tokens"],
    )


# -- the cold run ----------


def replay_cold(program: Program, recording: Recording, *, name: str = "the request") -> None:
    """Runs a recorded request again on zeroed buffers and compares every bit.

    The program must hold nothing; its buffers hold the rerun afterwards, so reset the executor.

    Raises:
        AssertionError: naming the step and what differs.
    """
    executor, facts = program.executor, recording.facts
    executor.reset()
    cold = _Cold(program, facts)
    for number, (warm, (frontier, result)) in enumerate(zip(recording.draws, cold.draws(), strict=True)):
        token = int(result.tokens()[0])
        found = _draw(executor, 0, result, 0, token, facts)
        where = f"{name}, draw {number} at {frontier} tokens"
        _same(f"{where}: tail hidden", warm.tail_hidden, found.tail_hidden)
        for what, a, b in zip(
            ("log-probability", "ids", "values"), warm.logprobs, found.logprobs, strict=False
        ):
            _same(f"{where}: {what}", a, b)
        if token != warm.token:
            raise AssertionError(f"{where}: warm drew {warm.token}, cold {token}")
    for i, (a, b) in enumerate(zip(recording.image, _image(executor, 0), strict=True)):
        _same(f"{name}: leaf {i} of the final state", a, b)
    pages = _pages(executor, range(pages_for(facts.frontier_tokens)), facts.frontier_tokens)
    _same(f"{name}: KV of {facts.frontier_tokens} tokens", recording.pages, pages)


class _Cold:
    """Runs one sequence from root in recorded steps: lane 0, state slot 0, pages from 0 on."""

    def __init__(self, program: Program, facts: SequenceFacts) -> None:
        self._executor: Executor = program.executor
        self._facts = facts
        self._identity = facts.work.identity
        capacity = program.capacity
        self._rows = ExecutionRows(capacity.num_lanes, capacity.row_pages)
        self._row = self._lease(self._identity.num_tokens, facts.work.sampling)
        num_pages = pages_for(facts.frontier_tokens)
        self._rows.append(self._row, 0, list(range(num_pages)))
        self._others: list[int] = []
        for _ in range(max((segment.num_rows for segment in facts.history), default=1) - 1):
            other = self._lease(1, LaneSampling())
            self._rows.append(other, 0, [min(num_pages, capacity.pools[0].num_pages - 1)])
            self._others.append(other)

    def _lease(self, num_prompt_tokens: int, sampling: LaneSampling) -> int:
        number = self._rows.pool.num_taken
        rope_delta = self._identity.rope_delta if number == 0 else 0
        return self._rows.lease(
            lane=number,
            state_slot=number,
            prompt_tokens=num_prompt_tokens,
            rope_delta=rope_delta,
            sampling=sampling,
        )

    def draws(self) -> Iterator[tuple[int, StepResult]]:
        """Yields each draw of the recorded answer with the frontier it was made at."""
        facts, num_prompt = self._facts, self._identity.num_tokens
        before = history_up_to(facts.history, num_prompt)
        for segment in before:
            if segment.decoded:
                for index in range(segment.start_tokens, segment.end_tokens):
                    self._feed(index, segment.num_rows)
            else:
                self._prefill(segment.start_tokens, segment.end_tokens)
        # Only now: the draws above were nobody's, and the lane counts what it draws.
        self._executor.set_lane(
            0, facts.work.sampling, np.asarray(facts.ledger_tokens[:num_prompt], np.int32)
        )
        yield num_prompt, self._executor.draw_from_tail(self._rows.copy([self._row]))
        for segment in facts.history:
            for index in range(max(segment.start_tokens, num_prompt), segment.end_tokens):
                yield index + 1, self._feed(index, segment.num_rows)

    def _prefill(self, start: int, end: int) -> None:
        self._executor.prefill(
            PrefillInputs(
                tokens=np.array(self._facts.ledger_tokens[start:end], np.int32),
                positions=np.array(self._identity.positions[:, start:end], np.int32),
                block_table=self._rows.tables[self._row].copy(),
                start_tokens=start,
                read_slot=ZERO_STATE if start == 0 else 0,
                write_slot=0,
            )
        )

    def _feed(self, index: int, num_rows: int) -> StepResult:
        """Feeds the ledger's token `index`, in a step of as many rows as then."""
        num_prompt, numbers = self._identity.num_tokens, self._rows.numbers[self._row]
        in_prompt = index < num_prompt
        numbers[TOKEN] = self._facts.ledger_tokens[index]
        numbers[PROMPT_TOKENS] = index + 1 if in_prompt else num_prompt
        numbers[STEP] = 0 if in_prompt else index + 1 - num_prompt
        numbers[ROPE_DELTA] = (
            self._identity.positions[0, index] - index if in_prompt else self._identity.rope_delta
        )
        result = self._executor.decode(self._rows.copy([self._row, *self._others[: num_rows - 1]]))
        numbers[PROMPT_TOKENS], numbers[ROPE_DELTA] = num_prompt, self._identity.rope_delta
        return result


# -- bits ----------


def _draw(
    executor: Executor, slot: int, result: StepResult, row: int, token: int, facts: SequenceFacts
) -> Draw:
    logprobs: tuple[np.ndarray, ...] = ()
    if facts.work.sampling.num_logprobs != NO_LOGPROBS:
        found = result.logprobs()
        logprobs = tuple(np.array(part[row]) for part in dataclasses.astuple(found))
    return Draw(token, _image(executor, slot)[-1], logprobs)


def _image(executor: Executor, slot: int) -> tuple[np.ndarray, ...]:
    """Returns a copy of one state image; the tail hidden is its last leaf."""
    arriving = cast("ModelMover", executor.mover).copy_image_out(slot, 0)  # never finished: it lands nowhere
    return tuple(np.array(array) for array in arriving.arrays)


def _pages(executor: Executor, pages: Sequence[int], num_tokens: int) -> np.ndarray:
    """Returns a copy of the KV of so many tokens; what lies behind them is zero."""
    arriving = cast("ModelMover", executor.mover).copy_pages_out(list(pages), list(pages))
    packed = np.concatenate([np.array(array) for array in arriving.arrays])[: len(pages)]
    behind = num_tokens % PAGE_TOKENS
    if behind:
        packed[-1, ..., behind:, :] = 0
    return packed


def _same(what: str, warm: np.ndarray, cold: np.ndarray) -> None:
    if warm.tobytes() == cold.tobytes() and warm.shape == cold.shape:
        return
    gap = np.abs(warm.astype(np.float64) - cold.astype(np.float64)).max()
    raise AssertionError(f"{what}: warm and cold differ, by up to {gap:.3g}")
