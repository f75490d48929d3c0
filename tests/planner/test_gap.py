"""The gap tool itself, on few problems: the search reaches the exhaustive optimum."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "planner_gap.py"


@pytest.fixture(scope="module")
def gap():
    spec = importlib.util.spec_from_file_location("ninfer_tools_planner_gap", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_report_over_few_problems(gap):
    report = gap.measure(10, seed=3)
    assert list(report) == [
        "problems", "optimal_share", "worst_ratio", "mean_ratio", "infeasible_missed", "p50_ms", "p99_ms",
    ]  # fmt: skip
    assert report["problems"] == 10
    assert report["infeasible_missed"] == 0
    assert report["worst_ratio"] <= 1.05


def test_problems_are_repeatable_and_varied(gap):
    cases = [gap.random_case(i) for i in range(25)]
    again = [gap.random_case(i) for i in range(25)]
    assert [gap.num_targets(c.problem, None) for c in cases] == [
        gap.num_targets(c.problem, None) for c in again
    ]
    assert {len(c.problem.state.capacity.pools) for c in cases} == {1, 2}
    assert max(c.problem.num_victims for c in cases) == 6
    assert any((c.problem.objects.class_of >= 0).any() for c in cases)
    assert any(c.recency is not None for c in cases)
    assert any(c.adoptable.publishes and not c.adoptable.vacant for c in cases)


def test_a_crippled_search_is_noticed(gap):
    """With no optional targets the incumbent is root maximal or an identity, and the gap shows."""
    cases = [gap.random_case(i) for i in range(16)]
    worse = 0
    for case in cases:
        result = gap.search_case(case, gap.Budget(max_targets=0))
        best = gap.exhaust(case, None if case.recency is None else result.licensed)
        worse += result.best is not None and best is not None and result.best.price_ns > best
    assert worse >= 3


@pytest.mark.slow
def test_three_hundred_problems_from_the_command_line():
    command = [sys.executable, str(TOOL), "--problems", "300", "--seed", "5", "--json"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    report = json.loads(out)
    assert report["infeasible_missed"] == 0
    assert report["optimal_share"] >= 0.99
    assert report["worst_ratio"] <= 1.05
