"""Loads the planner's test helpers: under importlib mode a test file cannot import its neighbours."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def naive():
    """The set-based oracle and the generators of random legal states."""
    name = "ninfer_tests_planner_naive"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("naive.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
