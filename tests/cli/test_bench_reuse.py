"""The shape of the reuse bench's report at sizes too small to mean anything; speed is measured elsewhere."""

from __future__ import annotations

import json

import pytest

from ninfer_jax.cli import bench_reuse
from ninfer_jax.cli.bench_shapes import BenchShape
from ninfer_jax.cli.main import build_parser, main

# The geometry of the tiny dense reference checkpoint: starts in seconds.
SMALLEST = BenchShape(
    name="smallest",
    config={
        "vocab_size": 96,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "tie_word_embeddings": False,
        "rope_parameters": {"mrope_section": [1, 1, 0], "rope_theta": 50_000.0},
    },
)


def test_every_kind_starts_from_where_it_says(capsys, monkeypatch):
    monkeypatch.setattr(bench_reuse, "SHAPES", {"smallest": SMALLEST})
    monkeypatch.setattr(bench_reuse, "DEFAULT_SHAPES", ("smallest",))
    monkeypatch.setattr(bench_reuse, "ROOM_TOKENS", 256)
    words = "bench reuse --tokens 70 --repeats 1 --prefill-chunk 64 --json"
    assert main(words.split()) == 0
    report = json.loads(capsys.readouterr().out)["smallest"]
    row = report["tokens"]["70"]
    assert set(row) == {"cold", "device", "host", "identical", "restored_bytes"}
    for kind in ("device", "host", "identical"):  # each asked its result where it had started from
        assert row[kind]["ratio_to_cold"] == pytest.approx(
            row[kind]["first_token_s"] / row["cold"]["first_token_s"]
        )
    assert row["restored_bytes"] > 0
    assert report["planning"]["admissions"] >= 5
    assert 0 < report["planning"]["p50_ms"] <= report["planning"]["p99_ms"]
    assert set(report["decode"]) == {
        "plain_ms", "copying_ms", "copying_steps", "ratio", "starting_ms", "offloads"
    }  # fmt: skip
    assert report["compilations_after_warmup"] == 0


def test_defaults_are_the_lengths_and_shapes_of_the_issue():
    args = build_parser().parse_args(["bench", "reuse"])
    assert args.tokens == [256, 1024, 4096]
    assert bench_reuse.DEFAULT_SHAPES == ("dense-tiny", "hidden-512")
