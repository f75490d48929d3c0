"""Faults in the middle of work: what consumers saw, who fails, who goes on (Q-5, Q-7)."""

from __future__ import annotations

import logging

import pytest

from ninfer_jax.errors import EngineClosedError, InvariantError, RequestError, RequestErrorKind
from ninfer_jax.frontend.output import OutputSession
from ninfer_jax.handle import Response
from ninfer_jax.results import TextDelta
from ninfer_jax.sampling_params import SamplingParams

PROMPT = list(range(1, 21))


def params(max_tokens=5, **changes):
    return SamplingParams(max_tokens=max_tokens, seed=0, **changes)


class Breakable:
    """Raises at the n-th of the named steps, once for each number it is given."""

    def __init__(self, step: str, *numbers: int) -> None:
        self.step, self.numbers, self.seen = step, set(numbers), 0

    def __call__(self, step: str) -> None:
        if step == self.step:
            self.seen += 1
            if self.seen in self.numbers:
                raise RuntimeError(f"{step} number {self.seen} broke")


def read_now(handle):
    """The committed tokens that are visible at this moment."""
    tokens = []
    while handle._response.has_events():
        for event in handle._response.next_events():
            if isinstance(event, TextDelta):
                tokens.extend(event.token_ids)
    return tokens


@pytest.fixture(autouse=True)
def quiet_log():
    """The faults are ours; their tracebacks would drown a real one."""
    logging.getLogger("ninfer_jax").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("ninfer_jax").setLevel(logging.NOTSET)


@pytest.mark.smoke
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_consumer_never_sees_an_uncommitted_token(kit, monkeypatch, nth):
    # the commit fails, so the tokens of that batch and all after it stay unseen, in every row
    engine = kit.engine(max_concurrency=2)
    program = engine._parts.program
    commit, calls, committed = program.commit, 0, []

    def failing_commit(pending, accepted):
        nonlocal calls
        calls += 1
        if calls == nth:
            raise RuntimeError("commit broke")
        commit(pending, accepted)
        committed.extend(pending.tokens().tolist())

    monkeypatch.setattr(program, "commit", failing_commit)
    handles = [engine.submit([token], sampling=params()) for token in (1, 2)]
    while not all(handle.done() for handle in handles):
        engine.step()
    visible = [token for handle in handles for token in read_now(handle)]
    assert sorted(visible) == sorted(committed)
    assert len(visible) < 10
    for handle in handles:
        with pytest.raises(RequestError, match="commit broke") as failed:
            handle.result()
        assert failed.value.kind is RequestErrorKind.FAULT
    kit.assert_quiet(engine)


def test_the_order_of_a_commit(kit, monkeypatch):
    # preview, program commit, terminal resources, then output and publication
    engine = kit.engine()
    program, order = engine._parts.program, []
    for name in ("commit", "terminate", "finish"):
        original, said = getattr(program, name), "settle" if name == "finish" else name
        monkeypatch.setattr(program, name, lambda *args, n=said, f=original: (order.append(n), f(*args))[1])
    handle = engine.submit([1], sampling=params(2))
    for name, owner in (("publish", Response), ("finish", Response), ("preview", OutputSession)):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda self, value, n=name, f=original: (order.append(n), f(self, value))[1]
        )
    kit.drain(engine)
    assert order == [
        "publish",  # the start
        *("preview", "commit", "publish"),
        *("preview", "commit", "terminate", "settle", "publish", "finish"),
    ]
    assert handle.done()


