"""Builders that every Program test uses: a prompt, a request, a program over the model-free executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from ninfer_jax.identity import PromptIdentity
from ninfer_jax.program.admission import RequestWork
from ninfer_jax.program.fake import open_fake_program
from ninfer_jax.program.lane_sampling import LaneSampling
from ninfer_jax.program.program import Program


@dataclass(frozen=True)
class Builders:
    """Short ways to make what a test is not about."""

    def program(self, **settings) -> Program:
        settings.setdefault("num_pages", 16)
        settings.setdefault("vocab_size", 50)
        return open_fake_program(verify=True, **settings)

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
