"""The arithmetic and geometries of the bench, with sides that only pretend; speed is measured elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer_jax.cli import bench_model
from ninfer_jax.cli.bench_model import run_bench_model, take_turns, warm_up
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


PRETEND_JOBS: dict[tuple[str, int], Any] = {
    ("prefill", 9): lambda side: side.prefill_s(np.zeros(9, np.int32)),
    ("prefill", 4): lambda side: side.prefill_s(np.zeros(4, np.int32)),
    ("decode", 2): lambda side: side.decode_s(np.zeros((2, 4)), 5),
}


def pretend_sides(log: list[str]) -> list[PretendSide]:
    return [PretendSide("ours", 1.0, log), PretendSide("theirs", 3.0, log)]


def test_sides_alternate_within_a_job() -> None:
    log: list[str] = []
    seconds = take_turns(PRETEND_JOBS, pretend_sides(log), 2, budget_s=1.0)
    first, second, third = (
        [f"{side} {what}" for side in ("ours", "theirs")] for what in ("prefill 9", "prefill 4", "decode 2x5")
    )
    assert log == first * 2 + second * 2 + third * 2
    np.testing.assert_array_equal(seconds["prefill", 4], [[1.0, 3.0]] * 2)


@pytest.mark.parametrize(("seconds_a_turn", "turns"), [(0.1, 6), (2.5, 4), (5.0, 3), (1000.0, 3)])
def test_a_slow_job_takes_fewer_turns_but_never_too_few(seconds_a_turn: float, turns: int) -> None:
    now_s = 0.0

    def job(side: Any) -> float:
        nonlocal now_s
        now_s += seconds_a_turn
        return seconds_a_turn

    side = PretendSide("ours", 0, [])
    seconds = take_turns({("prefill", 4): job}, [side], 6, budget_s=10.0, clock=lambda: now_s)
    assert len(seconds["prefill", 4]) == turns


def test_the_warm_up_runs_the_smallest_job_of_each_kind() -> None:
    log: list[str] = []
    warm_up(PRETEND_JOBS, pretend_sides(log))
    assert log == ["ours prefill 4", "theirs prefill 4", "ours decode 2x5", "theirs decode 2x5"]


def test_speeds_are_of_the_best_turn_and_ratios_medians() -> None:
    log: list[str] = []
    sides = [PretendSide("ninfer_jax", 0, log), PretendSide("transformers", 0, log)]
    report: dict[str, Any] = {"prefill": {}, "decode": {}, "ratio_to_transformers": {}}
    seconds = {("decode", 4): np.array([[2.0, 2.0], [1.0, 6.0], [4.0, 12.0]])}
    bench_model._write(report, "shape", seconds, {("decode", 4): 100}, sides)
    assert report["decode"] == {"shape": {"4": {"ninfer_jax": 100.0, "transformers": 50.0}}}
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
