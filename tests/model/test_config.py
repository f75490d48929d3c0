"""Reading Hugging Face configs: accepted spellings, and errors that name the field."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from ninfer_jax.model import CheckpointError, Qwen35Config, load_config
from ninfer_jax.model.layers import rotary_rows

FLAT = {
    "model_type": "qwen3_5_text",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
}


def test_flat_nested_and_old_rope_names_mean_the_same():
    text = {name: value for name, value in FLAT.items() if name != "rope_parameters"}
    old = {
        **text,
        "rope_scaling": {"type": "mrope", "mrope_section": [11, 11, 10]},
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "some_future_field": {"x": 1},
    }
    nested = {"model_type": "qwen3_5", "text_config": FLAT, "vision_config": {"depth": 3}}
    flat = Qwen35Config.from_hf(FLAT)
    assert Qwen35Config.from_hf(nested) == flat
    assert Qwen35Config.from_hf(old) == flat
    assert flat.rope_theta == 1e7
    assert flat.rotary_dim == 64
    assert flat.full_layers == (3, 7)
    assert flat.linear_layers == (0, 1, 2, 4, 5, 6)


def test_the_rope_dict_wins_over_fields_beside_it():
    config = Qwen35Config.from_hf({**FLAT, "rope_theta": 5.0})
    assert config.rope_theta == 1e7


def test_missing_fields_get_the_transformers_defaults():
    config = Qwen35Config.from_hf({"model_type": "qwen3_5_moe_text"})
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (2048, 40, 2)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.num_experts_per_tok) == (256, 8)
    assert config.intermediate_size is None
    assert config.rope_theta == 10000.0


@pytest.mark.parametrize("where", ["top", "text", "both"])
def test_either_level_can_tie_the_head(where):
    raw = {"model_type": "qwen3_5", "text_config": dict(FLAT)}
    if where != "text":
        raw["tie_word_embeddings"] = True
    if where != "top":
        raw["text_config"]["tie_word_embeddings"] = True
    assert Qwen35Config.from_hf(raw).tie_word_embeddings
    assert not Qwen35Config.from_hf(FLAT).tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, r"model_type is 'llama'.*expected one of qwen3_5_text"),
        ({"hidden_size": 0}, r"hidden_size is 0, expected a positive integer"),
        ({"hidden_size": "big"}, r"hidden_size is 'big', expected a positive integer"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, r"num_attention_heads 6 is not a multiple"),
        (
            {"linear_num_value_heads": 5},
            r"linear_num_value_heads 5 is not a multiple of linear_num_key_heads",
        ),
        ({"layer_types": ["full_attention"]}, r"layer_types has 1 entries for num_hidden_layers 8"),
        ({"layer_types": ["mamba"] * 8}, r"unknown kinds \['mamba'\]"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'"),
        ({"attention_bias": True}, r"attention_bias"),
        ({"head_dim": 128}, r"mrope_section \[11, 11, 10\] adds up to 32, expected half the rotary size 16"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, r"rope_type is 'yarn'"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, r"mrope_section is \[1, 2\], expected three"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised"),
    ],
)
def test_unusable_configs_say_what_and_what_was_expected(change, message):
    with pytest.raises(CheckpointError, match=message):
        Qwen35Config.from_hf({**FLAT, **change})


def test_all_problems_are_reported_at_once():
    with pytest.raises(CheckpointError, match=r"hidden_act.*linear_num_value_heads"):
        Qwen35Config.from_hf({**FLAT, "hidden_act": "relu", "linear_num_value_heads": 5})


def test_missing_or_broken_files_are_one_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_config(tmp_path)


def test_signature_is_stable_across_processes_and_tells_geometries_apart():
    config = Qwen35Config.from_hf(FLAT)
    code = f"from ninfer_jax.model import Qwen35Config; print(Qwen35Config.from_hf({FLAT!r}).signature)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == config.signature
    assert dataclasses.replace(config, rms_norm_eps=1e-5).signature != config.signature
    assert hash(config) == hash(Qwen35Config.from_hf(FLAT))


def test_position_rows_interleave_until_a_section_is_used_up():
    rows = rotary_rows(Qwen35Config.from_hf(FLAT))
    assert rows.tolist() == [0, 1, 2] * 10 + [0, 1]
    assert np.bincount(rows).tolist() == [11, 11, 10]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 2**40),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 10**18),
        ("layer_types", 5),
        ("layer_types", ["linear_attention"] * 8),
        ("rms_norm_eps", "abc"),
        ("rms_norm_eps", -1.0),
        ("rms_norm_eps", [1]),
        ("rope_theta", "x"),
        ("rope_theta", 0),
        ("rope_theta", float("nan")),
        ("partial_rotary_factor", float("inf")),
        ("partial_rotary_factor", [1]),
        ("mrope_section", ["a", 1, 2]),
        ("mrope_section", [-1, 33, 0]),
        ("tie_word_embeddings", "false"),
        ("rope_scaling", {"type": "linear", "factor": 2}),
        ("rope_scaling", [2]),
    ],
)
def test_nonsense_in_a_field_is_one_error_that_names_what_is_wrong(field, value):
    rope = dict(FLAT["rope_parameters"])
    raw = {**FLAT, "rope_parameters": rope}
    (rope if field in rope else raw)[field] = value
    word = {"rope_scaling": "rope_"}.get(field, field)
    with pytest.raises(
        CheckpointError, match="full_attention" if field == "layer_types" and value != 5 else word
    ):
        Qwen35Config.from_hf(raw)


def test_one_linear_layer_alone_is_refused():
    with pytest.raises(CheckpointError, match="no layer is full_attention"):
        Qwen35Config.from_hf({**FLAT, "num_hidden_layers": 1})


def test_json_nested_without_end_is_a_clear_error(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_config(tmp_path)
