"""Faults and cancellations while context is reused: nothing is lost or half done (X-9, Q-6, Q-7).

One story with conversations, edits, regenerations, shared prefixes and pressure is told again and again, each
time with another operation failing or another boundary cancelled.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

import pytest

from ninfer_jax.errors import RequestError, RequestErrorKind
from ninfer_jax.request import CacheMarker, RequestState
from ninfer_jax.sampling_params import SamplingParams

pytestmark = pytest.mark.slow  # minutes on two cores

NUM_REQUESTS, NUM_OPERATIONS, NUM_DEVICE_STEPS = 17, 160, 190  # of the story: beyond that nothing fails


def text(num_tokens, start=0):
    return [(7 * index + start) % 47 for index in range(num_tokens)]


@dataclass
class Told:
    """What became of the story's requests."""

    answers: int = 0
    failed: list[RequestError] = field(default_factory=list)
    cancelled: int = 0


class Story:
    """Rounds of requests, those of one round at once; a conversation goes on by what it should have said."""

    def __init__(self, lab, engine, watch):
        self.lab, self.engine, self.watch = lab, engine, watch
        self.told = Told()
        self.chats = {}
        self.live = []
        self.each = watch.check
        self.is_armed = True  # what was made to break does

    def say(self, name, num_tokens, start, **hints):
        chat = self.chats.setdefault(name, [{"role": "system", "content": text(70, 1)}])
        chat.append({"role": "user", "content": text(num_tokens, start)})
        self.ask(chat, name=name, session=name, markers=[CacheMarker(1)], **hints)

    def ask(self, prompt, *, name=None, output=3, **hints):
        params = SamplingParams(max_tokens=output, temperature=1.0, seed=7)
        prompt = list(prompt)
        handle = self.engine.submit(prompt, sampling=params, **hints)
        self.live.append((handle, name, self.lab.solo(self.engine, prompt, params)))

    def settle(self):
        for _ in range(2000):
            if all(handle.done() for handle, _, _ in self.live):
                break
            self.engine.step()
            self.each()
        for handle, name, expected in self.live:
            try:
                result = handle.result()
            except RequestError as error:
                self.told.failed.append(error)
            else:
                tokens = list(result.token_ids)
                assert tokens == expected[: len(tokens)]
                if result.finish_reason == "cancelled":
                    self.told.cancelled += 1
                else:
                    assert tokens == expected
                    self.told.answers += 1
            if name is not None and self.chats[name][-1]["role"] == "user":
                self.chats[name].append({"role": "assistant", "content": expected})
        self.live.clear()

    def tell(self):
        self.say("a", 30, 2)
        self.say("b", 25, 3)
        self.settle()
        self.say("a", 20, 4)
        self.ask(text(150, 5), anchor_prompt_end=True)
        self.settle()
        self.say("b", 30, 6)
        self.ask(text(240, 7), output=10)
        self.settle()
        self.ask(self.chats["a"][:-1], session="a")  # regenerate
        self.settle()
        edited = {"role": "assistant", "content": text(5, 8), "opener": 48}  # other words than were said
        self.chats["a"][-1] = edited
        self.say("a", 12, 14)
        self.say("d", 12, 9)
        self.settle()
        self.say("b", 10, 10)
        self.ask(text(150, 5), output=20)
        self.settle()
        self.ask(text(200, 11), cache="disabled")
        self.say("a", 10, 12)
        self.settle()
        self.ask(text(240, 7), output=2)
        self.say("d", 14, 13)
        self.settle()
        for start in (15, 16):
            self.ask(text(240, start), output=3)
        self.settle()
        return self.told


@pytest.fixture(autouse=True)
def quiet_log():
    logging.getLogger("ninfer_jax").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("ninfer_jax").setLevel(logging.NOTSET)


@pytest.fixture
def story(lab):
    engines = []

    def make(**settings):
        engine = lab.open_engine(
            clock=lab.TickingClock(300_000),
            pages=10,
            host_pages=12,
            host_state_slots=8,
            max_private_continuations=8,
            prefill_chunk=64,
            **{"copy_polls": 2} | settings,
        )
        engines.append(engine)
        return Story(lab, engine, lab.Watch(engine))

    yield make
    for engine in engines:
        engine.close()


def epilogue(story):
    """Later requests answer like solo runs, everything ends, and what is kept can all be let go."""
    story.is_armed, failed = False, len(story.told.failed)
    for name in sorted(story.chats):
        story.say(name, 9, 20)
        story.settle()
    assert len(story.told.failed) == failed
    assert story.engine.stats()["outstanding"] == 0
    story.watch.close()


def strided(count, stride):
    """Every number; those off the stride in the slow run only."""
    return [pytest.param(n, marks=() if n % stride == 1 else pytest.mark.slow) for n in range(1, count + 1)]


