"""The whole engine on a real, tiny, randomly weighted model: what the model-free tests cannot see."""

from __future__ import annotations

import gc
import json
import threading

import jax
import pytest

from ninfer_jax.engine import Engine, plan_memory
from ninfer_jax.errors import OptionError
from ninfer_jax.results import TextDelta
from ninfer_jax.sampling_params import SamplingParams

TINY = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 300,  # more rows than the tokenizer has ids
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
    "dtype": "float32",
}
PROMPTS = [
    "The owl",
    "a",
    "x" * 70,
    "It was a dark and stormy night; the rain fell in torrents",
    "\u201c\u2026\u201d",
]


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory, byte_tokenizer_file):
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(TINY))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 256}))
    (directory / "tokenizer.json").write_bytes(byte_tokenizer_file.read_bytes())
    return directory


@pytest.fixture(scope="module")
def engine(tiny_checkpoint):
    with Engine.from_pretrained(
        tiny_checkpoint, load_format="dummy", max_context=256, prefill_chunk=64, max_concurrency=3
    ) as engine:
        yield engine


def greedy(max_tokens=24, **changes):
    return SamplingParams(max_tokens=max_tokens, temperature=0, **changes)


@pytest.mark.smoke
def test_a_rows_greedy_output_equals_its_solo_run(engine):
    solo = [engine.generate(prompt, greedy(8 + 3 * i)) for i, prompt in enumerate(PROMPTS)]
    together = engine.generate(PROMPTS, [greedy(8 + 3 * i) for i in range(len(PROMPTS))])
    assert [r.token_ids for r in together] == [r.token_ids for r in solo]
    assert len({r.token_ids[:8] for r in solo}) == len(PROMPTS)  # the answers tell the prompts apart
    assert max(map(int, engine.stats()["decode_rounds"])) == 3


def test_streaming_equals_not_streaming(engine):
    for prompt in PROMPTS:
        whole = engine.generate(prompt, greedy())
        events = list(engine.stream(prompt, sampling=greedy()))
        deltas = [event for event in events if isinstance(event, TextDelta)]
        assert "".join(delta.text for delta in deltas) == whole.text == events[-1].result.text
        assert tuple(token for delta in deltas for token in delta.token_ids) == whole.token_ids


def test_text_is_the_tokens_decoded(engine):
    result = engine.generate("abc", greedy(60))
    assert result.text == engine.frontend.decode(result.token_ids)
    assert max(result.token_ids) < 258  # rows beyond the tokenizer are never drawn


def test_stop_strings_end_answers(engine):
    drawing = {"max_tokens": 200, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    whole = engine.generate("abc", SamplingParams(**drawing))
    pairs = (whole.text[i : i + 2] for i in range(10, len(whole.text)))
    stop = next(pair for pair in pairs if pair.isascii() and pair.isprintable())
    cut = engine.generate("abc", SamplingParams(**drawing, stop=[stop]))
    assert (cut.text, cut.finish_reason, cut.stop_detail) == (
        whole.text[: whole.text.index(stop)],
        "stop",
        stop,
    )
    assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids


def test_logprobs_belong_to_the_drawn_tokens(engine):
    result = engine.generate("abc", greedy(6, logprobs=3))
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    for entry in result.logprobs:
        assert len(entry.top) == 3 and entry.top[0] == (
            entry.token_id,
            entry.logprob,
        )  # greedy draws the best
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True) and values[0] <= 0


def test_seeds_repeat_whatever_else_is_in_the_batch(engine):
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=17)
    alone = engine.generate("The owl", sampling).token_ids
    others = [
        engine.submit(prompt, sampling=SamplingParams(temperature=1.0, seed=i))
        for i, prompt in enumerate(PROMPTS[:3])
    ]
    beside = engine.generate("The owl", sampling).token_ids
    for other in others:
        other.cancel()
    assert beside == alone
    assert (
        engine.generate("The owl", SamplingParams(max_tokens=20, temperature=1.0, seed=18)).token_ids != alone
    )


