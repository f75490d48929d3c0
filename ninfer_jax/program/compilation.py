"""Owns what is said to and heard from XLA's compiler: the persistent cache, and a count of compilations.

It does not own the programs (`execution`). Nothing here runs at import.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import jax.monitoring

Result = TypeVar("Result")

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def use_compilation_cache(directory: str | Path) -> None:
    """Keeps every compiled program in a directory, for this process from here on.

    The default lower bounds on time and size would keep only a few of an engine's programs (measured: 4 of
    59).

    Args:
        directory: made if absent; give each JAX version and CPU model its own.
    """
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


class CompileCounter:
    """Counts backend compilations caused by the calls it watches; after warm-up there must be none.

    Other code of the process may compile what it likes: JAX tells every listener about every compilation, in
    the thread that compiles, so only events of a watched call count. A program that comes out of the
    persistent cache counts too: it still stalls the step that asked for it.
    """

    def __init__(self) -> None:
        self.num_compilations = 0
        self._watched_thread: int | None = None
        self._listening = False

    def start(self) -> None:
        """Begins to listen."""
        if not self._listening:
            jax.monitoring.register_event_duration_secs_listener(self._on_event)
            self._listening = True

    def stop(self) -> None:
        """Stops listening; the count stays readable."""
        if self._listening:
            jax.monitoring.unregister_event_duration_listener(self._on_event)
            self._listening = False

    def watch(self, call: Callable[..., Result], *args: object) -> Result:
        """Returns `call(*args)`, counting what it compiles."""
        self._watched_thread = threading.get_ident()
        try:
            return call(*args)
        finally:
            self._watched_thread = None

    def _on_event(self, event: str, duration_secs: float, **_: object) -> None:
        if event == _COMPILE_EVENT and threading.get_ident() == self._watched_thread:
            self.num_compilations += 1
