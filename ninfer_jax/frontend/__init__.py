"""Turns messages, text or token ids into exact prompts, and generated tokens into text.

Knows templates, tokens and stops. Knows no page, no slot and no model.
"""

from ninfer_jax.frontend.channels import Delta
from ninfer_jax.frontend.frontend import Frontend
from ninfer_jax.frontend.output import OutputSession, Preview

__all__ = ["Delta", "Frontend", "OutputSession", "Preview"]
