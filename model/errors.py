"""Owns the one error of the model package: a checkpoint directory that cannot be used as it is."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is unsupported, contradictory or incomplete; the message says got, expected and what to do."""
