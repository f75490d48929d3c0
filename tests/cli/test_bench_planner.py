"""``ninfer-jax bench planner``, tiny: the report's shape, a file that `plan` verifies, its mistakes."""

import json

import pytest

from ninfer_jax.cli.main import main

TINY = ["bench", "planner", "--owners", "4", "--checkpoints", "2", "--pages", "60", "--repeats", "2"]
TINY += ["--rounds", "20", "--no-growth"]


def test_the_report_and_its_saved_round(tmp_path, capsys):
    saved = tmp_path / "round.json"
    assert main([*TINY, "--json", "--save", str(saved)]) == 0
    report = json.loads(capsys.readouterr().out)
    size = report["sizes"][0]
    for name in ("tables", "targets_256", "targets_4096", "identity_search", "identity_round"):
        assert 0 < size[name]["p50_ms"] <= size[name]["p99_ms"]
    assert size["pressured_round"]["targets_p50"] > 0
    assert abs(report["memory"]["object_growth"]) < 20  # a round that kept anything would keep 20 of it
    assert main(["plan", str(saved), "--verify"]) == 0


def test_the_report_for_a_person(capsys):
    assert main(TINY) == 0
    out = capsys.readouterr().out
    assert "pressured round" in out and "memory over 20 rounds" in out


@pytest.mark.parametrize("words", [["--owners", "0"], ["--pages", "3"], ["--checkpoints", "31"]])
def test_mistakes_are_one_line(words, capsys):
    assert main([*TINY, *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
