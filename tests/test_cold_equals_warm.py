"""Cold equals warm, bit for bit (C-9): every way of restoring context, on real tiny checkpoints.

Each talk runs warm on one engine; then `testing` runs every request of it again from root on zeroed buffers.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_jax.engine import Engine
from ninfer_jax.results import GenerationResult
from ninfer_jax.sampling_params import SamplingParams
from ninfer_jax.testing import assert_cold_equals_warm, check_cold_equals_warm, record, replay_cold

REFERENCE = Path(__file__).resolve().parent / "data" / "reference"
VOCAB_SIZE = 96
# Two lanes; a device that holds six pages and three states; a Host that holds much more.
SMALL = {
    "max_context": 256,
    "kv_capacity": 384,
    "prefill_chunk": 64,
    "max_concurrency": 2,
    "device_state_slots": 1,
    "host_state_slots": 12,
    "host_kv_capacity_bytes": 2**20,
}
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, logprobs=20, ignore_eos=True)
SEEDED = SamplingParams(
    max_tokens=10, temperature=1.0, top_p=0.95, presence_penalty=0.5, seed=5, logprobs=20, ignore_eos=True
)


class SlowClock:
    """Time that hardly passes: how long planning takes on this machine decides nothing here."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1
        return self.now_ns


def open_reference(name: str, **changes: Any) -> Engine:
    return Engine.from_pretrained(REFERENCE / name, threaded=False, clock=SlowClock(), **(SMALL | changes))


@pytest.fixture(scope="module", params=["dense", "moe"])
def engine(request) -> Iterator[Engine]:
    with open_reference(request.param) as engine:
        yield engine


@pytest.fixture(params=[GREEDY, SEEDED], ids=["greedy", "seeded"])
def sampling(request) -> SamplingParams:
    return request.param


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


class Talk:
    """One side of a conversation in token ids; keeps what each turn started from."""

    def __init__(self, engine: Engine, sampling: SamplingParams, num_tokens: int, seed: int, **hints: Any):
        self.engine, self.sampling, self.seed, self.hints = engine, sampling, seed, hints
        self.prompt = words(num_tokens, seed)
        self.answers: list[GenerationResult] = []

    def submit(self):
        return self.engine.submit(self.prompt, sampling=self.sampling, **self.hints)

    def take(self, answer: GenerationResult, say: int = 4) -> None:
        self.answers.append(answer)
        self.prompt = [*self.prompt, *answer.token_ids, *words(say, self.seed + len(self.answers))]

    def turn(self, say: int = 4) -> GenerationResult:
        answer = self.submit().result()
        self.take(answer, say)
        return answer

    def facts(self, name: str) -> list[Any]:
        return [getattr(answer.materialization, name) for answer in self.answers]


def check(engine: Engine, talk: Callable[[Engine], None]):
    """Runs and compares; the engine is clean afterwards, and its books agree."""
    found = check_cold_equals_warm(engine, talk)
    engine._parts.program.check()
    return found


def test_device_move_of_the_endpoint(engine, sampling):
    def talk(engine):
        one = Talk(engine, sampling, 70, 1, session="a")
        for _ in range(3):
            one.turn()
        assert one.facts("source") == ["root", "private_endpoint", "private_endpoint"]
        assert one.facts("reused_tokens") == [0, 79, 93]
        assert engine.stats()["cache"]["private"]["catalogued"] == 1  # each turn took its source over

    found = check(engine, talk)
    assert (found.requests, found.draws, found.reused_tokens) == (3, 30, 79 + 93)


def test_device_fork_of_a_retained_source(engine, sampling):
    def talk(engine):
        first = Talk(engine, sampling, 60, 2, session="first")  # its own session keeps it
        first.turn()
        branch = Talk(engine, sampling, 1, 3, session="branch")
        branch.prompt = list(first.prompt)
        branch.turn()
        again = Talk(engine, sampling, 1, 4, session="again")
        again.prompt = list(first.prompt)
        again.turn()
        assert branch.facts("source") == again.facts("source") == ["private_endpoint"]
        assert branch.answers[0].token_ids == again.answers[0].token_ids

    check(engine, talk)


