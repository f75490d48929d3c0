"""A file with one line of JSON for each request that has ended; its sums are those of ``engine.stats()``.

Owns the lines and the file. Says nothing of what was asked or answered: no text, no token, no session name.
Written by the worker alone; a disk that fails stops the log, never a request.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ninfer_jax.errors import OptionError

if TYPE_CHECKING:
    from ninfer_jax.job import Job

logger = logging.getLogger("ninfer_jax")


class RequestLog:
    """Appends to a JSONL file.

    Args:
        path: made if absent, appended to otherwise.
    Raises:
        OptionError: if it cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            self._file = open(path, "a", encoding="utf-8")
        except OSError as error:
            raise OptionError(f"request_log: got {str(path)!r}, which cannot be written: {error}") from error

    def write(self, job: Job, end: str, now_ns: int, *, is_failure: bool) -> None:
        """Appends the line of a request that has just ended.

        Args:
            job: the request.
            end: its finish reason, or the kind of its error.
            now_ns: the worker's clock.
            is_failure: which of the two.
        """
        if self._file.closed:
            return
        try:
            self._file.write(json.dumps(line_of(job, end, now_ns, is_failure=is_failure)) + "\n")
            self._file.flush()  # a line is there when its answer is
        except Exception:  # whatever it is, the request itself must come to its end
            logger.exception("the request log stops here")
            self.close()

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        try:
            self._file.close()
        except OSError:  # what was not written is lost, and was told
            logger.exception("the request log was not closed well")


def line_of(job: Job, end: str, now_ns: int, *, is_failure: bool) -> dict[str, Any]:
    """Returns what the log says about a request, as plain values.

    Args:
        job, end, now_ns, is_failure: as for ``RequestLog.write``.
    """
    record = job.record
    return {
        "request_id": job.request_id,
        "finish_reason": None if is_failure else end,
        "error": end if is_failure else None,
        "prompt_tokens": job.request.prompt_tokens,
        "completion_tokens": len(job.token_ids),
        "retention": job.request.hints.retention,
        "has_session": job.request.hints.session is not None,
        "timings": {
            name: round(seconds, 6) for name, seconds in dataclasses.asdict(job.timings(now_ns)).items()
        },
        "materialization": None if record is None else dataclasses.asdict(record),
    }
