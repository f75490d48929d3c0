"""Five hundred requests of every fate: each ends once, in one state, and leaves nothing behind (Q-1, Q-6)."""

from __future__ import annotations

import gc
import random
import threading
import time

import pytest

from ninfer_jax.errors import RequestError, RequestErrorKind
from ninfer_jax.results import Finished, GenerationStart, TextDelta
from ninfer_jax.sampling_params import SamplingParams

VOCAB = 50


def random_request(rng):
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 15, 16, 17, 40, 90)))]
    sampling = SamplingParams(
        max_tokens=rng.choice((1, 2, 5, 12, 30, None)) if len(prompt) < 80 else rng.choice((1, 4)),
        temperature=rng.choice((0.0, 1.0)),
        seed=rng.randrange(2**32),
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 2)))),
        logprobs=rng.choice((None, None, 2)),
    )
    return prompt, sampling


def expected(kit, engine, prompt, sampling):
    """The solo run, cut where its stop ids say; the fate may cut it earlier."""
    limit = min(sampling.max_tokens or 1000, engine.options.max_context - len(prompt))
    drawn = kit.solo(engine, prompt, SamplingParams(max_tokens=limit, temperature=1.0, seed=sampling.seed))
    for index, token in enumerate(drawn):
        if token in sampling.stop_token_ids:
            return drawn[: index + 1], "stop"
    return drawn, "length"


@pytest.mark.parametrize("seed", [1, 2])
def test_random_load_on_a_fake_clock(kit, fake_clock, seed):
    rng = random.Random(seed)
    engine = kit.engine(
        clock=fake_clock,
        max_concurrency=4,
        max_pending_requests=12,
        max_context=128,
        pages=5,  # of 8 that four longest requests would want: heads block
        pending_timeout_s=20,
    )
    fates = ("stop", "length", "cancelled", "timeout", "queue_timeout", "overloaded", "abandoned")
    states = dict.fromkeys(fates, 0)
    live, submitted = [], 0
    while submitted < 500 or live:
        if submitted < 500 and rng.random() < 0.35:
            submitted += 1
            prompt, sampling = random_request(rng)
            timeout_s = rng.choice((None, None, None, 0.5, 3.0))
            try:
                handle = engine.submit(
                    prompt, sampling=sampling, timeout_s=timeout_s, session=rng.choice((None, "a"))
                )
            except RequestError as error:
                assert error.kind is RequestErrorKind.OVERLOADED
                states["overloaded"] += 1
                continue
            live.append((handle, prompt, sampling))
            if rng.random() < 0.05:
                handle.cancel()  # before it started
        fate = rng.random()
        if live and fate < 0.01:
            rng.choice(live)[0].cancel()
        elif live and fate < 0.02:
            live.pop(rng.randrange(len(live)))
            handle = None
            states["abandoned"] += 1
        elif fate < 0.05:
            fake_clock.advance(rng.choice((0.1, 1.0, 6.0)))
        engine.step()
        assert engine.stats()["occupancy"]["main_pages"] <= 5
        for entry in [entry for entry in live if entry[0].done()]:
            live.remove(entry)
            handle, prompt, sampling = entry
            try:
                result = handle.result()
            except RequestError as error:
                assert error.kind is RequestErrorKind.QUEUE_TIMEOUT
                states["queue_timeout"] += 1
                continue
            states[result.finish_reason] += 1
            solo, reason = expected(kit, engine, prompt, sampling)
            if result.finish_reason in ("stop", "length"):
                assert (list(result.token_ids), result.finish_reason) == (solo, reason)
            else:
                assert list(result.token_ids) == solo[: len(result.token_ids)]
            if sampling.logprobs is not None:
                assert len(result.logprobs) == len(result.token_ids)
    handle = entry = None
    gc.collect()
    kit.drain(engine)
    stats = engine.stats()
    assert sum(states.values()) == 500 and min(states.values()) > 0, states
    ended = sum(stats["finished"].values()) + sum(stats["failed"].values())
    assert ended == stats["submitted"] == 500 - states["overloaded"]
    assert stats["outstanding"] == 0 and stats["faults"] == 0
    kit.assert_quiet(engine)