def test_the_story_does_everything(story):
    operations, steps = Counter(), Counter()
    told = story(on_operation=lambda name: operations.update([name]), before_step=lambda s: steps.update([s]))
    assert told.tell().answers == NUM_REQUESTS and not told.told.failed
    stats = told.engine.stats()
    assert set(operations) == {
        *("release", "reserve host", "copy image out", "copy pages out", "land copy", "publish host"),
        *(
            "reserve device",
            "copy pages in",
            "copy image in",
            "commit",
            "reserve growth",
            "copy tail",
            "capture",
        ),
    }
    counters = stats["cache"]["counters"]
    assert counters["published_shared"] and counters["owners_evicted"] and counters["checkpoints_dropped"]
    assert {
        "private_endpoint",
        "private_turn_closure",
        "private_response_replay",
        "shared_stable_prefix",
    } <= set(stats["sources"])
    assert sum(operations.values()) <= NUM_OPERATIONS and sum(steps.values()) <= NUM_DEVICE_STEPS
    epilogue(told)


@pytest.mark.parametrize("nth", strided(NUM_OPERATIONS, 13))
def test_any_operation_may_fail(story, nth):
    """A reservation, copy or commit that fails costs at most the request it was made for (X-9)."""
    seen = []

    def fail(name):
        seen.append(name)
        if len(seen) == nth and one.is_armed:
            raise RuntimeError(f"{name} broke")

    one = story(on_operation=fail)
    told = one.tell()
    assert len(told.failed) <= 1 and told.answers + len(told.failed) == NUM_REQUESTS
    if told.failed:
        assert told.failed[0].kind is RequestErrorKind.FAULT and f"{seen[nth - 1]} broke" in str(
            told.failed[0]
        )
    stats = one.engine.stats()
    assert stats["faults"] == 0 and stats["failure"] is None
    if len(seen) >= nth:  # not the last few, which this machine's story may not have
        counters = stats["cache"]["counters"]
        assert counters["materializations_aborted"] == len(told.failed)
        assert len(told.failed) or counters["captures_aborted"]
    epilogue(one)


@pytest.mark.parametrize("nth", strided(NUM_DEVICE_STEPS, 40))
def test_any_device_step_may_fail(story, nth):
    """A copy that fails aborts its transition; any other step clears the device and fails what ran (Q-7)."""
    seen = []

    def fail(step):
        seen.append(step)
        if len(seen) == nth and one.is_armed:
            raise RuntimeError(f"{step} broke")

    one = story(before_step=fail)
    told = one.tell()
    assert told.answers + len(told.failed) == NUM_REQUESTS and len(told.failed) <= 2
    assert all(error.kind is RequestErrorKind.FAULT for error in told.failed)
    stats = one.engine.stats()
    assert stats["faults"] <= 1 and stats["failure"] is None
    epilogue(one)


@pytest.mark.parametrize("state", list(RequestState)[:4])
@pytest.mark.parametrize("which", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 8))])
def test_a_cancel_at_any_boundary_loses_nothing(story, state, which):
    """Cancels the request that is in a state for the n-th time, at that very boundary (Q-6)."""
    one = story(copy_polls=4)
    seen = []

    def cancel_one():
        one.watch.check()
        for handle, _, _ in one.live:
            job = one.watch.worker._jobs.get(handle.request_id)
            if job is not None and job.state is state:
                seen.append(handle)
                if len(seen) == which * 3:
                    handle.cancel()

    one.each = cancel_one
    told = one.tell()
    assert told.failed == [] and told.cancelled == (len(seen) >= which * 3)
    epilogue(one)


def test_every_request_that_is_seen_materialising_is_cancelled(story):
    """Slow copies: whatever is seen materialising is cancelled at that boundary."""
    one = story(copy_polls=3)
    cancels = Counter()

    def cancel_one():
        one.watch.check()
        for handle, _, _ in one.live:
            job = one.watch.worker._jobs.get(handle.request_id)
            if job is not None and job.state is RequestState.MATERIALIZING and not cancels[handle.request_id]:
                cancels[handle.request_id] += 1
                handle.cancel()

    one.each = cancel_one
    told = one.tell()
    assert told.cancelled == len(cancels) > 0 and told.failed == []
    one.each = one.watch.check
    epilogue(one)


def test_recovery_with_reuse_on_forgets_the_cache_and_serves_on(story):
    broken = []

    def fail(step):
        if step == "decode" and broken:
            raise RuntimeError(broken.pop())

    one = story(before_step=fail)
    one.say("a", 30, 2)
    one.settle()
    one.say("a", 20, 4)
    broken.append("device lost")
    one.settle()
    assert len(one.told.failed) == 1
    stats = one.engine.stats()
    assert stats["faults"] == 1 and not any(stats["occupancy"].values())
    assert stats["cache"]["private"]["catalogued"] == stats["cache"]["sessions_bound"] == 0
    one.say("a", 10, 5)
    one.settle()
    assert one.engine.stats()["sources"]["root"] == 2  # cold again, and right
    one.say("a", 10, 6)
    one.settle()
    assert one.engine.stats()["sources"]["private_endpoint"] >= 1
    epilogue(one)
