"""The program's handles are opaque to the manager: no file of it looks into a round, a target or a plan."""

from __future__ import annotations

import ast

INSIDES = {
    "state",
    "holdings",
    "sources",
    "entries",
    "objects",
    "options",
    "tables",
    "checkpoints",
    "templates",
}
ROUNDS = {"problem", "target", "targets"}
HANDS_THEM_ON = {"explain.py"}  # to the planner's own explanation


def test_no_file_looks_inside_a_round(project_root):  # D-2, D-5
    offences = []
    for path in sorted((project_root / "ninfer_jax" / "context_cache").glob("*.py")):
        if path.name in HANDS_THEM_ON:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute):
                continue
            holder = node.value
            name = holder.id if isinstance(holder, ast.Name) else getattr(holder, "attr", "")
            if (name in ROUNDS and node.attr in INSIDES | {"codes"}) or node.attr == "steps":
                offences.append(f"{path.name}:{node.lineno} reads {name}.{node.attr}")
    assert offences == []
