"""Owns the memory table: planned and allocated bytes per axis, as values, as a dict and as text.

It does not own the numbers: `sizing` plans them, the executor counts what it allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

WEIGHTS = "weights"
SAMPLER = "sampler"
STATE_SLOTS = "state_slots"
SCRATCH = "scratch"
HOST_PAGES = "host_kv_pages"
HOST_STATES = "host_state_slots"


def pool_axis(kind: str) -> str:
    """Returns the axis name of a typed page pool."""
    return f"{kind}_pages"


@dataclass(frozen=True)
class MemoryRow:
    """One axis: how many units of what size."""

    axis: str
    num_units: int
    unit: str
    unit_bytes: int
    persistent: bool  # False for scratch, which exists only while a step runs
    allocated_bytes: int | None = None  # None until something was allocated

    @property
    def planned_bytes(self) -> int:
        """Bytes this axis was sized for."""
        return self.num_units * self.unit_bytes


@dataclass(frozen=True)
class MemoryTable:
    """Every axis of device memory in use, and what was free when it was sized."""

    rows: tuple[MemoryRow, ...]
    free_bytes: int  # F, before anything was allocated
    headroom_bytes: int  # R, left to others
    host_rows: tuple[MemoryRow, ...] = ()  # the Host tier, billed apart from the device (F-3)

    @property
    def planned_bytes(self) -> int:
        """Bytes of all axes together, scratch included."""
        return sum(row.planned_bytes for row in self.rows)

    def with_allocated(self, allocated: Mapping[str, int]) -> MemoryTable:
        """Returns the table with what an executor really holds filled in, by axis name."""

        def filled(rows: tuple[MemoryRow, ...]) -> tuple[MemoryRow, ...]:
            return tuple(
                replace(row, allocated_bytes=allocated.get(row.axis, row.allocated_bytes)) for row in rows
            )

        return replace(self, rows=filled(self.rows), host_rows=filled(self.host_rows))

    def as_dict(self) -> dict[str, object]:
        """Returns plain values for `--json`."""

        def facts(rows: tuple[MemoryRow, ...]) -> dict[str, object]:
            return {
                row.axis: {
                    "units": row.num_units,
                    "unit": row.unit,
                    "unit_bytes": row.unit_bytes,
                    "planned_bytes": row.planned_bytes,
                    "allocated_bytes": row.allocated_bytes,
                }
                for row in rows
            }

        return {
            "axes": facts(self.rows),
            "host_axes": facts(self.host_rows),
            "planned_bytes": self.planned_bytes,
            "free_bytes": self.free_bytes,
            "headroom_bytes": self.headroom_bytes,
        }

    def render(self) -> str:
        """Returns the table as lines of text."""
        lines = [f"{'axis':<16} {'units':>6}  {'unit':<12} {'each':>10} {'planned':>10} {'allocated':>10}"]
        lines += [_line(row) for row in self.rows]
        known = [row.allocated_bytes for row in self.rows if row.allocated_bytes is not None]
        total = format_bytes(sum(known)) if known else "-"
        lines.append(
            f"{'total':<16} {'':>6}  {'':<12} {'':>10} {format_bytes(self.planned_bytes):>10} {total:>10}"
        )
        lines.append(
            f"free before start {format_bytes(self.free_bytes)}, headroom {format_bytes(self.headroom_bytes)}"
        )
        if self.host_rows:
            lines += ["host tier, its memory is committed as it fills", *map(_line, self.host_rows)]
        return "\n".join(lines)


def _line(row: MemoryRow) -> str:
    allocated = "-" if row.allocated_bytes is None else format_bytes(row.allocated_bytes)
    return (
        f"{row.axis:<16} {row.num_units:>6}  {row.unit:<12} {format_bytes(row.unit_bytes):>10} "
        f"{format_bytes(row.planned_bytes):>10} {allocated:>10}"
    )


def format_bytes(num_bytes: int) -> str:
    """Returns a byte count with a binary unit and at most four digits before it."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