def test_random_load_from_several_threads(kit):
    """The threaded variant: real clock, consumers that stream, wait, cancel, give up, or vanish."""
    engine = kit.engine(threaded=True, max_concurrency=4, max_pending_requests=64, max_context=128, pages=6)
    failures, counts, lock = [], {}, threading.Lock()

    def count(name):
        with lock:
            counts[name] = counts.get(name, 0) + 1

    def consume(rng, prompt, sampling):
        handle = engine.submit(prompt, sampling=sampling, timeout_s=rng.choice((None, 30.0)))
        fate = rng.random()
        if fate < 0.1:
            time.sleep(rng.random() * 0.002)
            handle.cancel()
        elif fate < 0.2:
            return "abandoned"
        if fate > 0.6:
            events = list(handle)
            assert (
                isinstance(events[-1], Finished) and sum(isinstance(e, GenerationStart) for e in events) <= 1
            )
            streamed = tuple(t for e in events if isinstance(e, TextDelta) for t in e.token_ids)
            assert streamed == events[-1].result.token_ids
        result = handle.result(timeout=60)
        solo, reason = expected(kit, engine, prompt, sampling)
        assert list(result.token_ids) == solo[: len(result.token_ids)]
        if result.finish_reason != "cancelled":
            assert (list(result.token_ids), result.finish_reason) == (solo, reason)
        return result.finish_reason

    def client(seed):
        rng = random.Random(seed)
        for _ in range(500 // 8 + 1):
            try:
                count(consume(rng, *random_request(rng)))
            except RequestError as error:
                count(error.kind.value)
            except BaseException as failure:
                failures.append(failure)
                raise

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert failures == [] and not any(thread.is_alive() for thread in threads)
    gc.collect()
    deadline = time.monotonic() + 30
    while (stats := engine.stats())["outstanding"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stats["outstanding"] == 0 and stats["faults"] == 0 and stats["failure"] is None
    assert {"stop", "length", "cancelled", "abandoned"} <= set(counts), counts
    kit.assert_quiet(engine)


def test_close_while_busy(kit):
    engine = kit.engine(threaded=True, max_concurrency=2, max_pending_requests=32, max_context=4096)
    kinds, lock = [], threading.Lock()

    def client():
        for _ in range(4):
            try:
                engine.submit([1], sampling=SamplingParams(max_tokens=4000)).result(timeout=60)
                kind = "finished"
            except RequestError as error:
                kind = error.kind.value
            except Exception as error:
                kind = type(error).__name__
            with lock:
                kinds.append(kind)

    threads = [threading.Thread(target=client) for _ in range(6)]
    for thread in threads:
        thread.start()
    while engine.stats()["completion_tokens"] < 10:
        time.sleep(0.001)
    engine.close()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads) and len(kinds) == 24
    assert set(kinds) <= {"finished", "unavailable", "EngineClosedError"} and "unavailable" in kinds
    assert engine._worker.is_closed and not engine._thread.is_alive()


def test_an_engine_nobody_holds_any_more_closes_itself(kit):
    parts = kit.parts()
    from ninfer_jax.engine import Engine

    engine = Engine(parts)
    thread = engine._thread
    handle = engine.submit([1, 2], sampling=SamplingParams(max_tokens=3))
    del engine
    assert handle.result(timeout=30).finish_reason == "length"  # a handle keeps its engine alive
    del handle
    gc.collect()
    thread.join(timeout=30)
    assert not thread.is_alive() and parts.program._executor.closed


def test_result_with_a_timeout_leaves_the_request_running(kit):
    gate = threading.Event()
    engine = kit.engine(threaded=True, before_step=lambda step: gate.wait(30))
    handle = engine.submit([1], sampling=SamplingParams(max_tokens=2))
    with pytest.raises(TimeoutError, match=r"request 1 has not ended within 0\.05 s"):
        handle.result(timeout=0.05)
    gate.set()
    assert handle.result(timeout=30).usage.completion_tokens == 2
