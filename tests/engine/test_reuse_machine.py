"""A random life of an engine that reuses context: the 17 invariants after every boundary (requirements 17).

``Watch`` names each of them where it checks it. 1 order; 2 one authority each; 3 occupancy; 4 joint
post-state; 5 stages; 6 hits; 7 immutability; 8 reservations; 9 one transition; 10 stale plans; 11 adoption;
12 fallback; 13 a plan that was chosen starts; 14 session order; 15 a failed capture is a skip; 16 shared
gain; 17 no reservation by choice. Every answer is that of a solo run, whatever it started from.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ninfer_jax.context_cache.catalog import entries
from ninfer_jax.context_cache.records import protected
from ninfer_jax.errors import ContractError, RequestError, RequestErrorKind
from ninfer_jax.request import CacheMarker
from ninfer_jax.sampling_params import SamplingParams

pytestmark = pytest.mark.slow  # minutes on two cores

CHATS = 4
HOW = ("go on", "go on", "again", "edit answer", "edit question", "branch", "raw", "raw", "raw again")


def text(num_tokens, start=0):
    return [(7 * index + start) % 47 for index in range(num_tokens)]


@dataclass
class Known:
    """One request that is still held, and what it must draw."""

    handle: object
    expected: list[int]


def make_machine(lab, tally):
    class ReuseMachine(RuleBasedStateMachine):
        @initialize(
            pages=st.sampled_from([4, 8, 12, 16]),
            host=st.sampled_from([(0, 0), (3, 8), (8, 24), (8, 24)]),
            extra=st.sampled_from([0, 2, 4, 6]),
            lanes=st.integers(1, 3),
            cells=st.sampled_from([0, 2, 5, 8]),
            shared=st.integers(0, 3),
            polls=st.sampled_from([0, 1, 4]),
            tick_ns=st.sampled_from([300_000, 5_000_000]),
        )
        def open(self, pages, host, extra, lanes, cells, shared, polls, tick_ns):
            self.fuse = self.bomb = 0  # device steps and operations until the next fault; 0 never
            self.clock = lab.TickingClock(tick_ns)
            self.engine = lab.open_engine(
                clock=self.clock,
                pages=pages,
                host_pages=host[1],
                host_state_slots=host[0],
                device_state_slots=extra,
                max_concurrency=lanes,
                max_private_continuations=lanes + cells,
                max_shared_prefixes=shared,
                max_pending_requests=4,
                pending_timeout_s=30,
                copy_polls=polls,
                before_step=self.burn,
                on_operation=self.explode,
            )
            self.watch = lab.Watch(self.engine)
            self.known: list[Known] = []
            self.chats = [[{"role": "system", "content": text(70, k // 2)}] for k in range(CHATS)]

        def burn(self, step):
            self.fuse -= self.fuse > 0 and step != "copy"
            if self.fuse == 0 and self.fuse_is_lit:
                self.fuse_is_lit = False
                raise RuntimeError("the fuse blew")

        fuse_is_lit = bomb_is_lit = False

        def explode(self, name):
            self.bomb -= self.bomb > 0
            if self.bomb == 0 and self.bomb_is_lit:
                self.bomb_is_lit = False
                raise RuntimeError("the bomb went off")

        # -- requests

        def prompt(self, how, which, length, start):
            if how.startswith("raw"):
                return text(length * 3, 0 if how == "raw again" else start)
            chat = self.chats[which]
            if len(lab.prompt_ids(self.engine, chat)) > 150:
                del chat[1:]
            question = {"role": "user", "content": text(length, start)}
            if how == "again" and len(chat) > 2:
                return chat[:-1]
            if how == "edit question" and len(chat) > 2:
                del chat[-2:]
            elif how == "edit answer" and len(chat) > 2:
                chat[-1] = {"role": "assistant", "content": text(4, start), "opener": 48}
            elif how == "branch":
                return [*chat, question]
            chat.append(question)
            return chat

        @rule(
            how=st.sampled_from(HOW),
            which=st.integers(0, CHATS - 1),
            length=st.integers(1, 60),
            start=st.integers(0, 12),
            output=st.sampled_from([1, 5, 25, 60]),
            session=st.sampled_from(["own", "own", None, "other"]),
            marks=st.sampled_from([(), (1,), (1, 2)]),
            cache=st.sampled_from(["read_write"] * 5 + ["disabled"]),
            retention=st.sampled_from([None, None, "disposable", "recent_private"]),
            timeout_s=st.sampled_from([None, None, None, 2.0]),
            then=st.integers(0, 12),
        )
        def submit(
            self, how, which, length, start, output, session, marks, cache, retention, timeout_s, then
        ):
            self.ask(how, which, length, start, output, session, marks, cache, retention, timeout_s)
            self.step(then)

        def ask(self, how, which, length, start, output, session, marks, cache, retention, timeout_s):
            is_raw = how.startswith("raw")
            before = list(self.chats[which])
            prompt = list(self.prompt(how, which, length, start))
            params = SamplingParams(max_tokens=output, temperature=1.0, seed=3)
            try:
                handle = self.engine.submit(
                    prompt,
                    sampling=params,
                    session={"own": str(which), "other": "0", None: None}[session],
                    markers=[] if is_raw else [CacheMarker(count) for count in marks],
                    anchor_prompt_end=is_raw and length % 2 == 0,
                    cache=cache,
                    retention=retention,
                    timeout_s=timeout_s,
                )
            except RequestError as error:
                assert error.kind is RequestErrorKind.OVERLOADED
                self.chats[which] = before
                return
            expected = lab.solo(self.engine, prompt, params)
            self.known.append(Known(handle, expected))
            chat = self.chats[which]
            if not is_raw and chat[-1]["role"] == "user":
                chat.append({"role": "assistant", "content": expected})

        @rule(
            how=st.sampled_from(HOW),
            which=st.integers(0, CHATS - 1),
            length=st.integers(1, 30),
            output=st.sampled_from([2, 9, 30]),
            then=st.integers(4, 40),
        )
        def talk(self, how, which, length, output, then):
            """A turn of a conversation that mostly comes to its end."""
            self.ask(how, which, length, length % 13, output, "own", (1,), "read_write", None, None)
            self.step(then)

        @precondition(lambda self: self.known)
        @rule(data=st.data())
        def cancel(self, data):
            self.known[data.draw(st.integers(0, len(self.known) - 1))].handle.cancel()

        @precondition(lambda self: self.known)
        @rule(data=st.data())
        def drop(self, data):
            self.known.pop(data.draw(st.integers(0, len(self.known) - 1))).handle.close()

        # -- progress

        @rule(count=st.integers(5, 40))
        def advance(self, count):
            self.step(count)

        def step(self, count):
            for _ in range(count):
                if not self.engine.step():
                    break
                tally["boundaries"] += 1
                self.watch.check()

        @rule(seconds=st.sampled_from([0.5, 4, 40]))
        def wait(self, seconds):
            self.clock.advance(seconds)

        @precondition(lambda self: any(known.handle.done() for known in self.known))
        @rule()
        def read(self):
            for known in [known for known in self.known if known.handle.done()]:
                self.known.remove(known)
                try:
                    result = known.handle.result()
                except RequestError as error:
                    tally[error.kind.value] += 1
                    # 12: with the cache released every request of this machine fits, so none is overloaded
                    assert error.kind in (RequestErrorKind.QUEUE_TIMEOUT, RequestErrorKind.FAULT)
                    continue
                tokens = list(result.token_ids)
                tally[result.finish_reason] += 1
                assert tokens == known.expected[: len(tokens)]
                if result.finish_reason == "length":
                    assert tokens == known.expected

        # -- what is done to the cache, and to the machine

        @rule(chance=st.integers(0, 15))
        def clear_cache(self, chance):
            if chance:
                return
            if self.watch.program.has_open_transition:
                with pytest.raises(ContractError):
                    self.engine.clear_cache()
            else:
                self.engine.clear_cache()
            self.watch.check()

        @precondition(lambda self: any(entries(self.watch.manager.state.catalog)))
        @rule(data=st.data(), chance=st.integers(0, 4))
        def evict(self, data, chance):
            if chance:
                return
            state = self.watch.manager.state
            entry = data.draw(st.sampled_from([entry for _, entry in entries(state.catalog)]))
            owner = entry.summary.owner_key
            if owner in protected(state) or self.watch.program.has_open_transition:
                with pytest.raises(ContractError):
                    self.watch.worker._transitions.evict(owner)
            else:
                self.watch.worker._transitions.evict(owner)
                tally["evicted"] += 1
            self.watch.check()

        @rule(which=st.integers(0, CHATS - 1), start=st.integers(0, 9))
        def plan_without_starting(self, which, start):
            self.watch.dry_run(list(self.prompt("branch", which, 9, start)), session=str(which))

        @rule()
        def try_a_stale_plan(self):
            tally["stale"] += self.watch.refuse_stale()

        @precondition(lambda self: self.watch.worker._faults_in_a_row < 2)
        @rule(steps=st.integers(1, 200))
        def light_a_fuse(self, steps):
            if steps <= 40:
                self.fuse, self.fuse_is_lit = steps, True

        @rule(operations=st.integers(1, 24))
        def plant_a_bomb(self, operations):
            if operations <= 12:
                self.bomb, self.bomb_is_lit = operations, True

        def teardown(self):
            if not hasattr(self, "engine"):
                return
            self.fuse_is_lit = self.bomb_is_lit = False
            tally["boundaries"] += lab.drain(self.engine, self.watch.check)
            assert all(known.handle.done() for known in self.known)
            self.read()
            for known in self.known:
                known.handle.close()
            lab.drain(self.engine)
            stats = self.engine.stats()
            assert stats["outstanding"] == 0
            assert sum(stats["finished"].values()) + sum(stats["failed"].values()) == stats["submitted"]
            counters = stats["cache"]["counters"]
            assert counters["materializations_committed"] == stats["admissions"]
            for name in ("sources", "misses", "faults"):
                tally.update(stats[name] if name != "faults" else {"faults": stats[name]})
            for name in ("captures_committed", "captures_aborted", "published_shared", "owners_evicted"):
                tally[name] += counters[name]
            tally["offloaded"] += stats["offloaded_bytes"] > 0
            tally["restored"] += stats["restored_bytes"] > 0
            tally["backfills"] += stats["backfills"]
            self.watch.close()
            self.engine.close()

    return ReuseMachine


@pytest.fixture(autouse=True)
def quiet_log():
    logging.getLogger("ninfer_jax").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("ninfer_jax").setLevel(logging.NOTSET)


def live(lab, number, *, max_examples, tally=None):
    tally = Counter() if tally is None else tally
    run_state_machine_as_test(
        seed(number)(make_machine(lab, tally)),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=120,
            deadline=None,
            derandomize=False,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # a life is too slow to be shrunk within a test run
        ),
    )
    return tally


def lives_of(lab, first, boundaries):
    tally = Counter()
    for number in range(first, first + 1000):
        live(lab, number, max_examples=10, tally=tally)
        if tally["boundaries"] >= boundaries:
            break
    return tally


def test_five_thousand_boundaries(lab):
    tally = lives_of(lab, 1, 5_000)
    for name in (
        *("root", "private_endpoint", "private_turn_closure", "private_response_replay"),
        *("private_long_anchor", "shared_stable_prefix", "published_shared", "captures_committed"),
        *("captures_aborted", "owners_evicted", "offloaded", "restored", "evicted", "stale"),
        *("faults", "fault", "cancelled"),
    ):
        assert tally[name], f"{name} never happened: {dict(tally)}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, 41))
def test_two_hundred_thousand_boundaries(lab, part):
    assert lives_of(lab, 1000 * part, 5_000)["boundaries"] >= 5_000
