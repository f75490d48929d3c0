"""Loading: every spelling gives the same parameters; errors come before any weight is read."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from ninfer_jax.model import CheckpointError, load_config, load_model, loader, param_bytes, tensor_files
from ninfer_jax.model.loader import export_tensors, load_settled_config, make_random_module, parameters_of
from ninfer_jax.model.weights import CheckpointStyle, detect_style, recipes


@pytest.fixture
def checkpoint(tmp_path, reference_dir):
    """`checkpoint(kind)` copies a small reference checkpoint to a folder that may be changed."""

    def copy(kind):
        target = tmp_path / kind
        shutil.copytree(reference_dir / kind, target)
        return target

    return copy


@pytest.fixture
def no_reads(monkeypatch):
    """Makes reading any weight a failure."""

    def refuse(self, name):
        raise AssertionError(f"read {name} before the checkpoint was known to be usable")

    monkeypatch.setattr(tensor_files.TensorFiles, "read", refuse)


def tensors_of(directory):
    return {
        name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()
    }


def rewrite(directory, tensors, config=None):
    for path in (*directory.glob("*.safetensors"), *directory.glob("*.index.json")):
        path.unlink()
    save_file(tensors, directory / "model.safetensors")
    if config is not None:
        raw = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**raw, **config}))


def assert_same_parameters(first, second):
    assert first.config == second.config
    for a, b in zip(first.leaves, second.leaves, strict=True):
        np.testing.assert_array_equal(a, b)


def test_recipes_cover_exactly_the_parameters(reference_dir):
    for kind in ("dense", "moe", "tied"):
        config = load_config(reference_dir / kind)
        specs = loader.abstract_parameters(config, jnp.dtype(jnp.bfloat16))
        table = {r.path: r for r in recipes(config, CheckpointStyle("model.", True))}
        assert {path: r.shape for path, r in table.items()} == {path: s.shape for path, s in specs.items()}


def test_shards_vision_and_draft_tensors(reference_dir):
    model = load_model(reference_dir / "moe", dtype="float32")
    assert model.skipped_tensors == ("model.visual.pos_embed.weight", "mtp.fc.weight")
    assert model.extra_tensors == ()


def test_prefix_and_expert_styles_load_alike(checkpoint, small_model):
    directory = checkpoint("moe")
    tensors = {}
    for name, value in tensors_of(directory).items():
        prefix, _, leaf = name.replace("model.language_model.", "model.").rpartition(".experts.")
        if leaf == "gate_up_proj":
            for e, both in enumerate(value):
                gate, up = np.split(both, 2)
                tensors[f"{prefix}.experts.{e}.gate_proj.weight"] = np.ascontiguousarray(gate)
                tensors[f"{prefix}.experts.{e}.up_proj.weight"] = np.ascontiguousarray(up)
        elif leaf == "down_proj":
            for e, down in enumerate(value):
                tensors[f"{prefix}.experts.{e}.down_proj.weight"] = np.ascontiguousarray(down)
        else:
            tensors[name.replace("model.language_model.", "model.")] = value
    rewrite(directory, tensors)
    assert detect_style(tensors) == CheckpointStyle("model.", fused_experts=False)
    assert_same_parameters(load_model(directory, dtype="float32"), small_model("moe"))


@pytest.mark.parametrize("kind", ["dense", "moe", "tied"])
def test_export_is_the_inverse_of_loading(kind, small_model, reference_dir):
    stored = tensors_of(reference_dir / kind)
    exported = export_tensors(small_model(kind).module(), detect_style(stored))
    used = {name: value for name, value in stored.items() if not name.startswith(("model.visual.", "mtp."))}
    assert set(exported) == set(used)
    for name, value in used.items():
        np.testing.assert_array_equal(exported[name], value.astype(np.float32), err_msg=name)


def test_a_head_beside_a_tied_flag_is_used(checkpoint):
    directory = checkpoint("tied")
    tensors = tensors_of(directory)
    tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]
    rewrite(directory, tensors)
    model = load_model(directory, dtype="float32")
    assert not model.config.tie_word_embeddings
    parameters = parameters_of(model.module())
    np.testing.assert_array_equal(parameters["head"], -parameters["embedding"])
    assert load_settled_config(directory) == model.config


@pytest.mark.parametrize("kind", ["dense", "moe", "tied"])
def test_the_settled_config_is_the_loaded_one(kind, small_model, reference_dir):
    assert load_settled_config(reference_dir / kind) == small_model(kind).config


def test_without_weights_or_with_dummy_ones_the_config_is_taken_at_its_word(checkpoint, no_reads):
    directory = checkpoint("tied")
    tensors = tensors_of(directory)
    rewrite(directory, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert load_settled_config(directory, load_format="dummy").tie_word_embeddings
    assert not load_settled_config(directory).tie_word_embeddings
    (directory / "model.safetensors").unlink()
    assert load_settled_config(directory).tie_word_embeddings


def test_missing_tensors_are_named_before_any_is_read(checkpoint, no_reads):
    directory = checkpoint("dense")
    tensors = tensors_of(directory)
    del tensors["lm_head.weight"], tensors["model.layers.2.linear_attn.A_log"]
    rewrite(directory, tensors)
    with pytest.raises(
        CheckpointError, match=r"2 tensors are missing: .*layers\.2\.linear_attn\.A_log, lm_head\.weight"
    ):
        load_model(directory)


def test_shapes_that_contradict_the_config_are_named_before_any_is_read(checkpoint, no_reads):
    directory = checkpoint("dense")
    rewrite(directory, tensors_of(directory), config={"intermediate_size": 41})
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight is \[40, 24\], expected \[41, 24\]"):
        load_model(directory)


def test_unknown_tensors_are_listed_and_harmless(checkpoint, small_model):
    directory = checkpoint("dense")
    tensors = {**tensors_of(directory), "model.layers.0.strange.weight": np.zeros(3, np.float32)}
    rewrite(directory, tensors)
    model = load_model(directory, dtype="float32")
    assert model.extra_tensors == ("model.layers.0.strange.weight",)
    assert_same_parameters(model, small_model("dense"))


def test_quantised_tensors_are_refused(checkpoint, no_reads):
    directory = checkpoint("dense")
    tensors = tensors_of(directory)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    rewrite(directory, tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is I8, expected one of F32, BF16, F16"):
        load_model(directory)


def test_float16_loads(checkpoint):
    directory = checkpoint("dense")
    rewrite(directory, {name: value.astype(np.float16) for name, value in tensors_of(directory).items()})
    model = load_model(directory, dtype="float32")
    assert all(leaf.dtype == jnp.float32 for leaf in model.leaves)


def test_missing_files_are_one_clear_error(checkpoint):
    directory = checkpoint("moe")
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shards .* missing: model-00002-of-00002\.safetensors"):
        load_model(directory)
    (directory / "model.safetensors.index.json").unlink()
    (directory / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors weights"):
        load_model(directory)
    (directory / "model.safetensors").write_bytes(b"not a header")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        load_model(directory)


def test_foreign_layouts_say_what_was_found():
    with pytest.raises(CheckpointError, match="MLX conversion"):
        detect_style(["language_model.model.layers.0.input_layernorm.weight"])
    with pytest.raises(CheckpointError, match=r"no Qwen3\.5 text weights.*transformer\.h\.0"):
        detect_style(["transformer.h.0.attn.weight"])


def test_parameters_do_not_alias_the_file(checkpoint):
    directory = checkpoint("dense")
    model = load_model(directory, dtype="float32")
    before = [np.array(leaf) for leaf in model.leaves]
    path = directory / "model.safetensors"
    with path.open("r+b") as file:  # in place: a mapped page would show it
        file.seek(-4096, 2)
        file.write(b"\xff" * 4096)
    for leaf, value in zip(model.leaves, before, strict=True):
        np.testing.assert_array_equal(leaf, value)


def test_bfloat16_keeps_the_float32_vectors(reference_dir):
    model = load_model(reference_dir / "tied", dtype="bfloat16")
    stored = tensors_of(reference_dir / "tied")
    for path, value in parameters_of(model.module()).items():
        assert value.dtype == (jnp.float32 if value.ndim == 1 else jnp.bfloat16), path
    a_log = parameters_of(model.module())["layers.0.mixer.a_log"]
    assert stored["model.layers.0.linear_attn.A_log"].dtype == np.float32
    np.testing.assert_array_equal(a_log, stored["model.layers.0.linear_attn.A_log"])
    assert stored["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("kind", ["dense", "moe", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_param_bytes_is_what_loading_allocates(kind, dtype, reference_dir):
    model = load_model(reference_dir / kind, dtype=dtype)
    assert param_bytes(model.config, dtype) == sum(leaf.nbytes for leaf in model.leaves)


def test_dummy_weights_need_only_a_config_and_give_sane_logits(checkpoint):
    directory = checkpoint("dense")
    (directory / "model.safetensors").unlink()
    model = load_model(directory, dtype="float32", load_format="dummy", seed=3)
    again = load_model(directory, dtype="float32", load_format="dummy", seed=3)
    other = load_model(directory, dtype="float32", load_format="dummy", seed=4)
    assert_same_parameters(model, again)
    assert any((a != b).any() for a, b in zip(model.leaves, other.leaves, strict=True))
    logits = model.logits(np.arange(70))  # the length of the reference prompt, compiled anyway
    assert logits.shape == (70, model.config.vocab_size)
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10


def test_real_geometry_counts(reference_dir):
    """The published parameter counts of the text models (spec/qwen3_5_facts 1.6), without allocating them."""
    base = load_config(reference_dir / "tied")
    small = dataclasses.replace(
        base,
        vocab_size=248320,
        hidden_size=1024,
        num_hidden_layers=24,
        layer_types=(("linear_attention",) * 3 + ("full_attention",)) * 6,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        intermediate_size=3584,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    assert param_bytes(small, "float32") == 4 * 752_393_024


def test_bad_arguments_are_named(reference_dir, small_model):
    with pytest.raises(ValueError, match=r"dtype is 'int8', expected"):
        load_model(reference_dir / "dense", dtype="int8")
    with pytest.raises(ValueError, match=r"load_format is 'gguf', expected"):
        load_model(reference_dir / "dense", load_format="gguf")
    model = small_model("dense")
    with pytest.raises(ValueError, match=r"token ids span 0\.\.96, expected 0\.\.95"):
        model.logits([0, 96])
    with pytest.raises(ValueError, match="expected one text"):
        model.logits([])


def test_random_modules_hold_only_parameters(reference_dir):
    module = make_random_module(load_config(reference_dir / "dense"))

    variables = jax.tree.leaves(nnx.state(module), is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert variables
    assert all(type(variable) is nnx.Param for variable in variables)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[" * 100_000,
        "[]",
        '{"weight_map": null}',
        '{"weight_map": ["a"]}',
        '{"weight_map": {"a": 3}}',
        b"\xff",
    ],
)
def test_a_broken_index_is_one_clear_error(checkpoint, index, no_reads):
    directory = checkpoint("dense")
    path = directory / "model.safetensors.index.json"
    path.write_bytes(index if isinstance(index, bytes) else index.encode())
    with pytest.raises(CheckpointError, match=r"index\.json"):
        load_model(directory)


def test_an_index_may_not_name_files_outside_its_directory(checkpoint, no_reads):
    directory = checkpoint("dense")
    outside = directory.parent / "outside.safetensors"
    (directory / "model.safetensors").rename(outside)
    for name in ("../outside.safetensors", str(outside), ""):
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match="same directory"):
            load_model(directory)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_weight_that_is_no_number_is_named(checkpoint, dtype, value):
    directory = checkpoint("dense")
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors_of(directory).items()}
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = value
    rewrite(directory, tensors)
    with pytest.raises(CheckpointError, match=rf"layers\.1\.mlp\.down_proj\.weight is {value} at \[3, 5\]"):
        load_model(directory, dtype="float32")


def test_every_slice_of_a_tensor_is_checked_and_the_largest_numbers_pass():
    size = 2 * tensor_files._CHECKED_ELEMENTS + 3
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        whole = np.full(size, ml_dtypes.finfo(dtype).min, dtype)
        tensor_files.check_finite("w", whole)
        tensor_files.check_finite("w", np.zeros((0, 4), dtype))
        for place in (0, tensor_files._CHECKED_ELEMENTS, size - 1):
            spoilt = whole.copy()
            spoilt[place] = np.nan
            with pytest.raises(CheckpointError, match=rf"w is nan at \[{place}\]"):
                tensor_files.check_finite("w", spoilt)


def test_a_shard_without_what_the_index_promises_is_named_before_any_is_read(checkpoint, no_reads):
    directory = checkpoint("moe")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.layers.9.gone.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"1 tensors .*layers\.9\.gone\.weight in model-00001-of-00002\.safetensors"
    ):
        load_model(directory)


def test_a_stripped_draft_head_is_no_reason_to_refuse(checkpoint, small_model):
    directory = checkpoint("moe")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["mtp.norm.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    assert_same_parameters(load_model(directory, dtype="float32"), small_model("moe"))


def test_the_index_decides_between_two_shards_that_hold_a_tensor(checkpoint, small_model):
    directory = checkpoint("moe")
    first, second = (directory / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    held = load_file(first)
    name = sorted(held)[0]
    save_file({**load_file(second), name: np.zeros_like(held[name])}, second)
    assert_same_parameters(load_model(directory, dtype="float32"), small_model("moe"))
