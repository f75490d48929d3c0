"""Draws one planning decision: occupancy after each stage, one panel per axis, against capacity.

Owns the picture only. matplotlib is not a dependency of this package; its absence is one clear error.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ninfer_jax.planner.outcome import PlanOutcome

USE, PEAK, FULL = "#7aa6c2", "#d97b3f", "#444444"


def draw(outcome: PlanOutcome, path: Path) -> None:
    """Writes the picture as PNG.

    Raises:
        OptionError: if matplotlib is missing, or nothing was planned.
    """
    from ninfer_jax.errors import OptionError
    from ninfer_jax.planner.capacity import axis_names
    from ninfer_jax.planner.outcome import STAGE_TITLES

    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
        from matplotlib.ticker import MaxNLocator  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise OptionError("--png needs matplotlib, which is not installed: pip install matplotlib") from None
    decision, capacity = outcome.decision, outcome.inputs.state.capacity
    if not decision.used:
        raise OptionError(f"--png: there is no plan to draw, the answer was {decision.readiness.name}")
    names, limits = axis_names(capacity), capacity.units().tolist()
    figure = Figure(figsize=(3.1 * len(names), 4.0), layout="constrained")
    for r, axes in enumerate(figure.subplots(1, len(names), squeeze=False)[0]):
        use = [row[r] for row in decision.used]
        peak, limit = max(use), limits[r]
        bars = axes.bar(
            range(len(use)), use, width=0.8, color=[PEAK if u == peak and u else USE for u in use]
        )
        axes.bar_label(bars, labels=[f"{u:,}" for u in use], fontsize=7, padding=2)
        axes.axhline(limit, color=FULL, linestyle="--", linewidth=1)
        axes.set_ylim(0, max(limit, peak, 1) * 1.12)
        axes.set_title(f"{names[r].replace('_', ' ')}\ncapacity {limit:,} (dashed)", fontsize=8)
        axes.set_xticks(range(len(use)), STAGE_TITLES, rotation=60, ha="right", fontsize=7)
        axes.tick_params(axis="y", labelsize=7)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(outcome), fontsize=9)
    figure.savefig(path, format="png", dpi=130)


def _title(outcome: PlanOutcome) -> str:
    d = outcome.decision
    evicted = sum(o.evicted for o in d.owners)
    source = d.source
    start = "root" if source is None or source.owner < 0 else f"owner {source.owner}"
    reused = 0 if source is None else source.reused_tokens
    return (
        f"{d.readiness.name}: start from {start}, {reused:,} tokens reused; "
        f"{len(d.owners)} owners degraded, {evicted} of them evicted (peak stages in orange)"
    )
