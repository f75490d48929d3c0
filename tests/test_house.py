"""The walls of the house: who may import whom, what the planner may touch, and what the wheel must hold.

Source: design.md section 1 and the import table of style.md 2.3.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_FOLDERS = {
    "ninfer_jax": ROOT / "ninfer_jax",
    "ninfer_jax.planner": ROOT / "planner",
    "ninfer_jax.model": ROOT / "model",
}
TOP = "ninfer_jax"

# part of the package -> the other parts it may import. A part is the first name below ninfer_jax.
EDGE_VALUES = {"errors", "checks", "options", "request", "identity", "sampling_params"}
MAY_IMPORT = {
    "planner": set(),
    "model": set(),
    "errors": set(),
    "checks": {"errors"},
    "identity": {"errors"},
    "sampling_params": {"errors", "checks"},
    "options": {"errors", "checks"},
    "request": EDGE_VALUES,
    "frontend": EDGE_VALUES,
    "scheduler": EDGE_VALUES,
    "digests": {"identity", "reuse"},
    "reuse": {"request", "planner"},
    "program": EDGE_VALUES | {"model", "planner", "reuse", "digests"},
    "context_cache": EDGE_VALUES | {"planner", "reuse", "digests"},
}
PLANNER_PARTS_OF = {
    "program": {"cost", "portfolio", "search", "shared_capture"},  # the parts it must not see
    "context_cache": {
        "state", "extents", "target", "projection", "stages", "rows", "operations", "post_state",
        "resolution", "holders", "contributions", "needs", "sources", "tables", "outcomes", "identity",
        "option_sizes",
    },
}  # fmt: skip
PLANNER_VALUE_HALF = {
    "allowance", "codec", "cost", "demand", "losses", "outcome", "planning", "portfolio", "problem_json",
    "publication", "recency_ladder", "round_facts", "savings", "search", "search_model", "search_session",
    "search_steps", "search_values", "shared_capture",
}  # fmt: skip
SEARCH_MAY_NOT_SEE = {"portfolio", "demand", "projection", "state", "problem", "resolution", "functions"}
PLANNER_BANNED_MODULES = {
    "time",
    "logging",
    "random",
    "os",
    "pathlib",
    "io",
    "flax",
    "orbax",
    "chex",
    "threading",
}
PLANNER_BANNED_NAMES = {"device_put", "devices", "experimental"}


def source_files() -> list[tuple[str, Path]]:
    """Every module of the package as (dotted name, real path), links followed once."""
    files = []
    for package, folder in PACKAGE_FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            inner = path.relative_to(folder)
            if package == TOP and inner.parts[0] in {"planner", "model"}:
                continue  # the tracked links; their targets are walked under their own names
            parts = list(inner.with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            files.append((".".join([package, *parts]), path))
    return files


def imported_modules(name: str, path: Path) -> set[str]:
    """Dotted names of everything a module imports: relative ones resolved, names from packages included."""
    found: set[str] = set()
    base = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                anchor = base[: len(base) - (node.level - 1)]
                module = ".".join([*anchor, module]) if module else ".".join(anchor)
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def part_of(module: str) -> str | None:
    """The first name below ninfer_jax, or None for outside modules and the package itself."""
    parts = module.split(".")
    return parts[1] if parts[0] == TOP and len(parts) > 1 else None


MODULES = source_files()


@pytest.mark.smoke
def test_the_planner_and_the_model_stand_alone_and_the_shell_points_downwards():
    offences = []
    for name, path in MODULES:
        part = part_of(name)
        if part not in MAY_IMPORT:
            continue  # engine, worker, cli, testing: the composition root and what stands on it
        for module in imported_modules(name, path):
            target = part_of(module)
            if target is None or target == part:
                continue
            if target not in MAY_IMPORT[part]:
                offences.append(f"{name} imports {module}")
    assert offences == []


def test_nothing_imports_the_engine_or_the_command_line_but_the_shell_itself():
    roots = {"engine", "cli"}
    allowed = {None, "cli", "engine", "testing"}
    offences = [
        f"{name} imports {module}"
        for name, path in MODULES
        if part_of(name) not in allowed
        for module in imported_modules(name, path)
        if part_of(module) in roots
    ]
    assert offences == []


def planner_imports(part: str) -> set[str]:
    """The parts of the planner that one part of it imports."""
    (path,) = (path for name, path in MODULES if name == f"{TOP}.planner.{part}")
    inner = (module.split(".") for module in imported_modules(f"{TOP}.planner.{part}", path))
    return {names[2] for names in inner if names[:2] == [TOP, "planner"] and len(names) > 2}


PLANNER_PARTS = {
    name.split(".")[2] for name, _ in MODULES if part_of(name) == "planner" and name.count(".") == 2
}


def test_the_physical_half_of_the_planner_never_sees_a_price():
    # "cost only orders feasible targets" as an import rule (O-1, invariant 13); new files are physical
    assert PLANNER_VALUE_HALF <= PLANNER_PARTS
    physical = PLANNER_PARTS - PLANNER_VALUE_HALF
    assert {part: seen for part in physical if (seen := planner_imports(part) & PLANNER_VALUE_HALF)} == {}


def test_the_search_is_given_both_halves_and_imports_neither():
    searches = {part for part in PLANNER_PARTS if part.startswith("search")} | {"recency_ladder"}
    assert {part: seen for part in searches if (seen := planner_imports(part) & SEARCH_MAY_NOT_SEE)} == {}


def test_program_sees_no_policy_and_the_manager_no_placement():
    # D-2, D-4: each layer sees only its own half of the planner
    offences = []
    for name, path in MODULES:
        for module in imported_modules(name, path):
            inner = module.split(".")
            if inner[:2] == [TOP, "planner"] and len(inner) > 2:
                if inner[2] in PLANNER_PARTS_OF.get(part_of(name) or "", set()):
                    offences.append(f"{name} imports {module}")
    assert offences == []


def test_the_planner_touches_no_clock_device_file_or_chance():
    offences = []
    for name, path in MODULES:
        if part_of(name) != "planner":
            continue
        for module in imported_modules(name, path):
            first = module.split(".")[0]
            if first in PLANNER_BANNED_MODULES or module.startswith("jax.experimental"):
                offences.append(f"{name} imports {module}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in PLANNER_BANNED_NAMES:
                if isinstance(node.value, ast.Name) and node.value.id == "jax":
                    offences.append(f"{name}:{node.lineno} uses jax.{node.attr}")
    assert offences == []


def test_the_model_hides_no_cache_in_a_flax_variable():
    # A Variable mutated inside a jitted step is silently dropped: caches are arguments and results.
    offences = [
        f"{name}:{node.lineno} uses nnx.{node.attr}"
        for name, path in MODULES
        if part_of(name) == "model"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in {"Variable", "Cache", "BatchStat", "jit"}
        if isinstance(node.value, ast.Name) and node.value.id == "nnx"
    ]
    assert offences == []


def test_mosaic_is_imported_in_one_compatibility_file_only():
    offences = [
        name
        for name, path in MODULES
        if any("mosaic_gpu" in module or "_src" in module for module in imported_modules(name, path))
        if not name.endswith("_mgpu_compat")
    ]
    assert offences == []


def test_nobody_imports_the_bare_folders():
    offences = []
    for path in (
        [p for _, p in MODULES]
        + sorted((ROOT / "tests").rglob("*.py"))
        + sorted((ROOT / "tools").rglob("*.py"))
    ):
        for module in imported_modules("x.y", path):
            if module.split(".")[0] in {"planner", "model"}:
                offences.append(f"{path.relative_to(ROOT)} imports {module}")
    assert offences == []


@pytest.mark.smoke
def test_importing_everything_leaves_no_second_copy_and_starts_no_backend():
    names = [name for name, _ in MODULES]
    script = "\n".join(
        [
            "import importlib, sys",
            f"for name in {names!r}: importlib.import_module(name)",
            "assert not {'planner', 'model'} & set(sys.modules), 'a bare folder was imported'",
            "from jax._src import xla_bridge",
            "assert not xla_bridge.backends_are_initialized(), 'an import initialised a backend'",
        ]
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_file_says_what_it_owns():
    silent = [
        name for name, path in MODULES if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_every_package_folder_is_listed_for_the_wheel():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    present = {name for name, path in MODULES if path.name == "__init__.py"}
    assert listed == present


def test_the_links_are_relative_and_tracked():
    for link in ("planner", "model"):
        path = ROOT / "ninfer_jax" / link
        assert path.is_symlink() and path.readlink() == Path("..") / link


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_the_demo(tmp_path):
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            str(tmp_path),
            str(ROOT),
        ],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    for name, path in MODULES:
        stem = name.replace(".", "/")
        assert (f"{stem}/__init__.py" if path.name == "__init__.py" else f"{stem}.py") in held
    assert {"ninfer_jax/py.typed", "ninfer_jax/assets/demo/config.json"} <= held
