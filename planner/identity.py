"""Assessment of identity targets: activation and source disposition, nobody under pressure (T-4, G-2).

Owns: the same answer as `projection` gives for these targets, from the sources' own objects alone. A round
whose identities fit ends here, without options and tables. Owns no other target.

With everybody else keeping what they have, an object leaves a tier only if its source lets go of it and no
other holder is left; nothing is copied to Host, and nothing is freed before the commit.

Letters: D candidates, B targets, F source objects of all candidates, J items, R axes.
"""

from __future__ import annotations

import numpy as np
from ninfer_jax.planner.capacity import DEVICE_PAGES, DEVICE_STATE, HOST_KV, HOST_STATE
from ninfer_jax.planner.needs import growth_pages, source_objects
from ninfer_jax.planner.problem import Problem
from ninfer_jax.planner.search_types import Assessment
from ninfer_jax.planner.sources import ImageRule, SourceView, TailRule
from ninfer_jax.planner.stages import NUM_STAGES
from ninfer_jax.planner.target import ABSENT, TargetBatch


def are_identities(problem: Problem, targets: TargetBatch) -> bool:
    """Returns whether there are targets and every one is the identity of its candidate."""
    if not len(targets) or (targets.codes > ABSENT).any() or targets.codes.shape[1] != problem.num_victims:
        return False
    source = problem.source_victim[targets.candidate]
    absent = targets.codes == ABSENT
    has_source = source >= 0
    if not (absent.sum(1) == has_source).all():
        return False
    rows = np.flatnonzero(has_source)
    return bool(absent[rows, source[rows]].all())


def assess_identities(problem: Problem, candidate: np.ndarray) -> Assessment:
    """Returns the assessment of the candidates' identity targets.

    Args:
        candidate: int32[B].
    """
    state, objects = problem.state, problem.objects
    sources = [problem.sources[d] for d in candidate.tolist()]
    b, items = len(sources), 1 + state.capacity.num_pools
    fresh, d2d, tail_h2d, growth = (np.zeros((b, items), np.int32) for _ in range(4))
    is_fork = np.zeros(b, bool)
    f = source_objects(sources)
    in_domain = problem.source_victim[candidate] >= 0
    device, host = objects.device[f.obj], objects.host[f.obj]
    fixed_device, fixed_host = objects.fixed_device[f.obj], objects.fixed_host[f.obj]
    elsewhere = objects.holders[f.obj] > in_domain[f.row]
    need = f.need
    for i, (d, view) in enumerate(zip(candidate.tolist(), sources, strict=True)):
        chosen = problem.candidates[d]
        root = chosen.checkpoint is None
        base = None if root else state.checkpoint_kv_tokens[chosen.checkpoint]
        growth[i, 1:] = growth_pages(state.capacity, chosen, base)
        fresh[i, 0] = root
        copied = [(n + 1, t) for n, (t, r) in enumerate(_tails(view)) if r == TailRule.COPY]
        undecided = [(n + 1, t) for n, (t, r) in enumerate(_tails(view)) if r == TailRule.BY_OTHERS]
        if view.image_rule == ImageRule.FORK:
            copied.append((0, view.image_obj))
        elif view.image_rule == ImageRule.BY_OTHERS:
            undecided.append((0, view.image_obj))
        for item, obj in undecided:
            others = objects.fixed_device[obj] or objects.fixed_host[obj] or objects.holders[obj] > 1
            if others:
                copied.append((item, obj))
            else:
                need = need | ((f.row == i) & (f.obj == obj))
        for item, obj in copied:
            (d2d if objects.device[obj] else tail_h2d)[i, item] += 1
            is_fork[i] |= item == 0

    stays_device = fixed_device | (device & elsewhere) | f.hold_device | need
    stays_host = (fixed_host | (host & elsewhere) | f.hold_host) & (host | ~stays_device)

    cell = f.row * items + objects.item[f.obj]
    size = objects.size[f.obj]

    def units(picked: np.ndarray, amount: np.ndarray | None = None) -> np.ndarray:
        if not picked.any():
            return np.zeros((b, items), np.int32)
        weights = None if amount is None else amount[picked]
        counts = np.bincount(cell[picked], weights, minlength=b * items)
        return counts.astype(np.int32).reshape(b, items)

    restored = need & ~device
    h2d = units(restored, size)
    device_late = units(f.late & device & ~stays_device, size)
    host_late = units(f.late & host & ~stays_host, size)
    used = np.repeat(np.tile(problem.holdings.used0, (b, 1))[:, None], NUM_STAGES + 1, 1)
    taken = h2d + d2d + tail_h2d + fresh
    for change, since in ((taken, NUM_STAGES - 1), (growth - device_late, NUM_STAGES)):
        used[:, since:, DEVICE_STATE] += change[:, None, 0]
        used[:, since:, DEVICE_PAGES:] += change[:, None, 1:]
    used[:, NUM_STAGES, HOST_STATE] -= host_late[:, 0]
    used[:, NUM_STAGES, HOST_KV] -= (host_late[:, 1:] * state.capacity.page_granules()).sum(1, dtype=np.int32)
    peak = used.max(1)
    residual = np.maximum(peak - state.capacity.units(), 0)
    nothing = np.zeros((b, items), np.int32)
    none = np.zeros(b, np.int32)
    return Assessment(
        used=used,
        peak=peak,
        residual=residual,
        fits=~residual.any(1),
        d2h=nothing,
        d2h_ops=nothing,
        h2d=h2d + tail_h2d,
        h2d_ops=units(restored) + tail_h2d,
        d2d=d2d,
        is_fork=is_fork,
        evictions=none,
        drops=none,
        degraded=none,
    )


def _tails(view: SourceView) -> zip[tuple[int, TailRule]]:
    return zip(view.tail_obj, view.tail_rule, strict=True)
