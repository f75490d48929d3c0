"""The only place that imports Pallas Mosaic GPU: one face for jax 0.10.2 and 0.11.2, device and interpreter.

Owns the differences between the versions and between a device and the GPU interpreter of the CPU. Knows
nothing of attention: the kernels are in `mosaic_decode` and `mosaic_prefill`.

The interpreter executes copies, barriers, threads and indexing, and detects races; it knows no register
layouts, so `Tile` replaces the few operations that name one by plain jax.numpy there. Layouts are checked by
lowering for CUDA, which needs no device.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Rows of one tensor-core instruction of a warpgroup.
WGMMA_ROWS = 64

axis_index = lax.axis_index
when = pl.when
ds = pl.ds
barrier_arrive = plgpu.barrier_arrive
barrier_wait = plgpu.barrier_wait
commit_smem = plgpu.commit_smem
load_tile = plgpu.copy_gmem_to_smem
store_tile = plgpu.copy_smem_to_gmem
wait_stores = plgpu.wait_smem_to_gmem
barrier = plgpu.Barrier


def shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns a shared-memory buffer whose last two axes are laid out for the tensor cores if it is a matrix.

    Tiles of 8 rows x 128 bytes under the 128-byte swizzle: what TMA and wgmma agree on. Vectors stay linear.
    """
    if len(shape) < 2:
        return plgpu.SMEM(shape, dtype)
    columns = 128 // jnp.dtype(dtype).itemsize
    transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def kernel(body: Any, *, interpret: Any, **kwargs: Any) -> Any:
    """Returns `plgpu.kernel` with fast exp2 and the same lowering on both versions.

    The default lowering changed from Lane to Warpgroup in 0.11; the kernels are written and checked for Lane.
    """
    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    if interpret is not None:
        kwargs["interpret"] = interpret
    return plgpu.kernel(body, compiler_params=params, **kwargs)


def interpret_params(**kwargs: Any) -> Any:
    """Returns the parameters that run a kernel in the GPU interpreter (private until 0.11)."""
    public = getattr(plgpu, "InterpretGPUParams", None)
    if public is not None:
        return public(**kwargs)
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams(**kwargs)


def reset_interpreter() -> None:
    """Forgets what a kernel that raised has left in the GPU interpreter; else the next one fails too."""
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state

    reset_gpu_interpret_mode_state()


def int32(value: int) -> jax.Array:
    """Returns a constant that does not widen the int32 arithmetic of a kernel under x64."""
    return jnp.asarray(value, jnp.int32)


@dataclass(frozen=True)
class Tile:
    """Register tiles of one warpgroup: matrices [64, N] and one value per row, in the layout of the tensor
    cores."""

    is_interpreted: bool

    def rows(self, value: float) -> jax.Array:
        """Returns f32[64], one value per row of a matrix."""
        full = jnp.full((WGMMA_ROWS,), value, jnp.float32)
        return full if self.is_interpreted else plgpu.layout_cast(full, plgpu.Layout.WGMMA.reduce(1))

    def zeros(self, columns: int) -> jax.Array:
        """Returns f32[64, columns] of zeros."""
        full = jnp.full((WGMMA_ROWS, columns), 0.0, jnp.float32)
        return full if self.is_interpreted else plgpu.layout_cast(full, plgpu.Layout.WGMMA)

    def iota(self, columns: int, axis: int) -> jax.Array:
        """Returns int32[64, columns], the index along one axis."""
        shape = (WGMMA_ROWS, columns)
        if self.is_interpreted:
            return lax.broadcasted_iota(jnp.int32, shape, axis)
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

    def across(self, per_row: jax.Array, columns: int) -> jax.Array:
        """Returns [64, columns] with each row's value in all its columns."""
        return lax.broadcast_in_dim(per_row, (WGMMA_ROWS, columns), [0])

    def product_transposed(self, left: Any, right: Any) -> jax.Array:
        """Returns f32[64, N] = left @ right.T of two shared-memory buffers [64, D] and [N, D]."""
        if self.is_interpreted:
            product = jnp.dot(left[...], right[...].T, preferred_element_type=jnp.float32)
            self._read_done()
            return product
        columns = right.shape[0]

        def multiply(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, left, _transposed(right))
            return acc[...]

        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((WGMMA_ROWS, columns), jnp.float32))

    def add_product(self, acc: jax.Array, left: jax.Array, right: Any) -> jax.Array:
        """Returns acc + left @ right, left [64, N] in registers and right [N, D] in shared memory.

        The accumulator goes through the instruction: a fresh one added afterwards spills at D = 256.
        """
        if self.is_interpreted:
            acc = acc + jnp.dot(left, right[...], preferred_element_type=jnp.float32)
            self._read_done()
            return acc

        def multiply(acc_ref: Any) -> None:
            plgpu.wgmma(acc_ref, left, right)

        start: Any = plgpu.WGMMAAccumulatorRef.init(acc)
        return pl.run_state(multiply)(start)

    def _read_done(self) -> None:
        """Orders the reads above before later copies into the same buffers.

        The instruction reads shared memory as the copies write it, by the asynchronous path, and needs no
        fence; its stand-in reads like a program, and without one the race detector rightly objects.
        """
        plgpu.commit_smem()


def use_registers(count: int, *, is_more: bool, is_interpreted: bool) -> None:
    """Moves registers between warpgroups of a block: those that compute take what the copying one gives."""
    if not is_interpreted:
        plgpu.set_max_registers(count, action="increase" if is_more else "decrease")


def _transposed(ref: Any) -> Any:
    # 0.11 has refs that transpose themselves, and deprecates the function that 0.10 needs.
    if hasattr(plgpu, "transform_ref"):
        return plgpu.transpose_ref(ref, (1, 0))
    return ref.transpose((1, 0))
