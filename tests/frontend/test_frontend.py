"""The files around the weights: what is read, what may be missing, and what is said then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ninfer_jax.errors import OptionError, PromptError
from ninfer_jax.frontend import Frontend
from ninfer_jax.frontend.generation_config import make_generation_config


def test_a_qwen_directory(frontend):
    assert frontend.allowed_vocab_size == 248077  # facts 8.1
    assert frontend.eos_token_ids == {248044, 248046}  # facts 8.2: stop on both
    assert frontend.generation_defaults == {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "do_sample": True}
    assert frontend.decode([9419, 11, 1814, 0, 248046]) == "Hello, world!"
    assert frontend.decode([9419, 248046], skip_special_tokens=False) == "Hello<|im_end|>"


def test_a_checkpoint_without_tokenizer_takes_and_gives_ids(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    frontend = Frontend.from_directory(tmp_path, vocab_size=50)
    assert frontend.allowed_vocab_size == 50
    assert frontend.eos_token_ids == {2}
    prepared = frontend.prepare_tokens([1, 49])
    preview = frontend.open_output(prepared, max_tokens=4).preview([7, 2, 3])
    assert (preview.accepted, preview.finish_reason, preview.stop_detail) == (2, "stop", 2)
    assert preview.deltas == () and preview.next.finish() == ()
    with pytest.raises(
        PromptError, match=r"has no tokenizer\.json, so it takes and gives token ids only, not text"
    ):
        frontend.prepare_text("hi")
    with pytest.raises(PromptError, match="token ids only, not messages"):
        frontend.prepare_messages([{"role": "user", "content": "hi"}])
    with pytest.raises(PromptError, match="token ids only, not text"):
        frontend.decode([1])
    with pytest.raises(OptionError, match="stop strings need a tokenizer"):
        frontend.open_output(prepared, max_tokens=4, stop="x")


def test_a_tokenizer_without_template_takes_text(tiny, tmp_path):
    tiny._tokenizer.save(str(tmp_path / "tokenizer.json"))
    frontend = Frontend.from_directory(tmp_path, vocab_size=512)
    assert frontend.allowed_vocab_size == tiny.vocab_size < 512
    assert frontend.eos_token_ids == frozenset() and frontend.generation_defaults == {}
    assert frontend.prepare_text("hi").identity.tokens.tolist() == [ord("h"), ord("i")]
    with pytest.raises(PromptError, match="has no chat template"):
        frontend.prepare_messages([{"role": "user", "content": "hi"}])


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(OptionError, match="is not a directory"):
        Frontend.from_directory(tmp_path / "nowhere", vocab_size=8)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(OptionError, match=r"generation_config\.json is not readable JSON"):
        Frontend.from_directory(tmp_path, vocab_size=8)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(OptionError, match="must hold a JSON object, got list"):
        Frontend.from_directory(tmp_path, vocab_size=8)


@pytest.mark.parametrize(
    ("generation", "model", "tokenizer_eos", "expected"),
    [
        ({"eos_token_id": [7, 5]}, {}, None, {5, 7}),
        ({"eos_token_id": 7}, {"text_config": {"eos_token_id": 5}}, 6, {5, 6, 7}),
        ({}, {"eos_token_id": [4]}, None, {4}),
        ({"eos_token_id": None}, {"eos_token_id": 99, "text_config": None}, None, set()),  # no row 99
        ({"eos_token_id": [True, "x", -1]}, {}, None, set()),
    ],
)
def test_every_source_of_end_tokens_counts(generation, model, tokenizer_eos, expected):
    config = make_generation_config(
        generation=generation, model=model, tokenizer_eos=tokenizer_eos, vocab_size=10
    )
    assert config.eos_token_ids == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "min_p": None, "pad_token_id": 1},
            {"temperature": 0.6, "do_sample": True},
        ),
        ({"do_sample": False, "temperature": 0.6}, {}),
        ({"temperature": 0.6}, {}),
    ],
)
def test_recommended_sampling_needs_do_sample(raw, expected):
    assert (
        make_generation_config(generation=raw, model={}, tokenizer_eos=None, vocab_size=10).defaults
        == expected
    )


def test_the_demo_template_is_valid_for_a_directory_of_its_own(qwen_directory):
    text = (Path(__file__).resolve().parents[2] / "ninfer_jax/assets/demo/chat_template.jinja").read_text()
    assert (qwen_directory / "chat_template.jinja").read_text() == text


@pytest.mark.parametrize("wrong", [[1], "abc", {1: 2}])
def test_template_kwargs_must_be_named_values(frontend, wrong):
    with pytest.raises(OptionError, match="template_kwargs"):
        frontend.prepare_messages([{"role": "user", "content": "a"}], template_kwargs=wrong)


def test_settings_nested_without_end_are_named(tmp_path):
    (tmp_path / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(OptionError, match=r"generation_config\.json is not readable JSON"):
        Frontend.from_directory(tmp_path, vocab_size=10)