def test_min_tokens_and_bias_reach_the_device(engine):
    forced = SamplingParams(max_tokens=10, temperature=0, logit_bias={256: 100.0})
    assert engine.generate("abc", forced).token_ids == (256,)
    held = SamplingParams(max_tokens=10, min_tokens=4, temperature=0, logit_bias={256: 100.0})
    tokens = engine.generate("abc", held).token_ids
    assert 256 not in tokens[:4] and tokens[4:] == (256,)


def test_mixed_loads_compile_nothing_after_warm_up(engine):
    # issue 2 item 5
    results = []

    def client(seed):
        for i in range(3):
            results.append(
                engine.generate(PROMPTS[(seed + i) % 5], SamplingParams(max_tokens=5 + seed, logprobs=i))
            )

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(results) == 12
    assert engine._parts.program._executor.compilations_after_warmup == 0
    stats = engine.stats()
    assert (stats["outstanding"], stats["faults"]) == (0, 0)
    engine.clear_cache()
    assert {axis: used for axis, used in engine.stats()["occupancy"].items() if used} == {}


def test_describe_and_the_plan_agree_on_memory(engine, tiny_checkpoint):
    planned = plan_memory(
        tiny_checkpoint, load_format="dummy", max_context=256, prefill_chunk=64, max_concurrency=3
    )
    planned_bytes = {name: axis["planned_bytes"] for name, axis in planned["axes"].items()}
    allocated = engine._parts.program.memory_table().as_dict()["axes"]
    for name, axis in allocated.items():
        if axis["allocated_bytes"] is not None:
            assert axis["allocated_bytes"] == pytest.approx(planned_bytes[name], rel=0.01)  # issue 2 item 5
    assert "main_pages" in engine.describe() and "12 " in engine.describe()


def test_closing_frees_the_device(tiny_checkpoint):
    gc.collect()
    before = sum(array.nbytes for array in jax.live_arrays())
    with Engine.from_pretrained(
        tiny_checkpoint, load_format="dummy", max_context=64, prefill_chunk=64, max_concurrency=1
    ) as engine:
        assert sum(array.nbytes for array in jax.live_arrays()) > before
        assert engine.generate("abc", greedy(3)).usage.completion_tokens == 3
    gc.collect()
    assert sum(array.nbytes for array in jax.live_arrays()) <= before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_context": 8192}, r"max_context: got 8192, expected at most 4096, the model's own limit"),
        ({"device": "tpu:9"}, r"device: got 'tpu:9'"),
        ({"device": "cpu:9"}, r"device: got 'cpu:9', expected cpu:0\.\.cpu:\d"),
        ({"kv_capacity": 64, "max_context": 128}, r"kv_capacity: got 64 tokens"),
        ({"max_concurrency": 9}, r"max_concurrency: got 9"),
    ],
)
def test_options_are_refused_before_weights_are_read(tiny_checkpoint, changes, message):
    with pytest.raises(OptionError, match=message):  # there are no weights to read: only the options can fail
        Engine.from_pretrained(tiny_checkpoint, **changes)


def test_a_folder_that_is_not_there():
    with pytest.raises(
        OptionError, match=r"model: got '/nowhere', expected a Hugging Face directory, or 'demo'"
    ):
        Engine.from_pretrained("/nowhere")


@pytest.mark.slow
def test_the_embedded_model_chats_streams_and_takes_many_conversations():
    with Engine.from_pretrained("demo", max_context=512, prefill_chunk=128, max_concurrency=2) as engine:
        hello = [{"role": "user", "content": "Hello! How are you today?"}]
        answer = engine.chat(hello, sampling=greedy(12), session="ana")
        assert answer.text and answer.usage.prompt_tokens > 10
        events = list(engine.stream(hello, sampling=greedy(12)))
        assert events[-1].result.text == answer.text
        many = engine.generate([hello] * 25, greedy(4))
        assert {result.token_ids for result in many} == {answer.token_ids[:4]}
