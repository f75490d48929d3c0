"""The embedded checkpoint is complete, loads through the product, and is as good as its README says.

Expectations are in tests/data/demo/held_out.json (tools/demo_excerpt.py). The training tools run once, tiny.
"""

import json
import math
import random
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from ninfer_jax.frontend.frontend import Frontend
from ninfer_jax.model import load_model
from ninfer_jax.model.config import load_config
from ninfer_jax.model.loader import parameters_of
from ninfer_jax.model.transformer import sequence_logits

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "ninfer_jax" / "assets" / "demo"
EXPECTED = json.loads((ROOT / "tests" / "data" / "demo" / "held_out.json").read_text(encoding="utf-8"))
ROW_TOKENS = 512


@pytest.fixture(scope="module")
def frontend():
    return Frontend.from_directory(ASSETS, vocab_size=load_config(ASSETS).vocab_size)


@pytest.fixture(scope="module")
def logits_of():
    """Logits f32[S, V] of a token sequence, by one compiled pass over a padded row."""
    model = load_model(ASSETS, dtype="float32")
    run = jax.jit(lambda leaves, tokens: sequence_logits(model.module(leaves), tokens))

    def logits(tokens) -> np.ndarray:
        padded = np.zeros((1, ROW_TOKENS), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(run(model.leaves, padded))[0, : len(tokens)]

    return logits


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def test_folder_is_complete_and_small():
    names = {path.name for path in ASSETS.iterdir()}
    assert names >= {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) < 8_000_000


def test_geometry_exercises_what_real_checkpoints_have():
    config = load_config(ASSETS)
    assert (len(config.linear_layers), len(config.full_layers)) == (6, 2)
    assert config.num_attention_heads > config.num_key_value_heads
    assert config.linear_num_value_heads > config.linear_num_key_heads
    assert config.tie_word_embeddings
    assert config.vocab_size <= 1024


def test_weights_have_the_dtypes_of_released_checkpoints():
    from safetensors import safe_open

    with safe_open(ASSETS / "model.safetensors", framework="numpy") as file:
        wide = {name for name in file.keys() if file.get_slice(name).get_dtype() == "F32"}
        narrow = {name for name in file.keys() if file.get_slice(name).get_dtype() == "BF16"}
        count = sum(math.prod(file.get_slice(name).get_shape()) for name in wide | narrow)
    assert {name.split("linear_attn.")[1] for name in wide} == {"A_log", "norm.weight"}
    assert len(wide) == 2 * 6
    assert 2_500_000 < count < 3_500_000


def test_markup_tokens_are_single_ids_and_both_ends_stop(frontend):
    def ids(text):
        return list(frontend.prepare_text(text).identity.tokens)

    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    marks += ["<tool_response>", "</tool_response>", "<think>", "</think>"]
    assert [len(ids(mark)) for mark in marks] == [1] * len(marks)
    assert frontend.eos_token_ids == {ids("<|im_end|>")[0], ids("<|endoftext|>")[0]}
    assert frontend.allowed_vocab_size == load_config(ASSETS).vocab_size


@pytest.mark.parametrize(
    "text", ["Tell me a story.", "naïve café", "日本語 🙂", "a\r\n\tb  c\n\n", "1234567"]
)
def test_every_text_survives_the_tokenizer(frontend, text):
    tokens = list(frontend.prepare_text(text).identity.tokens)
    assert frontend.decode(tokens) == text


@pytest.mark.parametrize("sample", EXPECTED["samples"], ids=lambda sample: sample["source"])
def test_held_out_text_has_the_reported_loss(tools, logits_of, sample):
    import demo_packing

    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    piece = demo_packing.tokenize(sample["text"], tokenizer)
    logits = logits_of(piece.tokens)
    counted = np.flatnonzero(piece.weights == 1.0)
    log_probs = logits[counted - 1] - np.logaddexp.reduce(logits[counted - 1], axis=-1, keepdims=True)
    nats = -np.mean(log_probs[np.arange(len(counted)), piece.tokens[counted]])
    assert len(counted) == sample["num_answer_tokens"]
    # float32 rounding moves a mean of a hundred losses by about 1e-5; a wrong layer or layout by whole nats.
    assert nats == pytest.approx(sample["nats_per_token"], abs=1e-3)


def test_model_predicts_better_than_letter_frequencies(logits_of):
    # A uniform guess costs log(1024) = 6.9 nats and the best guess without context about 5.6.
    mean = np.mean([sample["nats_per_token"] for sample in EXPECTED["samples"]])
    assert mean < 4.5


def test_greedy_answer_is_the_recorded_one(frontend, logits_of):
    expected = EXPECTED["greedy"]
    prepared = frontend.prepare_messages([{"role": "user", "content": expected["question"]}])
    tokens = list(prepared.identity.tokens)
    start = len(tokens)
    for _ in expected["answer_tokens"]:
        tokens.append(int(np.argmax(logits_of(tokens)[-1])))
    assert tokens[start:] == expected["answer_tokens"]
    assert frontend.decode(tokens[start:]) == expected["answer"]


@pytest.mark.slow
def test_transformers_loads_it_and_agrees(logits_of):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(ASSETS)
    tokens = tokenizer.encode(EXPECTED["samples"][0]["text"])
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    # Tied heads: see section 10 of the facts for 5e-4 between two float32 implementations.
    np.testing.assert_allclose(logits_of(tokens), theirs, atol=5e-4, rtol=0)


class TestTrainingData:
    def test_training_text_continues_the_prompt_that_serving_renders(self, tools, frontend):
        import demo_corpus

        render = demo_corpus.make_renderer((ASSETS / "chat_template.jinja").read_text(encoding="utf-8"))
        turns = (
            demo_corpus.Turn("Hello", "Hi."),
            demo_corpus.Turn("Tell me a story.", "Once there was a fox."),
        )
        text = render(demo_corpus.Conversation("grimm", turns, system="You tell tales."))
        messages = [
            {"role": "system", "content": "You tell tales."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi."},
            {"role": "user", "content": "Tell me a story."},
        ]
        prompt = frontend.decode(
            list(frontend.prepare_messages(messages).identity.tokens), skip_special_tokens=False
        )
        assert text == prompt + "Once there was a fox.<|im_end|>\n"

    def test_loss_counts_answers_and_written_thoughts_only(self, tools):
        import demo_corpus
        import demo_packing

        tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
        render = demo_corpus.make_renderer((ASSETS / "chat_template.jinja").read_text(encoding="utf-8"))
        turns = (demo_corpus.Turn("Hello", "Hi."), demo_corpus.Turn("Go on.", "The end."))

        def counted(thought):
            piece = demo_packing.tokenize(
                render(demo_corpus.Conversation("grimm", turns, thought=thought)), tokenizer
            )
            return tokenizer.decode(piece.tokens[piece.weights == 1.0].tolist(), skip_special_tokens=False)

        assert counted("") == "Hi.<|im_end|>The end.<|im_end|>"
        assert counted("A tale.") == "Hi.<|im_end|>A tale.\n</think>\n\nThe end.<|im_end|>"

    def test_stream_is_reproducible_and_keeps_the_mixture(self, tools, corpora):
        import demo_corpus
        import demo_packing

        train, _ = demo_corpus.read_corpora(corpora)
        tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
        render = demo_corpus.make_renderer((ASSETS / "chat_template.jinja").read_text(encoding="utf-8"))

        def batches(count):
            stream = demo_packing.TokenStream(3)
            rows = [stream.next_batch(train, render, tokenizer, 4, 128) for _ in range(count)]
            return np.concatenate([batch.tokens for batch in rows]), stream.drawn_tokens

        tokens, drawn = batches(8)
        np.testing.assert_array_equal(tokens, batches(8)[0])
        shares = {source: drawn[source] / sum(drawn.values()) for source in drawn}
        # A source is at most one conversation, some hundred of four thousand tokens, away from its share.
        assert shares == pytest.approx(demo_packing.MIXTURE, abs=0.08)


@pytest.fixture
def corpora(tmp_path):
    """Six small corpora in the formats of the real ones."""
    folder = tmp_path / "corpora"
    folder.mkdir()
    rng = random.Random(0)
    words = "the king went to a wood and saw an old fox who said go home my son".split()

    def sentence():
        return " ".join(rng.choices(words, k=8)).capitalize() + "."

    tale = "\n".join(f"THE TALE OF {i}ABC\n" + "\n".join(sentence() for _ in range(12)) for i in range(8))
    speeches = "\n\n".join(f"KING {i}:\n{sentence()}" for i in range(60))
    dialogues = "\n\n".join(
        f"user: {sentence()}\nassistant: {sentence()}\nuser: {sentence()}\nassistant: {sentence()}"
        for _ in range(40)
    )
    for source in ("grimm", "little_women"):
        (folder / f"{source}.txt").write_text(tale)
    (folder / "tinyshakespeare.txt").write_text(speeches)
    for source in ("airline_chat", "retail_chat", "smalltalk"):
        (folder / f"{source}.txt").write_text(dialogues)
    return folder


def test_missing_corpus_is_named(tools, tmp_path):
    import demo_corpus

    with pytest.raises(FileNotFoundError, match=r"grimm\.txt is missing"):
        demo_corpus.read_corpora(tmp_path)


def test_learning_rate_rises_stays_and_decays_to_zero(tools):
    import demo_optimizer

    rates = [demo_optimizer.rate_at(step, 200, 50, peak=1.0) for step in range(201)]
    assert rates[0] == pytest.approx(1 / demo_optimizer.WARM_UP_STEPS)
    assert rates[100] == rates[150] == 1.0
    assert rates[175] == pytest.approx(0.5)
    assert rates[200] == 0.0


TINY_GEOMETRY = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
# Long enough for the whole first turn of every source: a text whose answers are cut off has no loss.
TINY_SIZE = {"decay_steps": 1, "rows": 2, "row_tokens": 256, "checkpoint_steps": 1, "held_out_texts": 2}


@pytest.fixture
def setting(tools, corpora):
    import train_demo

    template = (ASSETS / "chat_template.jinja").read_text(encoding="utf-8")
    return train_demo.make_setting(corpora, template, TINY_GEOMETRY, vocab_size=300)


def test_trainer_takes_steps_and_writes_a_loadable_checkpoint(tools, setting, tmp_path):
    import train_demo

    records = []
    size = train_demo.RunSize(num_steps=2, held_out_steps=2, **TINY_SIZE)
    params = train_demo.train(setting, size, tmp_path, 0, records.append)

    assert [record["step"] for record in records] == [1, 2]
    assert records[-1]["held_out"].keys() == setting.held_out.keys()
    # Untrained: all losses near the entropy of a uniform guess over 300 symbols, 5.7 nats.
    assert all(4.5 < record["loss"] < 8.0 for record in records)
    rounded = train_demo.export(setting, params, tmp_path / "out")
    loaded = load_model(tmp_path / "out", dtype="float32")
    for path, value in parameters_of(loaded.module()).items():
        np.testing.assert_array_equal(value, rounded[path], err_msg=path)


@pytest.mark.slow
def test_interrupted_run_ends_with_the_parameters_of_an_uninterrupted_one(tools, setting, tmp_path):
    import train_demo

    def run(name, *ends):
        (tmp_path / name).mkdir()
        for end in ends:
            # The schedule before the decay does not depend on the end: both runs have the same rates.
            size = train_demo.RunSize(num_steps=end, held_out_steps=99, **TINY_SIZE)
            params = train_demo.train(setting, size, tmp_path / name, 0, lambda _: None)
        return params

    whole, halves = run("whole", 3), run("halves", 1, 3)
    for path, value in whole.items():
        np.testing.assert_array_equal(halves[path], value, err_msg=path)