@pytest.mark.parametrize(
    ("step", "nth"),
    [
        ("set_lane", 1),
        ("set_lane", 2),
        ("prefill", 1),
        ("prefill", 2),
        ("draw_from_tail", 1),
        ("decode", 1),
        ("decode", 3),
    ],
)
def test_a_device_fault_fails_what_it_touched_and_keeps_the_queue(kit, step, nth):
    # device work and cache cleared, affected requests fail, the untouched queue goes on
    engine = kit.engine(max_concurrency=2, before_step=Breakable(step, nth))
    handles = [engine.submit([token] * 20, sampling=params()) for token in range(1, 6)]
    outcomes = []
    for handle in handles:
        try:
            outcomes.append(list(handle.result().token_ids))
        except RequestError as error:
            assert error.kind is RequestErrorKind.FAULT and "broke" in str(error)
            outcomes.append(None)
    failed = [index for index, outcome in enumerate(outcomes) if outcome is None]
    assert failed in ([0], [1], [0, 1])
    for token, outcome in enumerate(outcomes, start=1):
        if outcome is not None:
            assert outcome == kit.solo(engine, [token] * 20, params())
    assert (engine.stats()["faults"], engine.stats()["failure"]) == (1, None)
    kit.assert_quiet(engine)


def test_an_interrupt_in_the_driving_thread_leaves_a_working_engine(kit):
    interrupts = [KeyboardInterrupt() for _ in range(4)]  # more than the faults that would latch

    def interrupt(step):
        if step == "decode" and interrupts:
            raise interrupts.pop()

    engine = kit.engine(before_step=interrupt)
    while interrupts:
        handle = engine.submit(PROMPT, sampling=params())
        with pytest.raises(KeyboardInterrupt):
            handle.result()
        with pytest.raises(RequestError, match="KeyboardInterrupt"):
            handle.result()
    assert list(engine.submit(PROMPT, sampling=params()).result().token_ids) == kit.solo(
        engine, PROMPT, params()
    )
    kit.assert_quiet(engine)


def test_a_fault_while_assessing_fails_the_head_alone(kit, monkeypatch):
    engine = kit.engine(max_concurrency=1)
    program = engine._parts.program
    problem, calls = program.problem, []

    def failing_problem(work, choices):
        calls.append(work)
        if len(calls) == 1:
            raise RuntimeError("assess broke")
        return problem(work, choices)

    monkeypatch.setattr(program, "problem", failing_problem)
    head, behind = (engine.submit(PROMPT, sampling=params()) for _ in range(2))
    with pytest.raises(RequestError, match="assess broke"):
        head.result()
    assert behind.result().finish_reason == "length"
    kit.assert_quiet(engine)


def test_a_fault_in_the_frontend_is_no_cache_miss_and_no_hang(kit, monkeypatch):
    engine = kit.engine()
    handle = engine.submit(PROMPT, sampling=params())
    monkeypatch.setattr(OutputSession, "preview", lambda self, tokens: 1 / 0)
    with pytest.raises(RequestError, match="ZeroDivisionError"):
        handle.result()
    kit.assert_quiet(engine)


def test_the_third_fault_in_a_row_latches(kit):
    #
    engine = kit.engine(max_concurrency=1, before_step=Breakable("prefill", *range(1, 99)))
    handles = [engine.submit(PROMPT, sampling=params()) for _ in range(5)]
    kinds = []
    for handle in handles:
        with pytest.raises(RequestError) as failed:
            handle.result()
        kinds.append(failed.value.kind)
    fault, unavailable = RequestErrorKind.FAULT, RequestErrorKind.UNAVAILABLE
    assert kinds == [fault, fault, fault, unavailable, unavailable]
    with pytest.raises(EngineClosedError, match="prefill number 3 broke"):
        engine.submit(PROMPT)
    assert "prefill number 3 broke" in engine.stats()["failure"]
    engine.close()


def test_an_answer_in_between_starts_the_count_again(kit):
    # Q-7 says consecutive: four faults, never three without a finished answer between
    engine = kit.engine(max_concurrency=1, before_step=Breakable("draw_from_tail", 1, 2, 4, 5))
    finished = 0
    for _ in range(7):
        try:
            engine.submit(PROMPT, sampling=params()).result()
            finished += 1
        except RequestError as error:
            assert error.kind is RequestErrorKind.FAULT
    assert (finished, engine.stats()["faults"], engine.stats()["failure"]) == (3, 4, None)


