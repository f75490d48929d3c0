"""The arithmetic and geometries of the bench, with sides that only pretend; speed is measured elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_jax.cli import bench_model
from ninfer_jax.cli.bench_model import run_bench_model, take_turns
from ninfer_jax.cli.bench_shapes import SHAPES, hf_config, write_checkpoint
from ninfer_jax.model.config import Qwen35Config, load_config
from ninfer_jax.model.loader import param_bytes


class PretendSide:
    """Takes the given seconds and keeps a log shared with the other side."""

    def __init__(self, name: str, seconds: float, log: list[str]) -> None:
        self.name, self._seconds, self._log = name, seconds, log

    def prefill_s(self, prompt: np.ndarray) -> float:
        self._log.append(f"{self.name} prefill {len(prompt)}")
        return self._seconds

    def decode_s(self, prompts: np.ndarray, num_steps: int) -> float:
        self._log.append(f"{self.name} decode {len(prompts)}x{num_steps}")
        return self._seconds

    def greedy(self, prompt: np.ndarray, num_tokens: int) -> list[int]:
        return [0] * num_tokens

    def close(self) -> None:
        self._log.append(f"{self.name} closed")


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_supported_config(name: str, tmp_path: Path) -> None:
    config = Qwen35Config.from_hf(hf_config(SHAPES[name]))
    assert load_config(write_checkpoint(SHAPES[name], tmp_path, with_weights=False)) == config
    assert config.layer_types[3::4] == ("full_attention",) * (config.num_hidden_layers // 4)


def test_the_large_shape_is_the_released_one() -> None:
    config = Qwen35Config.from_hf(hf_config(SHAPES["0.8b"]))
    assert param_bytes(config, "float32") == 4 * 752_393_024  # facts 1.6, text parameters


def test_sides_alternate_within_a_repetition() -> None:
    log: list[str] = []
    sides = [PretendSide("ours", 1.0, log), PretendSide("theirs", 3.0, log)]
    prompt = np.zeros(4, np.int32)
    jobs: dict[tuple[str, int], Any] = {
        ("prefill", 4): lambda side: side.prefill_s(prompt),
        ("decode", 2): lambda side: side.decode_s(np.zeros((2, 4)), 5),
    }
    seconds = take_turns(jobs, sides, repeats=2)
    turn = ["ours prefill 4", "theirs prefill 4", "ours decode 2x5", "theirs decode 2x5"]
    assert log == turn * 3  # one unmeasured, two measured
    np.testing.assert_array_equal(seconds["prefill", 4], [[1.0, 3.0]] * 2)


def test_speeds_and_ratios_are_medians() -> None:
    log: list[str] = []
    sides = [PretendSide("ninfer_jax", 0, log), PretendSide("transformers", 0, log)]
    report: dict[str, Any] = {"prefill": {}, "decode": {}, "ratio_to_transformers": {}}
    seconds = {("decode", 4): np.array([[1.0, 2.0], [2.0, 6.0], [4.0, 40.0]])}
    bench_model._write(report, "shape", seconds, {("decode", 4): 100}, sides)
    assert report["decode"] == {"shape": {"4": {"ninfer_jax": 50.0, "transformers": 16.7}}}
    assert report["ratio_to_transformers"]["shape"]["decode"] == {"4": 3.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "--repeats: got 0, expected 1 or more"),
        ({"rows": [9]}, r"--rows: got \[9\], expected numbers from 1 to 8"),
        ({"steps": 0}, "--steps: got 0, expected 1 or more"),
        ({"prompt_tokens": [0]}, r"--prompt-tokens: got \[0\], expected 1 or more"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    parser = argparse.ArgumentParser()
    bench_model.add_parser(parser.add_subparsers())
    args = parser.parse_args(["model"])
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(ValueError, match=message):
        run_bench_model(args)
