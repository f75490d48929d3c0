"""Builders that every Program test uses: a capacity, a prompt, a program over the model-free executor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from ninfer_jax.identity import PromptIdentity
from ninfer_jax.program.admission import RequestWork
from ninfer_jax.program.capacity import CapacityVector, PoolCapacity, PoolKind
from ninfer_jax.program.fake import FakeExecutor
from ninfer_jax.program.lane_sampling import LaneSampling
from ninfer_jax.program.memory_table import MemoryTable
from ninfer_jax.program.program import Program


@dataclass(frozen=True)
class Builders:
    """Short ways to make what a test is not about."""

    def capacity(
        self, *, lanes: int = 2, pages: int = 16, max_context: int = 512, extra_slots: int = 0
    ) -> CapacityVector:
        return CapacityVector(
            num_lanes=lanes,
            max_context_tokens=max_context,
            num_state_slots=lanes + extra_slots,
            state_image_bytes=100,
            pools=(PoolCapacity(PoolKind.MAIN, pages, page_bytes=1000),),
            num_host_state_slots=0,
            host_kv_bytes=0,
        )

    def identity(
        self, tokens: Sequence[int], *, frontiers: tuple[int, ...] = (), rope_delta: int = 0
    ) -> PromptIdentity:
        num_tokens = len(tokens)
        return PromptIdentity(
            tokens=np.asarray(tokens, np.int32),
            token_types=np.zeros(num_tokens, np.int8),
            positions=np.tile(np.arange(num_tokens, dtype=np.int32), (3, 1)),
            rope_delta=rope_delta,
            media=(),
            mode="test",
            rewrite_execution_frontiers=frontiers,
        )

    def work(
        self,
        prompt: int | Sequence[int],
        output: int,
        *,
        sampling: LaneSampling | None = None,
        frontiers: tuple[int, ...] = (),
        rope_delta: int = 0,
    ) -> RequestWork:
        tokens = [(7 * index + 3) % 50 for index in range(prompt)] if isinstance(prompt, int) else prompt
        return RequestWork(
            self.identity(tokens, frontiers=frontiers, rope_delta=rope_delta),
            output,
            LaneSampling() if sampling is None else sampling,
        )

    def program(
        self,
        capacity: CapacityVector | None = None,
        *,
        chunk: int = 128,
        vocab: int = 50,
        before_step: Callable[[str], None] | None = None,
    ) -> Program:
        capacity = self.capacity() if capacity is None else capacity
        executor = FakeExecutor(capacity, vocab_size=vocab, verify=True, before_step=before_step)
        return Program(capacity, executor, prefill_chunk_tokens=chunk, memory=MemoryTable((), 0, 0))

    def run_alone(self, program: Program, work: RequestWork) -> list[int]:
        """The whole output of one request, run by itself and released."""
        handle = program.activate(work)
        while (pending := program.prefill(handle)) is None:
            pass
        program.commit(pending, [1])
        for _ in range(work.max_output_tokens - 1):
            program.commit(program.decode([handle]), [1])
        prompt = len(work.identity.tokens)
        output = list(program.facts(handle).ledger_tokens[prompt:])
        program.terminate(handle)
        program.discard(handle)
        return output


@pytest.fixture(scope="session")
def build() -> Builders:
    """Short ways to make what a test is not about."""
    return Builders()