def test_identical_prompt_needs_no_token_but_the_last(engine, sampling):  # N-7: raw prompts keep an anchor
    def talk(engine):
        first = Talk(engine, sampling, 100, 5, anchor_prompt_end=True)
        prompt = list(first.prompt)
        first.turn()
        first.prompt = prompt
        first.turn()
        assert first.facts("reused_tokens") == [0, 99]
        assert first.facts("source") == ["root", "private_long_anchor"]
        assert first.answers[0].token_ids == first.answers[1].token_ids

    check(engine, talk)


def test_pages_that_a_consumed_source_gives_up_serve_its_successor(engine, sampling):
    def talk(engine):
        long = dataclasses.replace(sampling, max_tokens=185)
        one = Talk(engine, long, 65, 6, anchor_prompt_end=True)
        for _ in range(2):
            one.prompt = words(65, 6)
            one.turn()
        assert one.facts("source") == ["root", "private_long_anchor"]
        assert engine.stats()["cache"]["private"]["catalogued"] == 1

    check(engine, talk)


def test_host_restore_of_states_three_round_trips(engine, sampling):
    def talk(engine):
        talks = [Talk(engine, sampling, 20, 10 + i, session=f"s{i}") for i in range(4)]  # a page each
        for _ in range(5):
            for one in talks:
                one.turn(2)
        for one in talks:
            assert one.facts("source") == ["root"] + 4 * ["private_endpoint"]
            assert sum(map(bool, one.facts("restored_bytes"))) >= 3, one.facts("restored_bytes")

    found = check(engine, talk)
    assert found.requests == 20


