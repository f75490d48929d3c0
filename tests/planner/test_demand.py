"""Demand window and shared credit as values (O-4, O-8, E-1)."""

import doctest

from ninfer_jax.planner import demand
from ninfer_jax.planner.demand import (
    WINDOW,
    Demand,
    Portfolio,
    commit_demand,
    grant_credit,
    match_matrix,
    num_domains,
    with_provisional,
    without_owner,
)


def asks(*keys, domain="d"):
    return Demand(domain, frozenset(keys))


def after(portfolio, n):
    for i in range(n):
        portfolio = commit_demand(portfolio, asks(domain=i))
    return portfolio


def test_val_01_window_of_32():
    portfolio = commit_demand(Portfolio(), asks("k"))
    assert match_matrix(after(portfolio, 31), ["k"]).sum() == 1
    assert match_matrix(after(portfolio, 32), ["k"]).sum() == 0
    assert len(after(portfolio, 100).demands) == WINDOW


def test_val_05_credit_ends_at_the_first_exact_match():
    portfolio = grant_credit(Portfolio(), "S", ["s"])
    assert len(commit_demand(portfolio, asks("other")).credits) == 1
    assert commit_demand(portfolio, asks("s")).credits == ()
    creatable = Demand("d", creatable=frozenset(["s"]))  # wanting to create it is no match
    assert len(commit_demand(portfolio, creatable).credits) == 1


def test_val_07_credit_expires_after_32_commits():
    portfolio = grant_credit(Portfolio(), "S", ["s"])
    assert len(after(portfolio, 31).credits) == 1
    assert after(portfolio, 32).credits == ()


def test_val_08_declared_flags_give_one_credit():
    once = grant_credit(Portfolio(), "S", ["s"])
    assert grant_credit(once, "S", ["s"]) == once
    assert without_owner(once, "S").credits == ()


def test_val_16_planning_and_aborting_leave_the_window_alone():
    portfolio = after(grant_credit(Portfolio(), "S", ["s"]), 3)
    view = with_provisional(portfolio, asks("s"))
    assert len(view.demands) == 4
    assert view.credits == portfolio.credits  # consumed only by a commit
    assert len(portfolio.demands) == 3


def test_provisional_record_displaces_the_oldest_when_full():
    full = after(commit_demand(Portfolio(), asks("old")), 31)
    view = with_provisional(full, asks("new"))
    assert len(view.demands) == WINDOW
    assert match_matrix(view, ["old", "new"]).sum(1).tolist() == [0, 1]


def test_cand_15_two_stateless_requests_are_two_domains():
    portfolio = commit_demand(Portfolio(), asks("k", domain=1))
    assert num_domains(commit_demand(portfolio, asks("k", domain=1)), "k") == 1
    assert num_domains(commit_demand(portfolio, asks("k", domain=2)), "k") == 2
    creatable = Demand(3, creatable=frozenset(["k"]))
    assert num_domains(with_provisional(portfolio, creatable), "k") == 2


def test_match_matrix_ignores_checkpoints_without_a_key():
    portfolio = commit_demand(Portfolio(), asks("a", "b"))
    assert match_matrix(portfolio, ["a", None, "c", "b", "a"])[:, 0].tolist() == [
        True,
        False,
        False,
        True,
        True,
    ]


def test_doctests():
    assert doctest.testmod(demand).failed == 0
