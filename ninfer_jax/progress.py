"""A progress bar for batch generation: on a terminal only, silent everywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int, show: bool | None) -> Iterator[Callable[[int], None]]:
    """Yields a function that records one more finished prompt and its answer tokens.

    Args:
        total: number of prompts.
        show: None shows the bar where stderr is a terminal and there is more than one prompt.
    """
    if not (sys.stderr.isatty() and total > 1 if show is None else show):
        yield lambda num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("generating", total=total, tokens=0)
        tokens = 0

        def advance(num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            progress.update(task, advance=1, tokens=tokens)

        yield advance
