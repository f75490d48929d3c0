"""The compile counter sees what a watched call compiles, and nothing else of the process."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ninfer_jax.program.compilation import CompileCounter


def fresh_jit(addend: float):
    return jax.jit(lambda x: x * 2 + addend)


def test_only_watched_calls_count_and_only_the_first_time():
    counter = CompileCounter()
    x = jnp.arange(3.0)
    counter.start()
    fresh_jit(1.0)(x)  # somebody else's program
    assert counter.num_compilations == 0
    step = fresh_jit(2.0)
    assert counter.watch(step, x).tolist() == [2.0, 4.0, 6.0]
    assert counter.num_compilations == 1
    counter.watch(step, x)
    assert counter.num_compilations == 1
    counter.stop()
    counter.watch(fresh_jit(3.0), x)
    assert counter.num_compilations == 1
    counter.stop()
