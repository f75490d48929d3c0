"""Loads the test helpers of this folder: under importlib mode a test file cannot import its neighbours."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def worlds() -> ModuleType:
    """The module `world`: a program over real planner states, and a manager driven against it."""
    name = "ninfer_tests_context_cache_world"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("world.py"))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
