"""Random lives of sequences against a naive model of sets: the books equal a recount, and idle means zero.

The naive model keeps, per active handle, only its sizes and what it has seen; every capacity answer is
recomputed from those by counting pages one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ninfer_jax.errors import ContractError, StaleHandleError
from ninfer_jax.identity import PromptIdentity
from ninfer_jax.program.admission import RequestWork
from ninfer_jax.program.fake import expected_tokens, open_fake_program
from ninfer_jax.program.lane_sampling import LaneSampling
from ninfer_jax.request import AdmissionStatus

LANES, PAGES, MAX_CONTEXT, CHUNK, VOCAB = 3, 9, 320, 128, 40


def pages(num_tokens: int) -> int:
    return len({index // 64 for index in range(num_tokens)})


@dataclass(eq=False)
class Known:
    """What the naive model remembers of one active sequence."""

    handle: object
    work: RequestWork
    fed_tokens: int = 0  # prompt and output tokens in KV
    drawn: list[int] = field(default_factory=list)
    phase: str = "prefill"  # prefill, ready, ending, terminal
    batch: object = None

    @property
    def prompt_tokens(self) -> int:
        return len(self.work.identity.tokens)

    @property
    def reserved_pages(self) -> int:
        return pages(self.prompt_tokens + self.work.max_output_tokens)


class ProgramMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.program = open_fake_program(
            num_lanes=LANES,
            max_context_tokens=MAX_CONTEXT,
            num_pages=PAGES,
            extra_state_slots=1,
            prefill_chunk_tokens=CHUNK,
            vocab_size=VOCAB,
            verify=True,
        )
        self.known: list[Known] = []
        self.stale: list[object] = []
        self.consumed: list[object] = []
        self.batches: list[tuple[object, list[Known]]] = []
        self.revision = 0

    def free_in(self, phase: str) -> list[Known]:
        return [known for known in self.known if known.phase == phase and known.batch is None]

    @rule(
        prompt=st.integers(1, 200),
        output=st.integers(1, 130),
        seed=st.integers(0, 3),
        frontiers=st.sets(st.integers(1, 200), max_size=2),
    )
    def activate(self, prompt, output, seed, frontiers):
        tokens = (np.arange(prompt, dtype=np.int32) * (seed + 3) + seed) % VOCAB
        identity = PromptIdentity(
            tokens=tokens,
            token_types=np.zeros(prompt, np.int8),
            positions=np.tile(np.arange(prompt, dtype=np.int32), (3, 1)),
            rope_delta=0,
            media=(),
            mode="test",
            rewrite_execution_frontiers=tuple(sorted(f for f in frontiers if f <= prompt)),
        )
        work = RequestWork(identity, output, LaneSampling(seed=seed))
        need = pages(prompt + output)
        promised = sum(known.reserved_pages for known in self.known)
        if prompt + output > MAX_CONTEXT or need > PAGES:
            expected = AdmissionStatus.PERMANENTLY_INFEASIBLE
        elif len(self.known) == LANES or promised + need > PAGES:
            expected = AdmissionStatus.TEMPORARILY_BLOCKED
        else:
            expected = AdmissionStatus.READY
        assert self.program.assess(work) is expected
        if expected is not AdmissionStatus.READY:
            with pytest.raises(ContractError):
                self.program.activate(work)
            return
        handle = self.program.activate(work)
        assert handle not in self.stale
        self.known.append(Known(handle, work))
        self.revision += 1

    @precondition(lambda self: self.free_in("prefill"))
    @rule(data=st.data())
    def prefill(self, data):
        known = data.draw(st.sampled_from(self.free_in("prefill")))
        stops = [
            *(f for f in known.work.identity.rewrite_execution_frontiers if f > known.fed_tokens),
            known.prompt_tokens,
            known.fed_tokens + CHUNK,
        ]
        pending = self.program.prefill(known.handle)
        known.fed_tokens = min(stops)
        assert (pending is not None) == (known.fed_tokens == known.prompt_tokens)
        if pending is not None:
            known.batch = pending
            self.batches.append((pending, [known]))

    @precondition(lambda self: [k for k in self.free_in("ready") if len(k.drawn) < k.work.max_output_tokens])
    @rule(data=st.data())
    def decode(self, data):
        ready = [k for k in self.free_in("ready") if len(k.drawn) < k.work.max_output_tokens]
        chosen = data.draw(st.lists(st.sampled_from(ready), min_size=1, max_size=LANES, unique=True))
        pending = self.program.decode([known.handle for known in chosen])
        for known in chosen:
            known.batch = pending
        self.batches.append((pending, chosen))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def commit(self, data):
        entry = data.draw(st.sampled_from(self.batches))
        pending, rows = entry
        accepted = data.draw(st.lists(st.sampled_from([1, 1, 1, 0]), min_size=len(rows), max_size=len(rows)))
        tokens = pending.tokens().tolist()
        self.program.commit(pending, accepted)
        self.batches.remove(entry)
        self.consumed.append(pending)
        for known, count, token in zip(rows, accepted, tokens, strict=True):
            known.batch = None
            if known.phase == "ready":
                known.fed_tokens += 1  # it is in the state, whatever becomes of what was drawn
            if count == 0:
                known.phase = "ending"
                continue
            known.phase = "ready"
            known.drawn.append(token)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def abort(self, data):
        entry = data.draw(st.sampled_from(self.batches))
        self.program.abort(entry[0])
        self.batches.remove(entry)
        self.consumed.append(entry[0])
        for known in entry[1]:
            known.batch = None
            if known.phase == "ready":
                known.fed_tokens += 1
            known.phase = "ending"

    @precondition(lambda self: [k for k in self.known if k.batch is None and k.phase != "terminal"])
    @rule(data=st.data())
    def terminate(self, data):
        known = data.draw(
            st.sampled_from([k for k in self.known if k.batch is None and k.phase != "terminal"])
        )
        self.program.terminate(known.handle)
        known.phase = "terminal"

    @precondition(lambda self: self.free_in("terminal"))
    @rule(data=st.data())
    def discard(self, data):
        known = data.draw(st.sampled_from(self.free_in("terminal")))
        self.program.discard(known.handle)
        self.known.remove(known)
        self.stale.append(known.handle)
        self.revision += 1

    @precondition(lambda self: self.stale or self.consumed)
    @rule(data=st.data())
    def misuse(self, data):
        before = [self.program.facts(known.handle) for known in self.known]
        if self.stale:
            handle = data.draw(st.sampled_from(self.stale))
            call = data.draw(
                st.sampled_from([self.program.prefill, self.program.terminate, self.program.discard])
            )
            with pytest.raises(StaleHandleError):
                call(handle)
        if self.consumed:
            with pytest.raises(ContractError):
                self.program.commit(data.draw(st.sampled_from(self.consumed)), [1])
        assert [self.program.facts(known.handle) for known in self.known] == before

    @invariant()
    def books_equal_the_naive_model(self):
        self.program.check()
        occupancy = self.program.occupancy()
        assert occupancy["main_pages"] == sum(known.reserved_pages for known in self.known)
        mapped = sum(pages(known.fed_tokens) for known in self.known)
        assert occupancy["main_pages_reserved"] == occupancy["main_pages"] - mapped
        for axis in ("lanes", "execution_rows", "state_slots"):
            assert occupancy[axis] == len(self.known)
        assert occupancy["open_batches"] == len(self.batches)
        assert self.program.resource_revision == self.revision

    @invariant()
    def what_was_drawn_is_what_a_solo_run_draws(self):
        for known in self.known:
            if known.drawn:
                sampling = known.work.sampling
                tokens = known.work.identity.tokens
                assert known.drawn == expected_tokens(tokens, sampling, len(known.drawn), VOCAB)

    def teardown(self):
        for pending, rows in self.batches:
            self.program.commit(pending, [0] * len(rows))
        for known in self.known:
            if known.phase != "terminal":
                self.program.terminate(known.handle)
            self.program.discard(known.handle)
        self.program.check()
        assert set(self.program.occupancy().values()) == {0}


class TestProgramMachine(ProgramMachine.TestCase):
    settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