def test_a_broken_contract_latches_at_once(kit, monkeypatch):
    # broken handles and invariants are engine-wide
    engine = kit.engine(max_concurrency=1)

    def broken(handle):
        raise InvariantError("the books say 3, a recount says 4")

    monkeypatch.setattr(engine._parts.program, "prefill", broken)
    handles = [engine.submit(PROMPT, sampling=params()) for _ in range(2)]
    for handle, kind in zip(handles, (RequestErrorKind.FAULT, RequestErrorKind.UNAVAILABLE), strict=True):
        with pytest.raises(RequestError) as failed:
            handle.result()
        assert failed.value.kind is kind
    with pytest.raises(EngineClosedError, match="the books say 3"):
        engine.submit(PROMPT)


def test_leftover_occupancy_after_recovery_latches(kit, monkeypatch):
    # continues only if every occupancy is zero
    engine = kit.engine(before_step=Breakable("decode", 1))
    program = engine._parts.program
    monkeypatch.setattr(program, "occupancy", lambda: {"lanes": 0, "main_pages": 2})
    handle = engine.submit(PROMPT, sampling=params())
    with pytest.raises(RequestError, match="decode number 1 broke"):
        handle.result()
    with pytest.raises(EngineClosedError, match=r"still in use: \{'main_pages': 2\}"):
        engine.submit(PROMPT)


def test_a_reset_that_fails_latches(kit, monkeypatch):
    engine = kit.engine(before_step=Breakable("decode", 1))
    monkeypatch.setattr(engine._parts.program, "reset", lambda: 1 / 0)
    handle = engine.submit(PROMPT, sampling=params())
    with pytest.raises(RequestError):
        handle.result()
    with pytest.raises(EngineClosedError, match="ZeroDivisionError"):
        engine.submit(PROMPT)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nth", range(1, 12))
def test_wherever_a_call_into_the_program_fails_every_request_ends(kit, monkeypatch, nth, when):
    """Fails the n-th call of any kind, before or after it had its effect, on a full small load."""
    engine = kit.engine(max_concurrency=2)
    program, calls = engine._parts.program, 0
    for name in ("assess", "activate", "prefill", "decode", "commit", "terminate", "discard"):
        original = getattr(program, name)

        def call(*args, original=original):
            nonlocal calls
            calls += 1
            if calls == nth and when == "before":
                raise RuntimeError("broke")
            value = original(*args)
            if calls == nth:
                raise RuntimeError("broke")
            return value

        monkeypatch.setattr(program, name, call)
    handles = [engine.submit([token] * 20, sampling=params(3)) for token in (1, 2, 3)]
    kit.drain(engine)
    assert all(handle.done() for handle in handles)
    good = [h for h in handles if h._response._error is None]
    assert len(good) >= 1 and engine.stats()["failure"] is None
    for handle in handles:
        handle.close()
    kit.drain(engine)
    assert engine.stats()["outstanding"] == 0
    kit.assert_quiet(engine)


@pytest.mark.parametrize(("token", "says"), [(-1, "every id is banned"), (-2, "are not finite")])
def test_a_row_with_nothing_to_draw_fails_alone_and_leaves_no_poisoned_state(kit, monkeypatch, token, says):
    engine = kit.engine(max_concurrency=2)
    executor = engine._parts.program._executor
    decode, calls = executor.decode, []

    def poisoned(rows):
        result = decode(rows)
        calls.append(len(rows))
        if len(calls) == 2:
            result.drawn[0] = token
        return result

    monkeypatch.setattr(executor, "decode", poisoned)
    sick, well = (engine.submit([number] * 9, sampling=params()) for number in (1, 2))
    with pytest.raises(RequestError, match=says) as failed:
        sick.result()
    assert failed.value.kind is RequestErrorKind.FAULT
    assert list(well.result().token_ids) == kit.solo(engine, [2] * 9, params())
    kept = engine.stats()["cache"]["private"]["catalogued"]
    assert kept == (2 if token == -1 else 1)  # a state that is not finite is never offered to anybody
    kit.assert_quiet(engine)
