"""Checks the product's kernels on the first GPU they meet, and prints one JSON object.

Owns the questions that no CPU can answer: numerics of the Mosaic kernels on the device, donation, speed of
decode (TB/s of K and V) and of prefill (TFLOP/s), and the copy rates of the host tier. Without a GPU it runs
the same code with small sizes, the kernels in the GPU interpreter, and measures no kernel.

    python -m tools.gpu_check [--quick]        (from the root of the checkout)

A check that fails is reported under its name with its error; the others still run. Exit status 1 if any did.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ninfer_jax.model.cache import PAGE_TOKENS
from ninfer_jax.model.kernels import _mgpu_compat as mgpu
from ninfer_jax.model.kernels.mosaic_decode import decode_mosaic, split_count
from ninfer_jax.model.kernels.mosaic_prefill import prefill_mosaic
from ninfer_jax.model.kernels.page_write import copy_pages, pack_pages, unpack_pages, write_tokens
from ninfer_jax.model.kernels.reference import decode_attention_reference, prefill_attention_reference

HEAD_DIM = 256
# Weights are rounded to bfloat16 before they meet V, and the result once more: two steps of 2**-8 of about 1.
TOLERANCE = 8e-3


def main() -> int:
    """Runs every check and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes even on a GPU")
    is_gpu = jax.default_backend() == "gpu"
    is_small = parser.parse_args().quick or not is_gpu
    interpret = None if is_gpu else mgpu.interpret_params()
    checks = {
        "decode_numerics": partial(check_decode_numerics, is_small, interpret),
        "prefill_numerics": partial(check_prefill_numerics, is_small, interpret),
        "donation": partial(check_donation, is_small),
        "host_tier": partial(check_host_tier, is_small),
        "decode_speed": partial(measure_decode, is_small) if is_gpu else lambda: "needs a GPU",
        "prefill_speed": partial(measure_prefill, is_small) if is_gpu else lambda: "needs a GPU",
    }
    report: dict[str, Any] = {
        "jax": jax.__version__,
        "device": str(jax.devices()[0].device_kind),
        "is_interpreted": not is_gpu,
    }
    failed = []
    for name, check in checks.items():
        started = time.perf_counter()
        try:
            report[name] = check()
        except Exception as error:  # the session is short: one failure must not hide the other answers
            failed.append(name)
            report[name] = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            if not is_gpu:
                mgpu.reset_interpreter()
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
    report["failed"] = failed
    print(json.dumps(report, indent=2))
    return 1 if failed else 0


