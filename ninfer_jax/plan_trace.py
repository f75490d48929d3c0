"""A directory with one replayable plan file for each admission, for ``ninfer-jax plan FILE --verify``.

Owns names and writing; the format is `planner.outcome`'s. A plan file holds sizes and prices, no
token. Written by the worker alone, before the plan runs, so that a plan that brings an engine down is there
too; a disk that fails stops the trace, never a request.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ninfer_jax.errors import OptionError

if TYPE_CHECKING:
    from ninfer_jax.context_cache.records import Admission
    from ninfer_jax.request import RequestId

logger = logging.getLogger("ninfer_jax")


class PlanTrace:
    """Writes into a directory.

    Args:
        directory: made if absent.
    Raises:
        OptionError: if it cannot be made.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._has_failed = False
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(
                f"trace_plans: got {str(directory)!r}, expected a directory: {error}"
            ) from error

    def write(self, request_id: RequestId, plan_id: str, admission: Admission) -> None:
        """Writes ``<request>-<plan>.json``.

        Args:
            request_id: who is admitted.
            plan_id: as in the request's materialization record.
            admission: what was planned for it.
        """
        from ninfer_jax.context_cache.explain import outcome_of

        if self._has_failed:
            return
        try:
            path = self._directory / f"{request_id:06d}-{plan_id}.json"
            path.write_text(outcome_of(admission).to_json(), encoding="utf-8")
        except OSError:
            self._has_failed = True
            logger.exception("the trace of plans stops here")
