"""The oracle's oracle: one target over Python sets of page objects, no tables, no vectorisation.

It reads a PhysicalState, turns every page and image into one key, interprets an owner's option from its plain
parameters, and plays the canonical stages as set operations. Slow on purpose; shares no code with projection.
"""

from __future__ import annotations

import random

import numpy as np

from ninfer_jax.planner.candidate import Candidate, Disposition, make_request, root_candidate
from ninfer_jax.planner.capacity import make_capacity
from ninfer_jax.planner.ids import CheckpointKind, OwnerKind, Tier
from ninfer_jax.planner.operations import (
    CheckpointSpec,
    activate_root,
    add_owner,
    advance,
    capture,
    demote,
    place_image,
    place_run,
    set_edge,
    set_pin,
)
from ninfer_jax.planner.problem import identity_targets
from ninfer_jax.planner.state import make_state
from ninfer_jax.planner.target import ABSENT, EVICT, KEEP, make_targets

NONE, DROP_HOST, DROP_DEVICE, DEMOTE = range(4)


class World:
    """Sets of keys: ("image", row) and (pool, run, index)."""

    def __init__(self, state):
        self.state = state
        self.page = state.capacity.page_tokens
        self.pools = state.capacity.num_pools
        self.device, self.host = set(), set()
        self.where = {}  # (owner, pool) -> list of keys in logical order
        self.run_holders = {}
        for s in range(len(state.image_live)):
            if state.image_live[s] and state.image_device[s] >= 0:
                self.device.add(("image", s))
            if state.image_live[s] and state.image_host[s] >= 0:
                self.host.add(("image", s))
        for e in range(len(state.space_run)):
            owner, run = int(state.space_owner[e]), int(state.space_run[e])
            pool = int(state.run_pool[run])
            self.run_holders.setdefault(run, set()).add(owner)
            for i in range(int(state.run_pages[run])):
                key = (pool, run, i)
                self.where.setdefault((owner, pool), []).append(key)
                if state.run_device[run]:
                    self.device.add(key)
                if state.run_host_start[run] >= 0:
                    self.host.add(key)

    def checkpoints(self, owner):
        st = self.state
        rows = [c for c in range(len(st.checkpoint_owner)) if st.checkpoint_owner[c] == owner]
        return sorted(
            rows,
            key=lambda c: (st.checkpoint_frontier[c], st.checkpoint_kind[c], st.checkpoint_ordinal[c]),
        )

    def required(self, owner, rows):
        """Keys that the checkpoints `rows` of `owner` need."""
        keys = {("image", int(self.state.checkpoint_image[c])) for c in rows}
        for pool in range(self.pools):
            longest = max((int(self.state.checkpoint_kv_tokens[c, pool]) for c in rows), default=0)
            keys |= set(self.where.get((owner, pool), [])[: -(-longest // self.page)])
        return keys

    def current(self, keys):
        return {k for k in keys if k in self.device}, {k for k in keys if k in self.host}

    def used(self, device, host, reserved_pages, reserved_states):
        st = self.state
        granules = [p.page_granules for p in st.capacity.pools]
        out = [
            sum(k[0] == "image" for k in device) + reserved_states,
            sum(k[0] == "image" for k in host),
            sum(granules[k[0]] for k in host if k[0] != "image"),
        ]
        for pool in range(self.pools):
            out.append(sum(k[0] == pool for k in device) + reserved_pages[pool])
        return out


def naive_assess(problem, candidate_idx, codes):
    """Returns a dict: used per stage, peak, work counts, fork, and the final key sets."""
    st = problem.state
    w = World(st)
    cap = st.capacity
    candidate = problem.candidates[candidate_idx]
    victims = {int(o): int(codes[v]) for v, o in enumerate(problem.victims)}
    row_of = {int(o): v for v, o in enumerate(problem.victims)}
    source_owner = None
    if candidate.checkpoint is not None:
        source_owner = int(st.checkpoint_owner[candidate.checkpoint])
    wants_device, wants_host = set(), set()
    evictions = drops = 0

    # holders that no option touches
    for o in range(st.num_owners):
        kind = int(st.owner_kind[o])
        if kind == OwnerKind.ACTIVE:
            for pool in range(w.pools):
                wants_device |= set(w.where.get((o, pool), []))
            images = {("image", int(st.owner_writes[o]))}
            d, h = w.current({("image", int(st.checkpoint_image[c])) for c in w.checkpoints(o)})
            wants_device |= (images & w.device) | d
            wants_host |= h
            continue
        if kind == OwnerKind.FREE or o in victims or o == source_owner:
            continue
        d, h = w.current(w.required(o, w.checkpoints(o)))
        wants_device |= d
        wants_host |= h
    for s in range(len(st.image_live)):
        if st.image_live[s] and st.image_pins[s] > 0:
            d, h = w.current({("image", s)})
            wants_device |= d
            wants_host |= h

    # victims under their options
    for o, code in victims.items():
        if code == ABSENT:
            assert o == source_owner
            continue
        v = row_of[o]
        rows = w.checkpoints(o)
        alive_mask = int(problem.options.alive[v, code])
        alive = [c for i, c in enumerate(rows) if alive_mask >> i & 1]
        drops += len(rows) - len(alive)
        evictions += code == EVICT
        need = w.required(o, alive)
        acted = set()
        bits = int(problem.options.state_bits[v, code])
        for key in need:
            if key[0] == "image":
                refs = [i for i, c in enumerate(rows) if c in alive and st.checkpoint_image[c] == key[1]]
                if all(bits >> i & 1 for i in refs):
                    acted.add((key, int(problem.options.state_action[code])))
        for pool in range(w.pools):
            first = int(problem.options.kv_from[v, code, pool])
            sequence = w.where.get((o, pool), [])
            inside = [k for k in sequence[first:] if k in need]
            for key in inside:
                run_keys = [k for k in sequence if k[1] == key[1]]
                shared = len(w.run_holders[key[1]]) > 1
                if shared and not all(k in inside for k in run_keys):
                    continue  # a shared run is only acted on whole
                acted.add((key, int(problem.options.kv_action[code])))
        d, h = w.current(need)
        for key, action in acted:
            both = key in w.device and key in w.host
            if action == DROP_HOST and both:
                h.discard(key)
            elif action == DROP_DEVICE and both:
                d.discard(key)
            elif action == DEMOTE:
                d.discard(key)
                h.add(key)
        wants_device |= d
        wants_host |= h

    # the source
    page = w.page
    consume = candidate.disposition == Disposition.CONSUME
    d2d, h2d_copy = [], []
    used_by_sequence, held_until_commit = set(), set()
    fresh = [0] * (1 + w.pools)
    growth = [-(-t // page) for t in candidate.request.capacity_tokens]
    fork = False
    if source_owner is None:
        fresh[0] = 1
    else:
        src = candidate.checkpoint
        rows = w.checkpoints(source_owner)
        everything = w.required(source_owner, rows)
        if consume:
            held_until_commit = everything
            stay = [
                c
                for c in rows
                if st.checkpoint_frontier[c] <= st.checkpoint_frontier[src]
                and all(st.checkpoint_kv_tokens[c] <= st.checkpoint_kv_tokens[src])
                and st.checkpoint_kind[c] != CheckpointKind.SESSION_ENDPOINT
            ]
            d, h = w.current({("image", int(st.checkpoint_image[c])) for c in stay})
            source_device, source_host = d, h
            lineage_images = {int(st.checkpoint_image[c]) for c in stay}
        else:
            source_device, source_host = w.current(everything)
            lineage_images = {int(st.checkpoint_image[c]) for c in rows}
        for pool in range(w.pools):
            base = int(st.checkpoint_kv_tokens[src, pool])
            keys = w.where.get((source_owner, pool), [])
            used_by_sequence |= set(keys[: base // page])
            growth[pool] -= -(-base // page)
            if base % page:
                tail = keys[base // page]
                if not consume or tail in wants_device or tail in wants_host:
                    fresh[pool + 1] += 1
                    (d2d if tail in w.device else h2d_copy).append((pool + 1, tail))
                else:
                    used_by_sequence.add(tail)
        image = ("image", int(st.checkpoint_image[src]))
        fork = (not consume) or image[1] in lineage_images or image in wants_device or image in wants_host
        if fork:
            fresh[0] += 1
            (d2d if image in w.device else h2d_copy).append((0, image))
            if image in w.device:
                source_device = source_device | {image}
        else:
            used_by_sequence.add(image)
        wants_device |= source_device
        wants_host |= source_host
    wants_device |= used_by_sequence

    final_device = set(wants_device)
    final_host = {k for k in wants_host if k in w.host or k not in final_device}
    everything = w.device | w.host
    final_device &= everything
    final_host &= everything

    d2h = final_host - w.host
    h2d = final_device - w.device
    # stage by stage
    reserved = [int(st.owner_reserved_pages[:, n].sum()) for n in range(w.pools)]
    states = int(st.owner_reserved_states.sum())
    device, host = set(w.device), set(w.host)
    levels = [w.used(device, host, reserved, states)]
    gone_device, gone_host = device - final_device, host - final_host
    device -= {k for k in gone_device if k not in d2h and k not in held_until_commit}
    host -= {k for k in gone_host if k not in held_until_commit}
    levels.append(w.used(device, host, reserved, states))
    host |= d2h
    staged = [
        min(cap.pools[n].staging_pages, sum(k[0] == n for k in d2h if k[0] != "image"))
        for n in range(w.pools)
    ]
    levels.append(w.used(device, host, [r + s for r, s in zip(reserved, staged, strict=True)], states))
    levels.append(levels[-1])
    device -= {k for k in gone_device if k in d2h and k not in held_until_commit}
    levels.append(w.used(device, host, reserved, states))
    device |= h2d
    own = [r + f for r, f in zip(reserved, fresh[1:], strict=True)]
    levels.append(w.used(device, host, own, states + fresh[0]))
    device &= final_device
    host &= final_host
    own = [r + g for r, g in zip(own, growth, strict=True)]
    levels.append(w.used(device, host, own, states + fresh[0]))
    items = ["image", *range(w.pools)]

    def count(keys):
        return [sum(k[0] == i for k in keys) for i in items]

    return {
        "used": np.array(levels),
        "peak": np.array(levels).max(0),
        "d2h": count(d2h),
        "h2d": [a + sum(i == j for i, _ in h2d_copy) for j, a in enumerate(count(h2d))],
        "d2d": [sum(i == j for i, _ in d2d) for j in range(1 + w.pools)],
        "is_fork": fork,
        "evictions": evictions,
        "drops": drops,
        "final_device": device,
        "final_host": host,
    }


def naive_outcomes(problem, candidate_idx, codes, final_device):
    """Returns per live checkpoint row (alive, state on Device, Host-only pages per pool, copies)."""
    st, w = problem.state, World(problem.state)
    candidate = problem.candidates[candidate_idx]
    row_of = {int(o): v for v, o in enumerate(problem.victims)}
    out = {}
    for c in range(len(st.checkpoint_owner)):
        o = int(st.checkpoint_owner[c])
        if o < 0:
            continue
        alive = True
        rows = w.checkpoints(o)
        if o in row_of and codes[row_of[o]] != ABSENT:
            mask = int(problem.options.alive[row_of[o], codes[row_of[o]]])
            alive = bool(mask >> rows.index(c) & 1)
        elif candidate.checkpoint is not None and o == st.checkpoint_owner[candidate.checkpoint]:
            if candidate.disposition == Disposition.CONSUME:
                src = candidate.checkpoint
                below = st.checkpoint_frontier[c] <= st.checkpoint_frontier[src]
                below &= all(st.checkpoint_kv_tokens[c] <= st.checkpoint_kv_tokens[src])
                alive = bool(below) and st.checkpoint_kind[c] != CheckpointKind.SESSION_ENDPOINT
        missing = [k for k in w.required(o, [c]) if k not in final_device]
        pages = [sum(k[0] == n for k in missing) for n in range(w.pools)]
        copies = len({k[1] for k in missing if k[0] != "image"})
        on_device = ("image", int(st.checkpoint_image[c])) in final_device
        out[c] = (alive, on_device, pages, copies)
    return out


def random_state(seed, *, owners=6, checkpoints=3, apply=None, make_problem=None):
    """Returns a state built by legal operations: aliases, both tiers, partial tails, one or two pools."""
    rng = random.Random(seed)
    pools = rng.choice([1, 2])
    capacity = make_capacity(
        device_state_slots=80,
        host_state_slots=60,
        device_pages=tuple([400] * pools),
        host_kv_granules=900,
        page_granules=tuple(rng.choice([1, 2]) for _ in range(pools)),
        staging_pages=tuple(rng.choice([0, 0, 3]) for _ in range(pools)),
        page_bytes=tuple([1000] * pools),
        state_image_bytes=5000,
        lanes=4,
    )
    state = make_state(capacity)
    made = []
    kinds = [
        CheckpointKind.SESSION_ENDPOINT,
        CheckpointKind.TURN_CLOSURE,
        CheckpointKind.RESPONSE_REPLAY,
        CheckpointKind.LONG_ANCHOR,
    ]
    for _ in range(rng.randint(1, owners)):
        tokens = rng.choice([rng.randint(1, 900), 64 * rng.randint(1, 12)])
        if made and rng.random() < 0.3:  # the same end as another owner, so that a partial tail can be shared
            tokens = int(state.owner_frontier[rng.choice(made), 0])
        m = rng.randint(1, checkpoints)
        shared_owner = rng.random() < 0.3
        frontiers = sorted({tokens, *(rng.randint(1, tokens) for _ in range(m - 1))}, reverse=True)
        specs = []
        for i, f in enumerate(frontiers):
            kv = None
            if pools == 2:
                kv = (f, max(f - rng.choice([0, 0, 1, 5]), 1))
            image = None
            if made and rng.random() < 0.2:
                c = rng.choice(
                    [c for c in range(len(state.checkpoint_owner)) if state.checkpoint_owner[c] >= 0]
                )
                image = int(state.checkpoint_image[c])
            elif specs and rng.random() < 0.1:
                image = specs[-1].image
            kind = CheckpointKind.SHARED_STABLE_PREFIX if shared_owner else kinds[min(i, 3)]
            specs.append(CheckpointSpec(f, kind, ordinal=i, kv_tokens=kv, image=image))
        share = {}
        if made and rng.random() < 0.7:
            other = rng.choice(made)
            longest = [
                max(f.frontier_tokens if f.kv_tokens is None else f.kv_tokens[n] for f in specs)
                for n in range(pools)
            ]
            limit = [min(int(state.owner_frontier[other, n]), longest[n]) for n in range(pools)]
            amount = rng.randint(0, limit[0])
            share = {
                "share_with": other,
                "share_tokens": [min(amount, limit[n]) for n in range(pools)],
                "share_tail": False,
            }
            if rng.random() < 0.3:
                share["share_tokens"] = [limit[n] for n in range(pools)]
                share["share_tail"] = all(
                    limit[n] == int(state.owner_frontier[other, n]) and longest[n] == limit[n]
                    for n in range(pools)
                )
        kind = OwnerKind.SHARED if shared_owner else OwnerKind.PRIVATE
        tiers = rng.choices([Tier.DEVICE, Tier.HOST, Tier.BOTH], [5, 2, 2], k=2)
        state, o = add_owner(state, specs, kind=kind, kv_tier=tiers[0], state_tier=tiers[1], **share)
        made.append(o)
    for _ in range(rng.randint(0, 2)):
        if rng.random() < 0.5:
            state, a = activate_root(state, 700)
            state = advance(state, a, rng.randint(1, 500))
            if rng.random() < 0.6:
                f = [int(t) for t in state.owner_frontier[a]]
                shared = rng.random() < 0.6
                kind = CheckpointKind.SHARED_STABLE_PREFIX if shared else CheckpointKind.LONG_ANCHOR
                state, o = capture(state, a, CheckpointSpec(max(f), kind, ordinal=9), shared=shared)
                if shared:
                    made.append(o)
                state = advance(state, a, max(f) + rng.randint(0, 100))
        elif apply is not None:
            cands = random_candidates(state, rng)
            problem = make_problem(state, cands)
            ids = identity_targets(problem)
            i = rng.randrange(len(cands))
            state, a = apply(problem, make_targets(i, ids.codes[i]))
            made = [o for o in made if int(state.owner_kind[o]) in (2, 3)]
            if rng.random() < 0.5:
                state = advance(state, a, [int(t) + rng.randint(0, 70) for t in state.owner_frontier[a]])
    for _ in range(rng.randint(0, 4)):
        live = [o for o in made if int(state.owner_kind[o]) in (2, 3)]
        if not live:
            break
        o = rng.choice(live)
        roll = rng.random()
        if roll < 0.3:
            rows = [
                e
                for e in range(len(state.space_run))
                if not any(
                    state.owner_kind[state.space_owner[x]] == OwnerKind.ACTIVE
                    for x in np.flatnonzero(state.space_run == state.space_run[e])
                )
            ]
            if rows:
                run = int(state.space_run[rng.choice(rows)])
                state = place_run(state, run, rng.choice(list(Tier)))
        elif roll < 0.5:
            image = int(rng.choice([int(i) for i in state.checkpoint_image if i >= 0]))
            if state.image_pins[image] == 0:
                state = place_image(state, image, rng.choice(list(Tier)))
        elif roll < 0.65:
            shared_with = {
                int(x)
                for r in state.space_run[state.space_owner == o]
                for x in state.space_owner[state.space_run == r]
            }
            if not any(state.owner_kind[x] == OwnerKind.ACTIVE for x in shared_with):
                pinned = any(
                    state.image_pins[i] > 0 for i in state.checkpoint_image[state.checkpoint_owner == o]
                )
                state = demote(
                    state, o, images=not pinned and rng.random() < 0.5, kv_from_page=rng.randint(0, 6)
                )
        elif roll < 0.8:
            state = set_pin(state, o, pins=1)
        else:
            actives = np.flatnonzero(state.owner_kind == OwnerKind.ACTIVE)
            if len(actives):
                state = set_edge(state, int(actives[0]), o)
    return state


def random_candidates(state, rng):
    """Returns root and some exact candidates with a legal disposition."""
    pools = state.capacity.num_pools
    request = make_request(950, rng.randint(0, 200), num_pools=pools)
    out = [root_candidate(request)]
    rows = [
        c
        for c in range(len(state.checkpoint_owner))
        if state.checkpoint_owner[c] >= 0 and state.owner_kind[state.checkpoint_owner[c]] in (2, 3)
    ]
    rng.shuffle(rows)
    for c in rows[:4]:
        o = int(state.checkpoint_owner[c])
        free = (
            state.owner_kind[o] == OwnerKind.PRIVATE
            and state.owner_pins[o] == 0
            and not state.edges[:, o].any()
        )
        how = Disposition.CONSUME if free and rng.random() < 0.6 else Disposition.RETAIN
        out.append(Candidate(len(out), c, how, request))
    return out


def random_targets(problem, rng, count):
    """Returns `count` random complete targets over random candidates, identities first."""
    valid = problem.options.valid
    rows = []
    which = []
    for _ in range(count):
        c = rng.randrange(len(problem.candidates))
        codes = [
            KEEP if rng.random() < 0.3 else int(rng.choice(np.flatnonzero(valid[v]).tolist()))
            for v in range(problem.num_victims)
        ]
        v = int(problem.source_victim[c])
        if v >= 0:
            codes[v] = ABSENT
        rows.append(codes)
        which.append(c)
    return make_targets(
        np.array(which, np.int32), np.array(rows, np.int32).reshape(count, problem.num_victims)
    )
