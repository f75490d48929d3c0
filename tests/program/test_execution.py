"""Program over the real executor on a tiny random model: memory, donation, no late compilation, equal rows.

Greedy tokens are compared exactly: the model's best two logits differ by far more than the 3e-6 by which CPU
programs of different batch sizes differ (seen in the margins that `test_every_token_is_the_models_own_choice`
asserts).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest

from ninfer_jax.errors import InvariantError
from ninfer_jax.model.cache import make_cache_spec
from ninfer_jax.model.config import Qwen35Config, load_config
from ninfer_jax.model.loader import load_model
from ninfer_jax.program import execution
from ninfer_jax.program.execution import choose_attention_backend, prefill_buckets
from ninfer_jax.program.executor import PrefillInputs
from ninfer_jax.program.lane_sampling import LaneSampling
from ninfer_jax.program.opening import open_program, size_program
from ninfer_jax.program.row_layout import ROW_WIDTH
from ninfer_jax.program.sizing import SizingOptions
from ninfer_jax.program.weight_bundle import make_weight_bundle

CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
    "tie_word_embeddings": False,
}
CHUNK, LANES, EOS = 128, 3, 7
OPTIONS = SizingOptions(
    max_context_tokens=512,
    max_concurrency=LANES,
    kv_capacity_tokens=1280,
    device_state_slots=1,
    headroom_bytes=0,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def open_tiny(checkpoint):
    config = load_config(checkpoint)
    plan = size_program(
        config,
        OPTIONS,
        dtype="float32",
        prefill_chunk_tokens=CHUNK,
        device=jax.devices()[0],
        free_bytes=1 << 32,
    )
    model = load_model(checkpoint, dtype="float32", load_format="dummy", seed=3)
    return open_program(
        model, plan, prefill_chunk_tokens=CHUNK, eos_token_ids=frozenset({EOS}), allowed_vocab_size=120
    )


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture(scope="module")
def opened(checkpoint):
    """The program, and by how much the live arrays of the process grew when it was opened."""
    before = live_bytes()
    program = open_tiny(checkpoint)
    yield program, live_bytes() - before
    held = live_bytes()
    planned = sum(row.planned_bytes for row in program.memory_table().rows if row.persistent)
    program.close()
    program.close()
    # `with Engine(...)` frees the device, weights included
    assert held - live_bytes() == pytest.approx(planned, rel=0.01)


@pytest.fixture(scope="module")
def program(opened):
    return opened[0]


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, dtype="float32", load_format="dummy", seed=3)


@pytest.fixture(autouse=True)
def idle_afterwards(request):
    yield
    if "program" in request.fixturenames:
        program = request.getfixturevalue("program")
        program.check()
        assert set(program.occupancy().values()) == {0}


def prompt(size: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 120, size).tolist()


def start(program, work):
    handle = program.activate(work)
    while (pending := program.prefill(handle)) is None:
        pass
    program.commit(pending, [1])
    return handle


def end(program, *handles):
    outputs = []
    for handle in handles:
        facts = program.facts(handle)
        outputs.append(list(facts.ledger_tokens[len(facts.ledger_tokens) - facts.num_output_tokens :]))
        program.terminate(handle)
        program.discard(handle)
    return outputs


# -- memory (K-9, design 4)


def test_planned_bytes_equal_allocated_bytes(program):
    table = program.memory_table()
    for row in table.rows:
        if row.persistent:
            assert row.allocated_bytes == pytest.approx(row.planned_bytes, rel=0.01), row.axis
    held = sum(row.allocated_bytes for row in table.rows if row.persistent)
    buffers = program._executor._buffers
    arrays = [
        *program._executor._weights.arrays,
        *jax.tree.leaves((buffers.cache, buffers.counts, buffers.lanes)),
    ]
    assert held == sum(array.nbytes for array in arrays)


def test_opening_allocates_what_the_table_says(opened):
    program, grown_bytes = opened
    planned = sum(row.planned_bytes for row in program.memory_table().rows if row.persistent)
    assert grown_bytes == pytest.approx(planned, rel=0.01)


def test_every_step_updates_pools_and_states_in_place(program):
    buffers = program._executor._buffers
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(buffers.cache))
    counts_bytes = buffers.counts.nbytes
    sampler_bytes = counts_bytes + sum(leaf.nbytes for leaf in jax.tree.leaves(buffers.lanes))
    scratch = next(row for row in program.memory_table().rows if row.axis == "scratch").planned_bytes
    expected = {
        "decode": cache_bytes + counts_bytes,
        "prefill": cache_bytes,
        "draw": counts_bytes,
        "set": sampler_bytes,
        "unpack": cache_bytes,
        "copy": cache_bytes,
        "write": cache_bytes,
    }
    for name, compiled in program._executor.programs.all().items():
        memory, kind = compiled.memory_analysis(), name.split()[0]
        assert memory.temp_size_in_bytes <= scratch, name
        if kind in ("pack", "read"):  # what leaves for Host is a new array
            continue
        # Pointers prove nothing (a copy may land where its source was); the compiler's own account does.
        assert memory.alias_size_in_bytes == expected[kind], name
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 4096, name


def test_buckets_double_up_to_the_chunk():
    assert prefill_buckets(1024) == (64, 128, 256, 512, 1024)
    assert prefill_buckets(100) == (64, 128)
    assert prefill_buckets(1) == (64,)


# -- compile once (jax_facts 7)


def test_mixed_loads_compile_nothing_after_warm_up(program, build):
    rng = np.random.default_rng(0)
    live: list = []
    left: dict = {}
    before = program.compilations_after_warmup
    for round_number in range(40):
        if len(live) < LANES and round_number < 30:
            sampling = LaneSampling(
                temperature=float(rng.choice([0.0, 1.0])),
                top_k=int(rng.choice([0, 5])),
                top_p=float(rng.choice([1.0, 0.9])),
                repetition=float(rng.choice([1.0, 1.2])),
                seed=round_number,
                num_logprobs=int(rng.choice([-1, 3])),
                logit_bias=((5, 1.0),) if round_number % 3 == 0 else (),
            )
            size, output = int(rng.integers(1, 300)), int(rng.integers(1, 12))
            work = build.work(prompt(size, round_number), output, sampling=sampling, frontiers=(size // 2,))
            handle = start(program, work)
            live.append(handle)
            left[handle] = output - 1
        for handle in [handle for handle in live if left[handle] == 0]:
            live.remove(handle)
            end(program, handle)
        if live:
            batch = list(rng.permutation(np.arange(len(live)))[: rng.integers(1, len(live) + 1)])
            rows = [live[index] for index in batch]
            pending = program.decode(rows)
            pending.logprobs()
            program.commit(pending, [1] * len(rows))
            for handle in rows:
                left[handle] -= 1
    end(program, *live)
    program.reset()
    end(program, start(program, build.work(prompt(20, 0), 1)))
    assert (before, program.compilations_after_warmup) == (0, 0)


def test_a_size_without_a_program_is_an_error_not_a_compilation(program):
    executor = program._executor
    many = np.zeros((LANES + 1, ROW_WIDTH + 8), np.int32)
    with pytest.raises(InvariantError, match="no decode program for 4 rows"):
        executor.decode(many)
    with pytest.raises(InvariantError, match="no program for 129 tokens"):
        executor.prefill(
            PrefillInputs(
                tokens=np.zeros(129, np.int32),
                positions=np.zeros((3, 129), np.int32),
                block_table=np.zeros(8, np.int32),
                start_tokens=0,
                read_slot=-1,
                write_slot=0,
            )
        )
    assert program.compilations_after_warmup == 0


# -- what comes out


def test_every_token_is_the_models_own_choice(program, model, build):
    tokens = prompt(150, 1)
    output = build.run_alone(program, build.work(tokens, 70))  # over two page borders
    logits = np.array(model.logits(np.array(tokens + output, np.int32)))[:, :120]
    margins = []
    for index, token in enumerate(output):
        row = logits[len(tokens) - 1 + index]
        assert int(row.argmax()) == token
        best, second = np.sort(row)[-2:][::-1]
        margins.append(best - second)
    assert min(margins) > 1e-4  # far above float32 noise, so exact comparison is fair


def test_batched_greedy_rows_equal_their_solo_runs(program, build):
    works = [build.work(prompt(size, size), 25) for size in (5, 64, 200)]
    alone = [build.run_alone(program, work) for work in works]
    handles = [start(program, work) for work in works]
    for step in range(24):
        rotated = handles[step % 3 :] + handles[: step % 3]
        program.commit(program.decode(rotated), [1, 1, 1])
    assert end(program, *handles) == alone


def test_chunking_and_rewrite_frontiers_do_not_change_greedy_output(program, build):
    tokens = prompt(300, 9)
    whole = build.run_alone(program, build.work(tokens, 12))
    for frontiers in ((1,), (63, 64, 65), (128, 200, 299)):
        assert build.run_alone(program, build.work(tokens, 12, frontiers=frontiers)) == whole


def test_dirty_pages_slots_and_lanes_leave_no_trace(program, build):
    work = build.work(prompt(100, 2), 20)
    first = build.run_alone(program, work)
    loud = LaneSampling(temperature=1.0, repetition=1.5, seed=1, logit_bias=((3, 50.0),))
    end(program, *(start(program, build.work(prompt(380, 3 + lane), 1, sampling=loud)) for lane in range(3)))
    assert build.run_alone(program, work) == first


def test_a_seeded_row_draws_the_same_in_any_company(program, build):
    sampling = LaneSampling(temperature=0.9, top_p=0.95, seed=11)
    work = build.work(prompt(40, 4), 15, sampling=sampling)
    alone = build.run_alone(program, work)
    others = [
        start(program, build.work(prompt(30 + n, n), 20, sampling=LaneSampling(1.0, seed=n))) for n in (5, 6)
    ]
    handle = start(program, work)
    for _ in range(14):
        program.commit(program.decode([others[0], handle, others[1]]), [1, 1, 1])
    assert end(program, handle)[0] == alone
    end(program, *others)


def test_bias_bans_and_logprobs_reach_the_device(program, build):
    forced = LaneSampling(logit_bias=((42, 1000.0),), num_logprobs=2)
    handle = program.activate(build.work(prompt(10, 5), 3, sampling=forced))
    pending = program.prefill(handle)
    assert pending.tokens().tolist() == [42]
    logprobs = pending.logprobs()
    assert logprobs.drawn.shape == (1,) and logprobs.top_ids.shape[0] == 1
    assert logprobs.drawn[0] < 0 and logprobs.top[0, 0] >= logprobs.drawn[0]
    program.commit(pending, [1])
    end(program, handle)
    wanted = LaneSampling(
        logit_bias=((EOS, 1000.0), (9, 900.0), (8, 800.0)), min_tokens=2, ban_token_ids=(9,)
    )
    assert build.run_alone(program, build.work(prompt(10, 5), 4, sampling=wanted)) == [8, 8, EOS, EOS]


def test_reset_gives_fresh_buffers_that_work(program, build):
    work = build.work(prompt(70, 6), 10)
    first = build.run_alone(program, work)
    start(program, work)
    program.reset()
    assert set(program.occupancy().values()) == {0}
    assert build.run_alone(program, work) == first


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    platform: str
    compute_capability: str | None = None


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "backend"),
    [
        (FakeDevice("gpu", "9.0"), "bfloat16", 64, "mosaic"),
        (FakeDevice("gpu", "9.0"), "float32", 64, "xla"),
        (FakeDevice("gpu", "9.0"), "bfloat16", 16, "xla"),
        (FakeDevice("gpu", "8.0"), "bfloat16", 64, "xla"),
        (FakeDevice("cpu"), "bfloat16", 64, "xla"),
    ],
)
def test_the_attention_kernels_follow_device_dtype_and_geometry(device, dtype, head_dim, backend):
    config = dataclasses.replace(Qwen35Config.from_hf(CONFIG), head_dim=head_dim)
    assert choose_attention_backend(config, make_cache_spec(config, dtype), device) == backend


def test_the_chosen_kernels_reach_the_compiled_step(program, model, monkeypatch):
    assert program.attention_backend == "xla"  # this machine's
    asked = []

    def remember(module, cache, *_, backend):
        asked.append(backend)
        raise LookupError

    def lower_only(lowerings, progress):
        for (kind, _), lower in lowerings.items():
            with contextlib.suppress(LookupError):
                lower() if kind in ("decode", "prefill") else None
        return dict.fromkeys(lowerings)

    monkeypatch.setattr(execution, "_compile_all", lower_only)
    monkeypatch.setattr(execution, "decode_step", remember)
    monkeypatch.setattr(execution, "prefill_chunk", remember)
    spec = make_cache_spec(model.config, "float32")
    buffers = execution.make_buffers(spec, program.capacity, 128, 128)
    settings = {"capacity": program.capacity, "prefill_chunk_tokens": CHUNK, "attention_backend": "mosaic"}
    programs = execution.compile_programs(
        model, spec, make_weight_bundle(model.leaves), buffers, jax.numpy.zeros(128, bool), **settings
    )
    assert asked == ["mosaic"] * (LANES + len(prefill_buckets(CHUNK)))
    assert programs.attention_backend == "mosaic"
