"""Owns the compiled programs of one model and the device buffers they update in place.

It does not own pages, slots or lanes: every index a step touches arrives from Program. All programs are
compiled before the first request, for exactly B = 1..C decode rows and for each prefill bucket; asking for
another is an error, because compiling in the middle of serving would stall every lane.

Letters: B rows, C lanes, T tokens of a bucket, V vocabulary, W block-table width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import jax
import jax.numpy as jnp
import numpy as np

from ninfer_jax.errors import InvariantError
from ninfer_jax.model.cache import Cache, CacheSpec, make_cache
from ninfer_jax.model.config import Qwen35Config
from ninfer_jax.model.kernels.paged_attention import Backend, supports_mosaic
from ninfer_jax.model.loader import LoadedModel
from ninfer_jax.model.sampling import SamplerState, make_sampler_state, sample, set_lane
from ninfer_jax.model.transformer import decode_step, logits_from_tail, prefill_chunk
from ninfer_jax.program.capacity import CapacityVector, PoolKind
from ninfer_jax.program.compilation import CompileCounter
from ninfer_jax.program.executor import ZERO_STATE, Logprobs, Mover, NoMover, PrefillInputs
from ninfer_jax.program.host_tier import HostTier
from ninfer_jax.program.lane_sampling import LaneSampling, dense_bias, token_mask
from ninfer_jax.program.memory_table import SAMPLER, STATE_SLOTS, WEIGHTS, pool_axis
from ninfer_jax.program.mover import (
    CopyPrograms,
    ModelMover,
    copy_lowerings,
    image_leaves,
    packed_page,
)
from ninfer_jax.program.packing import (
    pack_prefill,
    pack_sampled,
    unpack_decode,
    unpack_logprobs,
    unpack_prefill,
    unpack_tail,
    unpack_tokens,
)
from ninfer_jax.program.row_layout import ROW_WIDTH
from ninfer_jax.program.rows import ExecutionRows
from ninfer_jax.program.weight_bundle import WeightBundle, make_weight_bundle

SMALLEST_BUCKET_TOKENS = 64

# name of a program, how many are done, how many there are
Progress = Callable[[str, int, int], None]


def prefill_buckets(prefill_chunk_tokens: int) -> tuple[int, ...]:
    """Returns the padded chunk sizes, ascending: 64 doubling until a whole chunk fits."""
    buckets = [SMALLEST_BUCKET_TOKENS]
    while buckets[-1] < prefill_chunk_tokens:
        buckets.append(2 * buckets[-1])
    return tuple(buckets)


@dataclass(frozen=True, eq=False)
class Programs:
    """Everything that may run after warm-up. Keys are exact sizes."""

    decode: Mapping[int, jax.stages.Compiled]  # by B
    prefill: Mapping[int, jax.stages.Compiled]  # by T
    draw_from_tail: Mapping[int, jax.stages.Compiled]  # by B
    set_lane: jax.stages.Compiled
    attention_backend: Backend = "xla"  # what decode and prefill were compiled with
    copies: CopyPrograms | None = None  # None where nothing is ever kept

    def all(self) -> dict[str, jax.stages.Compiled]:
        """Returns every program by a readable name."""
        return {
            **{f"decode {size}": program for size, program in self.decode.items()},
            **{f"prefill {size}": program for size, program in self.prefill.items()},
            **{f"draw from tail {size}": program for size, program in self.draw_from_tail.items()},
            "set lane": self.set_lane,
            **({} if self.copies is None else self.copies.all()),
        }


@dataclass(eq=False)
class Buffers:
    """The device arrays that steps update in place; a step replaces what was donated to it by its results.

    What a draw only reads is kept apart from what it counts up: giving an array away and taking it back costs
    the host three times as much as showing it.
    """

    cache: Cache  # donated to every model step
    counts: jax.Array  # int32[C, V], `SamplerState.output_counts`; donated to every draw
    lanes: SamplerState  # all else that a draw reads, `output_counts` None; donated when a lane is set


def make_buffers(
    spec: CacheSpec, capacity: CapacityVector, vocab_size: int, allowed_vocab_size: int
) -> Buffers:
    """Returns zeroed pools, state slots and sampler rows of the given capacity."""
    (main,) = (pool for pool in capacity.pools if pool.kind is PoolKind.MAIN)
    counts, lanes = _split(make_sampler_state(capacity.num_lanes, vocab_size, allowed_vocab_size))
    return Buffers(make_cache(spec, main.num_pages, capacity.num_state_slots), counts, lanes)


def _split(state: SamplerState) -> tuple[jax.Array, SamplerState]:
    return state.output_counts, dataclasses.replace(state, output_counts=None)


def _whole(counts: jax.Array, lanes: SamplerState) -> SamplerState:
    return dataclasses.replace(lanes, output_counts=counts)


def compile_programs(
    model: LoadedModel,
    spec: CacheSpec,
    weights: WeightBundle,
    buffers: Buffers,
    eos_mask: jax.Array,
    *,
    capacity: CapacityVector,
    prefill_chunk_tokens: int,
    attention_backend: Backend,
    progress: Progress | None = None,
) -> Programs:
    """Returns every program of one engine, compiled; cache and sampler arrays are donated by name.

    Args:
        model: its module is rebuilt from traced leaves, so weights are arguments, not constants.
        spec: the layout of pages and state images.
        weights: of this model.
        buffers: give the shapes; nothing is run.
        eos_mask: bool[V].
        capacity: decides B = 1..C and W.
        prefill_chunk_tokens: decides the buckets.
        attention_backend: of decode and prefill.
        progress: told after each program.
    """
    width = capacity.row_pages
    vocab_size = model.config.vocab_size

    def decode(
        arrays: tuple[jax.Array, ...],
        eos_mask: jax.Array,
        lanes: SamplerState,
        cache: Cache,
        counts: jax.Array,
        rows: jax.Array,
    ) -> tuple[Cache, jax.Array, jax.Array]:
        batch, draws = unpack_decode(rows)
        logits, cache = decode_step(
            model.module(weights.leaves(arrays)), cache, batch, backend=attention_backend
        )
        sampled, state = sample(logits, _whole(counts, lanes), draws, eos_mask)
        return cache, state.output_counts, pack_sampled(sampled)

    def prefill(arrays: tuple[jax.Array, ...], cache: Cache, packed: jax.Array) -> Cache:
        # The logits are dropped, so the head is not part of this program: see `draw_from_tail`.
        chunk = unpack_prefill(packed, width)
        _, cache = prefill_chunk(
            model.module(weights.leaves(arrays)), cache, chunk, backend=attention_backend
        )
        return cache

    def draw_from_tail(
        arrays: tuple[jax.Array, ...],
        eos_mask: jax.Array,
        lanes: SamplerState,
        cache: Cache,
        counts: jax.Array,
        rows: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        slots, draws = unpack_tail(rows)
        logits = logits_from_tail(model.module(weights.leaves(arrays)), cache, slots)
        sampled, state = sample(logits, _whole(counts, lanes), draws, eos_mask)
        return state.output_counts, pack_sampled(sampled)

    def prepare_lane(
        counts: jax.Array,
        lanes: SamplerState,
        lane: jax.Array,
        bias: jax.Array,
        seen: jax.Array,
        banned: jax.Array,
    ) -> tuple[jax.Array, SamplerState]:
        return _split(set_lane(_whole(counts, lanes), lane, bias, seen, banned))

    jit_decode = jax.jit(decode, donate_argnames=("cache", "counts"))
    jit_prefill = jax.jit(prefill, donate_argnames=("cache",))
    jit_draw = jax.jit(draw_from_tail, donate_argnames=("counts",))
    jit_set_lane = jax.jit(prepare_lane, donate_argnames=("counts", "lanes"))

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    arrays, cache, counts, lanes = weights.arrays, buffers.cache, buffers.counts, buffers.lanes
    flags = jax.ShapeDtypeStruct((vocab_size,), jnp.bool_)
    bias = jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
    lowerings: dict[tuple[str, int | str], Callable[[], jax.stages.Lowered]] = {}
    for size in range(1, capacity.num_lanes + 1):
        lowerings["decode", size] = lambda size=size: jit_decode.lower(
            arrays, eos_mask, lanes, cache, counts, ints(size, ROW_WIDTH + width)
        )
    for size in prefill_buckets(prefill_chunk_tokens):
        lowerings["prefill", size] = lambda size=size: jit_prefill.lower(
            arrays, cache, ints(4 + width + 4 * size)
        )
    lowerings["draw_from_tail", 1] = lambda: jit_draw.lower(
        arrays, eos_mask, lanes, cache, counts, ints(1, ROW_WIDTH + width)
    )
    lowerings["set_lane", 1] = lambda: jit_set_lane.lower(counts, lanes, ints(), bias, flags, flags)
    if capacity.keeps_context:
        lowerings |= {("copy", field): lower for field, lower in copy_lowerings(cache, spec).items()}
    compiled = _compile_all(lowerings, progress)
    copies = {field: program for (kind, field), program in compiled.items() if kind == "copy"}
    return Programs(
        decode={size: program for (kind, size), program in compiled.items() if kind == "decode"},
        prefill={size: program for (kind, size), program in compiled.items() if kind == "prefill"},
        draw_from_tail={
            size: program for (kind, size), program in compiled.items() if kind == "draw_from_tail"
        },
        set_lane=compiled["set_lane", 1],
        attention_backend=attention_backend,
        copies=CopyPrograms(**{str(field): program for field, program in copies.items()}) if copies else None,
    )


def _compile_all(
    lowerings: Mapping[tuple[str, int | str], Callable[[], jax.stages.Lowered]], progress: Progress | None
) -> dict[tuple[str, int | str], jax.stages.Compiled]:
    """Returns each program compiled, one after the other.

    Not in parallel threads: on CPU the process once died inside a compiler that ran beside two others, and on
    an accelerator the compiler measures kernels on the device. The persistent cache is what makes the next
    start fast.
    """
    compiled: dict[tuple[str, int | str], jax.stages.Compiled] = {}
    for key, lower in lowerings.items():
        compiled[key] = lower().compile()
        if progress is not None:
            progress(f"{key[0]} {key[1]}", len(compiled), len(lowerings))
    return compiled


class DeviceResult:
    """Drawn tokens that may still be computed; read from the device once, by whoever asks first.

    Args:
        packed: int32[B, RESULT_WIDTH].
    """

    def __init__(self, packed: jax.Array) -> None:
        self._packed: jax.Array | np.ndarray = packed

    def tokens(self) -> np.ndarray:
        """Returns int32[B]; blocks until the step is done."""
        return unpack_tokens(self._read())

    def logprobs(self) -> Logprobs:
        """Returns the step's log-probabilities; blocks until the step is done."""
        return unpack_logprobs(self._read())

    def _read(self) -> np.ndarray:
        if not isinstance(self._packed, np.ndarray):
            self._packed = np.asarray(self._packed)
        return self._packed


