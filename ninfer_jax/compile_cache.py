"""Where compiled programs are kept between runs.

Owns the choice of the folder only. Start-up falls from the compiler's time to reading files (jax_facts 5).
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

OFF = "off"


def compile_cache_directory(option: str | None, jax_setting: str | None, jax_version: str) -> Path | None:
    """Returns the folder for compiled programs, or None to leave JAX as it is configured.

    A program compiled for one CPU may not run on another, so the default folder is told apart by JAX version
    and processor features.

    Args:
        option: the engine's own option; ``"off"`` names no folder, so nothing is kept unless JAX is told to.
        jax_setting: what JAX is already configured with, for instance by its environment variable; it wins
            over the default and loses to the option.
        jax_version: as in ``jax.__version__``.
    """
    if option == OFF:
        return None
    named = option or jax_setting
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(base).expanduser() / "ninfer_jax" / f"jax-{jax_version}-{processor_digest()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # a read-only home costs compile time, never a start
    return folder


def processor_digest() -> str:
    """Returns a short digest of what this processor can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        facts = "\n".join(
            sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
        )
    except OSError:
        facts = platform.processor()
    return hashlib.sha256(f"{platform.machine()}\n{facts}".encode()).hexdigest()[:12]
