"""``ninfer-jax bench``: measurements that print ratios from one run. Each subject owns its own file."""

from __future__ import annotations

import argparse

from ninfer_jax.cli import bench_model, bench_planner, bench_reuse, bench_session


def add_parser(verbs: argparse._SubParsersAction) -> None:
    """Attaches the verb and its subjects."""
    parser = verbs.add_parser("bench", help="measure speed and memory on this machine")
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    bench_model.add_parser(subjects)
    bench_planner.add_parser(subjects)
    bench_reuse.add_parser(subjects)
    bench_session.add_parser(subjects)
