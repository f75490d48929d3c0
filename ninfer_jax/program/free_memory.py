"""Owns one measurement: how many bytes of device memory this process could still take (K-9's F).

It does not own what is done with them (`sizing`).
"""

from __future__ import annotations

from pathlib import Path

import jax
import psutil

_CGROUP = Path("/sys/fs/cgroup")


def free_device_bytes(device: jax.Device) -> int:
    """Returns the bytes free on a device now: in the allocator's limit, or of the host.

    Args:
        device: where weights and pools will live. On CPU that is host memory, and a container's limit counts.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return max(0, int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)))
    return min(int(psutil.virtual_memory().available), _container_free_bytes(_CGROUP))


def _container_free_bytes(cgroup: Path) -> int:
    """Returns what a version 2 control group still allows; without a limit, more than any machine has."""
    unlimited = 1 << 62
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        current = int((cgroup / "memory.current").read_text(encoding="ascii"))
        reclaimable = sum(
            int(value)
            for name, value in (
                line.split() for line in (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()
            )
            if name in {"inactive_file", "active_file"}  # page cache gives way before anything is refused
        )
        return unlimited if limit == "max" else max(0, int(limit) - current + reclaimable)
    except (OSError, ValueError):
        return unlimited
