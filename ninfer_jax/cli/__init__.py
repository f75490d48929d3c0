"""The ``ninfer-jax`` command: one file per verb."""
