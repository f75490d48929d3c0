"""Owns the one error of the model package: a checkpoint directory that cannot be used as it is."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is unsupported, contradictory or incomplete; says got, expected, what to do."""
