"""tools/calibrate_costs.py: its fits find known coefficients, and a quick run writes a valid preset."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from ninfer_jax.cli.bench_shapes import SHAPES, hf_config
from ninfer_jax.planner.cost import CostSource, parse_presets, resolve_cost_model
from ninfer_jax.planner.work import attention_pairs


@pytest.fixture(scope="module")
def tool():
    path = Path(__file__).resolve().parents[2] / "tools" / "calibrate_costs.py"
    spec = importlib.util.spec_from_file_location("ninfer_tests_calibrate_costs", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_transfer_fit_finds_both_branches(tool):
    rng = np.random.default_rng(0)
    count, size = np.meshgrid([1, 2, 4, 8, 16], [4e3, 4e4, 1e6, 16e6])
    count, num_bytes = count.ravel(), (count * size).ravel()
    ns = np.maximum(50_000 + 7_000 * count, num_bytes * 0.04) * rng.uniform(0.98, 1.02, count.size)
    fit = tool.fit_transfer(np.stack([count, num_bytes, ns], 1))
    # 2 % noise on 20 samples: the coefficients come back within a few percent
    assert np.allclose(fit.coefficients, (50_000, 7_000, 0.04), rtol=0.06)
    assert fit.median_error < 0.02


def test_the_prefill_fit_separates_chunk_token_and_pair(tool):
    rows = []
    for tokens in (64, 256, 1024):
        for start in (0, 1024, 4096):
            pairs = attention_pairs(start, tokens)
            rows.append((tokens, pairs, 2e6 + 3e4 * tokens + 11.0 * pairs))
    fit = tool.fit_prefill(np.asarray(rows))
    assert np.allclose(fit.coefficients, (2e6, 3e4, 11.0), rtol=1e-6)  # exact data


def test_noise_never_gives_a_negative_price(tool):
    features = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    falling = tool.non_negative(features, np.array([9.0, 8.0, 7.0]))
    assert (falling >= 0).all() and falling[1] == 0
    assert 7 <= falling[0] <= 9


@pytest.mark.slow  # compiles a prefill program for two chunk sizes
def test_a_quick_run_writes_a_preset_that_the_cost_model_takes(tool, tmp_path, capsys):
    config = hf_config(SHAPES["dense-tiny"]) | {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "vocab_size": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "costs.json"
    words = ["--model", str(tmp_path), "--dummy", "--quick", "--repeats", "1", "--output", str(out)]
    assert tool.main(words) == 0
    presets = parse_presets(out.read_text())
    machine = presets.machines[0]
    (signature, _), *_ = machine.prefill
    model = resolve_cost_model(
        platform="cpu", hardware=machine.hardware_class, signature=signature, presets=presets
    )
    assert (model.transfer_source, model.prefill_source) == (CostSource.EXTERNAL, CostSource.EXTERNAL)
    assert "median_error_percent" in capsys.readouterr().err
