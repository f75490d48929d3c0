"""``ninfer-jax doctor``: what this environment is, what it can run, and what would fit.

Owns no fixes: it reports, and names what to do where something is missing.
"""

from __future__ import annotations

import argparse
import platform
import sys
from importlib import metadata
from typing import Any

from ninfer_jax.cli.arguments import add_engine_arguments, engine_options, print_json

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "orbax-checkpoint", "safetensors", "tokenizers", "jinja2")


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Attaches the verb."""
    parser = verbs.add_parser("doctor", help="report the environment, the devices and what would fit")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_engine_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report; exit code 1 when something needed is missing."""
    report = examine(args)
    if args.json:
        print_json(report)
    else:
        print_report(report)
    return 0 if not report["problems"] else 1


def examine(args: argparse.Namespace) -> dict[str, Any]:
    """Returns versions, devices, memory and the fit of the named checkpoint, without loading its weights."""
    problems: list[str] = []
    packages: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            packages[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            packages[package] = None
            problems.append(f"{package} is not installed: run tools/demo, or pip install ninfer-jax")
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "devices": [],
        "host_available_bytes": None,
        "fit": None,
        "problems": problems,
    }
    if problems:
        return report
    import jax
    import psutil

    report["host_available_bytes"] = psutil.virtual_memory().available
    report["devices"] = [
        {
            "kind": device.device_kind,
            "platform": device.platform,
            "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        }
        for device in jax.devices()
    ]
    report["fit"] = fit_of(args)
    return report


def fit_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the memory table that an engine with these options would allocate."""
    from ninfer_jax.engine import plan_memory

    return plan_memory(args.model, **engine_options(args))


def print_report(report: dict[str, Any]) -> None:
    """Prints the report for a person."""
    from rich.console import Console
    from rich.table import Table

    from ninfer_jax.program.memory_table import format_bytes

    console = Console()
    table = Table(show_header=False, box=None)
    table.add_row("python", f"{report['python']}  ({report['executable']})")
    table.add_row("system", report["system"])
    for package, version in report["packages"].items():
        table.add_row(package, version or "[red]missing[/red]")
    for device in report["devices"]:
        memory = f", {device['memory_bytes'] / 2**30:.1f} GiB" if device["memory_bytes"] else ""
        table.add_row("device", f"{device['kind']} ({device['platform']}{memory})")
    if report["host_available_bytes"] is not None:
        table.add_row("host memory free", f"{report['host_available_bytes'] / 2**30:.1f} GiB")
    console.print(table)
    if report["fit"] is not None:
        fit = Table(title="what would be allocated", show_footer=True)
        fit.add_column("axis", "total")
        fit.add_column("units", justify="right")
        fit.add_column("unit")
        fit.add_column("each", justify="right")
        fit.add_column("planned", format_bytes(report["fit"]["planned_bytes"]), justify="right")
        for axis, row in report["fit"]["axes"].items():
            sizes = format_bytes(row["unit_bytes"]), format_bytes(row["planned_bytes"])
            fit.add_row(axis, f"{row['units']:,}", row["unit"], *sizes)
        console.print(fit)
    for problem in report["problems"]:
        console.print(f"[red]problem:[/red] {problem}")
