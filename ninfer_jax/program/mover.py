"""Owns the compiled copies of pages and state images: on the device, to Host and back (K-5, S-2).

It does not own the device buffers (it is lent them for a call) nor what a copy is for. Copies to Host are
started and polled, so that decode goes on meanwhile; copies to Device are queued before every later step.
Groups have one size, padded, so that nothing is ever compiled while serving.

Letters: N = `GROUP_PAGES`, L full-attention layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ninfer_jax.model.cache import Cache, CacheSpec
from ninfer_jax.model.kernels.page_write import copy_pages, pack_pages, unpack_pages
from ninfer_jax.program.compilation import CompileCounter
from ninfer_jax.program.host_tier import HostTier

GROUP_PAGES = 8


@dataclass(frozen=True)
class CopyPrograms:
    """The copies, compiled; the cache is donated where it changes."""

    pack: jax.stages.Compiled  # (cache, int32[N]) -> [N, L, 2, Hkv, 64, D]
    unpack: jax.stages.Compiled  # (cache, packed, int32[N]) -> cache
    copy_page: jax.stages.Compiled  # (cache, int32[2]) -> cache
    read_image: jax.stages.Compiled  # (cache, int32[]) -> leaves
    write_image: jax.stages.Compiled  # (cache, leaves, int32[]) -> cache
    copy_image: jax.stages.Compiled  # (cache, int32[2]) -> cache

    def all(self) -> dict[str, jax.stages.Compiled]:
        """Returns every program by a readable name."""
        return {name.replace("_", " "): getattr(self, name) for name in self.__dataclass_fields__}


def _states(cache: Cache) -> tuple[jax.Array, ...]:
    return (*cache.recurrent, *cache.conv, cache.tail_hidden)


def _with_states(cache: Cache, leaves: Sequence[jax.Array]) -> Cache:
    layers = len(cache.recurrent)
    return replace(
        cache,
        recurrent=tuple(leaves[:layers]),
        conv=tuple(leaves[layers : 2 * layers]),
        tail_hidden=leaves[2 * layers],
    )


def _pack(cache: Cache, ids: jax.Array) -> jax.Array:
    return jnp.moveaxis(pack_pages(cache.k_pages, cache.v_pages, ids), 2, 0)


def _unpack(cache: Cache, packed: jax.Array, ids: jax.Array) -> Cache:
    k_pages, v_pages = unpack_pages(cache.k_pages, cache.v_pages, jnp.moveaxis(packed, 0, 2), ids)
    return replace(cache, k_pages=k_pages, v_pages=v_pages)


def _copy_page(cache: Cache, ids: jax.Array) -> Cache:
    source, destination = ids[:1], ids[1:]
    return replace(
        cache,
        k_pages=tuple(copy_pages(pages, source, destination) for pages in cache.k_pages),
        v_pages=tuple(copy_pages(pages, source, destination) for pages in cache.v_pages),
    )


def _read_image(cache: Cache, slot: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(lax.dynamic_index_in_dim(leaf, slot, keepdims=False) for leaf in _states(cache))


def _write_image(cache: Cache, leaves: tuple[jax.Array, ...], slot: jax.Array) -> Cache:
    held = [
        lax.dynamic_update_index_in_dim(a, b, slot, 0) for a, b in zip(_states(cache), leaves, strict=True)
    ]
    return _with_states(cache, held)


def _copy_image(cache: Cache, slots: jax.Array) -> Cache:
    return _write_image(cache, _read_image(cache, slots[0]), slots[1])


def copy_lowerings(cache: Cache, spec: CacheSpec) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Returns how to lower each field of `CopyPrograms`.

    Args:
        cache: gives the shapes.
        spec: the layout of pages and images.
    """
    ids, pair = jax.ShapeDtypeStruct((GROUP_PAGES,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    slot = jax.ShapeDtypeStruct((), jnp.int32)
    page = packed_page(spec)
    packed = jax.ShapeDtypeStruct((GROUP_PAGES, *page.shape), page.dtype)
    leaves = image_leaves(cache)

    def donating(function: Callable[..., Cache]) -> jax.stages.Wrapped:
        return jax.jit(function, donate_argnames=("cache",))

    return {
        "pack": lambda: jax.jit(_pack).lower(cache, ids),
        "unpack": lambda: donating(_unpack).lower(cache, packed, ids),
        "copy_page": lambda: donating(_copy_page).lower(cache, pair),
        "read_image": lambda: jax.jit(_read_image).lower(cache, slot),
        "write_image": lambda: donating(_write_image).lower(cache, leaves, slot),
        "copy_image": lambda: donating(_copy_image).lower(cache, pair),
    }


def packed_page(spec: CacheSpec) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of one page of all layers, as the Host tier keeps it."""
    return jax.ShapeDtypeStruct((spec.num_full_layers, 2, *spec.page_shape), jnp.dtype(spec.kv_dtype))


def image_leaves(cache: Cache) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns shapes and dtypes of one state image, leaf by leaf."""
    return tuple(jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for leaf in _states(cache))


@dataclass(frozen=True, eq=False)
class Arriving:
    """A copy to Host under way; satisfies `Transfer`."""

    arrays: tuple[jax.Array, ...]
    land: Callable[[list[np.ndarray]], None]

    def is_ready(self) -> bool:
        """Whether the device has computed it."""
        return all(array.is_ready() for array in self.arrays)

    def wait(self) -> None:
        """Sleeps until it is ready."""
        jax.block_until_ready(self.arrays)

    def finish(self) -> None:
        """Waits, and stores the bytes in the Host tier."""
        self.land([np.asarray(array) for array in self.arrays])


class ModelMover:
    """Moves pages and images of one executor's cache; satisfies `Mover`.

    Args:
        programs: compiled for this cache.
        host: where Host copies live.
        counter: counts compilations, of which there must be none.
        take_cache, put_cache: lend the executor's cache for a call and give its successor back.
    """

    def __init__(
        self,
        programs: CopyPrograms,
        host: HostTier,
        counter: CompileCounter,
        *,
        take_cache: Callable[[], Cache],
        put_cache: Callable[[Cache], None],
    ) -> None:
        self.programs = programs
        self.host = host
        self._counter = counter
        self._take_cache = take_cache
        self._put_cache = put_cache

    def copy_pages_out(self, pages: Sequence[int], granules: Sequence[int]) -> Arriving:
        """Starts to copy Device pages to Host."""
        cache, arrays = self._take_cache(), []
        for start in range(0, len(pages), GROUP_PAGES):
            arrays.append(self._counter.watch(self.programs.pack, cache, _group(pages, start)))
            arrays[-1].copy_to_host_async()

        def land(groups: list[np.ndarray]) -> None:
            for i, packed in enumerate(groups):
                part = granules[i * GROUP_PAGES : (i + 1) * GROUP_PAGES]
                self.host.put_pages(part, packed)

        return Arriving(tuple(arrays), land)

    def copy_pages_in(self, granules: Sequence[int], pages: Sequence[int]) -> None:
        """Copies Host pages to Device."""
        for start in range(0, len(pages), GROUP_PAGES):
            packed = self.host.pages(granules[start : start + GROUP_PAGES], GROUP_PAGES)
            self._replace(self.programs.unpack, packed, _group(pages, start))

    def copy_page(self, source: int, destination: int) -> None:
        """Copies one Device page onto another."""
        self._replace(self.programs.copy_page, np.array([source, destination], np.int32))

    def copy_image_out(self, slot: int, host_slot: int) -> Arriving:
        """Starts to copy a state image to Host."""
        arrays = self._counter.watch(self.programs.read_image, self._take_cache(), np.int32(slot))
        for array in arrays:
            array.copy_to_host_async()
        return Arriving(tuple(arrays), lambda leaves: self.host.put_image(host_slot, leaves))

    def copy_image_in(self, host_slot: int, slot: int) -> None:
        """Copies a Host image into a Device slot."""
        self._replace(self.programs.write_image, tuple(self.host.image(host_slot)), np.int32(slot))

    def copy_image(self, source: int, destination: int) -> None:
        """Copies one Device slot onto another."""
        self._replace(self.programs.copy_image, np.array([source, destination], np.int32))

    def read_pages(self, pages: Sequence[int]) -> Callable[[], np.ndarray]:
        """Starts to read Device pages; the function, from any thread, gives [N, L, 2, Hkv, 64, D]."""
        cache, count = self._take_cache(), len(pages)
        groups = [
            self._counter.watch(self.programs.pack, cache, _group(pages, start))
            for start in range(0, count, GROUP_PAGES)
        ]
        return lambda: np.concatenate([np.asarray(group) for group in groups])[:count]

    def read_host_pages(self, granules: Sequence[int]) -> Callable[[], np.ndarray]:
        """Reads Host pages, as above."""
        contents = self.host.pages(granules, len(granules))
        return lambda: contents

    def write_pages(self, contents: np.ndarray, pages: Sequence[int]) -> None:
        """Writes the contents of Device pages."""
        for start in range(0, len(pages), GROUP_PAGES):
            part = contents[start : start + GROUP_PAGES]
            packed = np.zeros((GROUP_PAGES, *contents.shape[1:]), contents.dtype)
            packed[: len(part)] = part
            self._replace(self.programs.unpack, packed, _group(pages, start))

    def write_host_pages(self, contents: np.ndarray, granules: Sequence[int]) -> None:
        """Writes the contents of Host pages."""
        self.host.put_pages(granules, contents)

    def read_image(self, slot: int) -> Callable[[], list[np.ndarray]]:
        """Starts to read a Device image; the function, from any thread, gives its leaves."""
        leaves = self._counter.watch(self.programs.read_image, self._take_cache(), np.int32(slot))
        return lambda: [np.asarray(leaf) for leaf in leaves]

    def read_host_image(self, host_slot: int) -> Callable[[], list[np.ndarray]]:
        """Reads a Host image, as above."""
        leaves = self.host.image(host_slot)
        return lambda: leaves

    def write_image(self, leaves: Sequence[np.ndarray], slot: int) -> None:
        """Writes a Device image."""
        self._replace(self.programs.write_image, tuple(leaves), np.int32(slot))

    def write_host_image(self, leaves: Sequence[np.ndarray], host_slot: int) -> None:
        """Writes a Host image."""
        self.host.put_image(host_slot, leaves)

    def _replace(self, program: jax.stages.Compiled, *args: object) -> None:
        self._put_cache(self._counter.watch(program, self._take_cache(), *args))


def _group(pages: Sequence[int], start: int) -> np.ndarray:
    """Returns int32[N] page ids; -1, which no page has, behind the last."""
    ids = np.full(GROUP_PAGES, -1, np.int32)
    part = pages[start : start + GROUP_PAGES]
    ids[: len(part)] = part
    return ids
