"""``ninfer-jax plan``: explains, verifies and draws a saved decision; one line for anything else."""

import builtins
import json

import pytest

from ninfer_jax.cli.main import main
from ninfer_jax.planner.candidate import Candidate, Disposition, make_request, root_candidate
from ninfer_jax.planner.capacity import make_capacity
from ninfer_jax.planner.cost import GENERIC_GPU
from ninfer_jax.planner.operations import CheckpointSpec, add_owner
from ninfer_jax.planner.outcome import decide
from ninfer_jax.planner.portfolio import make_facts
from ninfer_jax.planner.problem import make_problem
from ninfer_jax.planner.problem_json import PlanInputs, ReplayClock
from ninfer_jax.planner.search_types import Budget
from ninfer_jax.planner.state import make_state


@pytest.fixture(scope="module")
def outcome():
    state = make_state(make_capacity(device_state_slots=4, device_pages=20))
    for tokens in (64 * 8, 64 * 9):
        state, _ = add_owner(state, [CheckpointSpec(tokens)])
    request = make_request(64 * 10, 64)
    candidates = (root_candidate(request), Candidate(1, 0, Disposition.CONSUME, request))
    facts = make_facts(make_problem(state, candidates))
    clock = ReplayClock(tuple(range(0, 10**6, 1000)))
    return decide(PlanInputs(state, candidates, facts, GENERIC_GPU, Budget()), clock)


@pytest.fixture
def file(outcome, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(outcome.to_json())
    return path


def test_it_explains_and_verifies(file, outcome, capsys):
    assert main(["plan", str(file), "--verify"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(outcome.explain()) and "bit for bit" in out


def test_a_decision_that_no_longer_holds_exits_with_1(outcome, tmp_path, capsys):
    from dataclasses import replace

    wrong = replace(outcome, decision=replace(outcome.decision, plan_id="another"))
    path = tmp_path / "wrong.json"
    path.write_text(wrong.to_json())
    assert main(["plan", str(path)]) == 0
    assert main(["plan", str(path), "--verify"]) == 1
    assert "DIFFERS   decision.plan_id" in capsys.readouterr().out
    assert main(["plan", str(path), "--verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verified"] is False


def test_json_is_the_decision(file, outcome, capsys):
    assert main(["plan", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["decision"]["plan_id"] == outcome.decision.plan_id


@pytest.mark.parametrize("content", [b"", b"\xff", b"{}", b'{"artifact_type": "ninfer-jax-plan"}'])
def test_a_foreign_file_is_one_line_and_exit_code_2(content, tmp_path, capsys):
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    assert main(["plan", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "plan file" in err


def test_a_missing_file_is_exit_code_2(tmp_path, capsys):
    assert main(["plan", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_it_draws(file, tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    assert main(["plan", str(file), "--png", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_picture_is_one_clear_error(file, tmp_path, capsys, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["plan", str(file), "--png", str(tmp_path / "plan.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