class ModelExecutor:
    """The only holder of weights, pools, state slots and sampler rows on the device; satisfies `Executor`.

    Made by `make_model_executor`.
    """

    def __init__(
        self,
        weights: WeightBundle,
        programs: Programs,
        buffers: Buffers,
        eos_mask: jax.Array,
        *,
        make_buffers_fn: Callable[[], Buffers],
        capacity: CapacityVector,
        counter: CompileCounter,
        host: HostTier | None = None,
    ) -> None:
        self._weights = weights
        self._vocab_size = eos_mask.shape[0]
        self._programs = programs
        self._buffers: Buffers | None = buffers
        self._eos_mask = eos_mask
        self._make_buffers_fn = make_buffers_fn
        self._capacity = capacity
        self._counter = counter
        self._buckets = tuple(sorted(programs.prefill))
        self._mover: ModelMover | None = None
        if programs.copies is not None and host is not None:
            self._mover = ModelMover(
                programs.copies,
                host,
                counter,
                take_cache=lambda: self._open_buffers().cache,
                put_cache=self._put_cache,
            )

    @property
    def compilations_after_warmup(self) -> int:
        """Backend compilations since this executor was ready; anything but zero is a defect."""
        return self._counter.num_compilations

    @property
    def attention_backend(self) -> Backend:
        """Which attention kernels the programs were compiled with."""
        return self._programs.attention_backend

    @property
    def mover(self) -> Mover:
        """Moves pages and images of these buffers."""
        return NoMover() if self._mover is None else self._mover

    def weights_digest(self) -> str:
        """Returns a digest of up to 4,096 values of every weight, spread evenly over it.

        Another revision of a model differs nearly everywhere, so a sample tells it apart. An accelerator's
        weights are read back once for it.
        """
        digest = blake2b(digest_size=16)
        for array in self._weights.arrays:
            flat = np.asarray(array).reshape(-1)
            sample = np.ascontiguousarray(flat[:: max(1, flat.size // 4096)])
            digest.update(f"{array.dtype}{array.shape}".encode() + sample.view(np.uint8).tobytes())
        return digest.hexdigest()

    def _put_cache(self, cache: Cache) -> None:
        self._open_buffers().cache = cache

    @property
    def programs(self) -> Programs:
        """The compiled programs, for memory analysis."""
        return self._programs

    def set_lane(self, lane: int, sampling: LaneSampling, prompt_tokens: np.ndarray) -> None:
        """Prepares a lane's sampler for a new request."""
        buffers = self._open_buffers()
        bias = dense_bias(sampling, self._vocab_size)
        seen = token_mask(prompt_tokens, self._vocab_size)
        banned = token_mask(sampling.ban_token_ids, self._vocab_size)
        buffers.counts, buffers.lanes = self._counter.watch(
            self._programs.set_lane, buffers.counts, buffers.lanes, np.int32(lane), bias, seen, banned
        )

    def prefill(self, inputs: PrefillInputs) -> None:
        """Runs one chunk in the smallest bucket that holds it."""
        buffers = self._open_buffers()
        num_tokens = len(inputs.tokens)
        bucket = next((size for size in self._buckets if size >= num_tokens), None)
        if bucket is None:
            raise InvariantError(
                f"no program for {num_tokens} tokens of prefill; buckets are {self._buckets}"
            )
        packed = pack_prefill(inputs, bucket, self._capacity.num_state_slots)
        buffers.cache = self._counter.watch(
            self._programs.prefill[bucket], self._weights.arrays, buffers.cache, packed
        )

    def draw_from_tail(self, rows: np.ndarray) -> DeviceResult:
        """Draws one token per row from the stored tail hidden."""
        buffers = self._open_buffers()
        program = self._program_for(self._programs.draw_from_tail, len(rows), "draw_from_tail")
        buffers.counts, packed = self._counter.watch(
            program, self._weights.arrays, self._eos_mask, buffers.lanes, buffers.cache, buffers.counts, rows
        )
        return DeviceResult(packed)

    def decode(self, rows: np.ndarray) -> DeviceResult:
        """Feeds one token per row and draws the next."""
        buffers = self._open_buffers()
        program = self._program_for(self._programs.decode, len(rows), "decode")
        buffers.cache, buffers.counts, packed = self._counter.watch(
            program, self._weights.arrays, self._eos_mask, buffers.lanes, buffers.cache, buffers.counts, rows
        )
        return DeviceResult(packed)

    @staticmethod
    def _program_for(
        programs: Mapping[int, jax.stages.Compiled], num_rows: int, kind: str
    ) -> jax.stages.Compiled:
        program = programs.get(num_rows)
        if program is None:
            raise InvariantError(f"no {kind} program for {num_rows} rows; there are {sorted(programs)}")
        return program

    def reset(self) -> None:
        """Replaces all contents by zeroed buffers of the same shapes; nothing is compiled again."""
        self._free_buffers()
        self._buffers = self._counter.watch(self._make_buffers_fn)

    def allocated_bytes(self) -> dict[str, int]:
        """Returns the bytes of the arrays held, by axis."""
        if self._buffers is None:
            return {}
        cache = self._buffers.cache
        host = {} if self._mover is None else self._mover.host.num_bytes
        return {
            **host,
            WEIGHTS: _num_bytes(self._weights.arrays),
            pool_axis(PoolKind.MAIN.value): _num_bytes((cache.k_pages, cache.v_pages)),
            STATE_SLOTS: _num_bytes((cache.recurrent, cache.conv, cache.tail_hidden)),
            SAMPLER: _num_bytes((self._buffers.counts, self._buffers.lanes)),
        }

    def close(self) -> None:
        """Frees weights and buffers; a second call does nothing."""
        self._counter.stop()
        self._free_buffers()
        for array in (*self._weights.arrays, self._eos_mask):
            array.delete()

    def _free_buffers(self) -> None:
        if self._buffers is not None:
            for leaf in jax.tree.leaves((self._buffers.cache, self._buffers.counts, self._buffers.lanes)):
                leaf.delete()
            self._buffers = None

    def _open_buffers(self) -> Buffers:
        if self._buffers is None:
            raise InvariantError("this executor is closed")
        return self._buffers


def _num_bytes(tree: object) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def choose_attention_backend(config: Qwen35Config, spec: CacheSpec, device: jax.Device) -> Backend:
    """Returns "mosaic" where the GPU kernels can run this model, else "xla".

    Args:
        config: the geometry.
        spec: the cache layout; pages have the model's dtype.
        device: where the programs will run.
    """
    is_supported = supports_mosaic(
        platform=device.platform,
        compute_capability=getattr(device, "compute_capability", None),
        dtype=spec.kv_dtype,
        num_query_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
    )
    return "mosaic" if is_supported else "xla"


def make_model_executor(
    model: LoadedModel,
    spec: CacheSpec,
    capacity: CapacityVector,
    *,
    prefill_chunk_tokens: int,
    eos_token_ids: frozenset[int],
    allowed_vocab_size: int,
    progress: Progress | None = None,
) -> ModelExecutor:
    """Returns an executor with its buffers allocated and every program compiled.

    Args:
        model: taken over; `close` frees its weights.
        spec: the cache layout that `capacity` was sized with.
        capacity: pages, slots and lanes to allocate.
        prefill_chunk_tokens: the longest chunk.
        eos_token_ids: held back while a row's output is shorter than its `min_tokens`.
        allowed_vocab_size: ids from here on are never drawn.
        progress: told after each compiled program.
    """
    vocab_size = model.config.vocab_size
    (device,) = model.leaves[0].devices()

    def fresh_buffers() -> Buffers:
        with jax.default_device(device):
            return make_buffers(spec, capacity, vocab_size, allowed_vocab_size)

    buffers = fresh_buffers()
    with jax.default_device(device):
        eos_mask = jnp.asarray(token_mask(sorted(eos_token_ids), vocab_size))
        weights = make_weight_bundle(model.leaves)
        programs = compile_programs(
            model,
            spec,
            weights,
            buffers,
            eos_mask,
            capacity=capacity,
            prefill_chunk_tokens=prefill_chunk_tokens,
            attention_backend=choose_attention_backend(model.config, spec, device),
            progress=progress,
        )
    counter = CompileCounter()
    executor = ModelExecutor(
        weights,
        programs,
        buffers,
        eos_mask,
        make_buffers_fn=fresh_buffers,
        capacity=capacity,
        counter=counter,
        host=HostTier(
            capacity.num_host_pages,
            capacity.num_host_state_slots,
            page=packed_page(spec),
            image=image_leaves(buffers.cache),
        )
        if capacity.keeps_context
        else None,
    )
    _warm_up(executor, capacity)
    counter.start()
    return executor


def _warm_up(executor: ModelExecutor, capacity: CapacityVector) -> None:
    """Runs the cheapest of each kind once, so that the first request meets no lazy initialisation.

    Slot 0 and page 0 belong to nobody yet, and whoever gets them starts from zero state and zero length.
    """
    rows = ExecutionRows(1, capacity.row_pages)
    row = rows.lease(lane=0, state_slot=0, prompt_tokens=1, rope_delta=0, sampling=LaneSampling())
    rows.append(row, 0, [0])
    executor.set_lane(0, LaneSampling(), np.zeros(1, np.int32))
    executor.prefill(
        PrefillInputs(
            tokens=np.zeros(1, np.int32),
            positions=np.zeros((3, 1), np.int32),
            block_table=rows.tables[row].copy(),
            start_tokens=0,
            read_slot=ZERO_STATE,
            write_slot=0,
        )
    )
    drawn = executor.draw_from_tail(rows.copy([row])).tokens()
    rows.feed_next(row, int(drawn[0]), step=1)
    executor.decode(rows.copy([row])).tokens()
    if capacity.keeps_context:
        _warm_up_copies(executor.mover, capacity)


def _warm_up_copies(mover: Mover, capacity: CapacityVector) -> None:
    last = capacity.num_state_slots - 1
    mover.copy_image(0, last)
    mover.copy_page(0, 0)
    if capacity.num_host_pages:
        mover.copy_pages_out([0], [0]).finish()
        mover.copy_pages_in([0], [0])
    if capacity.num_host_state_slots:
        mover.copy_image_out(0, 0).finish()
        mover.copy_image_in(0, last)