def test_host_restore_of_pages_whole_and_in_part(engine, sampling):
    restored = {}

    def talk(engine):
        page_bytes = engine._parts.program.capacity.pools[0].page_bytes
        talks = [
            Talk(engine, sampling, size, 20 + i, session=f"s{i}") for i, size in enumerate((100, 150, 130))
        ]
        for _ in range(4):
            for one in talks:
                one.turn(2)
        for one in talks:
            for answer in one.answers:
                record = answer.materialization
                if record.source == "private_endpoint":
                    pages = -(-record.reused_tokens // 64)
                    restored[record.restored_bytes // page_bytes, pages] = True

    check(engine, talk)
    assert any(copied == pages for copied, pages in restored), restored  # everything had gone to Host
    assert any(0 < copied < pages for copied, pages in restored), restored  # some had stayed


def test_restored_next_to_a_lane_that_decodes(engine, sampling):
    def talk(engine):
        long = dataclasses.replace(sampling, max_tokens=40)
        talks = [Talk(engine, sampling, 30, 30, session="a"), Talk(engine, sampling, 20, 31, session="b")]
        for _ in range(3):
            beside = Talk(engine, long, 25, 32, cache="disabled").submit()
            for _ in range(5):
                engine.step()
            for one in talks:
                one.turn()
            beside.result()
        assert sum(one.facts("source").count("private_endpoint") for one in talks) == 4
        assert engine.stats()["decode_rounds"]["2"] > 20

    check(engine, talk)


def test_neighbours_change_the_last_bits_at_most(engine):
    """Kernels for another number of rows add up in another order: tokens and rounded logits are compared."""

    def talk(engine):
        alone = Talk(engine, GREEDY, 30, 40, cache="disabled")
        prompt = alone.prompt
        solo = alone.turn()
        beside = Talk(engine, GREEDY, 25, 41, cache="disabled").submit()
        alone.prompt = prompt
        together = alone.turn()
        beside.result()
        assert together.token_ids == solo.token_ids
        for a, b in zip(solo.logprobs, together.logprobs, strict=True):
            # float32 sums of some hundred terms; greedy near-ties aside, nothing else may differ
            assert np.allclose([v for _, v in a.top], [v for _, v in b.top], atol=1e-4)

    check(engine, talk)


def test_reuse_does_not_depend_on_the_chunk_size():
    def reused(engine):
        talks = [Talk(engine, GREEDY, 100, 50 + i, session=f"s{i}") for i in range(3)]
        for _ in range(3):
            for one in talks:
                one.turn(3)
        found.append([(one.facts("source"), one.facts("reused_tokens")) for one in talks])

    found: list[Any] = []
    for chunk in (64, 32):
        assert_cold_equals_warm(lambda size=chunk: open_reference("dense", prefill_chunk=size), reused)
    assert found[0] == found[1]
    assert any(sources[-1] != "root" for sources, _ in found[0])


# -- the check itself can fail ----------


@pytest.mark.parametrize("broken", ["copy_image_in", "copy_pages_in", "copy_image"])
def test_a_restore_that_brings_nothing_is_found(engine, monkeypatch, broken):
    def talk(engine):
        page_talks = [Talk(engine, GREEDY, n, 60 + n, session=f"s{n}") for n in (100, 150, 130)]
        fork = Talk(engine, GREEDY, 10, 70, anchor_prompt_end=True)
        prompt = list(fork.prompt)
        fork.turn()
        fork.prompt = prompt
        fork.turn()
        for _ in range(2):
            for one in page_talks:
                one.turn(2)

    mover = engine._parts.program.executor.mover
    monkeypatch.setattr(mover, broken, lambda source, destination: None)
    with pytest.raises(AssertionError, match=r"warm and cold differ|warm drew"):
        check_cold_equals_warm(engine, talk)


def test_a_single_wrong_bit_is_found(engine):
    program = engine._parts.program
    (recording,) = record(engine, [words(30, 80)])
    replay_cold(program, recording)
    image = [leaf.copy() for leaf in recording.image]
    image[0].view(np.uint8).flat[3] ^= 1
    with pytest.raises(AssertionError, match="leaf 0 of the final state"):
        replay_cold(program, dataclasses.replace(recording, image=tuple(image)))
    pages = recording.pages.copy()
    pages[-1, 0, 0, 0, 5] += 1e-6
    with pytest.raises(AssertionError, match="KV of 45 tokens"):
        replay_cold(program, dataclasses.replace(recording, pages=pages))
    program.executor.reset()


# -- text: what a chat template makes possible ----------


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    options = {"max_context": 512, "prefill_chunk": 64, "max_concurrency": 1, "device_state_slots": 6}
    with Engine.from_pretrained("demo", threaded=False, clock=SlowClock(), **options) as engine:
        yield engine


def test_turn_closure_response_replay_and_an_edited_answer(demo, sampling):
    def talk(engine):
        def chat():
            result = engine.chat(messages, session="a", sampling=sampling)
            return result, result.materialization

        messages = [{"role": "user", "content": "Who was the wolf?"}]
        first, _ = chat()
        again, record = chat()
        assert record.source == "private_response_replay"
        assert (record.prefill_tokens, again.token_ids) == (0, first.token_ids)  # not one prompt token
        messages += [{"role": "assistant", "content": "It ate."}, {"role": "user", "content": "And then?"}]
        second, record = chat()
        assert record.source == "private_turn_closure" and record.reused_tokens > 0
        messages += [{"role": "assistant", "content": second.text}, {"role": "user", "content": "Why?"}]
        _, following = chat()
        messages[-2] = {"role": "assistant", "content": "It slept."}  # after a follow-up was answered
        chat()
        assert following.reused_tokens > record.reused_tokens

    found = check(demo, talk)
    assert found.requests == 5
    assert found.sources["private_turn_closure"] >= 1 and found.sources["private_response_replay"] >= 1
    assert "the same bits" in str(found)


def test_a_list_of_messages_is_a_conversation(demo):
    found = check_cold_equals_warm(demo, ["Who was the wolf?", "And then?"])
    assert (found.requests, found.draws) == (2, 32)
    assert found.reused_tokens > 0
