"""A random life of one engine against a naive model; the books are recounted after every rule."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ninfer_jax.errors import RequestError, RequestErrorKind
from ninfer_jax.sampling_params import SamplingParams

LANES, PENDING, PAGES = 3, 4, 5


@dataclass
class Known:
    """What the model knows about one request that it still holds."""

    handle: object
    solo: list[int]
    outcome: object = None  # fixed once seen


def make_machine(kit, clock):
    class EngineMachine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.fuse = 0  # device calls until the next fault; 0 never
            self.engine = kit.engine(
                clock=clock,
                max_concurrency=LANES,
                max_pending_requests=PENDING,
                max_context=128,
                pages=PAGES,
                pending_timeout_s=30,
                before_step=self.burn,
            )
            self.known: list[Known] = []

        def burn(self, step):
            if self.fuse:
                self.fuse -= 1
                if self.fuse == 0:
                    raise RuntimeError("the fuse blew")

        @rule(
            length=st.integers(1, 100),
            tokens=st.integers(1, 27),
            seed=st.integers(0, 3),
            timeout_s=st.sampled_from([None, None, 5]),
        )
        def submit(self, length, tokens, seed, timeout_s):
            prompt = [seed + 1] * length
            sampling = SamplingParams(max_tokens=tokens, temperature=1.0, seed=seed)
            try:
                handle = self.engine.submit(prompt, sampling=sampling, timeout_s=timeout_s)
            except RequestError as error:
                assert error.kind is RequestErrorKind.OVERLOADED
                assert self.engine.stats()["outstanding"] == LANES + PENDING
                return
            self.known.append(Known(handle, kit.solo(self.engine, prompt, sampling)))

        @rule(count=st.integers(1, 12))
        def step(self, count):
            for _ in range(count):
                self.engine.step()

        @precondition(lambda self: self.known)
        @rule(data=st.data())
        def cancel(self, data):
            data.draw(st.sampled_from(self.known)).handle.cancel()

        @precondition(lambda self: self.known)
        @rule(data=st.data())
        def drop(self, data):
            self.known.pop(data.draw(st.integers(0, len(self.known) - 1)))
            gc.collect(0)

        @rule(seconds=st.sampled_from([0.5, 4, 20]))
        def wait(self, seconds):
            clock.advance(seconds)

        @rule(calls=st.integers(1, 6))
        def light_a_fuse(self, calls):
            # not three in a row: an engine that latched has no more to show
            if self.engine._worker._faults_in_a_row < 2:
                self.fuse = calls

        @precondition(lambda self: any(known.handle.done() for known in self.known))
        @rule()
        def read(self):
            for known in [known for known in self.known if known.handle.done()]:
                self.known.remove(known)
                try:
                    result = known.handle.result()
                except RequestError as error:
                    assert error.kind in (RequestErrorKind.QUEUE_TIMEOUT, RequestErrorKind.FAULT)
                    continue
                tokens = list(result.token_ids)
                assert tokens == known.solo[: len(tokens)]
                if result.finish_reason == "length":
                    assert tokens == known.solo

        @invariant()
        def the_books_agree(self):
            program, scheduler = self.engine._parts.program, self.engine._worker._scheduler
            program.check()
            occupancy = program.occupancy()
            assert occupancy["lanes"] == scheduler.num_active <= LANES
            assert occupancy["state_slots"] >= occupancy["lanes"]  # the rest is kept for later requests
            assert occupancy["main_pages"] <= PAGES
            assert occupancy["open_batches"] == 0  # every batch is consumed within its boundary
            assert self.engine._worker.failure is None

        @invariant()
        def ends_are_final(self):
            for known in self.known:
                if known.handle.done():
                    outcome = known.handle._response._result or known.handle._response._error
                    assert known.outcome in (None, outcome)
                    known.outcome = outcome

        def teardown(self):
            self.fuse = 0
            kit.drain(self.engine)
            assert all(known.handle.done() for known in self.known)
            self.known.clear()
            gc.collect()  # what was drawn sits in frames that only a full collection frees
            kit.drain(self.engine)
            stats = self.engine.stats()
            assert stats["outstanding"] == 0
            assert sum(stats["finished"].values()) + sum(stats["failed"].values()) == stats["submitted"]
            kit.assert_quiet(self.engine)

    return EngineMachine


@pytest.fixture(autouse=True)
def quiet_log():
    logging.getLogger("ninfer_jax").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("ninfer_jax").setLevel(logging.NOTSET)


def test_random_lives(kit, fake_clock):
    run_state_machine_as_test(
        make_machine(kit, fake_clock),
        settings=settings(max_examples=40, stateful_step_count=40, deadline=None),
    )
