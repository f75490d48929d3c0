"""Owns the record of one active sequence: its phase, ledger, state binding and the steps it ran.

It does not own capacity: pages, slots and rows are held by the stores, and only Program changes a record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ninfer_jax.planner.ids import OwnerId
from ninfer_jax.program.admission import RequestWork
from ninfer_jax.program.history import Segment
from ninfer_jax.request import SequenceHandle

__all__ = ["Sequence", "SequenceFacts", "SequenceHandle", "SequencePhase", "StateBinding"]


class SequencePhase(Enum):
    """Where a sequence stands between activation and release (Q-1, A-5)."""

    PREFILL = "prefill"
    DECODE_READY = "decode_ready"
    ENDING = (
        "ending"  # a row was cancelled or aborted: device state may be ahead of the ledger, so it only ends
    )
    TERMINAL_PENDING = (
        "terminal_pending"  # keeps its handle and its whole reservation until finish or discard
    )


@dataclass(frozen=True)
class StateBinding:
    """Where a step reads the recurrent state and where it writes it (S-2).

    A root start reads no slot: the model begins from zero state. After the first commit both are the
    destination.
    """

    read_slot: int | None
    write_slot: int


@dataclass(eq=False)
class Sequence:
    """One active sequence; mutable, held and changed by Program alone."""

    handle: SequenceHandle
    owner: OwnerId  # its row in the physical state
    work: RequestWork
    row: int  # execution row; another identity than the lane
    state: StateBinding
    ledger_tokens: np.ndarray  # int32[prompt + max output], the first `num_ledger_tokens` are committed
    num_ledger_tokens: int
    frontier_tokens: int = 0  # KV and state cover exactly the tokens before it
    num_output_tokens: int = 0
    phase: SequencePhase = SequencePhase.PREFILL
    open_batch: int | None = None  # serial of the uncommitted batch this sequence is in
    history: list[Segment] = field(default_factory=list)  # the steps that made its state (C-9)


@dataclass(frozen=True)
class SequenceFacts:
    """A read-only picture of one active sequence, for tests and reports."""

    phase: SequencePhase
    frontier_tokens: int
    ledger_tokens: tuple[int, ...]
    num_output_tokens: int
    work: RequestWork
    history: tuple[Segment, ...]
    mapped_pages: tuple[tuple[int, ...], ...]  # per pool, page ids in logical order
    reserved_pages: tuple[int, ...]  # per pool, entitled but not mapped
    state_slot: int
    row: int
