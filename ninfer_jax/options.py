"""Options of an engine and their resolution: every default filled in, every rule of F-1..F-4 checked once.

Owns no sizing: how many pages fit the device is the program's to say, with the resolved values in hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from ninfer_jax.checks import (
    MAX_INT32,
    MAX_INT64,
    check_choice,
    checked_flag,
    checked_integer,
    checked_seconds,
)
from ninfer_jax.errors import OptionError

PAGE_TOKENS = 64  # K-2: fixed for every growing pool
MAX_CONCURRENCY = 8  # P-1
DEFAULT_MAX_CONTEXT_TOKENS = 8192
GIB = 2**30
# Ordinals of long anchors share the session file's table of 64 (conventions 16).
MAX_LONG_ANCHORS = 64

DType = Literal["float32", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True)
class ContextCacheOptions:
    """What inactive context an engine may keep. None means the default that ``resolve`` fills in.

    ``endpoint_anchors`` and ``kv_lease_growth`` are recorded now and take effect with the parts they steer;
    without them nothing is weaker: a reservation is never smaller than A-1 asks.

    Args:
        enabled: False keeps nothing: every request starts from root (F-4).
        device_state_slots: H, beside the C that active requests own; default C.
        host_state_slots: complete state images on the host; default 8.
        host_kv_capacity_bytes: of one arena; default 1 GiB on CPU, 8 GiB on GPU.
        max_private_continuations: P, at least C; default max(2C, 8).
        max_shared_prefixes: S; default max(C, 7), an explicit value is kept, 0 included.
        max_long_anchors_per_continuation: 0 to 64; default 2.
        endpoint_anchors: N-8; off where no long anchor may be kept.
        recency_eviction: G-7.
        kv_lease_growth: A-4.
    """

    enabled: bool = True
    device_state_slots: int | None = None
    host_state_slots: int | None = None
    host_kv_capacity_bytes: int | None = None
    max_private_continuations: int | None = None
    max_shared_prefixes: int | None = None
    max_long_anchors_per_continuation: int | None = None
    endpoint_anchors: bool = True
    recency_eviction: bool = False
    kv_lease_growth: bool = False


@dataclass(frozen=True)
class EngineOptions:
    """Options of one engine, as a caller gives them; ``resolve`` checks them and fills in the defaults.

    Args:
        max_context: tokens of prompt and answer together, per request. None is 8192, or the model's own
            limit where that is smaller; an explicit value above that limit is an error.
        kv_capacity: tokens over all requests; None and ``"auto"`` size the pool from free memory (K-9).
        kv_headroom_bytes: device memory that automatic sizing leaves free; default 1 GiB.
        max_concurrency: C, 1 to 8 requests that run at once.
        max_pending_requests: that wait behind them; one more is refused with OVERLOADED.
        pending_timeout_s: seconds from submission to admission.
        prefill_chunk: prompt tokens per prefill step.
        dtype: ``"float32"`` or ``"bfloat16"``; default float32 on CPU, bfloat16 on GPU.
        load_format: ``"auto"`` reads the weights, ``"dummy"`` draws random ones.
        seed: of dummy weights, and of requests that sample without a seed of their own.
        device: ``"cpu"``, ``"gpu"``, ``"gpu:1"``; default JAX's first.
        compilation_cache_dir: default JAX's own, else one in ~/.cache; ``"off"`` names none.
        session_dir: a directory: saved sessions in it are restored at start, bound ones saved at close.
        request_log: a file that gets one line of JSON for each request that ends; no text of it.
        trace_plans: a directory that gets one replayable file for each admission, for ``ninfer-jax plan``.
        cache: what inactive context may be kept.
    """

    max_context: int | None = None
    kv_capacity: int | Literal["auto"] | None = None
    kv_headroom_bytes: int | None = None
    max_concurrency: int = 4
    max_pending_requests: int = 16
    pending_timeout_s: float = 600.0
    prefill_chunk: int = 1024
    dtype: DType | None = None
    load_format: LoadFormat = "auto"
    seed: int = 0
    device: str | None = None
    compilation_cache_dir: str | None = None
    session_dir: str | None = None
    request_log: str | None = None
    trace_plans: str | None = None
    cache: ContextCacheOptions = field(default_factory=ContextCacheOptions)


@dataclass(frozen=True)
class ResolvedCacheOptions:
    """``ContextCacheOptions`` with every value fixed; a disabled cache has no capacity but P = C."""

    enabled: bool
    device_state_slots: int
    host_state_slots: int
    host_kv_capacity_bytes: int
    max_private_continuations: int
    max_shared_prefixes: int
    max_long_anchors_per_continuation: int
    endpoint_anchors: bool
    recency_eviction: bool
    kv_lease_growth: bool


@dataclass(frozen=True)
class ResolvedOptions:
    """``EngineOptions`` with every value fixed. Built by ``resolve``."""

    max_context: int
    kv_capacity: int | Literal["auto"]
    kv_headroom_bytes: int
    max_concurrency: int
    max_pending_requests: int
    pending_timeout_s: float
    prefill_chunk: int
    dtype: DType
    load_format: LoadFormat
    seed: int
    device: str | None
    compilation_cache_dir: str | None
    session_dir: str | None
    request_log: str | None
    trace_plans: str | None
    cache: ResolvedCacheOptions

    @property
    def total_device_state_slots(self) -> int:
        """C + H: one pool, no slot tied to a lane (S-1)."""
        return self.max_concurrency + self.cache.device_state_slots

    @property
    def max_outstanding_requests(self) -> int:
        """Requests that may be unfinished or unread at once: the lanes and the queue before them."""
        return self.max_concurrency + self.max_pending_requests

    def as_dict(self) -> dict[str, Any]:
        """The resolved values as plain nested data, for reports."""
        return dataclasses.asdict(self)


def make_engine_options(options: EngineOptions | None = None, **changes: Any) -> EngineOptions:
    """Returns ``options`` with the named fields replaced.

    Fields of ``ContextCacheOptions`` may be named directly; ``cache`` takes a whole one, a mapping of its
    fields, or one of the two modes ``"read_write"`` and ``"disabled"``.

    Raises:
        OptionError: for a name that is no option, listing the names that are.
    """
    base = EngineOptions() if options is None else options
    if not isinstance(base, EngineOptions):
        raise OptionError(f"options: got {type(base).__name__}, expected EngineOptions")
    engine_names = {f.name for f in dataclasses.fields(EngineOptions)}
    cache_names = {f.name for f in dataclasses.fields(ContextCacheOptions)} - {"enabled"}
    unknown = sorted(set(changes) - engine_names - cache_names)
    if unknown:
        known = ", ".join(sorted(engine_names | cache_names))
        raise OptionError(f"unknown option {', '.join(unknown)}; the options are {known}")
    cache = changes.pop("cache", base.cache)
    if cache in ("read_write", "disabled"):
        cache = dataclasses.replace(base.cache, enabled=cache == "read_write")
    if isinstance(cache, Mapping):
        extra = sorted(set(cache) - cache_names - {"enabled"})
        if extra:
            raise OptionError(f"cache: unknown option {', '.join(map(str, extra))}")
        cache = dataclasses.replace(base.cache, **cache)
    if not isinstance(cache, ContextCacheOptions):
        raise OptionError(
            f"cache: got {repr(cache) if isinstance(cache, str) else type(cache).__name__}, expected "
            "'read_write', 'disabled', ContextCacheOptions or a mapping of its fields"
        )
    cache_changes = {name: changes.pop(name) for name in tuple(changes) if name in cache_names}
    return dataclasses.replace(base, cache=dataclasses.replace(cache, **cache_changes), **changes)


def resolve(
    options: EngineOptions, *, platform: str, model_max_context: int | None = None
) -> ResolvedOptions:
    """Returns the options with every default filled in.

    Args:
        options: as given by the caller.
        platform: JAX's platform name of the device that will be used; decides dtype and host arena defaults.
        model_max_context: the checkpoint's own limit in tokens, where it is known.
    Raises:
        OptionError: naming the field, its value and the bound it breaks (F-3).
    """
    on_cpu = platform == "cpu"
    concurrency = checked_integer("max_concurrency", options.max_concurrency, 1, MAX_CONCURRENCY)
    max_context = _resolve_max_context(options.max_context, model_max_context)
    dtype = options.dtype
    if dtype is None:
        dtype = "float32" if on_cpu else "bfloat16"
    check_choice("dtype", dtype, get_args(DType))
    check_choice("load_format", options.load_format, get_args(LoadFormat))
    headroom = options.kv_headroom_bytes
    return ResolvedOptions(
        max_context=max_context,
        kv_capacity=_resolve_kv_capacity(options.kv_capacity, max_context, concurrency),
        kv_headroom_bytes=checked_integer(
            "kv_headroom_bytes", GIB if headroom is None else headroom, 0, MAX_INT64
        ),
        max_concurrency=concurrency,
        max_pending_requests=checked_integer(
            "max_pending_requests", options.max_pending_requests, 1, MAX_INT32
        ),
        pending_timeout_s=checked_seconds("pending_timeout_s", options.pending_timeout_s),
        prefill_chunk=checked_integer("prefill_chunk", options.prefill_chunk, 1, MAX_INT32),
        dtype=dtype,
        load_format=options.load_format,
        seed=checked_integer("seed", options.seed, 0, 2**32 - 1),
        device=_optional_text("device", options.device),
        compilation_cache_dir=_optional_text("compilation_cache_dir", options.compilation_cache_dir),
        session_dir=_optional_text("session_dir", options.session_dir),
        request_log=_optional_text("request_log", options.request_log),
        trace_plans=_optional_text("trace_plans", options.trace_plans),
        cache=_resolve_cache(options.cache, concurrency, on_cpu),
    )


def _resolve_max_context(given: int | None, model_limit: int | None) -> int:
    if given is None:
        return (
            DEFAULT_MAX_CONTEXT_TOKENS
            if model_limit is None
            else min(DEFAULT_MAX_CONTEXT_TOKENS, model_limit)
        )
    # one prompt token and one answer token are the shortest request there is
    max_context = checked_integer("max_context", given, 2, MAX_INT32)
    if model_limit is not None and max_context > model_limit:
        raise OptionError(
            f"max_context: got {max_context}, expected at most {model_limit}, the model's own limit"
        )
    return max_context


def _resolve_kv_capacity(given: object, max_context: int, concurrency: int) -> int | Literal["auto"]:
    if given is None or given == "auto":
        return "auto"
    if isinstance(given, str):
        raise OptionError(f"kv_capacity: got {given!r}, expected a number of tokens or 'auto'")
    capacity = checked_integer("kv_capacity", given, 1, MAX_INT32)
    if capacity < max_context:
        raise OptionError(
            f"kv_capacity: got {capacity} tokens, expected at least max_context = {max_context}; "
            "raise it or lower max_context"
        )
    if -(-capacity // PAGE_TOKENS) < concurrency:
        raise OptionError(
            f"kv_capacity: got {capacity} tokens, expected at least one page of {PAGE_TOKENS} for each of "
            f"max_concurrency = {concurrency} requests, {concurrency * PAGE_TOKENS} tokens"
        )
    return capacity


_CAPACITY_NAMES = (
    "device_state_slots",
    "host_state_slots",
    "host_kv_capacity_bytes",
    "max_shared_prefixes",
    "max_long_anchors_per_continuation",
)


def _resolve_cache(cache: ContextCacheOptions, concurrency: int, on_cpu: bool) -> ResolvedCacheOptions:
    if not isinstance(cache, ContextCacheOptions):
        raise OptionError(f"cache: got {type(cache).__name__}, expected ContextCacheOptions")
    for name in ("enabled", "endpoint_anchors", "recency_eviction", "kv_lease_growth"):
        checked_flag(f"cache.{name}", getattr(cache, name))
    if not cache.enabled:
        return _disabled_cache(cache, concurrency)
    device_slots = _count(cache, "device_state_slots", concurrency, MAX_INT32 - concurrency)
    host_slots = _count(cache, "host_state_slots", 8, MAX_INT32)
    host_bytes = _count(cache, "host_kv_capacity_bytes", GIB if on_cpu else 8 * GIB, MAX_INT64)
    private = _count(cache, "max_private_continuations", max(2 * concurrency, 8), MAX_INT32)
    if private < concurrency:
        raise OptionError(
            f"cache.max_private_continuations: got {private}, expected at least max_concurrency = "
            f"{concurrency}: every active request may publish one"
        )
    shared = _count(cache, "max_shared_prefixes", max(concurrency, 7), MAX_INT32)
    anchors = _count(cache, "max_long_anchors_per_continuation", 2, MAX_LONG_ANCHORS)
    entries = private * (anchors + 2) + shared
    if entries > MAX_INT32:
        raise OptionError(
            f"cache.max_private_continuations: got {private}; with {anchors} anchors each and {shared} "
            f"shared prefixes the index needs {entries} entries, expected at most {MAX_INT32}"
        )
    return ResolvedCacheOptions(
        enabled=True,
        device_state_slots=device_slots,
        host_state_slots=host_slots,
        host_kv_capacity_bytes=host_bytes,
        max_private_continuations=private,
        max_shared_prefixes=shared,
        max_long_anchors_per_continuation=anchors,
        endpoint_anchors=cache.endpoint_anchors and anchors > 0,
        recency_eviction=cache.recency_eviction,
        kv_lease_growth=cache.kv_lease_growth,
    )


def _disabled_cache(cache: ContextCacheOptions, concurrency: int) -> ResolvedCacheOptions:
    """Root only (F-4): an explicit capacity contradicts the switch, and is refused rather than overridden."""
    for name in _CAPACITY_NAMES:
        if getattr(cache, name) not in (None, 0):
            raise OptionError(
                f"cache.{name}: got {getattr(cache, name)!r}, "
                "expected 0 or nothing while cache.enabled is False"
            )
    if cache.max_private_continuations not in (None, concurrency):
        raise OptionError(
            f"cache.max_private_continuations: got {cache.max_private_continuations!r}, expected "
            f"max_concurrency = {concurrency} or nothing while cache.enabled is False"
        )
    return ResolvedCacheOptions(
        enabled=False,
        device_state_slots=0,
        host_state_slots=0,
        host_kv_capacity_bytes=0,
        max_private_continuations=concurrency,
        max_shared_prefixes=0,
        max_long_anchors_per_continuation=0,
        endpoint_anchors=False,
        recency_eviction=False,
        kv_lease_growth=False,
    )


def _count(cache: ContextCacheOptions, name: str, default: int, high: int) -> int:
    given = getattr(cache, name)
    return default if given is None else checked_integer(f"cache.{name}", given, 0, high)


def _optional_text(name: str, got: object) -> str | None:
    if got is None:
        return None
    if not isinstance(got, str) or not got:
        raise OptionError(f"{name}: got {got!r}, expected text or None")
    return got
