"""The additive picture of a neighbourhood: what each option of each owner changes, taken one at a time.

Owns: the picture, and two ways to read promising combinations out of it. It is a hint (G-1): shared objects
and joint prices do not add, so every combination is assessed exactly before it means anything, and nothing is
ruled out by it. Around a target x,

    use(y) = use(x) + sum over owners of use[v, y_v]        price(y) = price(x) + sum of price[v, y_v]

Two readings: `sweep` picks each owner's best option under a price per missing unit (Lagrange multipliers),
for many multipliers at once; `core` enumerates all combinations of the few options whose choice those prices
leave open, cheapest first.

Letters: V victims, K options, G constraints (stage and axis), L multipliers, P combinations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from ninfer_jax.planner.search_types import Assessment
from ninfer_jax.planner.target import TargetBatch

NUM_SCALES = 16


@dataclass(frozen=True, eq=False)
class Picture:
    """Changes of single owners around one target."""

    candidate: int
    codes: np.ndarray  # int32[V], the target in the middle
    middle_price: int
    need: np.ndarray  # float64[G], units over (positive) or below capacity in the middle
    use: np.ndarray  # float64[V, K, G], change of each constraint; 0 for the middle's own codes
    price: np.ndarray  # float64[V, K], change of J
    is_open: np.ndarray  # bool[V, K], options that may be chosen; the middle's own always
    columns: np.ndarray  # int[2, G], stage and axis of each constraint


def make_picture(
    base: TargetBatch,
    base_assessment: Assessment,
    base_price: int,
    moves: TargetBatch,
    assessment: Assessment,
    prices: np.ndarray,
    capacity: np.ndarray,
    num_options: int,
) -> Picture:
    """Returns the picture around `base` from exactly assessed moves.

    Args:
        base: a batch of one.
        moves: neighbours of `base`; those that change several owners are left out.
        capacity: int32[R].
    """
    codes, v = base.codes[0], base.codes.shape[1]
    differs = moves.codes != codes
    single = np.flatnonzero(differs.sum(1) == 1)
    owner = differs[single].argmax(1)
    code = moves.codes[single, owner]
    change = assessment.used[single] - base_assessment.used[0]
    over = base_assessment.used[0] - capacity
    columns = _columns(over, change)
    use = np.zeros((v, num_options, columns.shape[1]))
    price = np.zeros((v, num_options))
    is_open = np.zeros((v, num_options), bool)
    use[owner, code] = change[:, columns[0], columns[1]]
    price[owner, code] = (prices[single] - base_price).astype(np.float64)  # subtracted exactly
    is_open[owner, code] = True
    is_open[np.arange(v), codes] = True
    return Picture(
        int(base.candidate[0]),
        codes,
        base_price,
        over[columns[0], columns[1]].astype(np.float64),
        use,
        price,
        is_open,
        columns,
    )


def _columns(over: np.ndarray, change: np.ndarray) -> np.ndarray:
    """Returns int[2, G], (stage, axis) of the constraints that can bind, equal neighbours once."""
    highest = over + np.maximum(change, 0).sum(0)  # an upper bound over all combinations of one per owner
    stages, axes = np.nonzero(highest[1:] > 0)
    keep: list[tuple[int, int]] = []
    for s, r in zip((stages + 1).tolist(), axes.tolist(), strict=True):
        last = next((t for t, a in reversed(keep) if a == r), None)
        if last is not None and over[last, r] == over[s, r]:
            if np.array_equal(change[:, last, r], change[:, s, r]):
                continue
        keep.append((s, r))
    return np.asarray(keep, np.int64).reshape(-1, 2).T


def forced(picture: Picture, codes: np.ndarray, change: np.ndarray, price: int) -> Picture:
    """Returns the picture around another target, whose changed owners stay as they are.

    Args:
        codes: int32[V].
        change: float64[G], exact change of the constraints from the middle to `codes`.
        price: exact J of `codes`.
    """
    changed = np.flatnonzero(codes != picture.codes)
    use, prices, is_open = picture.use.copy(), picture.price.copy(), picture.is_open.copy()
    is_open[changed] = False
    is_open[changed, codes[changed]] = True
    use[changed, codes[changed]] = 0
    prices[changed, codes[changed]] = 0
    need = picture.need + change
    return replace(
        picture, codes=codes, middle_price=price, need=need, use=use, price=prices, is_open=is_open
    )


@dataclass(frozen=True, eq=False)
class Swept:
    """Combinations that are best for some multipliers."""

    codes: np.ndarray  # int32[L, V]
    multipliers: np.ndarray  # float64[L, G]
    excess: np.ndarray  # float64[L, G], predicted units over capacity
    price: np.ndarray  # float64[L], predicted change of J


def sweep(picture: Picture) -> Swept:
    """Returns one combination per multiplier, from cheap and too little to dear and more than enough."""
    need, use = picture.need, picture.use
    v, k, g = use.shape
    short = need > 0
    relief = np.clip(-use[..., short], 0, need[short]) / np.where(short, need, 1)[short]
    relief = relief.sum(-1)
    useful = (relief > 0) & picture.is_open
    if useful.any():
        rate = np.maximum(picture.price[useful], 1.0) / relief[useful]
        low, high = float(rate.min()), float(rate.max())
    else:
        low = high = 1.0
    scales = np.geomspace(low / 2, high * 4, NUM_SCALES)
    directions = [np.where(short, 1 / np.maximum(need, 1), 0)]
    if short.sum() > 1:
        for i in np.flatnonzero(short):
            directions.append(np.where(np.arange(g) == i, 4.0, 1.0) * directions[0])
    loose = ~short
    if loose.any():
        room = np.maximum(-need, 1)
        directions += [d + np.where(loose, share / room, 0) for d in directions for share in (0.25, 1.0)]
    stacked = np.stack(directions)[None] * scales[:, None, None]
    multipliers = stacked.reshape(len(scales) * len(directions), g)
    open_price = np.where(picture.is_open, picture.price, np.inf)
    cost = open_price[None] + (use.reshape(v * k, g) @ multipliers.T).T.reshape(-1, v, k)
    codes = cost.argmin(-1).astype(np.int32)
    at = np.arange(v)
    return Swept(
        codes,
        multipliers,
        need + use[at, codes].sum(1),
        picture.price[at, codes].sum(1),
    )


def attainable_price(picture: Picture, swept: Swept) -> int:
    """Returns the least J that the picture allows for anything that fits: the best dual bound."""
    bound = swept.price + (swept.multipliers * swept.excess).sum(1)
    return picture.middle_price + max(int(min(bound.max(), 2.0**62)), 0)


def best_multiplier(swept: Swept) -> int:
    """Returns the row to enumerate around: the cheapest that is predicted to fit, else the nearest to it."""
    excess = np.maximum(swept.excess, 0).sum(1)
    order = np.lexsort((swept.price, excess))
    return int(order[0])


def core(
    picture: Picture, codes: np.ndarray, multipliers: np.ndarray, *, max_combinations: int, limit: int
) -> np.ndarray:
    """Returns int32[n, V], predicted-to-fit combinations, cheapest first, at most `limit`.

    Args:
        codes: int32[V], the combination to vary.
        multipliers: float64[G], price per unit under which the open choices are ranked.
        max_combinations: size of the enumerated product.
    """
    v, k, _ = picture.use.shape
    at = np.arange(v)
    reduced = picture.price + picture.use @ multipliers
    reduced = np.where(picture.is_open, reduced - reduced[at, codes][:, None], np.inf)
    reduced[at, codes] = np.inf
    flat = np.argsort(reduced, axis=None, kind="stable")
    choices: dict[int, list[int]] = {}
    total = 1
    for cell in flat.tolist():
        owner, code = divmod(cell, k)
        if not np.isfinite(reduced[owner, code]):
            break
        have = len(choices.get(owner, ())) + 1
        if total // have * (have + 1) > max_combinations:
            break
        total = total // have * (have + 1)
        choices.setdefault(owner, []).append(code)
    excess = (picture.need + picture.use[at, codes].sum(0))[None]
    price = np.asarray([picture.price[at, codes].sum()])
    for owner, extra in choices.items():
        options = np.asarray([codes[owner], *extra])
        own_use = picture.use[owner, options] - picture.use[owner, codes[owner]]
        own_price = picture.price[owner, options] - picture.price[owner, codes[owner]]
        size = (len(price) * len(options), excess.shape[1])
        excess = (excess[:, None] + own_use[None]).reshape(size)
        price = (price[:, None] + own_price[None]).ravel()
    rows = np.flatnonzero((excess <= 0).all(1))
    rows = rows[np.argsort(price[rows], kind="stable")[:limit]]
    out = np.repeat(codes[None], len(rows), 0)
    for owner, extra in reversed(choices.items()):
        options = np.asarray([codes[owner], *extra], np.int32)
        rows, which = np.divmod(rows, len(options))
        out[:, owner] = options[which]
    return out


def num_combinations(picture: Picture) -> int:
    """Returns how many targets the picture spans."""
    total = 1
    for n in picture.is_open.sum(1).tolist():
        total *= n
    return total