def make_rows(
    lengths: list[int], *, query_heads: int, kv_heads: int, head_dim: int = HEAD_DIM, num_pages: int = 0
) -> tuple[jax.Array, ...]:
    """Returns q, K and V pools, tables and lengths for rows over shuffled pages; all other pages are NaN."""
    rng = np.random.default_rng(0)
    pages_of = [-(-length // PAGE_TOKENS) for length in lengths]
    num_pages = max(num_pages, sum(pages_of) + 1)
    order = rng.permutation(num_pages)
    is_live = np.zeros(num_pages, bool)
    is_live[order[: sum(pages_of)]] = True
    tables = np.full((len(lengths), max([1, *pages_of])), order[-1], np.int32)
    used = 0
    for row, count in enumerate(pages_of):
        tables[row, :count] = order[used : used + count]
        used += count

    def pool(key: jax.Array) -> jax.Array:
        pages = jax.random.normal(key, (num_pages, kv_heads, PAGE_TOKENS, head_dim), jnp.bfloat16)
        return jnp.where(jnp.array(is_live)[:, None, None, None], pages, jnp.nan)

    keys = jax.random.split(jax.random.key(1), 3)
    q = jax.random.normal(keys[2], (len(lengths), query_heads, head_dim), jnp.bfloat16)
    return q, jax.jit(pool)(keys[0]), jax.jit(pool)(keys[1]), jnp.array(tables), jnp.array(lengths, jnp.int32)


def largest_error(got: jax.Array, want: jax.Array) -> float:
    """Returns the largest difference, and fails where it exceeds the tolerance or is NaN."""
    error = float(jnp.abs(got.astype(jnp.float32) - want.astype(jnp.float32)).max())
    if not error <= TOLERANCE:
        raise AssertionError(f"largest error {error}, tolerance {TOLERANCE}")
    return error


def check_decode_numerics(is_small: bool, interpret: Any) -> dict[str, float]:
    """Returns the largest error of decode per shape, lengths at every border of a page."""
    lengths = [0, 1, 65] if is_small else [0, 1, 63, 64, 65, 1000, 4096]
    shapes = (
        [(2, 1, 128)] if is_small else [(24, 4, 256), (16, 2, 256), (16, 4, 256), (8, 8, 128), (32, 2, 128)]
    )
    errors = {}
    for query_heads, kv_heads, head_dim in shapes:
        args = make_rows(lengths, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim)
        scale = head_dim**-0.5
        got = jax.jit(partial(decode_mosaic, scale=scale, interpret=interpret))(*args)
        want = jax.jit(partial(decode_attention_reference, scale=scale))(*args)
        errors[f"Hq{query_heads} Hkv{kv_heads} D{head_dim}"] = largest_error(got, want)
    return errors


def check_prefill_numerics(is_small: bool, interpret: Any) -> dict[str, float]:
    """Returns the largest error of prefill per shape and chunk."""
    shapes = [(1, 1, 128)] if is_small else [(24, 4, 256), (16, 2, 256), (8, 8, 128)]
    chunks = [(70, 60, 64)] if is_small else [(0, 1, 64), (0, 1024, 1024), (4000, 1000, 1024), (65, 63, 64)]
    errors = {}
    for query_heads, kv_heads, head_dim in shapes:
        for start, num, padded in chunks:
            _, k, v, tables, _ = make_rows([start + num], query_heads=1, kv_heads=kv_heads, head_dim=head_dim)
            q = jax.random.normal(jax.random.key(3), (padded, query_heads, head_dim), jnp.bfloat16)
            args = (q, k, v, tables[0], jnp.int32(start), jnp.int32(num))
            scale = head_dim**-0.5
            got = jax.jit(partial(prefill_mosaic, scale=scale, interpret=interpret))(*args)
            want = jax.jit(partial(prefill_attention_reference, scale=scale))(*args)
            name = f"Hq{query_heads} Hkv{kv_heads} D{head_dim} {start}+{num}"
            errors[name] = largest_error(got[:num], want[:num])
    return errors


def check_donation(is_small: bool) -> dict[str, Any]:
    """Returns, per page operation, temporary bytes and microseconds; fails if a pool is copied."""
    # CPU pools are float32: jax 0.10.2 widens others there.
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    shape = (64 if is_small else 8192, 2, PAGE_TOKENS, HEAD_DIM)
    ids = jnp.arange(8, dtype=jnp.int32)
    new = jnp.ones((8, 2, HEAD_DIM), dtype)
    operations = {
        "write_tokens": lambda pages: write_tokens(pages, new, ids, ids),
        "copy_pages": lambda pages: copy_pages(pages, ids, ids + 8),
    }
    report = {}
    for name, operation in operations.items():
        pages = jnp.zeros(shape, dtype)
        compiled = jax.jit(operation, donate_argnums=0).lower(pages).compile()
        memory = compiled.memory_analysis()
        pages = compiled(pages)
        pages.block_until_ready()
        started = time.perf_counter()
        for _ in range(20):
            pages = compiled(pages)
        pages.block_until_ready()
        seconds = (time.perf_counter() - started) / 20
        if memory.alias_size_in_bytes != pages.nbytes or memory.temp_size_in_bytes > pages.nbytes // 4:
            raise AssertionError(f"{name} is not in place: {memory}")
        report[name] = {
            "pool_bytes": pages.nbytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "microseconds": round(seconds * 1e6, 1),
        }
    return report


def check_host_tier(is_small: bool) -> dict[str, Any]:
    """Returns the rates of pack, copy to host, copy back and unpack per group of pages; compares contents."""
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    layers, num_pages = (2, 64) if is_small else (16, 1024)
    zeros = [jnp.zeros((num_pages, 2, PAGE_TOKENS, HEAD_DIM), dtype) for _ in range(2 * layers)]
    ks = [pool + layer for layer, pool in enumerate(zeros[:layers])]
    vs = [pool - layer for layer, pool in enumerate(zeros[layers:])]
    pack, unpack = jax.jit(pack_pages), jax.jit(unpack_pages, donate_argnums=(0, 1))
    report = {}
    for count in (1, 4) if is_small else (1, 16, 128):
        ids = jnp.arange(count, dtype=jnp.int32) * 2
        staged = jax.block_until_ready(pack(ks, vs, ids))
        _, pack_seconds = timed(lambda ids=ids: pack(ks, vs, ids))

        jax.block_until_ready(jax.device_put(staged, jax.memory.Space.Host))
        started = time.perf_counter()
        host = jax.device_put(staged, jax.memory.Space.Host)
        dispatch_seconds = time.perf_counter() - started
        was_ready = host.is_ready()
        host.block_until_ready()
        out_seconds = time.perf_counter() - started

        back, in_seconds = timed(lambda host=host: jax.device_put(host, jax.memory.Space.Device))
        if not bool((back == staged).all()):
            raise AssertionError(f"{count} pages came back changed")
        target = tuple(jnp.copy(k) for k in ks), tuple(jnp.copy(v) for v in vs)
        # Twice: results are committed to the device, and the first call with those compiles anew.
        for _ in range(2):
            target = jax.block_until_ready(unpack(*target, back, ids))
        started = time.perf_counter()
        jax.block_until_ready(unpack(*target, back, ids))
        unpack_seconds = time.perf_counter() - started
        gib = staged.nbytes / 2**30
        report[f"{count} pages"] = {
            "mib": round(gib * 1024, 2),
            "pack_gib_s": round(gib / pack_seconds, 2),
            "to_host_gib_s": round(gib / out_seconds, 2),
            "to_host_dispatch_ms": round(dispatch_seconds * 1e3, 3),
            "was_ready_at_return": was_ready,
            "to_device_gib_s": round(gib / in_seconds, 2),
            "unpack_gib_s": round(gib / unpack_seconds, 2),
        }
    return report


def measure_decode(is_small: bool) -> dict[str, Any]:
    """Returns microseconds and TB/s of K and V, per batch, length and number of splits."""
    report = {}
    shapes = [(1, 2048)] if is_small else [(1, 2048), (1, 16384), (8, 512), (8, 2048), (8, 16384)]
    for rows, length in shapes:
        args = make_rows([length - 3] * rows, query_heads=24, kv_heads=4)
        moved = rows * length * 4 * HEAD_DIM * 2 * 2
        default = split_count(rows, 4, args[3].shape[1])
        for splits in sorted({default, 2 * default, max(1, default // 2)}):
            seconds = kernel_seconds(partial(decode_mosaic, scale=HEAD_DIM**-0.5, splits=splits), args)
            report[f"B{rows} {length} tokens, {splits} splits{' (default)' * (splits == default)}"] = {
                "microseconds": round(seconds * 1e6, 1),
                "tb_s": round(moved / seconds / 1e12, 3),
            }
    return report


def measure_prefill(is_small: bool) -> dict[str, Any]:
    """Returns milliseconds and TFLOP/s of the two products, causal work only."""
    report = {}
    heads = 24
    for tokens, start in [(1024, 0)] if is_small else [(1024, 0), (1024, 4096), (1024, 16384), (256, 4096)]:
        _, k, v, tables, _ = make_rows([start + tokens], query_heads=heads, kv_heads=4)
        q = jax.random.normal(jax.random.key(3), (tokens, heads, HEAD_DIM), jnp.bfloat16)
        args = (q, k, v, tables[0], jnp.int32(start), jnp.int32(tokens))
        seconds = kernel_seconds(partial(prefill_mosaic, scale=HEAD_DIM**-0.5), args)
        work = 4 * heads * HEAD_DIM * (tokens * start + tokens * (tokens + 1) // 2)
        report[f"{tokens} tokens after {start}"] = {
            "milliseconds": round(seconds * 1e3, 3),
            "tflop_s": round(work / seconds / 1e12, 1),
        }
    return report


def kernel_seconds(attend: Callable[..., jax.Array], args: tuple[jax.Array, ...]) -> float:
    """Returns the seconds of one call inside a program of many: a call takes less time than its dispatch.

    Each call's result is the next one's query, so that none can be dropped or run beside another.
    """
    calls = 16

    def chain(q: jax.Array, *rest: jax.Array) -> jax.Array:
        for _ in range(calls):
            q = attend(q, *rest)
        return q

    run = jax.jit(chain)
    return timed(lambda: run(*args))[1] / calls


def timed(run: Callable[[], Any], repeats: int = 20) -> tuple[Any, float]:
    """Returns the result and the seconds of one call, queued back to back after a warm-up."""
    result = jax.block_until_ready(run())
    started = time.perf_counter()
    for _ in range(repeats):
        result = run()
    jax.block_until_ready(result)
    return result, (time.perf_counter() - started) / repeats


if __name__ == "__main__":
    sys.exit(main())
