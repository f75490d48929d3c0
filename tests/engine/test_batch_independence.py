"""The real engine on the reference checkpoint: neighbours change nothing, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path

import jax
import pytest

from ninfer_jax.engine import Engine
from ninfer_jax.sampling_params import SamplingParams

REFERENCE = Path(__file__).resolve().parents[1] / "data" / "reference" / "dense"
VOCAB_SIZE = json.loads((REFERENCE / "config.json").read_text())["vocab_size"]
LANES = 8

# One request a lane. Prompts that end inside, at and behind the borders of pages and chunks; a greedy one and
# draws through every path: whole vocabulary, few leading tokens, a border, penalties.
LENGTHS = (1, 63, 64, 65, 100, 128, 129, 190)
DRAWS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "min_p": 0.01, "presence_penalty": 0.5},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8, "frequency_penalty": 0.3},
)


@pytest.fixture(scope="module", params=[64, 128], ids="chunks of {}".format)
def engine(request):
    with Engine.from_pretrained(
        REFERENCE, max_context=256, kv_capacity=2048, prefill_chunk=request.param, max_concurrency=LANES,
        threaded=False,
    ) as engine:  # fmt: skip
        yield engine


def make_request(number: int) -> tuple[list[int], SamplingParams]:
    rng = random.Random(number)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(LENGTHS[number])]
    return prompt, SamplingParams(max_tokens=18 + number, seed=number, ignore_eos=True, **DRAWS[number])


def test_a_row_answers_alike_whatever_runs_beside_it(engine):  # issue 2 item 9, Q-3
    requests = [make_request(number) for number in range(LANES)]
    solo = [engine.submit(prompt, sampling=sampling).result().token_ids for prompt, sampling in requests]
    assert len({tokens[:8] for tokens in solo}) == LANES  # the answers tell the requests apart
    for size in range(2, LANES + 1):
        rng = random.Random(size)
        handles = {}
        for number in rng.sample(range(LANES), size):
            prompt, sampling = requests[number]
            handles[number] = engine.submit(prompt, sampling=sampling)
            for _ in range(rng.choice((0, 0, 1, 3))):  # the next one arrives while this one is under way
                engine.step()
        together = {number: handle.result().token_ids for number, handle in handles.items()}
        assert together == {number: solo[number] for number in together}
    rounds = engine.stats()["decode_rounds"]
    assert {size for size in range(1, LANES + 1) if rounds.get(size, rounds.get(str(size), 0))} == set(
        range(1, LANES + 1)
    )


def test_three_hundred_requests_leave_no_array_behind(engine):
    def run(count: int) -> tuple[int, int]:
        rng = random.Random(count)
        for _ in range(count // LANES):
            requests = [make_request(rng.randrange(LANES)) for _ in range(LANES)]
            handles = [
                engine.submit(prompt, sampling=SamplingParams(max_tokens=3, logprobs=2))
                for prompt, _ in requests
            ]
            handles.pop().cancel()
            for handle in handles:
                handle.result()
        gc.collect()
        arrays = jax.live_arrays()
        return len(arrays), sum(array.nbytes for array in arrays)

    warm = run(2 * LANES)
    assert run(300) == warm
