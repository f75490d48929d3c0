"""What having a checkpoint saves against rebuilding it, for every option of its owner (O-5).

Owns: the prices of recovery recipes and the choice of the cheapest. A checkpoint's fate depends on its own
owner's option, on which shared classes of that owner are on Host only, and on a candidate that restores or
releases some of the owner's objects; a *row* here is one such combination, priced when it is first met. Owns
no loss.

Letters: Q checkpoints of the problem, K options, U owners with checkpoints, M checkpoints of one owner, C
classes, N pools, n owners asked for, r rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from ninfer_jax.planner.cost import SATURATED, MachineCostModel, batch_ns_array, saturating_sum
from ninfer_jax.planner.outcomes import OutcomeTables
from ninfer_jax.planner.problem import Problem
from ninfer_jax.planner.round_facts import RoundFacts

NO_CANDIDATE = -1


@dataclass(eq=False)
class SavingsBook:
    """The rows priced so far in one round; holds nothing else that changes.

    Attributes:
        number: row of each (owner, candidate that touches it, packed Host-only classes of the owner).
        saving: int64[r, M, K], rebuild minus recovery; 0 where padded.
        recovery: int64[r, M, K].
    """

    problem: Problem
    facts: RoundFacts
    outcome: OutcomeTables
    model: MachineCostModel
    number: dict[tuple[int, int, bytes], int] = field(default_factory=dict)
    saving: list[np.ndarray] = field(default_factory=list)
    recovery: list[np.ndarray] = field(default_factory=list)

    @cached_property
    def owner_classes(self) -> np.ndarray:
        """bool[U, C], shared classes that the owner's checkpoints need."""
        num_classes = len(self.problem.tables.class_device)
        own = np.zeros((len(self.facts.owners), num_classes + 1), bool)
        rows = np.append(self.outcome.classes, np.full((1, self.outcome.classes.shape[1]), num_classes), 0)
        images = np.append(self.outcome.image_class, num_classes)
        who = np.arange(len(own))
        own[who[:, None, None], rows[self.facts.index]] = True
        own[who[:, None], images[self.facts.index]] = True
        return own[:, :-1]

    @cached_property
    def touched(self) -> np.ndarray:
        """bool[D, U], owners of which the candidate restores or releases something."""
        touched = self.outcome.released | self.outcome.restored.any(-1)
        padded = np.append(touched, np.zeros((len(touched), 1), bool), 1)
        return np.asarray(padded[:, self.facts.index].any(-1))

    def rows(self, which: int, owners: np.ndarray, host_only: np.ndarray) -> list[int]:
        """Returns the row of each owner under one candidate.

        Args:
            owners: int64[n], rows among U.
            host_only: bool[n, C] or bool[C], classes that end up on Host only.
        """
        local = host_only & self.owner_classes[owners]
        packed = np.packbits(local, axis=1)
        candidates = np.where(self.touched[which, owners], which, NO_CANDIDATE).tolist()
        keys = [
            (owner, candidate, bits.tobytes())
            for owner, candidate, bits in zip(owners.tolist(), candidates, packed, strict=True)
        ]
        missing = [i for i, key in enumerate(keys) if key not in self.number]
        for candidate in (NO_CANDIDATE, which):
            new = list({keys[i]: i for i in missing if keys[i][1] == candidate}.values())
            if new:
                saving, recovery = self._price(candidate, owners[new], local[new])
                for i in new:
                    self.number[keys[i]] = len(self.number)
                self.saving += list(saving)
                self.recovery += list(recovery)
        return [self.number[key] for key in keys]

    def _price(self, which: int, owners: np.ndarray, local: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns int64[n, M, K] twice: saving and recovery price."""
        s, outcome = self.facts, self.outcome
        index = s.index[owners]
        rows = np.minimum(index, len(outcome.victim) - 1)
        sizes = self.problem.state.capacity.item_bytes()
        pools = self.problem.state.capacity.num_pools
        alive = outcome.alive[rows] & (index < len(outcome.victim))[..., None]
        pages, on_device = outcome.host_pages[rows], outcome.image_device[rows]
        if which != NO_CANDIDATE:
            alive &= ~outcome.released[which][rows][..., None]
            pages = pages - outcome.restored[which][rows][:, :, None]
        if local.any():
            classes = outcome.classes[rows]
            gone = np.append(local, np.zeros((len(local), 1), bool), 1)
            gone = gone[np.arange(len(local))[:, None, None], classes]
            shared = (gone[..., None] * outcome.class_pages[classes]).sum(2)
            pages = pages + shared[:, :, None].astype(pages.dtype)
        image = outcome.image_class[rows]
        is_class = image < local.shape[1]
        if is_class.any():
            away = local[np.arange(len(local))[:, None], np.minimum(image, local.shape[1] - 1)]
            on_device = np.where(is_class[..., None], ~away[..., None], on_device)
        restore, fork = (~on_device).astype(np.int64), on_device.astype(np.int64)
        kv_bytes = pages[..., 0] * np.int64(sizes[1])
        for n in range(1, pools):
            kv_bytes = kv_bytes + pages[..., n] * np.int64(sizes[n + 1])
        t = self.model.transfer
        h2d = batch_ns_array(t.h2d, pages[..., pools] + restore, kv_bytes + restore * sizes[0])
        tail_ops, tail_bytes = s.tail_ops[rows][..., None], s.tail_bytes[rows][..., None]
        d2d = batch_ns_array(t.d2d, tail_ops + fork, tail_bytes + fork * sizes[0])
        mine = np.where(alive, saturating_sum(h2d, d2d), SATURATED)
        best = mine
        if index.shape[1] > 1:
            best = mine.copy()
            for j in range(index.shape[1] - 1):  # from checkpoint j to every deeper one
                via = saturating_sum(mine[:, j, None, :], s.interval[owners, j, j + 1 :, None])
                np.minimum(best[:, j + 1 :], via, out=best[:, j + 1 :])
        rebuild = s.rebuild[index][..., None]
        recovery = np.minimum(best, rebuild)
        return rebuild - recovery, recovery
